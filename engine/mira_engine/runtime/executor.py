"""The expert executor: computes a layer's routed experts from slots, or from the draft.

Resident experts first, grouped by expert; missing ones are submitted at once (most
tokens first) and computed as they land. An expert is pinned from the moment its layer
needs it until its tokens are done. When a layer needs more experts than there are
slots, slots roll. Outputs go to fixed positions and are summed over top-k in one fixed
order, so the result does not depend on what was resident or on arrival order.

Runs in the engine thread, inside the model's forward pass.

Source: Specter, Verification Expert Cache Residency Manager and cache-aware
expert-wise execution; Mira IV-F for the served-by accounting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import torch
from mira_kernels.dispatch import linear

from ..checkpoint.formats import BoundExpert
from ..errors import check_cancelled
from ..policy.base import FetchReason
from ..policy.lookahead import ExpertLookaheadBuffer
from ..policy.residency import ResidencyTable, SlotState
from ..types import ExpertId, Phase
from .fused import FusedExperts, FusedPlan, lookahead_counts
from .slots import DraftArena
from .telemetry import ReplyMeter, TrafficCounters
from .transfer import Completion, Transfer

_WAIT_SLICE_S = 0.05
"""Longest wait between two looks at the cancel flag."""


def _never() -> bool:
    return False


class ExpertExecutor:
    """Runs routed experts for every MoE layer of one loaded model.

    Args:
        residency: Slots and their experts.
        transfer: The link that fills slots.
        bind: Gives the weights of an expert in a slot.
        draft: The resident INT4 experts, `None` without a draft.
        lookahead: Counters the draft's routing adds to.
    """

    def __init__(
        self,
        *,
        residency: ResidencyTable,
        transfer: Transfer,
        bind: Callable[[ExpertId, int], BoundExpert],
        draft: DraftArena | None,
        lookahead: ExpertLookaheadBuffer,
    ) -> None:
        self.residency = residency
        self.transfer = transfer
        self.draft = draft
        self.lookahead = lookahead
        self.phase = Phase.PREFILL
        self.meter = ReplyMeter()
        self.is_cancelled: Callable[[], bool] = _never
        self._bind = bind
        self._fused: FusedExperts | None = None
        self._counts: list[torch.Tensor] = []
        self._failed: list[Completion] = []

    def __call__(
        self,
        module: torch.nn.Module,
        layer: int,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Computes one MoE layer's routed experts.

        Args:
            module: transformers' experts module; supplies what lies between the matrices.
            layer: MoE layer, counted from 0.
            hidden: `[T, C]`.
            top_k_index: `[T, k]` int64.
            top_k_weights: `[T, k]`.

        Returns:
            `[T, C]` in `hidden`'s dtype.

        Raises:
            CancelledError: The cancel flag was raised.
            StoreError: A record could not be read.
        """
        check_cancelled(self.is_cancelled)
        fused = self._fused
        if fused is not None and not fused.takes(hidden):
            fused = None
        if self.phase is Phase.DRAFT:
            return self._run_draft(fused, module, layer, hidden, top_k_index, top_k_weights)
        plan: FusedPlan | _LayerPlan
        if fused is not None:
            plan = FusedPlan(fused, hidden, top_k_index)
            if self._run_resident(layer, plan):
                return plan.combine(top_k_weights)
        else:
            plan = _LayerPlan(module, hidden, top_k_index, self._bind)
        _LayerRun(self, layer, plan).run()
        return plan.combine(top_k_weights).to(hidden.dtype)

    def use_fused(self, fused: FusedExperts) -> None:
        """Computes by native calls from now on. Between replies only: roundings differ."""
        self._fused = fused
        self._counts = lookahead_counts(self.lookahead)

    def _run_draft(
        self,
        fused: FusedExperts | None,
        module: torch.nn.Module,
        layer: int,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Computes with the resident draft; it only proposes, so always in bfloat16."""
        assert self.draft is not None
        if fused is not None:
            return fused.draft(layer, hidden, top_k_index, top_k_weights, self._counts[layer])
        narrow = hidden.to(torch.bfloat16)
        draft = self.draft
        plan = _LayerPlan(module, narrow, top_k_index, lambda expert, slot: draft.expert(*expert))
        self.lookahead.record(layer, plan.flat_experts)
        plan.compute([(ExpertId(layer, expert), 0) for expert in plan.experts])
        return plan.combine(top_k_weights).to(hidden.dtype)

    def _run_resident(self, layer: int, plan: FusedPlan) -> bool:
        """Computes a layer all of whose experts are in their slots; `False` where one is not.

        Nothing is loaded or evicted meanwhile, so nothing needs a pin.
        """
        residency = self.residency
        experts = []
        for index in plan.experts:
            expert = ExpertId(layer, index)
            slot = residency.slot_of(expert)
            if slot is None or residency.state(slot) is not SlotState.READY:
                return False
            experts.append((expert, slot))
        traffic = self._traffic()
        for expert, _ in experts:
            num_tokens = plan.num_tokens_of(expert.expert)
            traffic.num_hits += num_tokens
            if residency.use(expert):
                traffic.num_prefetch_hits += num_tokens
                traffic.num_prefetch_used += 1
        plan.compute(experts)
        return True

    @property
    def expert_bytes(self) -> int:
        """Device bytes that experts hold now, the draft included. Slots stay filled."""
        draft_bytes = self.draft.num_bytes if self.draft is not None else 0
        return draft_bytes + self.residency.num_used * self.transfer.record_bytes

    def collect(self, landed: list[Completion]) -> None:
        """Marks landed slots READY and counts their bytes.

        A failed record that no layer waits for (a prefetch, or one of a reply that has
        ended) only loses its slot: whoever needs it asks again, and is told then.

        Raises:
            StoreError: A record that is waited for failed; `abandon_failed` gives its
                slot up.
        """
        traffic = self._traffic()
        for item in landed:
            if item.error is not None:
                if self.residency.is_pinned(item.slot):
                    self._failed.append(item)
                else:
                    self.residency.abandon(item.slot)
                continue
            self.residency.complete(item.slot)
            traffic.num_records += 1
            traffic.num_bytes += item.num_bytes
            traffic.transfer_s += item.seconds
        if self._failed:
            assert self._failed[0].error is not None
            raise self._failed[0].error

    def abandon_failed(self) -> None:
        """Frees the slots of failed loads. Called when nothing is pinned any more."""
        for item in self._failed:
            self.residency.abandon(item.slot)
        self._failed.clear()

    def _traffic(self) -> TrafficCounters:
        return self.meter.prefill if self.phase is Phase.PREFILL else self.meter.decode


class _LayerPlan:
    """Tokens of one layer sorted by expert: each expert's rows are one span."""

    __slots__ = (
        "_bind",
        "_module",
        "_outputs",
        "_perm",
        "_rows",
        "experts",
        "flat_experts",
        "spans",
        "top_k",
    )

    def __init__(
        self,
        module: torch.nn.Module,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        bind: Callable[[ExpertId, int], BoundExpert],
    ) -> None:
        num_tokens, self.top_k = top_k_index.shape
        self._module = module
        self._bind = bind
        self._outputs: torch.Tensor | None = None
        self.spans: dict[int, tuple[int, int]] = {}
        if num_tokens == 1:
            self.flat_experts: list[int] = top_k_index[0].tolist()
            self._perm = None
            self._rows = hidden
            for row, expert in enumerate(self.flat_experts):
                self.spans[expert] = (row, row + 1)
            self.experts = sorted(self.spans)
            return
        flat = top_k_index.reshape(-1)
        ordered, self._perm = torch.sort(flat, stable=True)
        self._rows = hidden[self._perm // self.top_k]
        self.flat_experts = ordered.tolist()
        start = 0
        for row in range(1, len(self.flat_experts) + 1):
            if row == len(self.flat_experts) or self.flat_experts[row] != self.flat_experts[start]:
                self.spans[self.flat_experts[start]] = (start, row)
                start = row
        self.experts = sorted(self.spans)

    def num_tokens_of(self, expert: int) -> int:
        start, stop = self.spans[expert]
        return stop - start

    def compute(self, experts: Sequence[tuple[ExpertId, int]]) -> None:
        """Runs experts that are in their slots and puts the results at their places."""
        for expert, slot in experts:
            self._compute_one(expert.expert, self._bind(expert, slot))

    def _compute_one(self, expert: int, weights: BoundExpert) -> None:
        module = self._module
        start, stop = self.spans[expert]
        rows = self._rows if self._perm is None else self._rows[start:stop]
        inner = linear(rows, weights.up, weights.up_bias)
        inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
        result = linear(inner, weights.down, weights.down_bias)
        if module.has_post_expert_norm:
            result = module.post_expert_norm(result)
        if self._outputs is None:
            num_rows = len(self.flat_experts)
            self._outputs = result.new_empty((num_rows, result.shape[-1]))
        self._outputs[start:stop] = result

    def combine(self, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Weights the outputs, sums over top-k in the router's order. Returns `[T, C]`."""
        outputs = self._outputs
        assert outputs is not None
        if self._perm is not None:
            inverse = torch.empty_like(self._perm)
            inverse[self._perm] = torch.arange(len(self.flat_experts), device=inverse.device)
            outputs = outputs[inverse]
        weighted = outputs.view(-1, self.top_k, outputs.shape[-1]) * top_k_weights.unsqueeze(-1)
        return weighted.sum(dim=1)


class _LayerRun:
    """One layer's pass over the target experts: pins, loads, computes, releases."""

    __slots__ = ("_exec", "_layer", "_missing", "_pinned", "_plan", "_ready", "_waiting")

    def __init__(self, executor: ExpertExecutor, layer: int, plan: FusedPlan | _LayerPlan) -> None:
        self._exec = executor
        self._layer = layer
        self._plan = plan
        self._ready: list[ExpertId] = []
        self._waiting: set[ExpertId] = set()
        self._missing: list[ExpertId] = []
        self._pinned: set[ExpertId] = set()

    def run(self) -> None:
        executor = self._exec
        try:
            executor.collect(executor.transfer.poll())
            self._classify()
            self._submit_missing()
            self._compute(self._ready)
            while self._waiting or self._missing:
                self._await_some()
        finally:
            for expert in self._pinned:
                executor.residency.unpin(expert)

    def _classify(self) -> None:
        """Sorts the layer's experts into ready, loading and missing; pins the first two."""
        residency, traffic = self._exec.residency, self._exec._traffic()
        for index in self._plan.experts:
            expert = ExpertId(self._layer, index)
            slot = residency.slot_of(expert)
            num_tokens = self._plan.num_tokens_of(index)
            if slot is None:
                self._missing.append(expert)
                traffic.num_misses += num_tokens
                continue
            self._pin(expert)
            traffic.num_hits += num_tokens
            if residency.use(expert):
                traffic.num_prefetch_hits += num_tokens
                traffic.num_prefetch_used += 1
            if residency.state(slot) is SlotState.READY:
                self._ready.append(expert)
            else:
                self._waiting.add(expert)
                self._exec.transfer.promote(expert)
        if len(self._missing) > 1:
            tokens_of = self._plan.num_tokens_of
            self._missing.sort(key=lambda e: (-tokens_of(e.expert), e.expert))

    def _submit_missing(self) -> None:
        """Gives slots to missing experts while there are slots to give."""
        executor = self._exec
        while self._missing:
            fetch = executor.residency.admit(self._missing[0], FetchReason.MISS)
            if fetch is None:
                return
            self._missing.pop(0)
            self._pin(fetch.expert)
            self._waiting.add(fetch.expert)
            executor.transfer.submit(fetch.expert, fetch.slot, is_demand=True)

    def _await_some(self) -> None:
        """Waits for a record, computes what has landed and submits what now has room."""
        executor = self._exec
        started = time.perf_counter()
        landed = executor.transfer.wait_any(_WAIT_SLICE_S)
        executor._traffic().stall_s += time.perf_counter() - started
        executor.collect(landed)
        check_cancelled(executor.is_cancelled)
        ready = [item.expert for item in landed if item.expert in self._waiting]
        self._waiting.difference_update(ready)
        self._compute(ready)
        self._submit_missing()

    def _compute(self, experts: Sequence[ExpertId]) -> None:
        """Computes experts that are in their slots, gives the slots up, and submits more."""
        if not experts:
            return
        residency = self._exec.residency
        items = []
        for expert in experts:
            slot = residency.slot_of(expert)
            assert slot is not None
            items.append((expert, slot))
        self._plan.compute(items)
        for expert in experts:
            residency.unpin(expert)
            self._pinned.discard(expert)
        if self._missing:
            self._submit_missing()

    def _pin(self, expert: ExpertId) -> None:
        self._exec.residency.pin(expert)
        self._pinned.add(expert)
