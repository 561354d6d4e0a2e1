"""Passes that need more experts than there are slots keep what is there for each other."""

from __future__ import annotations

from dataclasses import replace

import pytest
from driver_scenes import SETUP, read_prompt, run_pass
from mira_engine.policy.base import Evict, EvictReason, FetchReason
from mira_engine.policy.driver import ExpertCacheDriver
from mira_engine.policy.eviction import LruEviction
from mira_engine.policy.flood import Flood
from mira_engine.policy.residency import ResidencyTable
from mira_engine.types import ExpertId


def test_passes_that_need_more_than_the_slots_keep_most_of_them_for_each_other() -> None:
    driver = ExpertCacheDriver(replace(SETUP, num_slots=9, num_reserved_slots=1))
    needed = 3 * SETUP.num_layers
    counts = [run_pass(driver, 1, 2, 3) for _ in range(5)]
    assert counts[0] == needed
    # By recency alone nothing of a pass would be there for the next one.
    assert counts[-1] <= needed - 9 + 3


def test_pass_that_fits_again_is_served_by_recency() -> None:
    driver = ExpertCacheDriver(replace(SETUP, num_slots=9, num_reserved_slots=1))
    for _ in range(3):
        run_pass(driver, 1, 2, 3)
    run_pass(driver, 5)
    run_pass(driver, 5)
    assert not driver.flood.is_flooded
    assert run_pass(driver, 5) == 0


def test_prompt_does_not_make_the_reply_look_as_if_it_needed_more_than_the_slots() -> None:
    driver = ExpertCacheDriver(replace(SETUP, num_slots=9, num_reserved_slots=1))
    driver.begin_prefill(1)
    run_pass(driver, 1, 2, 3)
    driver.end_prefill()
    driver.enter_layer(0, [(1, 1)])
    assert not driver.flood.is_flooded


@pytest.mark.parametrize("is_immediate", [True, False])
def test_draft_of_passes_that_need_more_than_the_slots_fetches_nothing(is_immediate: bool) -> None:
    driver = ExpertCacheDriver(
        replace(SETUP, num_slots=9, num_reserved_slots=1, is_lookahead_immediate=is_immediate)
    )
    assert driver.begin_draft(1, True) or driver.is_listening
    for _ in range(3):
        run_pass(driver, 1, 2, 3)
    assert driver.begin_draft(1, True) == []
    assert not driver.is_listening
    assert not driver.is_prediction_wanted


def test_regions_with_fewer_slots_than_a_pass_needs_go_on_staging() -> None:
    driver = ExpertCacheDriver(
        replace(SETUP, num_slots=9, num_reserved_slots=1, num_hot_slots=4, num_stage_slots=3)
    )
    for _ in range(3):
        run_pass(driver, 1, 2, 3)
    assert driver.is_prediction_wanted


def test_prompt_passes_leave_most_residents_in_their_slots() -> None:
    """32 experts, 24 slots: a pass in turn moves what has no slot, not everything."""
    driver = ExpertCacheDriver(replace(SETUP, num_slots=24))
    first = read_prompt(driver, 1)
    assert first == 32
    assert read_prompt(driver, 5) <= 5 * 20
    plain = ExpertCacheDriver(replace(SETUP, num_slots=24))
    plain.flood.make_room = lambda residency: []
    read_prompt(plain, 1)
    assert read_prompt(plain, 5) == 5 * 32, "LRU alone keeps nothing"


def test_prompt_passes_keep_what_took_slots_that_nobody_had() -> None:
    driver = ExpertCacheDriver(replace(SETUP, num_slots=24))
    assert read_prompt(driver, 5) <= 32 + 4 * 20


# -- the flood by itself ---------------------------------------------------------------------


def passed(flood: Flood, *num_experts: int) -> Flood:
    """Has a pass ask for so many experts in each layer, and the next pass begin."""
    for layer, number in enumerate(num_experts):
        flood.enter_layer(layer, number)
    flood.enter_layer(0, 1)
    return flood


@pytest.mark.parametrize(("last", "is_flooded"), [(3, False), (4, True)])
def test_flood_begins_where_a_pass_asks_for_one_expert_more_than_stays(
    last: int, is_flooded: bool
) -> None:
    flood = passed(Flood(5, has_regions=False), 2, last)
    assert flood.is_flooded is flood.is_passing_through is flood.is_streaming is is_flooded


def test_flood_ends_with_a_pass_that_fits_and_with_the_reply() -> None:
    flood = passed(Flood(5, has_regions=False), 6)
    assert not passed(flood, 2).is_streaming
    assert passed(flood, 6).is_streaming
    flood.end_reply()
    assert not flood.is_streaming
    assert not passed(flood, 4).is_flooded, "what the reply asked for is forgotten"


def test_flood_with_regions_lets_nothing_pass_through() -> None:
    flood = passed(Flood(5, has_regions=True), 6)
    assert flood.is_flooded
    assert not flood.is_passing_through
    flood.begin_prompt(2)
    assert flood.is_more_to_read
    assert not flood.is_streaming


def test_prompt_streams_up_to_its_last_pass() -> None:
    flood = Flood(5, has_regions=False)
    flood.begin_prompt(2)
    assert flood.is_streaming
    assert not flood.is_passing_through, "a draft knows nothing of it"
    flood.begin_prompt(1)
    assert not flood.is_streaming
    flood.end_prompt()
    assert not passed(flood, 1).is_flooded


def test_prompts_pass_that_asks_for_much_begins_no_flood() -> None:
    flood = Flood(5, has_regions=False)
    flood.begin_prompt(2)
    assert not passed(flood, 6).is_flooded


def test_what_a_flood_brought_stays_once_it_is_over() -> None:
    table, experts = full_table()
    flood = passed(Flood(1, has_regions=False), 3)
    flood.bring(experts[0], table.generation(0))
    passed(flood, 0)
    passed(flood, 3).enter_layer(1, 3)
    assert flood.is_streaming
    assert flood.make_room(table) == []


def full_table() -> tuple[ResidencyTable, list[ExpertId]]:
    """Three experts of layer 0 in three slots."""
    table = ResidencyTable(3, LruEviction())
    experts = [ExpertId(0, number) for number in range(3)]
    for expert in experts:
        bring_into(table, expert)
    return table, experts


def bring_into(table: ResidencyTable, expert: ExpertId) -> None:
    fetch = table.admit(expert, FetchReason.MISS)
    assert fetch is not None
    table.complete(fetch.slot)


def test_room_is_made_of_what_passed_through_for_a_layer_behind() -> None:
    table, experts = full_table()
    flood = Flood(1, has_regions=False)
    flood.enter_layer(0, 3)
    for expert in experts:
        flood.bring(expert, table.generation(table.slot_of(expert)))
    assert flood.make_room(table) == [], "their layer is computed"
    flood.enter_layer(1, 3)
    table.pin(experts[0])
    assert flood.make_room(table) == [Evict(experts[1], 1, EvictReason.LAYER_BEHIND)]
    assert flood.make_room(table) == [], "a slot is free"
    bring_into(table, ExpertId(1, 0))
    assert flood.make_room(table) == [Evict(experts[2], 2, EvictReason.LAYER_BEHIND)]


def test_room_is_not_made_of_an_expert_that_somebody_else_brought_again() -> None:
    table, experts = full_table()
    flood = Flood(1, has_regions=False)
    flood.enter_layer(0, 3)
    flood.bring(experts[0], table.generation(0))
    table.evict(experts[0])
    bring_into(table, experts[0])
    flood.enter_layer(1, 3)
    assert flood.make_room(table) == []
    assert table.is_ready(experts[0])
