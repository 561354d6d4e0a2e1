"""The prefetch planner in random windows: never over budget, never at the cost of what is
needed, and boundaries that cover the draft exactly.
"""

from __future__ import annotations

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from mira_engine.policy.base import Fetch, FetchReason
from mira_engine.policy.eviction import LruEviction
from mira_engine.policy.lookahead import (
    ExpertLookaheadBuffer,
    IncrementalRoutingPatternAnalyzer,
    RoutingSnapshot,
)
from mira_engine.policy.prefetch import LayerAwarePrefetchPlanner, PlannedBatch, PrefetchPhase
from mira_engine.policy.residency import ResidencyTable
from mira_engine.policy.slot_table import SlotState
from mira_engine.types import ExpertId

NUM_LAYERS, NUM_EXPERTS, TOP_K = 3, 8, 2
RECORD_BYTES = 4096
EVERY_EXPERT = [ExpertId(layer, e) for layer in range(NUM_LAYERS) for e in range(NUM_EXPERTS)]

SECONDS = st.none() | st.floats(0, 10, allow_nan=False)
ROUTING = st.lists(
    st.lists(st.integers(0, NUM_EXPERTS - 1), min_size=TOP_K, max_size=TOP_K, unique=True),
    min_size=NUM_LAYERS,
    max_size=NUM_LAYERS,
)


class Window:
    """One draft window on a table in some state, checked at each boundary."""

    def __init__(self, planner: LayerAwarePrefetchPlanner, data: st.DataObject) -> None:
        self.planner = planner
        self.draw = data.draw
        self.table = ResidencyTable(self.draw(st.integers(1, 20), label="slots"), LruEviction())
        self.buffer = ExpertLookaheadBuffer(NUM_LAYERS, NUM_EXPERTS)
        self.analyzer = IncrementalRoutingPatternAnalyzer(self.buffer)
        self.num_submitted = 0
        self.is_full = False
        residents = self.draw(st.lists(st.sampled_from(EVERY_EXPERT), unique=True, max_size=20))
        for expert in residents[: self.table.num_slots]:
            fetch = self.table.admit(expert, FetchReason.MISS)
            assert fetch is not None
            state = self.draw(st.sampled_from(["ready", "pinned", "loading"]))
            if state != "loading":
                self.table.complete(fetch.slot)
            if state == "pinned":
                self.table.pin(expert)

    def run(self, num_draft: int, num_reserved: int, max_records: int | None) -> None:
        """Drafts `num_draft` tokens and plans at every boundary."""
        boundary = self.planner.begin(num_draft)
        chunks, phases = [boundary], [self.planner.phase]
        for num_drafted in range(1, num_draft + 1):
            for layer, experts in enumerate(self.draw(ROUTING, label="routing")):
                self.buffer.record(layer, experts)
            self._land_some()
            if num_drafted == boundary:
                assert phases[-1] is not PrefetchPhase.FINAL_CLEANUP, "it is the last one"
                batch = self._plan_checked(num_drafted, num_reserved)
                boundary += batch.next_chunk
                chunks.append(batch.next_chunk)
                phases.append(batch.phase)
        assert all(chunk >= 1 for chunk in chunks[:-1])
        assert chunks[-1] == 0
        assert sum(chunks) == num_draft or self.is_full, "boundaries cover the draft"
        assert phases[0] is PrefetchPhase.COLD_START
        assert PrefetchPhase.COLD_START not in phases[1:]
        assert phases[-1] is PrefetchPhase.FINAL_CLEANUP, "a window ends with the cleanup"
        if max_records is not None:
            assert self.num_submitted <= max_records

    def _land_some(self) -> None:
        loading = [
            slot for _, slot in self.table.residents()
            if self.table.state(slot) is SlotState.LOADING
        ]  # fmt: skip
        for slot in loading:
            if self.draw(st.booleans(), label="landed"):
                self.table.complete(slot)

    def _plan_checked(self, num_drafted: int, num_reserved: int) -> PlannedBatch:
        snapshot = self.analyzer.snapshot()
        needed = snapshot.needed
        before = dict(self.table.residents())
        kept = {
            expert for expert, slot in before.items()
            if expert in needed or self.table.is_pinned(slot)
            or self.table.state(slot) is SlotState.LOADING
        }  # fmt: skip
        self.is_full = len(needed - set(before)) >= self.table.num_slots - len(kept) - num_reserved
        batch = self.planner.plan(snapshot, self.table, num_drafted=num_drafted)
        fetched = {fetch.expert for fetch in batch.fetches}
        self.num_submitted += len(fetched)
        after = dict(self.table.residents())
        assert kept <= set(after), "needed, pinned and loading experts stay"
        assert len(after) <= self.table.num_slots
        assert set(after) - set(before) == fetched <= needed - set(before)
        assert len(fetched) <= max(0, self.table.num_slots - len(kept) - num_reserved)
        assert {action.expert for action in batch.actions} == needed
        assert len(batch.actions) == len(needed), "one action for each"
        order = [fetch.expert.layer for fetch in batch.fetches]
        assert order == sorted(order), "verification meets the layers in order"
        skipped = needed - fetched - set(before)
        for each in skipped:
            for other in fetched:
                assert self._rank(snapshot, other) < self._rank(snapshot, each)
        return batch

    @staticmethod
    def _rank(snapshot: RoutingSnapshot, expert: ExpertId) -> tuple[int, int, int]:
        count = dict(snapshot.rankings[expert.layer])[expert.expert]
        return (-count, expert.layer, expert.expert)


def check(
    make: type[LayerAwarePrefetchPlanner], num_examples: int, *, is_hunt: bool = False
) -> None:
    """Runs windows of planners of a class; with `is_hunt` always the same, without shrinking."""

    @settings(
        max_examples=num_examples,
        database=None,
        derandomize=is_hunt,
        phases=[Phase.generate] if is_hunt else list(Phase),
        report_multiple_bugs=False,
    )
    @given(st.data())
    def runs(data: st.DataObject) -> None:
        num_reserved = data.draw(st.integers(0, 3), label="reserved")
        max_records = data.draw(st.none() | st.integers(0, 12), label="cap")
        planner = make(
            RECORD_BYTES,
            num_reserved_slots=num_reserved,
            max_window_bytes=None if max_records is None else max_records * RECORD_BYTES,
        )
        draft_s, record_s = data.draw(SECONDS), data.draw(SECONDS)
        if draft_s is not None:
            planner.observe_draft(3, 3 * draft_s)
        if record_s is not None:
            planner.observe_transfer(2 * RECORD_BYTES, 2 * record_s)
        num_draft = data.draw(st.integers(1, 12), label="K")
        for _ in range(2):
            Window(planner, data).run(num_draft, num_reserved, max_records)

    runs()


def test_planner_keeps_its_promises_in_every_window() -> None:
    check(LayerAwarePrefetchPlanner, 150)


class _EvictsNeeded(LayerAwarePrefetchPlanner):
    """A planted fault: what the draft named may go."""

    def plan(self, snapshot, residency, *, num_drafted):
        admit = residency.admit
        residency.admit = lambda expert, reason, protected: admit(expert, reason)
        try:
            return super().plan(snapshot, residency, num_drafted=num_drafted)
        finally:
            residency.admit = admit


class _ForgetsReserve(LayerAwarePrefetchPlanner):
    """A planted fault: no slot is left for misses."""

    def plan(self, snapshot, residency, *, num_drafted):
        self._num_reserved_slots = 0
        return super().plan(snapshot, residency, num_drafted=num_drafted)


class _ForgetsCap(LayerAwarePrefetchPlanner):
    """A planted fault: every boundary has the whole window's bytes."""

    def plan(self, snapshot, residency, *, num_drafted):
        self._num_submitted = 0
        return super().plan(snapshot, residency, num_drafted=num_drafted)


class _RunsOver(LayerAwarePrefetchPlanner):
    """A planted fault: a chunk may reach beyond the draft."""

    def _next_chunk(self, remaining: int) -> int:
        return remaining + 1


class _StopsShort(LayerAwarePrefetchPlanner):
    """A planted fault: a chunk may be empty, so that no boundary comes any more."""

    def _next_chunk(self, remaining: int) -> int:
        return 0


class _WrongWayRound(LayerAwarePrefetchPlanner):
    """A planted fault: the link begins with the last layer."""

    def _select(self, wanted, room, remaining):
        chosen, left = super()._select(wanted, room, remaining)
        return chosen[::-1], left


class _TakesTheRarest(LayerAwarePrefetchPlanner):
    """A planted fault: scarce slots go to the lowest counts."""

    def _select(self, wanted, room, remaining):
        turned = [(-count, expert) for count, expert in wanted]
        return super()._select(turned, room, remaining)


class _SubmitsTwice(LayerAwarePrefetchPlanner):
    """A planted fault: an action comes twice."""

    def plan(self, snapshot, residency, *, num_drafted):
        batch = super().plan(snapshot, residency, num_drafted=num_drafted)
        doubled = batch.actions + tuple(a for a in batch.actions if isinstance(a, Fetch))
        return PlannedBatch(actions=doubled, next_chunk=batch.next_chunk, phase=batch.phase)


@pytest.mark.parametrize(
    "fault",
    [
        _EvictsNeeded,
        _ForgetsReserve,
        _ForgetsCap,
        _RunsOver,
        _StopsShort,
        _WrongWayRound,
        _TakesTheRarest,
        _SubmitsTwice,
    ],
)
def test_planted_fault_is_found(fault: type[LayerAwarePrefetchPlanner]) -> None:
    with pytest.raises(AssertionError):
        check(fault, 1500, is_hunt=True)
