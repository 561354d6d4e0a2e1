"""The expert kernels: what they compute against float64, and their time against a copy's."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from fake_queues import FakeQueues
from gpu.card import DEVICE, HAS_CARD, median_ms
from gpu.records import fill_random
from gpu.sections import Deadline
from gpu.shapes import QWEN3, card_format, gated_expert
from mira_engine.runtime.cuda_transfer import CudaTransfer
from mira_engine.runtime.gpu_experts import GpuExperts
from mira_engine.runtime.gpu_form import GpuForm
from mira_engine.runtime.gpu_records import GpuArena
from mira_engine.types import ExpertId, ExpertShape, Precision
from mira_kernels.assignments import group_by_expert
from mira_kernels.gpu_layer import Between, LayerExperts
from mira_kernels.triton_experts import combine, draft_layer, expert_outputs
from random_experts import NUM_EXPERTS, STORED, Layer, hidden_states, routing, worst_error

NUM_TOKENS = (1, 7, 40, 200) if HAS_CARD else (7,)
MAX_ERROR = {torch.bfloat16: 2e-2, torch.float32: 1e-4}
"""Largest error, relative to the largest value, by the type of the hidden states."""


# -- correctness ---------------------------------------------------------------------------


def check_kernels(results: dict[str, Any], deadline: Deadline) -> None:
    """Compares every format and form with float64, and a token alone with it among others."""
    for precision in deadline.each(STORED):
        layer = Layer(precision, missing=(1,), device=DEVICE.type)
        worst = max(_compare(layer, count, torch.bfloat16) for count in NUM_TOKENS)
        results[precision.value] = worst
        assert worst < MAX_ERROR[torch.bfloat16], f"{precision}: error {worst}"
    forms = ((Between.CLAMPED_GATE, True), (Between.SQUARED_RELU, False))
    for between, has_bias in deadline.each(forms, lambda form: form[0].name.lower()):
        layer = Layer(
            Precision.NESTED,
            between=between,
            has_bias=has_bias,
            is_interleaved=has_bias,
            device=DEVICE.type,
        )
        worst = results[between.name.lower()] = _compare(layer, 5, torch.float32)
        assert worst < MAX_ERROR[torch.float32], f"{between.name}: error {worst}"
    results["draft"] = _compare_draft()
    assert results["draft"] < MAX_ERROR[torch.float32], f"draft: error {results['draft']}"


def _compare(layer: Layer, num_tokens: int, dtype: torch.dtype) -> float:
    """Returns the largest error of a pass."""
    hidden = hidden_states(num_tokens, 96, dtype).to(DEVICE)
    chosen = routing(num_tokens).to(DEVICE)
    found = expert_outputs(hidden, layer.experts, group_by_expert(chosen, NUM_EXPERTS))
    alone = expert_outputs(hidden[:1], layer.experts, group_by_expert(chosen[:1], NUM_EXPERTS))
    assert torch.equal(alone, found[:2]), f"{layer.format.precision}: a token depends on others"
    return worst_error(found, layer.outputs(hidden, chosen))


def _compare_draft() -> float:
    """Returns the largest error of a draft's layer and of weighting, which it has in itself."""
    layer = Layer(Precision.INT4, device=DEVICE.type)
    hidden, chosen = hidden_states(3, 96).to(DEVICE), routing(3).to(DEVICE)
    weights = torch.rand(3, 2, device=DEVICE)
    counts = torch.zeros(NUM_EXPERTS, dtype=torch.int32, device=DEVICE)
    inner, result = hidden.new_empty(6, 64), torch.empty_like(hidden)
    draft_layer(hidden, layer.experts, chosen, weights, counts, inner, result)
    expected = layer.outputs(hidden, chosen).view(3, 2, -1) * weights.cpu().double()[:, :, None]
    assert int(counts.sum()) == 6, "the draft's launches do not count what they compute"
    outputs = expert_outputs(hidden, layer.experts, group_by_expert(chosen, NUM_EXPERTS))
    weighted = worst_error(combine(outputs, weights), expected.sum(1))
    return max(weighted, worst_error(result, expected.sum(1)))


def describe_errors(results: dict[str, Any]) -> Iterable[str]:
    """Lines for people."""
    return (f"  {name:16} largest error {error:.1e}" for name, error in results.items())


# -- time ----------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelCase:
    """What is timed.

    Attributes:
        name: For people.
        shape: Of an expert.
        top_k: Experts of the one token.
        num_records: In turn, so that no cache holds what is read.
        least_share: Of the copy's rate that is asked for.
    """

    name: str
    shape: ExpertShape
    top_k: int
    num_records: int
    least_share: float


CASES = (
    KernelCase(
        name="Mixtral's expert",
        shape=gated_expert(4096, 14336),
        top_k=1,
        num_records=8,
        least_share=0.7,
    ),
    KernelCase(
        name=f"{QWEN3.top_k} of {QWEN3.name}",
        shape=QWEN3.expert_shape,
        top_k=QWEN3.top_k,
        num_records=QWEN3.num_experts,
        least_share=0.4,
    ),
)


class NoSource:
    """A link from which nothing is asked."""

    def close(self) -> None:
        """Nothing to stop."""


class RandomExperts:
    """Random records of one layer on the card."""

    def __init__(self, precision: Precision, shape: ExpertShape, num_records: int) -> None:
        self.format = card_format(precision, shape)
        self.arena = GpuArena(num_records, self.format.planes, self.format, DEVICE)
        for plane in self.format.planes:
            records = self.arena.data[plane].view(num_records, -1)
            fill_random(records, self.format, plane)
        self.experts = GpuExperts(
            self.format,
            GpuForm(between=Between.SILU_GATE),
            self.arena,
            CudaTransfer(FakeQueues(), NoSource(), self.arena.records),
            num_layers=1,
            num_experts=num_records,
            draft=None,
            device=DEVICE,
        )
        self.num_records = num_records

    def layer(self) -> LayerExperts:
        """Describes the layer, every expert in a slot."""
        return self.experts.layer(0, [(ExpertId(0, e), e) for e in range(self.num_records)])

    @property
    def bytes_each(self) -> int:
        """Payload of one expert."""
        return sum(self.format.payload_bytes(plane) for plane in self.format.planes)


def copy_bytes_per_s() -> float:
    """The card's bandwidth: bytes read and written by a large copy, per second."""
    source = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source)) * 1e3


def time_kernels(results: dict[str, Any], deadline: Deadline) -> None:
    """Times one token's experts; the share of a copy's rate that their bytes were read at."""
    bandwidth = copy_bytes_per_s()
    results["copy_gb_per_s"] = bandwidth / 1e9
    results["cases"] = {}
    cases = [
        (case, precision)
        for precision in (Precision.NESTED, Precision.INT8, Precision.INT4)
        for case in CASES
    ]
    for case, precision in deadline.each(cases, lambda pair: f"{pair[0].name}, {pair[1]}"):
        made = RandomExperts(precision, case.shape, case.num_records)
        ms = _token_ms(made, case)
        num_bytes = made.bytes_each * case.top_k
        results["cases"][f"{case.name}, {precision}"] = {
            "us": 1e3 * ms,
            "mb": num_bytes / 1e6,
            # A copy reads and writes; a product only reads.
            "share_of_copy_bandwidth": num_bytes / (ms / 1e3) / bandwidth,
            "least_share": case.least_share,
        }
        del made
        torch.cuda.empty_cache()


def _token_ms(made: RandomExperts, case: KernelCase) -> float:
    """Milliseconds of one token's launches, buffers given, each token with other experts."""
    hidden = torch.randn(1, case.shape.hidden_size, device=DEVICE, dtype=torch.bfloat16)
    starts = range(0, case.num_records - case.top_k + 1, case.top_k)
    rows = [
        group_by_expert(
            torch.arange(start, start + case.top_k, device=DEVICE)[None], case.num_records
        )
        for start in starts
    ]
    described = made.layer()
    inner = hidden.new_empty(case.top_k, case.shape.intermediate_size)
    result = hidden.new_empty(case.top_k, case.shape.hidden_size)

    def all_tokens() -> None:
        for each in rows:
            expert_outputs(hidden, described, each, inner=inner, result=result)

    return median_ms(all_tokens) / len(rows)


def describe_times(results: dict[str, Any]) -> Iterable[str]:
    """Lines for people."""
    if "copy_gb_per_s" in results:
        yield f"  a copy reads and writes {results['copy_gb_per_s']:.0f} GB/s"
    for name, figures in results.get("cases", {}).items():
        yield f"  {name:32} {figures['us']:8.1f} us {figures['share_of_copy_bandwidth']:6.1%}"
