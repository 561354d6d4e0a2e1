"""The plain kernels (`plain_kernels`) as launches that a fake card records and replays.

For tests of recorded steps that are about what goes on around the kernels: a pass takes
milliseconds, not seconds as in triton's interpreter. Launches tell the card's queues which slots
they read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from fake_card import FakeCard
from mira_kernels import triton_experts
from mira_kernels.assignments import Assignments
from mira_kernels.gpu_layer import LayerExperts
from plain_kernels import use_plain_kernels
from torch import Tensor


def use_recorded_plain_kernels(monkeypatch: pytest.MonkeyPatch, card: FakeCard) -> None:
    """Puts these in place of the kernels of a card that records, for a test."""
    use_plain_kernels(monkeypatch)
    outputs, draft = triton_experts.expert_outputs, triton_experts.draft_layer

    def compute(
        hidden: Tensor,
        experts: LayerExperts,
        top_k: int,
        order: Tensor,
        expert_stop: Tensor,
        result: Tensor,
        misses: Tensor | None,
    ) -> None:
        _tell_reads(card, experts, _chosen(expert_stop))
        rows = Assignments(top_k, order, order, order, expert_stop)
        outputs(hidden, experts, rows, inner=result, result=result)
        if misses is not None:
            misses += _num_missing(experts, expert_stop)

    def compute_draft(
        hidden: Tensor,
        experts: LayerExperts,
        index: Tensor,
        weights: Tensor,
        counts: Tensor,
        result: Tensor,
    ) -> None:
        _tell_reads(card, experts, set(index.reshape(-1).tolist()))
        draft(hidden, experts, index, weights, counts, result, result)

    target_kernel = _PlainKernel(
        compute, ("hidden", "experts", "top_k", "order", "expert_stop", "result", "misses")
    )
    draft_kernel = _PlainKernel(
        compute_draft, ("hidden", "experts", "index", "weights", "counts", "result")
    )

    def launch_outputs(
        hidden: Tensor,
        experts: LayerExperts,
        rows: Assignments,
        *,
        inner: Tensor | None = None,
        result: Tensor | None = None,
        misses: Tensor | None = None,
    ) -> Tensor:
        del inner
        if result is None:
            result = hidden.new_zeros(rows.num_rows, experts.hidden_size)
        args = (hidden, experts, rows.top_k, rows.order, rows.expert_stop, result, misses)
        card.graphs.launch(target_kernel, (), args, {})
        return result

    def launch_draft(
        hidden: Tensor,
        experts: LayerExperts,
        index: Tensor,
        weights: Tensor,
        counts: Tensor,
        inner: Tensor,
        result: Tensor,
    ) -> Tensor:
        del inner
        args = (hidden, experts, index, weights, counts, result)
        card.graphs.launch(draft_kernel, (), args, {})
        return result

    monkeypatch.setattr(triton_experts, "expert_outputs", launch_outputs)
    monkeypatch.setattr(triton_experts, "draft_layer", launch_draft)


@dataclass(frozen=True, slots=True, eq=False)
class _PlainKernel:
    """A function that is launched as a kernel is: on a grid, here of one."""

    compute: Callable[..., None]
    arg_names: tuple[str, ...]

    def __getitem__(self, grid: Any) -> Callable[..., None]:
        return self.compute


def _chosen(expert_stop: Tensor) -> set[int]:
    """Experts with rows."""
    stops = [0, *expert_stop.tolist()]
    return {
        e for e, (start, stop) in enumerate(zip(stops, stops[1:], strict=False)) if start < stop
    }


def _slots(experts: LayerExperts, expert: int) -> list[int]:
    planes = [experts.main] if experts.low is None else [experts.main, experts.low]
    return [int(plane.table[expert]) for plane in planes]


def _num_missing(experts: LayerExperts, expert_stop: Tensor) -> int:
    """Rows whose expert is in no slot."""
    rows = torch.diff(expert_stop, prepend=expert_stop.new_zeros(1)).tolist()
    return sum(rows[e] for e in _chosen(expert_stop) if min(_slots(experts, e)) < 0)


def _tell_reads(card: FakeCard, experts: LayerExperts, chosen: set[int]) -> None:
    """Has the queues check the reads of a launch."""
    planes = [experts.main] if experts.low is None else [experts.main, experts.low]
    for plane in planes:
        size = plane.record_bytes
        for expert in sorted(chosen):
            slot = int(plane.table[expert])
            if slot >= 0:
                card.queues.read(plane.data[slot * size : (slot + 1) * size])
