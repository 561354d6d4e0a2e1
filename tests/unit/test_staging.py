"""Predicted experts: whom of them the driver moves, when, and whom they may displace."""

from __future__ import annotations

from dataclasses import replace

from driver_scenes import SETUP, bring, fetched
from mira_engine.policy.base import Decline, Fetch, FetchReason, Skip, SkipReason
from mira_engine.policy.driver import ExpertCacheDriver
from mira_engine.types import ExpertId


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


def test_nothing_is_predicted_where_everything_is_resident() -> None:
    driver = ExpertCacheDriver(replace(SETUP, num_layers=1, num_slots=8))
    assert driver.is_prediction_wanted
    bring(driver, 0, *range(8))
    assert not driver.is_prediction_wanted
