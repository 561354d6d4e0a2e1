"""The prefetch planner's batches and chunks, and whether prefetching pays."""

from __future__ import annotations

import pytest
from mira_engine.policy.base import Fetch, FetchReason, Skip, SkipReason
from mira_engine.policy.eviction import LruEviction
from mira_engine.policy.lookahead import RoutingSnapshot
from mira_engine.policy.payoff import PrefetchPayoff, PrefetchRound
from mira_engine.policy.prefetch import (
    LayerAwarePrefetchPlanner,
    PlannedBatch,
    PrefetchPhase,
    first_boundary,
)
from mira_engine.policy.residency import ResidencyTable
from mira_engine.types import ExpertId, Region

RECORD_BYTES = 1000


def _table(num_slots: int, residents: list[ExpertId] = []) -> ResidencyTable:  # noqa: B006
    table = ResidencyTable(num_slots, LruEviction())
    for expert in residents:
        fetch = table.admit(expert, FetchReason.MISS)
        assert fetch is not None
        table.complete(fetch.slot)
    return table


def _planner(
    *, draft_s: float | None = None, record_s: float | None = None, reserved: int = 0,
    cap: int | None = None,
) -> LayerAwarePrefetchPlanner:  # fmt: skip
    planner = LayerAwarePrefetchPlanner(
        RECORD_BYTES, num_reserved_slots=reserved, max_window_bytes=cap
    )
    if draft_s is not None:
        planner.observe_draft(2, 2 * draft_s)
    if record_s is not None:
        planner.observe_transfer(3 * RECORD_BYTES, 3 * record_s)
    return planner


def _snapshot(*layers: list[tuple[int, int]]) -> RoutingSnapshot:
    return RoutingSnapshot(tuple(tuple(layer) for layer in layers), ())


def _fetched(batch: PlannedBatch) -> list[ExpertId]:
    return [fetch.expert for fetch in batch.fetches]


def _wide(num_experts: int, layer: int = 0) -> RoutingSnapshot:
    """Every expert of one layer, once."""
    return _snapshot(*([[]] * layer), [(e, 1) for e in range(num_experts)])


@pytest.mark.parametrize(
    ("k", "boundary"), [(1, 1), (2, 1), (4, 1), (5, 1), (7, 1), (8, 2), (12, 2), (32, 6)]
)
def test_cold_start_is_a_fifth_of_k_at_least_one(k: int, boundary: int) -> None:
    assert first_boundary(k) == boundary
    planner = _planner()
    assert planner.begin(k) == boundary
    assert planner.phase is PrefetchPhase.COLD_START


def test_batch_fetches_what_is_missing_layer_by_layer() -> None:
    table = _table(9, [ExpertId(0, 3)])
    planner = _planner(reserved=2)
    planner.begin(4)
    snapshot = _snapshot([(2, 1), (3, 1)], [(0, 1), (1, 3)])
    batch = planner.plan(snapshot, table, num_drafted=1)
    assert _fetched(batch) == [ExpertId(0, 2), ExpertId(1, 1), ExpertId(1, 0)]
    assert Skip(ExpertId(0, 3), SkipReason.RESIDENT) in batch.actions
    assert all(table.region(fetch.slot) is Region.STAGE for fetch in batch.fetches)
    assert batch.phase is PrefetchPhase.PREFETCH_OVERLAP


def test_scarce_slots_go_to_the_highest_counts_and_then_to_earlier_layers() -> None:
    planner = _planner(reserved=1)
    planner.begin(8)
    snapshot = _snapshot([(0, 2), (1, 1)], [(5, 3), (2, 1)], [(4, 2), (3, 1)])
    batch = planner.plan(snapshot, _table(5), num_drafted=2)
    assert _fetched(batch) == [ExpertId(0, 0), ExpertId(0, 1), ExpertId(1, 5), ExpertId(2, 4)]
    assert batch.phase is PrefetchPhase.FINAL_CLEANUP, "the room is full"
    assert batch.next_chunk == 0, "no boundary comes after it"


def test_batch_never_evicts_what_the_draft_named() -> None:
    table = _table(3, [ExpertId(0, 0), ExpertId(0, 5), ExpertId(0, 1)])
    planner = _planner()
    planner.begin(4)
    batch = planner.plan(_snapshot([(0, 1), (1, 1), (2, 1), (3, 1)]), table, num_drafted=1)
    assert [(f.expert, f.evicted) for f in batch.fetches] == [(ExpertId(0, 2), ExpertId(0, 5))]
    assert Skip(ExpertId(0, 3), SkipReason.NO_ROOM) in batch.actions


def test_batch_takes_no_slot_that_is_pinned_loading_or_reserved() -> None:
    residents = [ExpertId(1, e) for e in range(4)]
    table = _table(6, residents)
    table.pin(residents[0])
    table.admit(ExpertId(1, 9), FetchReason.MISS)  # stays LOADING
    planner = _planner(reserved=2)
    planner.begin(4)
    batch = planner.plan(_wide(6), table, num_drafted=1)
    assert len(batch.fetches) == 6 - 1 - 1 - 2
    assert table.slot_of(residents[0]) is not None
    assert table.slot_of(ExpertId(1, 9)) is not None


def test_fast_link_has_a_boundary_after_every_token() -> None:
    planner = _planner(draft_s=0.010, record_s=0.0001)
    table = _table(40)
    drafted = planner.begin(8)
    boundaries = [drafted]
    while drafted < 8:
        batch = planner.plan(_wide(2 * drafted), table, num_drafted=drafted)
        for fetch in batch.fetches:
            table.complete(fetch.slot)
        drafted += batch.next_chunk
        boundaries.append(drafted)
    assert boundaries == [2, 3, 4, 5, 6, 7, 8]


def test_chunk_lasts_as_long_as_its_batch_takes_to_move() -> None:
    planner = _planner(draft_s=0.010, record_s=0.005)
    planner.begin(20)
    batch = planner.plan(_wide(8), _table(40), num_drafted=4)
    assert len(batch.fetches) == 8
    assert batch.next_chunk == 4


def test_chunk_follows_the_link_as_it_is_measured() -> None:
    planner = _planner(draft_s=0.010, record_s=0.005)
    for _ in range(40):
        planner.observe_transfer(2 * RECORD_BYTES, 2 * 0.010)
    planner.begin(20)
    assert planner.plan(_wide(8), _table(40), num_drafted=4).next_chunk == 8


def test_batch_is_cut_to_what_the_rest_of_the_draft_hides() -> None:
    planner = _planner(draft_s=0.010, record_s=0.005)
    planner.begin(10)
    batch = planner.plan(_wide(30), _table(40), num_drafted=2)
    assert len(batch.fetches) == 16  # 8 tokens of 10 ms, 5 ms a record
    assert sum(a == Skip(a.expert, SkipReason.LATER) for a in batch.actions) == 14
    assert batch.next_chunk == 8, "the last boundary is at the end"
    table = _table(40)
    for fetch in batch.fetches:
        table.admit(fetch.expert, FetchReason.LOOKAHEAD)
    last = planner.plan(_wide(30), table, num_drafted=10)
    assert last.phase is PrefetchPhase.FINAL_CLEANUP
    assert len(last.fetches) == 14, "the final cleanup fills what room is left"
    assert last.next_chunk == 0


def test_records_under_way_count_against_the_next_batch() -> None:
    planner = _planner(draft_s=0.010, record_s=0.005)
    table = _table(60)
    planner.begin(10)
    first = planner.plan(_wide(10), table, num_drafted=2)
    for fetch in first.fetches[:4]:
        table.complete(fetch.slot)
    second = planner.plan(_wide(30), table, num_drafted=6)
    assert len(second.fetches) == 8 - 6  # 4 tokens hide 8 records, 6 are under way


def test_slow_link_is_kept_busy_with_one_record() -> None:
    planner = _planner(draft_s=0.001, record_s=1.0)
    planner.begin(8)
    table = _table(20)
    assert len(planner.plan(_wide(5), table, num_drafted=2).fetches) == 1
    assert len(planner.plan(_wide(5), table, num_drafted=3).fetches) == 0


def test_byte_cap_bounds_the_whole_window_and_no_longer() -> None:
    planner = _planner(cap=5 * RECORD_BYTES + 1)
    table = _table(40)
    planner.begin(4)
    first = planner.plan(_wide(3), table, num_drafted=1)
    second = planner.plan(_wide(9), table, num_drafted=2)
    assert (len(first.fetches), len(second.fetches)) == (3, 2)
    assert sum(a == Skip(a.expert, SkipReason.BYTE_CAP) for a in second.actions) == 4
    planner.begin(4)
    assert len(planner.plan(_wide(9), table, num_drafted=1).fetches) == 4


# -- whether it pays ------------------------------------------------------------------------


def _round(*, num_used: int, num_prefetched: int = 10, record_s: float = 0.001) -> PrefetchRound:
    return PrefetchRound(
        num_prefetched=num_prefetched,
        num_used=num_used,
        saved_s=num_used * record_s,
        spent_s=(num_prefetched - num_used) * record_s,
    )


def _feed(payoff: PrefetchPayoff, num_rounds: int, num_used: int) -> int:
    """Runs rounds. Returns how many of them prefetched."""
    num_prefetching = 0
    for _ in range(num_rounds):
        if payoff.begin_round():
            num_prefetching += 1
            payoff.observe(_round(num_used=num_used))
    return num_prefetching


def test_prefetching_that_pays_stays_on() -> None:
    payoff = PrefetchPayoff()
    assert _feed(payoff, 500, num_used=9) == 500
    assert payoff.is_on
    assert "90% of the records" in payoff.reason


def test_prefetching_that_does_not_pay_switches_off_and_says_why() -> None:
    payoff = PrefetchPayoff()
    assert _feed(payoff, 100, num_used=1) < 12
    assert not payoff.is_on
    assert payoff.reason.startswith("Prefetching is off: 10% of the records")


def test_prefetching_comes_back_once_probes_pay() -> None:
    payoff = PrefetchPayoff()
    _feed(payoff, 50, num_used=1)
    assert not payoff.is_on
    _feed(payoff, 32 * 6, num_used=9)
    assert payoff.is_on


def test_payoff_near_the_limit_does_not_flutter() -> None:
    payoff = PrefetchPayoff()
    states = []
    for number in range(2000):
        if payoff.begin_round():
            payoff.observe(_round(num_used=4 + number % 2))  # 45 % used: just not worth it
        states.append(payoff.is_on)
    assert sum(a != b for a, b in zip(states, states[1:], strict=False)) == 1


def test_rounds_without_a_batch_say_nothing() -> None:
    payoff = PrefetchPayoff()
    for _ in range(50):
        payoff.observe(_round(num_used=0, num_prefetched=0))
    assert payoff.is_on


def test_fetch_is_an_action_with_its_reason() -> None:
    planner = _planner()
    planner.begin(2)
    (action,) = planner.plan(_wide(1), _table(4), num_drafted=1).actions
    assert isinstance(action, Fetch)
    assert action.reason is FetchReason.LOOKAHEAD


def test_few_records_are_no_verdict_yet() -> None:
    payoff = PrefetchPayoff()
    single = PrefetchRound(num_prefetched=1, num_used=0, saved_s=0.0, spent_s=1.0)
    for number in range(1, 49):
        assert payoff.is_on, number
        payoff.observe(single)
    assert not payoff.is_on
