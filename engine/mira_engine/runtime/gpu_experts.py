"""A layer's routed experts on a GPU: which form they have there, and the launches of a pass.

Owns the device memory of slots and draft, and the tables from expert to slot that kernels
read. Stands where `mira_engine.runtime.fused` stands on a CPU; what the executor asks of both
is the same. Engine thread only.

Source: Specter, Overlap-Oriented Parallelism Optimizer (readiness and reuse events around
every launch); Mira, INT8 expert kernel.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from transformers.activations import ACT2FN
from transformers.integrations import moe

from ..checkpoint.formats import BoundExpert, ExpertFormat
from ..policy.lookahead import ExpertLookaheadBuffer
from ..types import ExpertId, Plane, Precision
from .cuda_transfer import CudaTransfer
from .host_experts import HostDemand

if TYPE_CHECKING:
    from mira_kernels.triton_experts import Assignments, Between, LayerExperts, PlaneArena

_STORED = {Precision.BF16: 0, Precision.INT8: 1, Precision.INT4: 2, Precision.NESTED: 3}


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuForm:
    """What lies between an expert's matrices, as the kernels name it.

    Attributes:
        between: The form.
        limit: Clamp of a clamped gate.
        alpha: Its factor.
    """

    between: Between
    limit: float = 0.0
    alpha: float = 0.0


def gpu_form(module: nn.Module) -> GpuForm | None:
    """Finds the kernels' form of an experts module; `None` where they have none."""
    from mira_kernels.triton_experts import Between

    if module.has_post_expert_norm:
        return None
    act = type(module.act_fn) if hasattr(module, "act_fn") else None
    is_silu = act in (nn.SiLU, type(ACT2FN["silu"]))
    if not module.has_gate:
        if act is type(ACT2FN["relu2"]):
            return GpuForm(between=Between.SQUARED_RELU)
        return GpuForm(between=Between.SILU) if is_silu else None
    if type(module)._apply_gate is moe._default_apply_gate:
        if act is type(ACT2FN["gelu_pytorch_tanh"]):
            return GpuForm(between=Between.GELU_GATE)
        return GpuForm(between=Between.SILU_GATE) if is_silu else None
    if type(module).__name__ == "GptOssExperts":
        return GpuForm(between=Between.CLAMPED_GATE, limit=module.limit, alpha=module.alpha)
    return None


class GpuArena:
    """Device memory for records, one allocation a plane, divided once.

    Args:
        num_records: Of each plane.
        planes: What a record consists of.
        fmt: Gives their sizes.
        device: Where.
    """

    def __init__(
        self, num_records: int, planes: Sequence[Plane], fmt: ExpertFormat, device: torch.device
    ) -> None:
        self.planes = tuple(planes)
        self.plane_bytes = {plane: fmt.record_bytes(plane) for plane in planes}
        self.num_bytes = num_records * sum(self.plane_bytes.values())
        self.data = {
            plane: torch.empty(num_records * size, dtype=torch.uint8, device=device)
            for plane, size in self.plane_bytes.items()
        }
        self.records: list[Mapping[Plane, Tensor]] = [
            {
                plane: self.data[plane][index * size : (index + 1) * size]
                for plane, size in self.plane_bytes.items()
            }
            for index in range(num_records)
        ]


class GpuDraft:
    """The INT4 draft of every expert on the device.

    Args:
        fmt: Format of the records.
        plane: The one that is a draft.
        num_layers: MoE layers.
        num_experts: Experts of each.
        load: Fills device memory with an expert's record.
        device: Where.
    """

    is_in_slots = False

    def __init__(
        self,
        fmt: ExpertFormat,
        plane: Plane,
        num_layers: int,
        num_experts: int,
        load: Callable[[ExpertId, Plane, Tensor], None],
        device: torch.device,
    ) -> None:
        self.format, self.plane, self.num_experts = fmt, plane, num_experts
        self.arena = GpuArena(num_layers * num_experts, (plane,), fmt, device)
        self.num_bytes = self.arena.num_bytes
        for layer in range(num_layers):
            for expert in range(num_experts):
                record = self.arena.records[layer * num_experts + expert][plane]
                load(ExpertId(layer, expert), plane, record)
        positions = torch.arange(num_layers * num_experts, dtype=torch.int32, device=device)
        self.tables = list(positions.view(num_layers, num_experts))


class GpuSlotDraft:
    """A draft that computes with what the slots hold, and leaves out what they do not."""

    is_in_slots = True
    num_bytes = 0


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
        """Returns zeroed `[rows, width]` of device memory that a purpose uses again and again."""
        size = rows * width
        buffer = self._buffers.get((purpose, dtype))
        if buffer is None or buffer.numel() < size:
            with torch.inference_mode(False):
                buffer = torch.empty(size, dtype=dtype, device=self._device)
            self._buffers[purpose, dtype] = buffer
        return buffer[:size].view(rows, width).zero_()

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
            main = _plane_arena(
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
            arena = _plane_arena(draft.arena, draft.plane, draft.format, draft.tables[layer])
            return draft.format, self._described(draft.format, arena, None, is_draft=True)
        table = self._in_slots[layer]
        if fmt.draft_plane is None:
            return fmt, self._described(fmt, self._planes(table)[0], None)
        arena = _plane_arena(self._slots, fmt.draft_plane, fmt, table)
        return fmt, self._described(fmt, arena, None, is_draft=True)

    def _planes(self, table: Tensor) -> list[PlaneArena]:
        return [_plane_arena(self._slots, plane, self._fmt, table) for plane in self._slots.planes]

    def _described(
        self,
        fmt: ExpertFormat,
        main: PlaneArena,
        low: PlaneArena | None,
        *,
        is_draft: bool = False,
    ) -> LayerExperts:
        from mira_kernels.triton_experts import LayerExperts, Stored

        shape = fmt.shape
        return LayerExperts(
            # A nested expert's high plane alone is an INT4 expert.
            stored=Stored.INT4 if is_draft else Stored(_STORED[fmt.precision]),
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


def _plane_arena(arena: GpuArena, plane: Plane, fmt: ExpertFormat, table: Tensor) -> PlaneArena:
    from mira_kernels.triton_experts import PlaneArena

    return PlaneArena(
        data=arena.data[plane],
        record_bytes=arena.plane_bytes[plane],
        sections=fmt.section_offsets(plane),
        table=table,
    )


class GpuPlan:
    """One layer's pass: which experts, how many tokens each, their outputs."""

    def __init__(self, experts: GpuExperts, hidden: Tensor, index: Tensor) -> None:
        from mira_kernels.triton_experts import group_by_expert

        self._experts = experts
        self._hidden = hidden.contiguous()
        self._rows = group_by_expert(index, experts._num_experts)
        width = experts._fmt.shape.hidden_size
        self._out = experts.room("out", self._rows.num_rows, width, hidden.dtype)
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
