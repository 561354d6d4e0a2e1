"""The layer that is computed: hits first, misses as slots come free, nothing left behind."""

from __future__ import annotations

from dataclasses import replace

import pytest
from driver_scenes import SETUP, bring, fetched
from mira_engine.policy.base import Await, Compute, ComputeOnHost, Fetch, FetchReason
from mira_engine.policy.driver import ExpertCacheDriver
from mira_engine.policy.eviction import LruEviction
from mira_engine.policy.flood import Flood
from mira_engine.policy.open_layer import OpenLayer
from mira_engine.policy.residency import ResidencyTable
from mira_engine.types import ExpertId, ServedBy


def test_layer_with_all_experts_there_is_computed_without_pins() -> None:
    driver = ExpertCacheDriver(SETUP)
    bring(driver, 0, 1, 2)
    actions = driver.enter_layer(0, [(1, 1), (2, 3)])
    assert [(a.expert.expert, a.num_tokens, a.served_by) for a in actions] == [
        (1, 1, ServedBy.HOT),
        (2, 3, ServedBy.HOT),
    ]
    assert not driver.is_layer_open
    assert not driver.open_layer.pinned


def test_missing_experts_are_fetched_most_tokens_first_and_computed_as_they_land() -> None:
    driver = ExpertCacheDriver(SETUP)
    bring(driver, 0, 1)
    actions = driver.enter_layer(0, [(1, 1), (4, 1), (5, 3)])
    assert isinstance(actions[0], Compute)
    assert fetched(actions) == [(0, 5), (0, 4)]
    assert driver.is_layer_open
    slots = {a.expert.expert: a.slot for a in actions}
    (found,) = driver.landed(slots[4])
    assert (found.expert, found.num_tokens, found.served_by) == ((0, 4), 1, ServedBy.MISS)
    driver.computed([slots[1], slots[4]])
    assert driver.is_layer_open, "one is on its way"
    driver.landed(slots[5])
    driver.computed([slots[5]])
    assert not driver.is_layer_open


def test_slots_roll_where_a_layer_needs_more_than_there_are() -> None:
    driver = ExpertCacheDriver(replace(SETUP, num_slots=2))
    actions = driver.enter_layer(0, [(e, 1) for e in range(5)])
    assert fetched(actions) == [(0, 0), (0, 1)]
    seen = []
    while driver.is_layer_open:
        fetch = actions.pop(0)
        (found,) = driver.landed(fetch.slot)
        seen.append(found.expert.expert)
        actions += driver.computed([fetch.slot])
    assert seen == [0, 1, 2, 3, 4]


def test_slot_that_somebody_elses_load_frees_goes_to_what_is_missing() -> None:
    driver = ExpertCacheDriver(
        replace(SETUP, num_slots=2, is_lookahead_immediate=True, num_reserved_slots=0)
    )
    driver.begin_draft(1, True)
    ahead = [a for e in (6, 7) for a in driver.draft_routed(3, [e]) if isinstance(a, Fetch)]
    driver.end_draft(1, 0.1)
    assert fetched(driver.enter_layer(0, [(1, 1)])) == []
    assert fetched(driver.landed(ahead[0].slot)) == [(0, 1)]


def test_leaving_a_broken_layer_leaves_nothing_pinned_or_awaited() -> None:
    driver = ExpertCacheDriver(SETUP)
    driver.enter_layer(0, [(1, 1), (2, 1)])
    driver.leave_layer()
    assert not driver.is_layer_open
    assert not any(map(driver.residency.is_pinned, range(SETUP.num_slots)))


def test_failed_load_loses_its_slot_at_once_or_at_the_end_of_the_reply() -> None:
    driver = ExpertCacheDriver(SETUP)
    (fetch,) = driver.enter_layer(0, [(1, 1)])
    driver.failed(fetch.slot)
    assert driver.residency.slot_of(ExpertId(0, 1)) is not None, "it is pinned"
    driver.leave_layer()
    driver.end_reply()
    assert driver.residency.slot_of(ExpertId(0, 1)) is None
    (fetch,) = driver.enter_layer(0, [(2, 1)])
    driver.leave_layer()
    driver.failed(fetch.slot)
    assert driver.residency.slot_of(ExpertId(0, 2)) is None


def test_failed_load_is_given_up_with_one_reply_and_not_again_with_the_next() -> None:
    driver = ExpertCacheDriver(SETUP)
    (fetch,) = driver.enter_layer(0, [(1, 1)])
    driver.failed(fetch.slot)
    driver.end_reply()
    bring(driver, 0, 2)
    driver.end_reply()
    assert driver.residency.is_ready(ExpertId(0, 2))


def test_slot_of_a_failed_load_goes_to_what_is_missing() -> None:
    driver = ExpertCacheDriver(replace(SETUP, num_slots=1, num_reserved_slots=0))
    driver.predict(3, [(7, 0.5)], 1)
    assert fetched(driver.enter_layer(0, [(1, 1)])) == [], "the only slot is loading"
    assert fetched(driver.failed(0)) == [(0, 1)]


def test_reply_that_ends_inside_a_layer_leaves_nothing_behind() -> None:
    driver = ExpertCacheDriver(SETUP)
    driver.enter_layer(0, [(1, 1), (2, 1)])
    driver.end_reply()
    assert not driver.is_layer_open
    assert not any(map(driver.residency.is_pinned, range(SETUP.num_slots)))


# -- the layer by itself ---------------------------------------------------------------------


@pytest.fixture
def residency() -> ResidencyTable:
    """Three slots; expert 1 of layer 0 is there, expert 2 on its way."""
    table = ResidencyTable(3, LruEviction())
    for number in (1, 2):
        fetch = table.admit(ExpertId(0, number), FetchReason.LOOKAHEAD)
        assert fetch is not None
    table.complete(0)
    return table


def entered(residency: ResidencyTable, *experts: int, on_host: frozenset = frozenset()):
    """Enters layer 0 with one token for each expert. Returns the layer and its actions."""
    layer = OpenLayer(residency, Flood(3, has_regions=False))
    tokens_of = {ExpertId(0, number): 1 for number in experts}
    return layer, layer.enter(0, tokens_of, on_host)


def test_layer_pins_what_is_there_and_awaits_what_is_on_its_way(residency) -> None:
    layer, actions = entered(residency, 1, 2)
    there, coming = ExpertId(0, 1), ExpertId(0, 2)
    assert actions == [Compute(there, 0, 1, ServedBy.STAGE, True), Await(coming, 1)]
    assert layer.pinned == {there, coming}
    assert list(layer.waiting) == [coming]
    assert not layer.is_miss_awaited


def test_layer_whose_missing_expert_the_host_computes_pins_nothing(residency) -> None:
    layer, actions = entered(residency, 1, 5, on_host=frozenset({ExpertId(0, 5)}))
    assert [type(action) for action in actions] == [Compute, ComputeOnHost]
    assert not layer.pinned
    assert not layer.missing


def test_layer_counts_what_it_fetched_once(residency) -> None:
    layer, _ = entered(residency, 1, 2, 6, 5)
    assert layer.missing == [ExpertId(0, 5), ExpertId(0, 6)], "ties by expert id"
    assert layer.is_miss_awaited, "though nothing of it was asked for yet"
    assert fetched(layer.fetch_missing(())) == [(0, 5)], "the others' slots are pinned"
    assert layer.is_miss_awaited
    assert layer.take_num_fetched() == 1
    assert layer.take_num_fetched() == 0
    layer.unpin([0])
    assert fetched(layer.fetch_missing(())) == [(0, 6)]
    layer.leave()
    assert not any(map(residency.is_pinned, range(3)))


def test_layer_that_is_left_early_forgets_whom_it_still_missed(residency) -> None:
    layer, _ = entered(residency, 1, 2, 5, 6)
    layer.fetch_missing(())
    layer.leave()
    assert not any((layer.missing, layer.waiting, layer.pinned))
    assert layer.fetch_missing(()) == []


def test_missing_expert_displaces_what_is_expected_only_where_nobody_else_can_go() -> None:
    residency = ResidencyTable(2, LruEviction())
    for number in (1, 2):
        fetch = residency.admit(ExpertId(1, number), FetchReason.MISS)
        assert fetch is not None
        residency.complete(fetch.slot)
    layer, _ = entered(residency, 5, 6)
    fetches = layer.fetch_missing({ExpertId(1, 1)})
    assert [fetch.evicted for fetch in fetches] == [(1, 2), (1, 1)]
