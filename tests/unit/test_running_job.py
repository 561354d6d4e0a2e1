"""A stop reaches the job that it is meant for, whenever it comes, and no other one."""

from __future__ import annotations

import pytest
from mira_engine.errors import CancelledError
from mira_engine.running_job import RunningJob


class FakeComputing:
    """Counts what it is told."""

    def __init__(self) -> None:
        self.is_stopped = False
        self.num_stops = 0

    def cancel(self) -> None:
        self.is_stopped = True
        self.num_stops += 1

    def clear_cancel(self) -> None:
        self.is_stopped = False


@pytest.fixture
def running() -> RunningJob:
    return RunningJob()


@pytest.fixture
def computing(running: RunningJob) -> FakeComputing:
    attached = FakeComputing()
    running.attach(attached)
    return attached


def test_stop_of_the_running_job_reaches_what_computes(
    running: RunningJob, computing: FakeComputing
) -> None:
    running.begin("a")
    assert not running.is_cancelled("a")
    running.cancel("a")
    assert running.is_cancelled("a")
    assert computing.is_stopped


@pytest.mark.parametrize("is_for_good", [False, True])
def test_no_other_job_begins_before_what_computes_was_told_to_stop(
    running: RunningJob, is_for_good: bool
) -> None:
    is_locked: list[bool] = []

    class AskedUnderTheLock(FakeComputing):
        def cancel(self) -> None:
            is_locked.append(running._lock.locked())

    running.attach(AskedUnderTheLock())
    running.begin("a")
    if is_for_good:
        running.cancel_for_good()
    else:
        running.cancel("a")
    assert is_locked == [True]


def test_stop_of_a_waiting_job_leaves_the_running_one_alone(
    running: RunningJob, computing: FakeComputing
) -> None:
    running.begin("a")
    running.cancel("b")
    assert not computing.is_stopped
    assert not running.is_cancelled("a")
    running.end("a")
    with pytest.raises(CancelledError):
        running.begin("b")


def test_stop_ends_with_its_job(running: RunningJob, computing: FakeComputing) -> None:
    running.begin("a")
    running.cancel("a")
    running.end("a")
    assert computing.is_stopped
    running.begin("a")
    assert not computing.is_stopped
    assert not running.is_cancelled("a")


def test_stop_between_jobs_reaches_nobody_that_computes(
    running: RunningJob, computing: FakeComputing
) -> None:
    running.begin("a")
    running.end("a")
    running.cancel("a")
    assert computing.num_stops == 0


def test_stop_before_there_was_anything_to_stop_is_told_to_what_comes(running: RunningJob) -> None:
    running.begin("load")
    running.cancel("load")
    late = FakeComputing()
    running.attach(late)
    assert late.is_stopped


def test_what_is_attached_for_another_job_is_not_stopped(running: RunningJob) -> None:
    running.begin("load")
    running.cancel("other")
    late = FakeComputing()
    running.attach(late)
    assert not late.is_stopped


def test_what_was_detached_is_told_nothing(running: RunningJob, computing: FakeComputing) -> None:
    running.begin("a")
    running.detach()
    running.cancel("a")
    running.cancel_for_good()
    assert computing.num_stops == 0


def test_end_of_the_process_stops_the_running_job(
    running: RunningJob, computing: FakeComputing
) -> None:
    running.begin("a")
    assert not running.is_ending()
    running.cancel_for_good()
    assert running.is_ending()
    assert running.is_cancelled("a")
    assert computing.is_stopped


def test_end_of_the_process_between_jobs_cancels_no_job_that_waits(
    running: RunningJob, computing: FakeComputing
) -> None:
    running.cancel_for_good()
    running.begin("waiting")
    assert not running.is_cancelled("waiting")
    assert not computing.is_stopped
