"""What one pass took is told once, also of a reply that began in another engine."""

from __future__ import annotations

import inspect

import pytest
from mira_engine.policy.driver import ExpertCacheDriver
from mira_engine.runtime.pass_account import PassAccount, PassFigures
from mira_engine.runtime.telemetry import TrafficCounters


@pytest.fixture
def account() -> PassAccount:
    return PassAccount()


def counted(scale: int) -> TrafficCounters:
    return TrafficCounters(
        num_bytes=scale,
        transfer_s=scale / 2,
        planning_s=scale / 4,
        predicting_s=scale / 8,
        host_s=scale / 16,
    )


def add(counters: TrafficCounters, scale: int) -> None:
    counters.num_bytes += scale
    counters.transfer_s += scale / 2
    counters.planning_s += scale / 4
    counters.predicting_s += scale / 8
    counters.host_s += scale / 16


def took(scale: int, round_s: float = 0.0) -> PassFigures:
    return PassFigures(scale, scale / 2, scale / 4, scale / 8, round_s, scale / 16)


def test_figures_are_in_the_order_that_the_driver_takes() -> None:
    assert tuple(inspect.signature(ExpertCacheDriver.end_pass).parameters)[2:] == (
        PassFigures._fields
    )


def test_each_pass_takes_what_was_added_since_the_one_before(account: PassAccount) -> None:
    counters = counted(16)
    assert account.close(counters, 1, now=5.0) == took(16)
    add(counters, 32)
    assert account.close(counters, 1, now=7.5) == took(32, round_s=2.5)
    assert account.close(counters, 1, now=8.0) == took(0, round_s=0.5)


def test_pass_without_new_text_has_no_round(account: PassAccount) -> None:
    counters = counted(0)
    account.close(counters, 1, now=1.0)
    assert account.close(counters, 0, now=4.0).round_s == 0.0
    assert account.close(counters, 1, now=5.0).round_s == 1.0


def test_another_reply_begins_at_nothing(account: PassAccount) -> None:
    account.close(counted(64), 1, now=1.0)
    assert account.close(counted(16), 1, now=2.0) == took(16)


def test_reply_from_another_engine_is_not_counted_twice(account: PassAccount) -> None:
    counters = counted(64)
    account.carry(counters)
    add(counters, 16)
    assert account.close(counters, 1, now=2.0) == took(16), "its time before is another engine's"
    add(counters, 16)
    assert account.close(counters, 1, now=3.0) == took(16, round_s=1.0)


def test_carrying_a_reply_that_is_here_already_loses_nothing(account: PassAccount) -> None:
    counters = counted(0)
    account.carry(counters)
    add(counters, 16)
    account.close(counters, 1, now=1.0)
    account.carry(counters)
    add(counters, 16)
    assert account.close(counters, 1, now=2.0) == took(16, round_s=1.0)


def test_what_was_carried_is_not_taken_from_another_reply(account: PassAccount) -> None:
    account.carry(counted(64))
    assert account.close(counted(16), 1, now=1.0) == took(16)
