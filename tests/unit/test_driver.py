"""The driver as a whole: what it is told is written down, and what becomes of its regions."""

from __future__ import annotations

import inspect
from dataclasses import replace

import pytest
from driver_scenes import SETUP, bring, fetched
from mira_engine.policy.base import Promote, SkipReason
from mira_engine.policy.driver import ExpertCacheDriver
from mira_engine.types import CacheMode, ExpertId, ServedBy

REGIONS = replace(SETUP, num_slots=8, num_hot_slots=4)


def test_driver_writes_down_all_that_it_is_told() -> None:
    methods = inspect.getmembers(ExpertCacheDriver, inspect.isfunction)
    public = {name: method for name, method in methods if not name.startswith("_")}
    assert {"enter_layer", "landed", "end_reply"} <= public.keys()
    told = [name for name, method in public.items() if hasattr(method, "__wrapped__")]
    assert told == list(public), "a replay would miss the others"


def test_driver_tells_observations_with_their_answers() -> None:
    driver, told = ExpertCacheDriver(SETUP), []
    driver.on_decision = lambda *decision: told.append(decision)
    actions = driver.enter_layer(0, [(3, 1)])
    assert fetched(actions) == [(0, 3)]
    assert told == [("enter_layer", (0, [(3, 1)]), actions)]


# -- regions ---------------------------------------------------------------------------------


def test_prompt_warms_hot_by_what_its_end_was_routed_to() -> None:
    driver = ExpertCacheDriver(REGIONS)
    driver.begin_prefill(1)
    bring(driver, 0, 1, 2)
    bring(driver, 1, 3)
    assert driver.residency.regions.num_hot == 0
    actions = driver.end_prefill()
    assert {tuple(a.expert) for a in actions if isinstance(a, Promote)} == {(0, 1), (0, 2), (1, 3)}
    found = driver.enter_layer(0, [(1, 1)])
    assert found[0].served_by is ServedBy.HOT


def test_static_hot_set_is_filled_and_stays() -> None:
    driver = ExpertCacheDriver(replace(REGIONS, is_rebalancing=False))
    actions = driver.fill_hot([(0, e) for e in range(6)])
    assert fetched(actions) == [(0, e) for e in range(4)]
    assert all(a.reason is SkipReason.NO_ROOM for a in actions[4:])
    for action in actions[:4]:
        driver.landed(action.slot)
    for number in range(600):
        bring(driver, 2, number % 8)
        driver.end_pass(1)
    assert all(driver.residency.is_ready(ExpertId(0, e)) for e in range(4))


def test_hot_expert_on_its_way_is_left_alone_by_the_rebalancer() -> None:
    driver = ExpertCacheDriver(REGIONS)
    for _ in range(300):
        bring(driver, 0, 1)
        driver.rebalancer.observe_tokens(1)
    driver.fill_hot([(2, 5)])  # It stays LOADING.
    driver.rebalancer.observe_routing(ExpertId(2, 5), 900, ServedBy.MISS)
    assert (2, 5) not in {tuple(a.expert) for a in driver.end_pass(1)}


def test_hot_follows_the_demand() -> None:
    driver = ExpertCacheDriver(REGIONS)
    moved = []
    for number in range(800):
        layer = 0 if number < 300 else 2
        bring(driver, layer, number % 4)
        moved += [a for a in driver.end_pass(1) if isinstance(a, Promote)]
    assert {a.expert.layer for a in moved} == {0, 2}
    assert {e.layer for e in driver.residency.regions.hot()} == {2}


@pytest.mark.parametrize("mode", [CacheMode.LARGE, CacheMode.SMALL])
def test_small_mode_reclaims_what_a_layer_leaves_behind(mode: CacheMode) -> None:
    driver = ExpertCacheDriver(
        replace(REGIONS, num_hot_slots=1, num_stage_slots=4, mode=mode, is_rebalancing=False)
    )
    assert driver.has_layer_ends
    bring(driver, 0, 1, 2, 3)
    held = [driver.residency.slot_of(ExpertId(0, e)) is not None for e in (1, 2, 3)]
    assert sum(held) == (3 if mode is CacheMode.LARGE else 1), "one went to HOT, which had room"
