"""Which misses the host computes: by both ends, never worse than copies, and not for ever."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mira_engine.policy.base import Compute, ComputeOnHost, Evict, Fetch, FetchReason
from mira_engine.policy.cache_setup import CacheSetup
from mira_engine.policy.driver import ExpertCacheDriver
from mira_engine.policy.eviction import LfuEviction
from mira_engine.policy.host_misses import (
    MAX_HOST_TOKENS,
    MIN_GAIN,
    HostMisses,
    HostSetup,
    num_on_host,
)
from mira_engine.policy.replay import DecisionLog, replay
from mira_engine.policy.residency import ResidencyTable
from mira_engine.types import CacheMode, Eviction, ExpertId

HOST = HostSetup(expert_s=1.0, token_s=0.5, record_s=2.0, num_held=32)
SETUP = CacheSetup(
    num_layers=4,
    num_experts=8,
    top_k=2,
    num_slots=6,
    eviction=Eviction.LRU,
    record_bytes=100,
    num_reserved_slots=1,
    host=HOST,
)
FAST = replace(SETUP, host=replace(HOST, expert_s=1e-6, token_s=0.0))
"""The host computes whatever it may."""


def on_host(actions) -> list[int]:
    return [a.expert.expert for a in actions if isinstance(a, ComputeOnHost)]


def fetched(actions) -> list[tuple[int, FetchReason]]:
    return [(a.expert.expert, a.reason) for a in actions if isinstance(a, Fetch)]


def land(driver: ExpertCacheDriver, actions) -> None:
    """Lets everything land, is computed, and leaves the layer."""
    for action in actions:
        if isinstance(action, Fetch):
            driver.landed(action.slot)
    driver.leave_layer()


# -- how many ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("host_s", "others", "expected"),
    [
        ([1.0], {}, 1),
        ([2.0], {}, 0),  # as long as the copy
        ([1.9], {}, 0),  # hardly shorter
        ([1.0, 1.0, 1.0], {}, 2),  # at 2 both ends come together; three would take 3
        ([3.0, 3.0, 3.0], {}, 1),  # beside two copies it is done before they are
        ([1.0], {"num_copied": 3}, 1),
        ([9.0], {"num_copied": 3}, 0),
        ([3.0], {"num_ahead": 2}, 1),  # the copy would be the third
        ([], {"num_copied": 3}, 0),
    ],
)
def test_number_on_the_host_is_where_both_ends_meet(host_s, others, expected) -> None:
    assert num_on_host(host_s, 2.0, **others) == expected


seconds = st.floats(1e-6, 10.0)


@given(
    host_s=st.lists(seconds, max_size=8).map(sorted),
    record_s=seconds,
    num_copied=st.integers(0, 4),
    num_ahead=st.integers(0, 3),
)
def test_split_is_never_worse_than_all_copies_and_the_best_there_is(
    host_s, record_s, num_copied, num_ahead
) -> None:
    def whole_s(number: int) -> float:
        copies = len(host_s) - number + num_copied
        link_s = (num_ahead + copies) * record_s if copies else 0.0
        return max(sum(host_s[:number]), link_s)

    chosen = num_on_host(host_s, record_s, num_copied=num_copied, num_ahead=num_ahead)

    best = min(map(whole_s, range(len(host_s) + 1)))
    assert whole_s(chosen) <= whole_s(0)
    if chosen:
        assert whole_s(chosen) == pytest.approx(best)
    else:
        assert best >= (1 - MIN_GAIN) * whole_s(0) * (1 - 1e-9)


# -- who ------------------------------------------------------------------------------------


def test_experts_of_the_fewest_tokens_are_computed_on_the_host() -> None:
    driver = ExpertCacheDriver(SETUP)

    actions = driver.enter_layer(0, [(1, 3), (2, 1), (3, 1), (4, 2)])

    # 1, 1 and 1.5 s on the host beside one copy of 2 s; the fourth would make it 5.5 s.
    assert on_host(actions) == [2, 3, 4]
    assert fetched(actions) == [(1, FetchReason.MISS)]


def test_nobody_is_computed_on_the_host_without_a_setup_or_leave() -> None:
    for driver in (ExpertCacheDriver(replace(FAST, host=None)), ExpertCacheDriver(FAST)):
        driver.allow_host(False)
        actions = driver.enter_layer(0, [(1, 1), (2, 1)])
        assert on_host(actions) == []
        assert len(fetched(actions)) == 2


def test_prompts_are_left_to_the_card() -> None:
    driver = ExpertCacheDriver(FAST)
    driver.begin_prefill(1)
    assert on_host(driver.enter_layer(0, [(1, 1)])) == []
    driver.leave_layer()
    driver.end_prefill()
    assert on_host(driver.enter_layer(0, [(2, 1)])) == [2]


def test_passes_of_many_tokens_are_left_to_the_card() -> None:
    most = MAX_HOST_TOKENS * SETUP.top_k
    driver = ExpertCacheDriver(FAST)
    assert on_host(driver.enter_layer(0, [(1, most)])) == [1]
    driver.leave_layer()
    assert on_host(driver.enter_layer(0, [(1, 1), (2, most)])) == []


def test_experts_whose_records_are_on_the_disk_are_copied() -> None:
    driver = ExpertCacheDriver(replace(FAST, host=replace(HOST, expert_s=1e-6, num_held=10)))
    assert on_host(driver.enter_layer(1, [(0, 1), (1, 1), (2, 1)])) == [0, 1]


def test_awaited_record_makes_room_for_the_host() -> None:
    driver = ExpertCacheDriver(replace(SETUP, host=replace(HOST, expert_s=3.0)))
    assert on_host(driver.enter_layer(0, [(2, 1)])) == [], "the copy takes 2 s"
    driver.leave_layer()
    actions = driver.enter_layer(0, [(2, 1), (3, 1)])
    assert on_host(actions) == [3], "behind the other copy it would take 4 s"


# -- pins, and what the layer waits for -----------------------------------------------------


def test_layer_whose_misses_are_all_on_the_host_is_closed_and_pins_nothing() -> None:
    driver = ExpertCacheDriver(FAST)
    driver.begin_prefill(1)
    land(driver, driver.enter_layer(0, [(5, 1)]))
    driver.end_prefill()

    actions = driver.enter_layer(0, [(1, 2), (5, 1)])

    assert actions[0] == ComputeOnHost(ExpertId(0, 1), 2)
    assert isinstance(actions[1], Compute)
    assert not driver.is_layer_open
    assert not driver.open_layer.pinned


def test_what_the_host_computes_has_no_slot_afterwards() -> None:
    driver = ExpertCacheDriver(FAST)
    driver.enter_layer(0, [(1, 1)])
    assert driver.residency.slot_of(ExpertId(0, 1)) is None
    assert driver.residency.num_used == 0


# -- not for ever ---------------------------------------------------------------------------


def test_second_miss_that_a_slot_would_have_spared_brings_the_expert() -> None:
    driver = ExpertCacheDriver(FAST)
    assert fetched(driver.enter_layer(0, [(1, 1)])) == []
    driver.end_pass(1)

    actions = driver.enter_layer(0, [(1, 1)])

    assert on_host(actions) == [1], "nobody waits for the record"
    assert fetched(actions) == [(1, FetchReason.RECURRING)]
    assert not driver.is_layer_open
    land(driver, actions)
    assert isinstance(driver.enter_layer(0, [(1, 1)])[0], Compute)


def test_misses_far_from_each_other_bring_nothing() -> None:
    driver = ExpertCacheDriver(FAST)
    for number in range(3):
        actions = driver.enter_layer(0, [(1, 1)])
        assert (on_host(actions), fetched(actions)) == ([1], []), number
        for expert in range(SETUP.num_slots):
            driver.enter_layer(1 + number, [(expert, 1)])


def test_expert_that_every_pass_misses_is_brought_however_few_the_slots() -> None:
    driver = ExpertCacheDriver(replace(FAST, num_slots=2))
    seen = []
    for _ in range(3):
        for layer in range(4):
            seen += fetched(driver.enter_layer(layer, [(1, 1), (2, 1)]))
        driver.end_pass(1)
    assert seen[0] == (1, FetchReason.RECURRING)


def test_what_comes_back_comes_one_at_a_time() -> None:
    driver = ExpertCacheDriver(FAST)
    driver.enter_layer(0, [(1, 1), (2, 1)])
    assert len(fetched(driver.enter_layer(0, [(1, 1), (2, 1)]))) == 1
    assert fetched(driver.enter_layer(0, [(2, 1)])) == [], "the other is on its way"


def test_what_comes_back_leaves_slots_whose_records_a_miss_need_not_wait_for() -> None:
    driver = ExpertCacheDriver(replace(FAST, num_slots=2, num_reserved_slots=2))
    for _ in range(3):
        assert fetched(driver.enter_layer(0, [(1, 1)])) == []


def test_what_comes_back_takes_no_slot_of_the_layer() -> None:
    driver = ExpertCacheDriver(replace(FAST, num_slots=3))
    driver.begin_prefill(1)
    for expert in (5, 6, 7):
        land(driver, driver.enter_layer(0, [(expert, 1)]))
    driver.end_prefill()
    driver.enter_layer(0, [(1, 1), (2, 1)])

    actions = driver.enter_layer(0, [(1, 1), (6, 1), (7, 1)])

    assert fetched(actions) == [(1, FetchReason.RECURRING)]
    assert [a.evicted.expert for a in actions if isinstance(a, Fetch)] == [5]

    land(driver, actions)
    driver.enter_layer(0, [(2, 1)])
    driver.end_pass(1)
    actions = driver.enter_layer(0, [(1, 1), (2, 1), (6, 1), (7, 1)])
    assert on_host(actions) == [2]
    assert fetched(actions) == [], "every slot is the layer's own"


def test_expert_that_is_coming_back_is_waited_for_like_a_prefetch() -> None:
    driver = ExpertCacheDriver(FAST)
    for _ in range(2):
        actions = driver.enter_layer(0, [(1, 1)])
        driver.end_pass(1)
    (fetch,) = (a for a in actions if isinstance(a, Fetch))

    driver.enter_layer(0, [(1, 1)])

    assert driver.is_layer_open
    assert not driver.is_miss_awaited
    (found,) = driver.landed(fetch.slot)
    assert isinstance(found, Compute)


def test_misses_on_the_host_count_as_uses() -> None:
    order = LfuEviction()
    driver = ExpertCacheDriver(FAST, order)
    for layer in (0, 1, 2):
        driver.enter_layer(layer, [(1, 2)])
    assert order._counts == {ExpertId(layer, 1): 1 for layer in (0, 1, 2)}


@pytest.mark.parametrize("mode", [CacheMode.LARGE, CacheMode.SMALL])
def test_regions_take_what_comes_back_into_stage(mode: CacheMode) -> None:
    regions = {"num_slots": 8, "num_hot_slots": 3, "num_stage_slots": 3, "mode": mode}
    driver = ExpertCacheDriver(replace(FAST, **regions))
    for _ in range(2):
        actions = driver.enter_layer(0, [(1, 1)])
        driver.leave_layer()
        driver.end_pass(1)
    (fetch,) = (a for a in actions if isinstance(a, Fetch))
    driver.landed(fetch.slot)
    found = driver.enter_layer(0, [(1, 1)])
    assert isinstance(found[0], Compute)
    driver.leave_layer()


# -- how fast it really is ------------------------------------------------------------------


def test_host_that_is_slower_than_measured_is_given_less_and_tried_again() -> None:
    misses = HostMisses(HOST, num_experts=8, top_k=2)
    table, demand = ResidencyTable(2, LfuEviction()), {ExpertId(0, 1): 1}
    num_used = 0
    for _ in range(30):
        num_used += len(misses.enter_layer(demand, table))
        misses.end_pass(10.0)
    assert 0 < num_used < 10
    assert misses.slowdown > 1.8

    for _ in range(200):
        if misses.enter_layer(demand, table):
            return
        misses.end_pass(0.0)
    pytest.fail("a bad moment keeps the host out for ever")


def test_one_bad_pass_is_bounded() -> None:
    misses = HostMisses(HOST, num_experts=8, top_k=2)
    misses.enter_layer({ExpertId(0, 1): 1}, ResidencyTable(2, LfuEviction()))
    misses.end_pass(1e9)
    assert misses.slowdown < 3.0


def test_reply_that_was_broken_off_says_nothing_of_the_rate() -> None:
    misses = HostMisses(HOST, num_experts=8, top_k=2)
    misses.enter_layer({ExpertId(0, 1): 1}, ResidencyTable(2, LfuEviction()))
    misses.end_reply()
    misses.end_pass(0.0)
    assert misses.slowdown == 1.0


# -- together -------------------------------------------------------------------------------

WAYS = {
    "pool": SETUP,
    "regions": replace(SETUP, num_slots=9, num_hot_slots=3),
    "small": replace(SETUP, num_slots=9, num_hot_slots=3, num_stage_slots=3, mode=CacheMode.SMALL),
    "two slots": replace(SETUP, num_slots=2),
    "disk": replace(SETUP, host=replace(HOST, num_held=13)),
}


def run_session(driver: ExpertCacheDriver, seed: int) -> list[list]:
    """Decodes random routing; records land in any order. Returns all answers."""
    rng, answers = random.Random(seed), []
    loading: list[int] = []

    def obey(actions) -> list[int]:
        answers.append(actions)
        loading.extend(a.slot for a in actions if isinstance(a, Fetch))
        return [a.slot for a in actions if isinstance(a, Compute)]

    for number in range(120):
        for layer in range(4):
            demand = {rng.choice((1, 2, 3, 5, rng.randrange(8))): 1 for _ in range(4)}
            ready = obey(driver.enter_layer(layer, sorted(demand.items())))
            is_open = driver.is_layer_open
            while driver.is_layer_open or (loading and rng.random() < 0.5):
                if loading:
                    ready += obey(driver.landed(loading.pop(rng.randrange(len(loading)))))
                if is_open and ready:
                    obey(driver.computed(ready))
                    ready = []
            if is_open or driver.has_layer_ends:
                obey(driver.leave_layer())
        obey(driver.end_pass(1, 0, 0.0, 0.0, 0.0, 0.0, rng.random() * 4))
        if number % 40 == 39:
            obey(driver.end_reply())
    return answers


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("seed", [1, 2])
def test_replay_of_a_session_with_the_host_is_byte_equal(way: str, seed: int) -> None:
    driver, log = ExpertCacheDriver(WAYS[way]), DecisionLog()
    driver.on_decision = log

    answers = run_session(driver, seed)

    done = [action for actions in answers for action in actions]
    assert any(isinstance(a, ComputeOnHost) for a in done)
    assert any(isinstance(a, Fetch) and a.reason is FetchReason.RECURRING for a in done)
    assert any(isinstance(a, Fetch) and a.reason is FetchReason.MISS for a in done)
    assert replay(log.lines, ExpertCacheDriver(WAYS[way])) is None
    other = replace(WAYS[way], host=replace(HOST, record_s=1.0))
    assert replay(log.lines, ExpertCacheDriver(other)) is not None


@pytest.mark.parametrize("way", WAYS)
def test_no_expert_is_computed_and_moved_away_by_the_same_answer(way: str) -> None:
    for actions in run_session(ExpertCacheDriver(WAYS[way]), 3):
        computed = {a.expert for a in actions if isinstance(a, (Compute, ComputeOnHost))}
        given_up = {a.evicted for a in actions if isinstance(a, Fetch)}
        given_up |= {a.expert for a in actions if isinstance(a, Evict)}
        assert not computed & given_up
