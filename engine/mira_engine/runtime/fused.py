"""Fused experts: all of a layer's experts that can be computed now in one native call.

Owns the addresses of every expert's matrices, prepared once: those of the draft's experts
and of each slot's records. A call then needs the experts of the token and nothing else.
Only experts of the ordinary form (silu gate, no biases, no norm behind) in a format that
the native kernels read; all others keep the module's own arithmetic between two products.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mira_kernels import native
from mira_kernels.weights import DenseWeight, Int4Weight, Int8Weight, NestedWeight, Weight
from torch import Tensor, nn
from transformers.activations import SiLUActivation
from transformers.integrations import moe

from ..checkpoint.formats import BoundExpert, ExpertFormat
from ..policy.lookahead import ExpertLookaheadBuffer
from ..types import ExpertId, Precision
from .slots import DraftArena, SlotArena, SlotBinder, SlotDraft

MAX_FUSED_TOKENS = 40
"""Most tokens of a pass taken here: the largest verification has 33."""

_KINDS: dict[type[Weight], int] = {DenseWeight: 0, Int8Weight: 1, Int4Weight: 2, NestedWeight: 3}


def is_plain(module: nn.Module) -> bool:
    """Whether an experts module computes `down(silu(gate(x)) * up(x))` and nothing else."""
    return (
        module.has_gate
        and not module.has_bias
        and not module.has_post_expert_norm
        and module.is_concatenated
        and type(module)._apply_gate is moe._default_apply_gate
        and isinstance(module.act_fn, (nn.SiLU, SiLUActivation))
    )


def is_fusable(fmt: ExpertFormat, modules: Sequence[nn.Module]) -> bool:
    """Whether the native kernels can compute these modules with experts of this format."""
    shape = fmt.shape
    is_ordinary = shape.has_gate and not shape.has_bias and not shape.is_interleaved
    if fmt.group_size is None:
        is_readable = fmt.precision in (Precision.BF16, Precision.INT8)
    else:
        is_readable = fmt.block_rows > 1
    is_possible = native.is_loaded() and is_ordinary and is_readable
    return is_possible and all(map(is_plain, modules))


def _parts(expert: BoundExpert) -> tuple[Tensor, ...]:
    """The tensors of an expert's record in the order the native kernels take them."""
    up, down = expert.up, expert.down
    match up, down:
        case DenseWeight(), DenseWeight():
            return (up.data, down.data)
        case Int8Weight(), Int8Weight():
            return (up.codes, down.scale, down.codes)
        case Int4Weight(), Int4Weight():
            return (up.packed, up.scales, down.packed, down.scales)
        case NestedWeight(), NestedWeight():
            return (up.hi.packed, up.hi.scales, up.lo, down.hi.packed, down.hi.scales, down.lo)
    raise TypeError(f"no native kernel for {type(up).__name__}")


def _addresses(expert: BoundExpert) -> tuple[int, ...]:
    return tuple(part.data_ptr() for part in _parts(expert))


class FusedExperts:
    """Native calls for one model's experts.

    Args:
        fmt: The target's format.
        slots: The arena, whose memory never moves.
        bind: Gives the views of an expert in a slot.
        num_experts: Experts of a layer.
        draft: The draft's experts, `None` without one.
        draft_format: Format of its records.
        num_layers: MoE layers.
    """

    def __init__(
        self,
        fmt: ExpertFormat,
        slots: SlotArena,
        bind: SlotBinder,
        num_experts: int,
        draft: DraftArena | SlotDraft | None,
        draft_format: ExpertFormat,
        num_layers: int,
    ) -> None:
        self._fmt = fmt
        self._shape = (fmt.shape.intermediate_size, fmt.group_size or 0, fmt.block_rows)
        self._joins_draft = bind.joins_draft
        first = ExpertId(0, 0)
        self._kind = _KINDS[type(bind(first, 0).up)]
        self._of_slot = [_addresses(bind(first, slot)) for slot in range(slots.num_slots)]
        self._num_experts = num_experts
        self._outputs = torch.empty(0)
        self._draft_tables: list[Tensor] = []
        self._of_draft: list[tuple[int, ...]] = []
        if draft is not None:
            self._of_draft = [_addresses(expert) for expert in draft.bound]
            num_parts = len(self._of_draft[0])
            if isinstance(draft, SlotDraft):
                table = torch.zeros(num_layers, num_experts, num_parts, dtype=torch.int64)
                self._in_slot = torch.tensor(self._of_draft)
            else:
                table = torch.tensor(self._of_draft).view(-1, num_experts, num_parts)
            self._draft_tables = list(table)
            self._draft_kind = _KINDS[type(draft.bound[0].up)]
            shape = draft_format.shape
            self._draft_shape = (
                shape.intermediate_size,
                draft_format.group_size or 0,
                draft_format.block_rows,
            )

    def takes(self, hidden: Tensor) -> bool:
        """Whether these tokens' experts are computed here."""
        return hidden.shape[0] <= MAX_FUSED_TOKENS and hidden.dtype is torch.bfloat16

    def plan(self, hidden: Tensor, index: Tensor) -> FusedPlan:
        """Begins one layer's pass."""
        return FusedPlan(self, hidden, index)

    def lookahead_counts(self, lookahead: ExpertLookaheadBuffer) -> list[Tensor]:
        """Returns what a draft's calls add to, by layer."""
        return lookahead_counts(lookahead)

    def gather_counts(self, lookahead: ExpertLookaheadBuffer) -> None:
        """Nothing to gather: a draft's calls add to the counters themselves."""

    def clear_counts(self) -> None:
        """Whoever owns the counters clears them."""

    def addresses(self, expert: ExpertId, slot: int) -> tuple[int, ...]:
        """Returns where an expert's matrices are while it is in the slot."""
        in_slot = self._of_slot[slot]
        if not self._joins_draft:
            return in_slot
        up, up_scales, down, down_scales = self._of_draft[
            expert.layer * self._num_experts + expert.expert
        ]
        return (up, up_scales, in_slot[2], down, down_scales, in_slot[5])

    def place(self, expert: ExpertId, slot: int) -> None:
        """The draft, which computes with what the slots hold, has this expert from now on."""
        self._draft_tables[expert.layer][expert.expert] = self._in_slot[slot]

    def remove(self, expert: ExpertId) -> None:
        """The draft does without this expert from now on."""
        self._draft_tables[expert.layer][expert.expert] = 0

    def free_temporaries(self) -> None:
        """Gives back what `outputs` has kept."""
        self._outputs = torch.empty(0)

    def outputs(self, num_rows: int, width: int) -> Tensor:
        """Returns `[num_rows, width]` float32 of reused room."""
        if self._outputs.numel() < num_rows * width:
            with torch.inference_mode(False):
                self._outputs = torch.empty(num_rows * width)
        return self._outputs[: num_rows * width].view(num_rows, width)

    def compute(
        self,
        out: Tensor,
        hidden: Tensor,
        index: Tensor,
        experts: Sequence[tuple[ExpertId, int]],
    ) -> None:
        """Computes `experts` (each with its slot) for all their tokens, into rows of `out`.

        Args:
            out: `[T * k, C]` float32; row t * k + j is for token t's j-th choice.
            hidden: `[T, C]` bfloat16.
            index: `[T, k]` int64.
            experts: At least one, all of one layer.
        """
        addresses = torch.tensor([self.addresses(expert, slot) for expert, slot in experts])
        torch.ops.mira.gated_experts_(
            out,
            hidden,
            index,
            [expert.expert for expert, _ in experts],
            addresses,
            self._kind,
            *self._shape,
        )

    def draft(
        self,
        layer: int,
        hidden: Tensor,
        index: Tensor,
        weights: Tensor,
        counts: Tensor,
    ) -> Tensor:
        """Computes a layer's routed experts with the draft's; adds the choices to `counts`.

        An expert that the draft does not have adds nothing to its tokens.

        Returns:
            `[T, C]` bfloat16.
        """
        return torch.ops.mira.draft_experts(
            hidden,
            index,
            weights,
            self._draft_tables[layer],
            counts,
            self._draft_kind,
            *self._draft_shape,
        )


def lookahead_counts(lookahead: ExpertLookaheadBuffer) -> list[Tensor]:
    """Returns int32 `[E]` a layer: the lookahead counters' own memory."""
    return [
        torch.frombuffer(lookahead.counters(layer), dtype=torch.int32)
        for layer in range(lookahead.num_layers)
    ]


class FusedPlan:
    """One layer's pass by fused calls: which experts, how many tokens each, their outputs."""

    __slots__ = ("_fused", "_hidden", "_index", "_num_tokens", "_out")

    def __init__(self, fused: FusedExperts, hidden: Tensor, index: Tensor) -> None:
        self._fused = fused
        self._hidden = hidden.contiguous()
        self._index = index
        rows = index.tolist()
        self._num_tokens: dict[int, int] = {}
        for row in rows:
            for expert in row:
                self._num_tokens[expert] = self._num_tokens.get(expert, 0) + 1
        self._out = fused.outputs(len(rows) * len(rows[0]), hidden.shape[1])

    def demand(self) -> list[tuple[int, int]]:
        """Returns experts and how many tokens chose each, ascending by expert."""
        return sorted(self._num_tokens.items())

    def compute(self, experts: Sequence[tuple[ExpertId, int]]) -> None:
        """Computes experts that are in their slots."""
        self._fused.compute(self._out, self._hidden, self._index, experts)

    def combine(self, weights: Tensor) -> Tensor:
        """Weights and sums over top-k in the router's order. Returns `[T, C]`."""
        return torch.ops.mira.combine_experts(self._out, weights)
