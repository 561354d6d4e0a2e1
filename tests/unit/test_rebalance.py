"""The rebalancer: who is promoted and who makes way, how many at once, and what moves."""

from __future__ import annotations

import pytest
from mira_engine.policy.base import (
    Action,
    Demote,
    DemoteReason,
    Fetch,
    FetchReason,
    Promote,
    PromoteReason,
)
from mira_engine.policy.eviction import LruEviction
from mira_engine.policy.rebalance import (
    ExpertUsage,
    Rebalancer,
    RoutingTelemetry,
    candidate_score,
    victim_score,
)
from mira_engine.policy.residency import ResidencyTable
from mira_engine.types import ExpertId, Region, ServedBy

A, B, C, D, E, F = (ExpertId(0, expert) for expert in range(6))


def _table(hot: list[ExpertId], stage: list[ExpertId], num_slots: int = 8) -> ResidencyTable:
    """A full HOT region, and STAGE entries that can go."""
    table = ResidencyTable(num_slots, LruEviction(), num_hot_slots=len(hot))
    for expert in (*hot, *stage):
        reason = FetchReason.REBALANCE if expert in hot else FetchReason.MISS
        fetch = table.admit(expert, reason)
        assert fetch is not None
        table.complete(fetch.slot)
    return table


def _rebalancer(**options: float) -> Rebalancer:
    settings = {"interval_tokens": 10, "max_swaps": 8, "probation_windows": 0, "hysteresis": 0.25}
    return Rebalancer(**(settings | {"miss_weight": 0.5} | options))


def _window(
    rebalancer: Rebalancer, table: ResidencyTable, counts: dict[ExpertId, int]
) -> list[Action]:
    for expert, count in counts.items():
        rebalancer.observe_routing(expert, count, table.served_by(expert))
    rebalancer.observe_tokens(10)
    return rebalancer.decide(table)


def _hot(table: ResidencyTable) -> set[ExpertId]:
    return {e for e, slot in table.residents() if table.region(slot) is Region.HOT}


# -- telemetry ---------------------------------------------------------------------------


def test_telemetry_counts_tokens_by_what_served_them() -> None:
    telemetry = RoutingTelemetry()
    for served_by, count in ((ServedBy.HOT, 3), (ServedBy.STAGE, 2), (ServedBy.MISS, 4)):
        telemetry.record(A, count, served_by)
    usage = telemetry.usage(A)
    assert (usage.num_tokens, usage.num_hot, usage.num_stage, usage.num_missed) == (9, 3, 2, 4)
    assert telemetry.usage(B).num_tokens == 0


def test_telemetry_end_of_the_window_resets_counts_and_keeps_the_history() -> None:
    telemetry = RoutingTelemetry()
    telemetry.record(A, 8, ServedBy.HOT)
    telemetry.advance(5)
    telemetry.end_window()
    usage = telemetry.usage(A)
    assert (usage.num_tokens, usage.num_hot, telemetry.num_window_tokens) == (0, 0, 0)
    assert (usage.frequency, usage.num_windows, telemetry.num_tokens) == (4.0, 1, 5)
    telemetry.record(A, 4, ServedBy.MISS)
    assert usage.last_used == 5
    telemetry.end_window()
    assert usage.frequency == 4.0


def test_telemetry_persistence_counts_windows_running_above_the_average() -> None:
    telemetry = RoutingTelemetry()
    for count in (5, 5):
        telemetry.record(A, count, ServedBy.MISS)
        telemetry.record(B, 1, ServedBy.MISS)
        telemetry.end_window()
    assert (telemetry.usage(A).num_windows, telemetry.usage(B).num_windows) == (2, 0)
    telemetry.record(A, 1, ServedBy.MISS)
    telemetry.record(B, 5, ServedBy.MISS)
    assert telemetry.num_windows(telemetry.usage(B)) == 1
    telemetry.end_window()
    assert (telemetry.usage(A).num_windows, telemetry.usage(B).num_windows) == (0, 1)


# -- scores ------------------------------------------------------------------------------


def test_victim_score_is_higher_for_low_volume_low_frequency_and_age() -> None:
    def score(age: int = 0, **counts: float) -> float:
        return victim_score(ExpertUsage(**counts), age_tokens=age, interval_tokens=10)

    assert score(num_tokens=2) > score(num_tokens=3)
    assert score(num_tokens=2, frequency=1.0) > score(num_tokens=2, frequency=2.0)
    assert score(num_tokens=2, age=20) > score(num_tokens=2, age=10)


def test_candidate_score_is_higher_for_volume_and_for_misses() -> None:
    def score(**counts: int) -> float:
        return candidate_score(ExpertUsage(**counts), miss_weight=0.5)

    assert score(num_tokens=3) > score(num_tokens=2)
    assert score(num_tokens=3, num_missed=2) > score(num_tokens=3, num_stage=3)


# -- a pass ------------------------------------------------------------------------------


def test_pass_is_due_after_the_interval_and_not_again_at_once() -> None:
    rebalancer = _rebalancer()
    table = _table([A], [])
    rebalancer.observe_tokens(9)
    assert not rebalancer.is_due()
    rebalancer.observe_tokens(1)
    assert rebalancer.is_due()
    rebalancer.decide(table)
    assert not rebalancer.is_due()


def test_promoting_a_stage_resident_moves_no_bytes() -> None:
    table = _table([A, B], [C])
    slots = dict(table.residents())
    actions = _window(_rebalancer(), table, {A: 9, B: 1, C: 8})
    assert actions == [
        Demote(B, slots[B], DemoteReason.LOW_DEMAND),
        Promote(C, slots[C], PromoteReason.DEMAND),
    ]
    assert dict(table.residents()) == slots
    assert _hot(table) == {A, C}


def test_promoting_what_is_not_resident_is_a_fetch() -> None:
    table = _table([A, B], [])
    demote, fetch = _window(_rebalancer(), table, {A: 9, C: 8})
    assert isinstance(demote, Demote)
    assert demote.expert == B
    assert isinstance(fetch, Fetch)
    assert (fetch.expert, fetch.reason) == (C, FetchReason.REBALANCE)
    assert _hot(table) == {A, C}
    assert not table.is_ready(C)


def test_pass_makes_no_more_swaps_than_allowed_and_the_best_first() -> None:
    table = _table([A, B, C], [D, E, F])
    counts = {A: 3, B: 2, C: 1, D: 10, E: 20, F: 30}
    _window(_rebalancer(max_swaps=2), table, counts)
    assert _hot(table) == {A, F, E}


def test_hysteresis_keeps_a_hot_expert_of_like_demand() -> None:
    table = _table([A], [B])
    assert _window(_rebalancer(), table, {A: 20, B: 22}) == []
    assert _hot(table) == {A}
    _window(_rebalancer(), table, {A: 20, B: 24})
    assert _hot(table) == {B}


def test_probation_admits_only_after_a_persistent_history() -> None:
    table = _table([A, B], [C])
    rebalancer = _rebalancer(probation_windows=3)
    counts = {A: 5, B: 1, C: 9}
    assert _window(rebalancer, table, counts) == []
    assert _window(rebalancer, table, counts) == []
    _window(rebalancer, table, counts)
    assert _hot(table) == {A, C}


def test_no_probation_admits_what_missed_once() -> None:
    table = _table([A, B], [C, D])
    _window(_rebalancer(), table, {C: 2, A: 50})
    assert _hot(table) == {A, C}


def test_room_in_hot_is_filled_by_labels_without_bound_and_by_fetches_with() -> None:
    table = ResidencyTable(12, LruEviction(), num_hot_slots=6)
    for expert in (A, B, C):
        fetch = table.admit(expert, FetchReason.MISS)
        assert fetch is not None
        table.complete(fetch.slot)
    actions = _window(_rebalancer(max_swaps=1), table, {A: 3, B: 3, C: 3, D: 9, E: 8})
    assert [type(a) for a in actions] == [Fetch, Promote, Promote, Promote]
    assert _hot(table) == {A, B, C, D}


def test_layers_end_up_with_different_numbers_of_hot_experts() -> None:
    low = [ExpertId(0, e) for e in range(2)]
    high = [ExpertId(1, e) for e in range(4)]
    table = _table([*low, *high[:2]], high[2:])
    _window(_rebalancer(), table, dict.fromkeys(high, 10) | dict.fromkeys(low, 1))
    assert _hot(table) == set(high)


def test_pinned_hot_expert_is_not_a_victim() -> None:
    table = _table([A, B], [C])
    table.pin(B)
    _window(_rebalancer(), table, {A: 2, C: 9})
    assert _hot(table) == {B, C}


def test_pass_during_prefill_does_nothing_and_goes_on_with_the_window() -> None:
    table = _table([A], [B])
    rebalancer = _rebalancer()
    table.begin_prefill()
    assert _window(rebalancer, table, {B: 9}) == []
    assert rebalancer.is_due()
    table.end_prefill()
    assert rebalancer.decide(table)


def test_pass_over_one_pool_does_nothing() -> None:
    table = ResidencyTable(2, LruEviction())
    assert table.admit(A, FetchReason.MISS) is not None
    assert _rebalancer().warm(table, {}) == []


def test_same_observations_give_the_same_actions_in_any_order_of_experts() -> None:
    counts = {C: 9, D: 9, E: 9, F: 9}
    passes = []
    for order in (list(counts), list(reversed(counts))):
        table = _table([A, B], [C, D, E, F])
        passes.append(_window(_rebalancer(), table, {e: counts[e] for e in order}))
    assert passes[0] == passes[1]
    assert [a.expert for a in passes[0]] == [A, C, B, D]


# -- after a prompt ------------------------------------------------------------------------


def test_warm_swaps_by_the_last_tokens_within_the_bound_and_keeps_the_window() -> None:
    table = _table([A, B, C], [D])
    rebalancer = _rebalancer(probation_windows=5)
    rebalancer.observe_routing(A, 1, ServedBy.HOT)
    actions = rebalancer.warm(table, {A: 5, B: 1, D: 6, E: 7, F: 4}, max_swaps=2)
    assert [type(a) for a in actions] == [Demote, Fetch, Demote, Promote]
    assert _hot(table) == {A, D, E}
    assert rebalancer.telemetry.usage(A).num_tokens == 1


@pytest.mark.parametrize("max_swaps", [0, 1, 3])
def test_bytes_moved_by_a_pass_are_bounded(max_swaps: int) -> None:
    table = _table([A, B, C], [], num_slots=12)
    wanted = {ExpertId(1, e): 10 for e in range(8)}
    actions = _window(_rebalancer(max_swaps=max_swaps), table, wanted)
    assert sum(isinstance(a, Fetch) for a in actions) == max_swaps
