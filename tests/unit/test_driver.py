"""The driver: what it answers to what it is told, one observation at a time."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mira_engine.policy.base import (
    Await,
    Compute,
    Decline,
    DraftOn,
    Fetch,
    FetchReason,
    Promote,
    Skip,
    SkipReason,
)
from mira_engine.policy.cache_setup import CacheSetup
from mira_engine.policy.driver import ExpertCacheDriver
from mira_engine.types import CacheMode, Eviction, ExpertId, ServedBy

SETUP = CacheSetup(
    num_layers=4,
    num_experts=8,
    top_k=2,
    num_slots=6,
    eviction=Eviction.LRU,
    record_bytes=100,
    num_reserved_slots=1,
)


def fetched(actions) -> list[tuple[int, int]]:
    return [tuple(a.expert) for a in actions if isinstance(a, Fetch)]


def bring(driver: ExpertCacheDriver, layer: int, *experts: int) -> None:
    """Has experts routed to, loaded and computed."""
    for action in driver.enter_layer(layer, [(e, 1) for e in sorted(experts)]):
        if isinstance(action, Fetch):
            driver.landed(action.slot)
    if driver.open_layer.pinned:
        driver.computed([driver.residency.slot_of(e) for e in sorted(driver.open_layer.pinned)])
    driver.leave_layer()


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


# -- drafting --------------------------------------------------------------------------------


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


def run_pass(driver: ExpertCacheDriver, *experts: int) -> int:
    """A pass in which every layer needs these experts. Returns what had to be fetched."""
    num_fetched = 0
    for layer in range(SETUP.num_layers):
        waiting = driver.enter_layer(layer, [(e, 1) for e in experts])
        while waiting:
            slots = [a.slot for a in waiting if isinstance(a, Fetch)]
            num_fetched += len(slots)
            waiting = [a for slot in slots for a in driver.landed(slot)]
            driver.computed([driver.residency.slot_of(e) for e in sorted(driver.open_layer.pinned)])
        driver.leave_layer()
    driver.end_pass(1)
    return num_fetched


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


def test_draft_without_prefetching_is_not_listened_to() -> None:
    for setup in (SETUP, replace(SETUP, is_lookahead_immediate=True)):
        driver = ExpertCacheDriver(setup)
        assert driver.begin_draft(2, False) == []
        assert not driver.is_listening


def test_lookahead_that_nobody_uses_is_switched_off_and_said() -> None:
    driver = ExpertCacheDriver(replace(SETUP, is_lookahead_immediate=True))
    for number in range(60):
        driver.begin_draft(1, True)
        if driver.is_listening:
            for action in driver.draft_routed(0, [number % 8]):
                if isinstance(action, Fetch):
                    driver.landed(action.slot)
        driver.end_draft(1, 0.1)
        driver.end_pass(1, 100, 1.0)
    assert not driver.payoff.is_on
    assert "0% of the records" in driver.payoff.reason


# -- prompts ---------------------------------------------------------------------------------


def read_prompt(driver: ExpertCacheDriver, num_passes: int) -> int:
    """Runs passes that need every expert of every layer. Returns how many were fetched."""
    num_fetched = 0

    def carry_out(actions):
        nonlocal num_fetched
        fetches = [a for a in actions if isinstance(a, Fetch)]
        num_fetched += len(fetches)
        return [a.slot for a in fetches], [a for a in actions if isinstance(a, Compute)]

    for number in range(num_passes):
        driver.begin_prefill(num_passes - number)
        for layer in range(SETUP.num_layers):
            loading, ready = carry_out(driver.enter_layer(layer, [(e, 30) for e in range(8)]))
            while driver.is_layer_open or loading:
                if loading:
                    more, found = carry_out(driver.landed(loading.pop(0)))
                    loading, ready = loading + more, ready + found
                if ready and driver.residency.is_pinned(ready[0].slot):
                    loading += carry_out(driver.computed([ready.pop(0).slot]))[0]
                elif ready:
                    ready.pop(0)
            while ready:
                one = ready.pop(0)
                if driver.residency.is_pinned(one.slot):
                    loading += carry_out(driver.computed([one.slot]))[0]
            driver.leave_layer()
    driver.end_prefill()
    return num_fetched


def test_prompt_passes_leave_most_residents_in_their_slots() -> None:
    """32 experts, 24 slots: a pass in turn moves what has no slot, not everything."""
    driver = ExpertCacheDriver(replace(SETUP, num_slots=24))
    first = read_prompt(driver, 1)
    assert first == 32
    assert read_prompt(driver, 5) <= 5 * 20
    plain = ExpertCacheDriver(replace(SETUP, num_slots=24))
    plain._make_room_in_prompt = list
    assert read_prompt(plain, 5) == 5 * 32, "LRU alone keeps nothing"


# -- predictions -----------------------------------------------------------------------------


def test_prediction_stages_likely_experts_once_and_counts_what_is_there() -> None:
    driver = ExpertCacheDriver(SETUP)
    bring(driver, 2, 3)
    driver.enter_layer(0, [(1, 1)])
    picks = [(3, 0.5), (4, 0.45), (5, 0.05)]
    first = driver.predict(2, picks, 1)
    assert first[0] == Skip(ExpertId(2, 3), SkipReason.RESIDENT)
    assert fetched(first) == [(2, 4)]
    assert first[1].reason is FetchReason.PREDICTED
    assert driver.predict(2, picks, 1) == [], "asked for once a pass"
    assert len(driver.predict(2, picks, 40)) == 1, "one of many tokens is likely to use it"


def test_predictions_under_way_are_bounded() -> None:
    driver = ExpertCacheDriver(replace(SETUP, max_predicted=1))
    assert fetched(driver.predict(2, [(1, 0.5), (2, 0.5)], 1)) == [(2, 1)]
    assert driver.predict(1, [(4, 0.5)], 1) == [], "waits, before what is needed later"
    landed = driver.landed(driver.residency.slot_of(ExpertId(2, 1)))
    assert fetched(landed) == [(1, 4)], "the nearest layer first"
    assert driver.is_staging
    assert driver.enter_layer(2, []) == [Skip(ExpertId(2, 2), SkipReason.BYTE_CAP)]
    assert not driver.is_staging


def test_prediction_that_waited_in_vain_is_skipped_at_the_end_of_the_pass() -> None:
    driver = ExpertCacheDriver(replace(SETUP, max_predicted=1))
    driver.predict(2, [(1, 0.5), (2, 0.5)], 1)
    assert driver.end_pass(1) == [Skip(ExpertId(2, 2), SkipReason.BYTE_CAP)]
    assert not driver.is_staging


def test_far_prediction_replaces_what_was_expected_of_later_layers() -> None:
    driver = ExpertCacheDriver(replace(SETUP, num_layers=4, max_predicted=1))
    driver.enter_layer(0, [])
    first = driver.predict_far([(1, 0, 0.9), (1, 1, 0.6), (2, 3, 0.9), (3, 5, 0.9)])
    assert fetched(first) == [(1, 0)]
    driver.predict_far([(2, 4, 0.9), (3, 5, 0.9)])
    order = []
    for _ in range(4):
        for slot in range(driver.residency.num_slots):
            expert = driver.residency.expert_in(slot)
            if expert is not None and not driver.residency.is_ready(expert):
                order += fetched(driver.landed(slot))
    assert order == [(1, 1), (2, 4), (3, 5)], "what nearer layers were told stays"


def test_what_is_expected_is_no_victim_while_there_is_another() -> None:
    driver = ExpertCacheDriver(replace(SETUP, num_slots=3, num_reserved_slots=0))
    bring(driver, 2, 5)
    bring(driver, 0, 1, 2)
    driver.enter_layer(0, [(1, 1)])
    driver.predict_far([(2, 5, 0.9)])
    (miss,) = [a for a in driver.enter_layer(1, [(7, 1)]) if isinstance(a, Fetch)]
    assert miss.evicted == ExpertId(0, 2), "(2, 5) was used longer ago, but is expected"


def test_prediction_takes_no_slot_of_the_layer_that_is_computed() -> None:
    driver = ExpertCacheDriver(replace(SETUP, num_slots=2, num_reserved_slots=0))
    bring(driver, 0, 1, 2)
    driver.enter_layer(0, [(1, 1), (2, 1)])
    assert [type(a) for a in driver.predict(2, [(5, 0.9)], 1)] == [Decline]


def test_predictions_that_nobody_uses_are_switched_off() -> None:
    driver = ExpertCacheDriver(SETUP)
    for number in range(60):
        if driver.is_prediction_wanted:
            for action in driver.predict(2, [(number % 8, 1.0)], 1):
                if isinstance(action, Fetch):
                    driver.landed(action.slot)
        driver.end_pass(1, 100, 1.0)
    assert not driver.prediction_payoff.is_on
    assert not driver.is_prediction_wanted


@pytest.mark.parametrize(("num_missed", "is_on"), [(0, True), (2, False)])
def test_unused_prediction_costs_what_misses_wait_for_it(num_missed: int, is_on: bool) -> None:
    driver = ExpertCacheDriver(SETUP)
    for number in range(60):
        picks = [(number % 8, 1.0), ((number + 1) % 8, 1.0)]
        fetches = driver.predict(2, picks, 1) if driver.is_prediction_wanted else []
        for expert in range(num_missed):
            fetches += driver.enter_layer(1, [((number * 2 + expert) % 8, 1)])
        for action in fetches:
            if isinstance(action, Fetch) and not driver.residency.is_ready(action.expert):
                driver.landed(action.slot)
        driver.leave_layer()
        # Of 100 bytes a second the link moves one record; a round lasts three.
        driver.end_pass(1, 100, 1.0, 0.0, 0.0, 3.0)
    assert driver.prediction_payoff.is_on is is_on


def test_nothing_is_predicted_where_everything_is_resident() -> None:
    driver = ExpertCacheDriver(replace(SETUP, num_layers=1, num_slots=8))
    assert driver.is_prediction_wanted
    bring(driver, 0, *range(8))
    assert not driver.is_prediction_wanted


# -- regions ---------------------------------------------------------------------------------

REGIONS = replace(SETUP, num_slots=8, num_hot_slots=4)


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
