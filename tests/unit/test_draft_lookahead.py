"""What a draft's routers choose is fetched at boundaries or at once, within bounds."""

from __future__ import annotations

from dataclasses import replace

from driver_scenes import SETUP, bring, fetched
from mira_engine.policy.base import Await, DraftOn, Skip, SkipReason
from mira_engine.policy.driver import ExpertCacheDriver
from mira_engine.types import ExpertId, ServedBy


def test_batches_come_at_boundaries_up_to_the_end_of_the_draft() -> None:
    driver = ExpertCacheDriver(SETUP)
    assert driver.begin_draft(3, True) == [DraftOn(1)]
    boundary, boundaries = 1, []
    for number in range(1, 4):
        driver.lookahead.record(0, [number])
        if number == boundary:
            actions = driver.reach_boundary(number, driver.lookahead.snapshot())
            assert fetched(actions) == [(0, number)]
            boundaries.append(number)
            boundary += sum(a.num_tokens for a in actions if isinstance(a, DraftOn))
    assert boundaries == [1, 2, 3]
    driver.end_draft(3, 0.1)
    assert driver.lookahead.is_empty


def test_immediate_lookahead_fetches_each_choice_once_and_evicts_nothing_of_the_window() -> None:
    driver = ExpertCacheDriver(
        replace(SETUP, num_slots=3, is_lookahead_immediate=True, num_reserved_slots=0)
    )
    bring(driver, 3, 0, 1, 2)
    assert not driver.is_listening
    assert driver.begin_draft(2, True) == []
    assert driver.is_listening
    assert driver.draft_routed(3, [2]) == []
    actions = driver.draft_routed(0, [1, 4])
    assert fetched(actions) == [(0, 1), (0, 4)]
    assert {a.evicted for a in actions} == {(3, 0), (3, 1)}
    assert driver.draft_routed(0, [1]) == [], "it is on its way"
    assert driver.draft_routed(1, [7]) == [Skip(ExpertId(1, 7), SkipReason.NO_ROOM)]
    driver.end_draft(2, 0.1)
    assert not driver.is_listening
    actions = driver.enter_layer(0, [(4, 1)])
    assert isinstance(actions[0], Await)
    (found,) = driver.landed(actions[0].slot)
    assert found.served_by is ServedBy.STAGE
    assert found.is_prefetched


def test_immediate_lookahead_leaves_slots_that_are_not_loading() -> None:
    driver = ExpertCacheDriver(replace(SETUP, is_lookahead_immediate=True, num_reserved_slots=2))
    driver.begin_draft(2, True)
    actions = driver.draft_routed(0, range(8))
    assert len(fetched(actions)) == SETUP.num_slots - 2
    driver.end_draft(2, 0.1)
    assert len(fetched(driver.enter_layer(1, [(1, 1), (2, 1)]))) == 2


def test_draft_that_asks_for_much_keeps_most_slots_to_compute_with() -> None:
    driver = ExpertCacheDriver(
        replace(SETUP, num_slots=8, is_lookahead_immediate=True, max_drafted_loading=2)
    )
    bring(driver, 3, *range(8))
    driver.begin_draft(2, True)
    actions = driver.draft_routed(0, range(5))
    assert fetched(actions) == [(0, 0), (0, 1)]
    assert actions[2:] == [Skip(ExpertId(0, e), SkipReason.NO_ROOM) for e in (2, 3, 4)]
    driver.landed(actions[0].slot)
    assert fetched(driver.draft_routed(1, [5])) == [(1, 5)], "one has landed"


def test_draft_without_prefetching_is_not_listened_to() -> None:
    for setup in (SETUP, replace(SETUP, is_lookahead_immediate=True)):
        driver = ExpertCacheDriver(setup)
        assert driver.begin_draft(2, False) == []
        assert not driver.is_listening


def test_draft_that_is_broken_off_with_its_reply_is_listened_to_no_longer() -> None:
    driver = ExpertCacheDriver(replace(SETUP, is_lookahead_immediate=True))
    driver.begin_draft(2, True)
    assert driver.is_listening
    driver.end_reply()
    assert not driver.is_listening
