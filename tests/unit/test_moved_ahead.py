"""What is moved ahead and does not pay is switched off."""

from __future__ import annotations

from dataclasses import replace

import pytest
from driver_scenes import SETUP
from mira_engine.policy.base import (
    Compute,
    ComputeOnHost,
    Fetch,
    FetchReason,
    Skip,
    SkipReason,
)
from mira_engine.policy.driver import ExpertCacheDriver
from mira_engine.policy.moved_ahead import MovedAhead
from mira_engine.policy.payoff import PrefetchRound
from mira_engine.types import ExpertId, ServedBy


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


@pytest.mark.parametrize("is_broken_off", [False, True])
def test_prediction_counts_as_used_by_the_pass_that_it_was_made_for(is_broken_off: bool) -> None:
    driver = ExpertCacheDriver(SETUP)
    told = driver._moved.payoffs[FetchReason.PREDICTED] = FakePayoff()
    (fetch,) = driver.predict(2, [(3, 1.0)], 1)
    driver.landed(fetch.slot)
    if is_broken_off:
        driver.end_reply()
    driver.enter_layer(2, [(3, 1)])
    driver.end_pass(1, 100, 1.0)
    assert [each.num_used for each in told.rounds] == [0 if is_broken_off else 1]


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


# -- the ledger by itself --------------------------------------------------------------------


class FakePayoff:
    """Keeps what it is told."""

    def __init__(self) -> None:
        self.rounds: list[PrefetchRound] = []

    def begin_round(self) -> bool:
        return True

    def observe(self, outcome: PrefetchRound) -> None:
        self.rounds.append(outcome)


@pytest.fixture
def moved() -> MovedAhead:
    """Two links; three records announced by a draft, of which one is used, one predicted."""
    ledger = MovedAhead(2)
    ledger.payoffs = {reason: FakePayoff() for reason in ledger.payoffs}
    announced = [Fetch(ExpertId(1, e), e, FetchReason.LOOKAHEAD) for e in range(3)]
    ledger.add([*announced, Skip(ExpertId(1, 3), SkipReason.NO_ROOM)])
    ledger.add([Fetch(ExpertId(2, 4), 4, FetchReason.PREDICTED)])
    used = ExpertId(1, 1)
    ledger.use([Compute(used, 1, 1, ServedBy.STAGE, True)])
    ledger.use([Compute(used, 1, 1, ServedBy.STAGE, False), ComputeOnHost(ExpertId(1, 0), 1)])
    return ledger


SPENT_S = {FetchReason.LOOKAHEAD: 0.5, FetchReason.PREDICTED: 0.25}


def end_pass(moved: MovedAhead, **others) -> list[list[PrefetchRound]]:
    facts = {"record_s": 1.0, "num_missed": 2, "round_s": 8.0, **others}
    moved.end_pass(SPENT_S, **facts)
    return [payoff.rounds for payoff in moved.payoffs.values()]


def test_pass_credits_each_use_once_and_charges_idle_records_for_the_misses(
    moved: MovedAhead,
) -> None:
    drafted, predicted = end_pass(moved)
    # The link was wanted for 2 of 8 seconds. Who misses one waits for both links' time.
    assert drafted == [
        PrefetchRound(num_prefetched=3, num_used=1, saved_s=2.0, spent_s=2 * 0.25 + 0.5)
    ]
    assert predicted == [
        PrefetchRound(num_prefetched=1, num_used=0, saved_s=0.0, spent_s=0.25 + 0.25)
    ]


def test_pass_of_unknown_length_charges_all_of_an_idle_records_time(moved: MovedAhead) -> None:
    drafted, _ = end_pass(moved, round_s=0.0)
    assert drafted[0].spent_s == 2 * 1.0 + 0.5


def test_pass_that_moved_nothing_says_nothing(moved: MovedAhead) -> None:
    end_pass(moved)
    assert not moved.unused, "what was not used has no claim"
    assert [len(rounds) for rounds in end_pass(moved)] == [1, 1]


def test_use_counts_in_its_own_pass_alone(moved: MovedAhead) -> None:
    end_pass(moved)
    moved.add([Fetch(ExpertId(1, 0), 0, FetchReason.LOOKAHEAD)])
    drafted, _ = end_pass(moved)
    assert [(each.num_prefetched, each.num_used) for each in drafted] == [(3, 1), (1, 0)]


def test_pass_says_nothing_before_a_record_was_measured(moved: MovedAhead) -> None:
    assert end_pass(moved, record_s=None) == [[], []]
    assert end_pass(moved) == [[], []], "nor later, of records that are long gone"


def test_what_prompts_move_ahead_and_do_not_use_says_nothing() -> None:
    driver = ExpertCacheDriver(SETUP)
    for number in range(60):
        driver.begin_prefill(1)
        for action in driver.predict(2, [(number % 8, 1.0)], 1):
            if isinstance(action, Fetch):
                driver.landed(action.slot)
        driver.end_prefill()
        driver.end_pass(1, 100, 1.0)
    assert driver.prediction_payoff.is_on
