"""A layer's routed experts on a GPU: the tables from expert to slot, and a pass's launches.

Owns the tables that kernels read, a draft's counters and what passes need for a while; the
records are `gpu_records`'. Stands where `mira_engine.runtime.fused` stands on a CPU; what the
executor asks of both is the same. Engine thread only. Launches are imported late: they need
triton, and what needs none of them goes without.

Source: Specter, Overlap-Oriented Parallelism Optimizer (readiness and reuse events around
every launch); Mira, INT8 expert kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import cached_property

import torch
from mira_kernels.assignments import Assignments, group_by_expert
from mira_kernels.gpu_layer import LayerExperts, PlaneArena, Stored
from torch import Tensor

from ..checkpoint.formats import BoundExpert, ExpertFormat
from ..policy.lookahead import ExpertLookaheadBuffer
from ..types import ExpertId, Precision
from .cuda_transfer import CudaTransfer
from .gpu_form import GpuForm
from .gpu_records import GpuArena, GpuDraft, GpuSlotDraft, plane_arena
from .host_experts import HostDemand

_STORED = {
    Precision.BF16: Stored.DENSE,
    Precision.INT8: Stored.INT8,
    Precision.INT4: Stored.INT4,
    Precision.NESTED: Stored.NESTED,
}


class GpuExperts:
    """Launches for one model's experts.

    Args:
        fmt: The target's format.
        form: What lies between the matrices.
        slots: The arena.
        transfer: Orders launches and copies.
        num_layers: MoE layers.
        num_experts: Experts of each.
        draft: The resident draft, `None` without one.
        device: Where everything is.
    """

    def __init__(
        self,
        fmt: ExpertFormat,
        form: GpuForm,
        slots: GpuArena,
        transfer: CudaTransfer,
        *,
        num_layers: int,
        num_experts: int,
        draft: GpuDraft | GpuSlotDraft | None,
        device: torch.device,
    ) -> None:
        self._fmt, self._form, self._slots = fmt, form, slots
        self._num_experts, self._device = num_experts, device
        self._draft = draft if isinstance(draft, GpuDraft) else None
        self._in_slots = torch.full((num_layers, num_experts), -1, dtype=torch.int32, device=device)
        self._placed: list[set[int]] = [set() for _ in range(num_layers)]
        """What the table in device memory says, as far as the host has written it."""
        self.transfer = transfer
        self._joins_draft = (
            self._draft is not None and fmt.precision is Precision.NESTED and len(slots.planes) == 1
        )
        self._counts = torch.zeros(num_layers, num_experts, dtype=torch.int32, device=device)
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def takes(self, hidden: Tensor) -> bool:
        """Whether these tokens' experts are computed here: all are."""
        return True

    def plan(self, hidden: Tensor, index: Tensor) -> GpuPlan:
        """Begins one layer's pass."""
        return GpuPlan(self, hidden, index)

    def lookahead_counts(self, lookahead: ExpertLookaheadBuffer) -> list[Tensor]:
        """Returns int32 `[E]` a layer on the device: what a draft's launches add to."""
        return list(self._counts)

    def gather_counts(self, lookahead: ExpertLookaheadBuffer) -> None:
        """Brings the counters to the host, in one compact read."""
        rows = self._counts.tolist()
        lookahead.restore([[(e, n) for e, n in enumerate(row) if n] for row in rows])

    def clear_counts(self) -> None:
        """Begins another window."""
        self._counts.zero_()

    @property
    def num_experts(self) -> int:
        """Experts of a layer."""
        return self._num_experts

    def place(self, expert: ExpertId, slot: int) -> None:
        """What is launched from now on finds this expert in its slot by the device's table.

        Only for slots whose copy the host has seen end: such launches wait for none.
        """
        self._placed[expert.layer].add(expert.expert)
        self._in_slots[expert.layer, expert.expert] = slot

    def remove(self, expert: ExpertId) -> None:
        """What is launched from now on does without this expert.

        Before the slot is given to a copy; that one waits for launches that still read it.
        """
        self._placed[expert.layer].discard(expert.expert)
        self._in_slots[expert.layer, expert.expert] = -1

    def num_placed(self, layer: int) -> int:
        """Returns how many experts of a layer are in the device's table."""
        return len(self._placed[layer])

    def drafted(self) -> list[list[int]]:
        """Returns by layer the experts that this window's draft launches have counted."""
        return [[e for e, n in enumerate(row) if n] for row in self._counts.tolist()]

    def room(self, purpose: str, rows: int, width: int, dtype: torch.dtype) -> Tensor:
        """Returns `[rows, width]` of memory that a purpose uses again and again, as it was left."""
        size = rows * width
        buffer = self._buffers.get((purpose, dtype))
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):
                buffer = torch.empty(size, dtype=dtype, device=self._device)
            self._buffers[purpose, dtype] = buffer
        return buffer[:size].view(rows, width)

    def free_temporaries(self) -> None:
        """Gives back what `room` has kept."""
        self._buffers.clear()

    def layer(self, layer: int, experts: Sequence[tuple[ExpertId, int]]) -> LayerExperts:
        """Describes a layer of which some experts are in slots."""
        table = torch.full((self._num_experts,), -1, dtype=torch.int32)
        for expert, slot in experts:
            table[expert.expert] = slot
        return self._target_of(layer, table.to(self._device, non_blocking=True))

    def _target_of(self, layer: int, table: Tensor) -> LayerExperts:
        """The target's experts of a layer that a table has slots of."""
        planes = self._planes(table)
        if self._joins_draft:
            assert self._draft is not None
            main = plane_arena(
                self._draft.arena, self._draft.plane, self._draft.format, self._draft.tables[layer]
            )
            return self._described(self._fmt, main, planes[0])
        return self._described(self._fmt, planes[0], planes[1] if len(planes) > 1 else None)

    def compute(
        self,
        experts: Sequence[tuple[ExpertId, int]],
        hidden: Tensor,
        rows: Assignments,
        result: Tensor,
    ) -> None:
        """Launches a layer's experts that are in slots; returns before they are done.

        Args:
            experts: With their slots, all of one layer.
            hidden: `[T, C]`.
            rows: The layer's routing.
            result: `[T * k, C]`, of which these experts' rows are written.
        """
        from mira_kernels.triton_experts import expert_outputs

        if not experts:
            return
        slots = [slot for _, slot in experts]
        self.transfer.acquire(slots)
        width = self._fmt.shape.intermediate_size
        inner = self.room("inner", rows.num_rows, width, hidden.dtype)
        described = self.layer(experts[0][0].layer, experts)
        expert_outputs(hidden, described, rows, inner=inner, result=result)
        self.transfer.release(slots)

    def record_layer(
        self, layer: int, hidden: Tensor, rows: Assignments, result: Tensor, misses: Tensor
    ) -> None:
        """Launches all of a layer's experts that the device's own table has slots of.

        Ready to be recorded: nothing of it depends on the host. Whoever launches it has to say
        so (`transfer.release_all`) before a slot is given to a copy.

        Args:
            layer: MoE layer.
            hidden: `[T, C]`.
            rows: The layer's routing.
            result: `[T * k, C]`, of which the found experts' rows are written.
            misses: int32 `[1]`, set to the assignments whose expert was in no slot.
        """
        from mira_kernels.triton_experts import expert_outputs

        misses.zero_()
        described = self._target_of(layer, self._in_slots[layer])
        expert_outputs(hidden, described, rows, result=result, misses=misses)

    def record_draft(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        """As `draft`, ready to be recorded: its memory is of the recording's pool."""
        from mira_kernels.triton_experts import draft_layer

        fmt, experts = self._draft_of(layer)
        inner = hidden.new_empty(index.numel(), fmt.shape.intermediate_size)
        result = torch.empty_like(hidden)
        counts = self._counts[layer]
        return draft_layer(hidden.contiguous(), experts, index, weights, counts, inner, result)

    def keep_counts(self) -> Tensor:
        """Returns a copy of the draft's counters, for `put_counts_back`."""
        return self._counts.clone()

    def put_counts_back(self, counts: Tensor) -> None:
        """Sets the draft's counters to what they were."""
        self._counts.copy_(counts)

    def release_draft(self) -> None:
        """Recorded draft launches have been replayed: they may read slots."""
        if self._draft is None:
            self.transfer.release_all()

    def draft(
        self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor, counts: Tensor
    ) -> Tensor:
        """Computes a layer's routed experts with the draft's; adds the choices to `counts`.

        Returns:
            `[T, C]` in the dtype of `hidden`.
        """
        from mira_kernels.triton_experts import draft_layer

        fmt, experts = self._draft_of(layer)
        num_tokens, top_k = index.shape
        inner = self.room("inner", num_tokens * top_k, fmt.shape.intermediate_size, hidden.dtype)
        result = torch.empty_like(hidden)
        draft_layer(hidden.contiguous(), experts, index, weights, counts, inner, result)
        if self._draft is None:
            self.transfer.release_all()
        return result

    def _draft_of(self, layer: int) -> tuple[ExpertFormat, LayerExperts]:
        """The experts that a draft has of a layer, and their format."""
        draft, fmt = self._draft, self._fmt
        if draft is not None:
            arena = plane_arena(draft.arena, draft.plane, draft.format, draft.tables[layer])
            return draft.format, self._described(draft.format, arena, None, is_draft=True)
        table = self._in_slots[layer]
        if fmt.draft_plane is None:
            return fmt, self._described(fmt, self._planes(table)[0], None)
        arena = plane_arena(self._slots, fmt.draft_plane, fmt, table)
        return fmt, self._described(fmt, arena, None, is_draft=True)

    def _planes(self, table: Tensor) -> list[PlaneArena]:
        return [plane_arena(self._slots, plane, self._fmt, table) for plane in self._slots.planes]

    def _described(
        self,
        fmt: ExpertFormat,
        main: PlaneArena,
        low: PlaneArena | None,
        *,
        is_draft: bool = False,
    ) -> LayerExperts:
        shape = fmt.shape
        return LayerExperts(
            # A nested expert's high plane alone is an INT4 expert.
            stored=Stored.INT4 if is_draft else _STORED[fmt.precision],
            between=self._form.between,
            hidden_size=shape.hidden_size,
            intermediate_size=shape.intermediate_size,
            main=main,
            low=low,
            group_size=fmt.group_size or 0,
            is_interleaved=shape.is_interleaved,
            has_bias=shape.has_bias,
            is_bias_float32=fmt.precision is not Precision.BF16,
            limit=self._form.limit,
            alpha=self._form.alpha,
        )


def never_bound(expert: ExpertId, slot: int) -> BoundExpert:
    """Stands where a processor's experts are bound: here nothing asks for views."""
    raise AssertionError("experts on a card are computed there")


def demand_of(flat_experts: Sequence[int]) -> list[tuple[int, int]]:
    """Returns experts and how often each was chosen, ascending by expert."""
    return sorted(Counter(flat_experts).items())


class GpuPlan:
    """One layer's pass: which experts, how many tokens each, their outputs."""

    def __init__(self, experts: GpuExperts, hidden: Tensor, index: Tensor) -> None:
        self._experts = experts
        self._hidden = hidden.contiguous()
        self._rows = group_by_expert(index, experts._num_experts)
        width = experts._fmt.shape.hidden_size
        self._out = experts.room("out", self._rows.num_rows, width, hidden.dtype).zero_()
        self._index = index

    @cached_property
    def flat_experts(self) -> list[int]:
        """Chosen experts of all tokens: the one read from the device of a layer."""
        return self._index.reshape(-1).tolist()

    def demand(self) -> list[tuple[int, int]]:
        """Returns experts and how many tokens chose each, ascending by expert."""
        return demand_of(self.flat_experts)

    def compute(self, experts: Sequence[tuple[ExpertId, int]]) -> None:
        """Launches what is in slots; returns before it is done."""
        self._experts.compute(experts, self._hidden, self._rows, self._out)

    def host_demand(self, experts: Sequence[ExpertId]) -> HostDemand:
        """Describes what the processor is to compute of this pass."""
        return HostDemand(
            hidden=self._hidden,
            flat_experts=self.flat_experts,
            outputs=self._out,
            experts=experts,
        )

    def combine(self, weights: Tensor) -> Tensor:
        """Weights and sums over top-k in the router's order. Returns `[T, C]`."""
        from mira_kernels.triton_experts import combine

        return combine(self._out, weights)
