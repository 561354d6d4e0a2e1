"""The expert executor: computes a layer's routed experts from slots, or from the draft.

Carries out what the driver (`mira_engine.policy.driver`) decides: resident experts first,
grouped by expert; missing ones are submitted at once and computed as they land. Outputs
go to fixed positions and are summed over top-k in one fixed order, so the result does not
depend on what was resident or on arrival order.

Runs in the engine thread, inside the model's forward pass.

Source: Specter, Verification Expert Cache Residency Manager and cache-aware
expert-wise execution; Mira IV-F for the served-by accounting.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence

import torch

from ..checkpoint.formats import BoundExpert
from ..errors import check_cancelled
from ..policy.base import (
    AHEAD,
    Action,
    Await,
    Compute,
    ComputeOnHost,
    Decline,
    Evict,
    Fetch,
    FetchReason,
    Skip,
)
from ..policy.driver import ExpertCacheDriver
from ..predictor.bank import PredictorBank
from ..trace import TraceRecorder
from ..types import ExpertId, Phase, ServedBy
from .asking_ahead import ask_ahead
from .expert_map import RoutingHeat
from .fused import FusedExperts, FusedPlan
from .gpu_experts import GpuExperts, GpuPlan
from .gpu_records import GpuDraft, GpuSlotDraft
from .host_experts import HostExperts
from .layer_work import LayerPlan, LayerWork, SharedWork
from .pass_account import PassAccount
from .slots import DraftArena, SlotDraft
from .telemetry import ReplyMeter, TrafficCounters
from .transfer import Completion, Transfer

_WAIT_SLICE_S = 0.05
"""Longest wait between two looks at the cancel flag."""

_HOST_SLICE_S = 1e-3
"""Longest wait for the host's experts between two looks at what has landed."""


def _never() -> bool:
    return False


class ExpertExecutor:
    """Runs routed experts for every MoE layer of one loaded model.

    Args:
        driver: Decides; its lookahead counters are what the draft's routing adds to.
        transfer: The link that fills slots.
        bind: Gives the weights of an expert in a slot.
        draft: What a draft computes with, `None` without one.
    """

    def __init__(
        self,
        *,
        driver: ExpertCacheDriver,
        transfer: Transfer,
        bind: Callable[[ExpertId, int], BoundExpert],
        draft: DraftArena | SlotDraft | GpuDraft | GpuSlotDraft | None,
    ) -> None:
        self.driver = driver
        self.transfer = transfer
        self.draft = draft
        self.phase = Phase.PREFILL
        self.meter = ReplyMeter()
        self.is_cancelled: Callable[[], bool] = _never
        self.recorder: TraceRecorder | None = None
        self._bind = bind
        self._fused: FusedExperts | GpuExperts | None = None
        self._counts: list[torch.Tensor] = []
        self._has_slot_table = False
        """Whether what computes has a table of its own that says what is in the slots."""
        self.is_drafted_kept = False
        self.drafted: Sequence[Collection[int]] = ()
        """By layer, the experts that the last draft chose; where `is_drafted_kept`."""
        self.predictor: PredictorBank | None = None
        """Tells what a later layer will need; used where the driver finds it worth it."""
        self.heat: RoutingHeat | None = None
        """Counts what is routed, once somebody looks."""
        self._account = PassAccount()
        self.host: HostExperts | None = None
        """Computes on the processor what the driver leaves to it."""
        self._for_host: list[ExpertId] = []

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
        self._begin_layer(layer, top_k_index)
        fused = self._fused
        if fused is not None and not fused.takes(hidden):
            fused = None
        if self.phase is Phase.DRAFT:
            return self._run_draft(fused, module, layer, hidden, top_k_index, top_k_weights)
        plan: FusedPlan | GpuPlan | LayerPlan
        if fused is not None:
            plan = fused.plan(hidden, top_k_index)
        else:
            plan = LayerPlan(module, hidden, top_k_index, self._bind)
        self._serve_layer(module, layer, plan, hidden, top_k_index)
        return plan.combine(top_k_weights).to(hidden.dtype)

    def settle_layer(
        self,
        module: torch.nn.Module,
        layer: int,
        work: LayerWork,
        hidden: torch.Tensor,
        chosen: torch.Tensor,
    ) -> None:
        """Has a layer of a captured pass computed: what `__call__` does for one that is not.

        Args:
            module: As for `__call__`.
            layer: MoE layer.
            work: Computes.
            hidden: `[T, C]`.
            chosen: The router's choice `[T, k]`, on the host.

        Raises:
            CancelledError: The cancel flag was raised.
            StoreError: A record could not be read.
        """
        self._begin_layer(layer, chosen)
        self._serve_layer(module, layer, work, hidden, chosen)

    def _serve_layer(
        self,
        module: torch.nn.Module,
        layer: int,
        work: LayerWork,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
    ) -> None:
        """Computes a target layer's experts, the processor's part of them included."""
        if self.host is not None:
            self.host.settle()
            self._for_host.clear()
        self._run_target(module, layer, work, hidden, top_k_index)
        if self.host is not None and self.host.is_busy:
            self._await_host(self.host)

    def _begin_layer(self, layer: int, top_k_index: torch.Tensor) -> None:
        check_cancelled(self.is_cancelled)
        if self.recorder is not None:
            self.recorder.record_layer(self.phase, layer, top_k_index.tolist())

    def use_fused(self, fused: FusedExperts | GpuExperts) -> None:
        """Computes by native calls from now on. Between replies only: roundings differ."""
        self._fused = fused
        is_draft_in_slots = self.draft is not None and self.draft.is_in_slots
        if is_draft_in_slots or isinstance(fused, GpuExperts):
            self._has_slot_table = True
            for expert, slot in self.driver.residency.residents():
                if self.driver.residency.is_ready(expert):
                    fused.place(expert, slot)
        self._counts = fused.lookahead_counts(self.driver.lookahead)

    def free_temporaries(self) -> None:
        """Gives back what passes have kept for later ones. Between passes."""
        if self._fused is not None:
            self._fused.free_temporaries()

    def begin_window(self) -> None:
        """A draft window begins."""
        if self._fused is not None:
            self._fused.clear_counts()

    def gather_lookahead(self) -> None:
        """Brings what the draft's launches counted to the driver's lookahead buffer."""
        if self._fused is not None:
            self._fused.gather_counts(self.driver.lookahead)

    def keep_drafted(self) -> None:
        """A draft window ends: keeps what its routers chose, where somebody asked for it."""
        if self.is_drafted_kept and isinstance(self._fused, GpuExperts):
            self.drafted = self._fused.drafted()

    def _run_draft(
        self,
        fused: FusedExperts | GpuExperts | None,
        module: torch.nn.Module,
        layer: int,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Computes with the resident draft; it only proposes, so always in bfloat16."""
        assert self.draft is not None
        if self.driver.is_listening:
            chosen = {expert for row in top_k_index.tolist() for expert in row}
            self.obey(self.driver.draft_routed(layer, sorted(chosen)))
        if fused is not None:
            return fused.draft(layer, hidden, top_k_index, top_k_weights, self._counts[layer])
        narrow = hidden.to(torch.bfloat16)
        draft, residency = self.draft, self.driver.residency
        plan = LayerPlan(module, narrow, top_k_index, lambda expert, slot: draft.bound[slot])
        self.driver.lookahead.record(layer, plan.flat_experts)
        chosen = [ExpertId(layer, expert) for expert in plan.experts]
        if isinstance(draft, DraftArena):
            present = [(expert, draft.position(expert)) for expert in chosen]
        else:
            present = [(e, residency.slot_of(e)) for e in chosen if residency.is_ready(e)]
            plan.begin_with_zeros()
        plan.compute(present)
        return plan.combine(top_k_weights).to(hidden.dtype)

    def _run_target(
        self,
        module: torch.nn.Module,
        layer: int,
        plan: LayerWork,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
    ) -> None:
        """Computes a layer's experts as they are there, until all are."""
        driver, is_open = self.driver, True
        try:
            demand = plan.demand()
            if self.heat is not None:
                self.heat.record(layer, demand)
            ready = self.obey(driver.enter_layer(layer, demand))
            is_open = driver.is_layer_open
            if self._for_host:
                self._begin_on_host(module, plan)
            if self.predictor is not None and driver.is_prediction_wanted:
                started = time.perf_counter()
                ahead = ask_ahead(self.predictor, driver, self.phase, layer, hidden, top_k_index)
                if ahead:
                    self.obey(ahead)
                self._traffic().predicting_s += time.perf_counter() - started
            if not is_open:  # Nothing of this layer moves meanwhile, so nothing is pinned.
                if driver.is_staging:
                    self.collect(self.transfer.poll())
                plan.compute(ready)
                return
            ready += self.collect(self.transfer.poll())
            while True:
                if ready:
                    plan.compute(ready)
                    self.obey(driver.computed([slot for _, slot in ready]))
                if not driver.is_layer_open:
                    return
                ready = self._await_some()
        finally:
            if is_open or driver.has_layer_ends:
                self.obey(driver.leave_layer())

    def _begin_on_host(self, module: torch.nn.Module, plan: SharedWork) -> None:
        """Has the processor compute what was left to it, beside all that follows."""
        assert self.host is not None
        experts, self._for_host = self._for_host, []
        self.host.begin(module, plan.host_demand(experts))

    def _await_host(self, host: HostExperts) -> None:
        """Waits for the processor's part of a layer; copies go on meanwhile."""
        self.collect(self.transfer.poll())
        while not host.wait(_HOST_SLICE_S):
            check_cancelled(self.is_cancelled)
            self.collect(self.transfer.poll())
        self._traffic().host_s += host.place()

    def go_on_with(self, meter: ReplyMeter) -> None:
        """Counts into a reply's meter, which may have counted in another engine before."""
        self.meter = meter
        self._account.carry(meter.decode)

    def end_pass(self, num_tokens: int) -> None:
        """A target pass is over, on which the text goes on by `num_tokens`."""
        took = self._account.close(self._traffic(), num_tokens, time.perf_counter())
        self.obey(self.driver.end_pass(num_tokens, *took))

    def _await_some(self) -> list[tuple[ExpertId, int]]:
        """Waits for a record. Returns experts that can be computed now."""
        traffic, is_miss_awaited = self._traffic(), self.driver.is_miss_awaited
        started = time.perf_counter()
        landed = self.transfer.wait_any(_WAIT_SLICE_S)
        elapsed = time.perf_counter() - started
        traffic.stall_s += elapsed
        if not is_miss_awaited:
            traffic.prefetch_stall_s += elapsed
        ready = self.collect(landed)
        check_cancelled(self.is_cancelled)
        return ready

    @property
    def expert_bytes(self) -> int:
        """Device bytes that experts hold now, the draft included. Slots stay filled."""
        draft_bytes = self.draft.num_bytes if self.draft is not None else 0
        return draft_bytes + self.driver.residency.num_used * self.transfer.record_bytes

    def obey(self, actions: Sequence[Action]) -> list[tuple[ExpertId, int]]:
        """Submits what is to be fetched and counts. Returns what is to be computed, and where."""
        traffic = self._traffic()
        ready = []
        for action in actions:
            match action:
                case Compute(expert, slot, num_tokens, served_by, is_prefetched):
                    ready.append((expert, slot))
                    if served_by is ServedBy.MISS:
                        traffic.num_misses += num_tokens
                        continue
                    traffic.num_hits += num_tokens
                    if served_by is ServedBy.STAGE:
                        traffic.num_stage_hits += num_tokens
                    if is_prefetched:
                        traffic.num_prefetch_hits += num_tokens
                        traffic.num_prefetch_used += 1
                case ComputeOnHost(expert, num_tokens):
                    self._for_host.append(expert)
                    traffic.num_misses += num_tokens
                    traffic.num_on_host += num_tokens
                case Await(expert):
                    self.transfer.promote(expert)
                case Fetch(expert, slot, reason, evicted):
                    if evicted is not None and self._has_slot_table:
                        self._fused.remove(evicted)
                    traffic.num_prefetched += reason in AHEAD
                    is_demand = reason is FetchReason.MISS
                    self.transfer.submit(expert, slot, is_demand=is_demand)
                case Evict(expert):
                    if self._has_slot_table:
                        self._fused.remove(expert)
                case Skip() | Decline():
                    traffic.num_skipped += 1
        return ready

    def collect(self, landed: Sequence[Completion]) -> list[tuple[ExpertId, int]]:
        """Tells the driver what has landed and counts the bytes.

        Returns:
            Experts that the open layer waited for, with their slots.

        Raises:
            StoreError: A record that is waited for failed. One that nobody waits for (a
                prefetch, or of a reply that has ended) only loses its slot: whoever needs
                it asks again, and is told then.
        """
        traffic = self._traffic()
        ready, error = [], None
        for item in landed:
            if item.error is not None:
                is_needed = self.driver.residency.is_pinned(item.slot)
                self.obey(self.driver.failed(item.slot))
                error = error or (item.error if is_needed else None)
                continue
            if self._has_slot_table:
                # First: the answer may give the slot to somebody else already.
                self._fused.place(item.expert, item.slot)
            ready += self.obey(self.driver.landed(item.slot))
            traffic.num_records += 1
            traffic.num_bytes += item.num_bytes
            traffic.transfer_s += item.seconds
        if error is not None:
            raise error
        return ready

    def _traffic(self) -> TrafficCounters:
        return self.meter.prefill if self.phase is Phase.PREFILL else self.meter.decode
