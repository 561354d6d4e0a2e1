"""A captured draft step against launching it, and against its kernels' own time."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from gpu.card import DEVICE, kernels_ms, median_ms
from gpu.kernel_checks import RandomExperts
from gpu.sections import Deadline
from gpu.shapes import QWEN3
from mira_engine.types import Precision
from mira_kernels.triton_experts import draft_layer
from torch import Tensor

MAX_RATIO = 2.0
"""What a captured draft step may take of its kernels' time."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class CapturedStep:
    """A step that can be launched, and replayed as a graph.

    Attributes:
        name: What is in it.
        launch: Launches it piece by piece.
        replay: Replays the graph.
        outputs: What both write.
    """

    name: str
    launch: Callable[[], object]
    replay: Callable[[], object]
    outputs: tuple[Tensor, ...]


def make_captured_draft() -> CapturedStep:
    """Captures a draft step: the routed experts of every layer of Qwen3-30B-A3B.

    Attention and the rest of a step are not in it.
    """
    made = RandomExperts(Precision.INT4, QWEN3.expert_shape, QWEN3.num_experts)
    described = made.layer()
    hidden_size, inner_size = QWEN3.fields["hidden_size"], QWEN3.fields["moe_intermediate_size"]
    hidden = torch.randn(1, hidden_size, device=DEVICE, dtype=torch.bfloat16)
    index = torch.randperm(QWEN3.num_experts, device=DEVICE)[: QWEN3.top_k][None]
    weights = torch.rand(1, QWEN3.top_k, device=DEVICE)
    counts = torch.zeros(QWEN3.num_experts, dtype=torch.int32, device=DEVICE)
    inner = hidden.new_empty(QWEN3.top_k, inner_size)
    result = torch.empty_like(hidden)

    def layers() -> None:
        for _ in range(QWEN3.num_layers):
            draft_layer(hidden, described, index, weights, counts, inner, result)

    layers()  # Kernels are built before anything is captured.
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    return CapturedStep(
        name=f"the experts of {QWEN3.num_layers} layers",
        launch=layers,
        replay=graph.replay,
        outputs=(result,),
    )


def is_same_captured(step: CapturedStep) -> bool:
    """Whether a replay writes what launching writes, bit for bit."""
    step.launch()
    expected = [output.clone() for output in step.outputs]
    for output in step.outputs:
        output.zero_()
    step.replay()
    return all(map(torch.equal, step.outputs, expected))


def time_captured_draft(results: dict[str, Any], deadline: Deadline) -> None:
    """Times a step both ways, and its kernels without the host."""
    step = make_captured_draft()
    results["what"] = step.name
    results["is_same"] = is_same_captured(step)
    assert results["is_same"], "a captured step gives something else"
    measures = {
        "kernels_ms": lambda: kernels_ms(step.launch),
        "captured_ms": lambda: median_ms(step.replay),
        "launched_ms": lambda: median_ms(step.launch),
    }
    for name in deadline.each(measures):
        results[name] = measures[name]()
    if "captured_ms" in results:
        results["ratio"] = results["captured_ms"] / results["kernels_ms"]


def describe_captured(results: dict[str, Any]) -> Iterable[str]:
    """Lines for people."""
    if "ratio" in results:
        yield (
            "  {what}: {captured_ms:.2f} ms captured, {kernels_ms:.2f} ms of kernels "
            "({ratio:.2f} times)"
        ).format(**results)
    if "launched_ms" in results:
        yield f"  launched one by one {results['launched_ms']:.2f} ms"
