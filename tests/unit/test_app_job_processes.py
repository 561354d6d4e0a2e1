"""Jobs of download and preparation with an engine process."""

from __future__ import annotations

import time

import pytest
from app_fakes import fake_engine_command
from mira_app.engine_client import EngineClient
from mira_app.job import Job, JobState, JobStep
from mira_app.jobs import JobRunner
from mira_engine import api

MODEL, TITLE = "owner/moe", "A MoE"
DEADLINE_S = 60
"""Only a failure takes so long."""


def run_until(runner: JobRunner, condition) -> list[Job]:
    finished: list[Job] = []
    deadline = time.monotonic() + DEADLINE_S
    while not condition(finished):
        assert time.monotonic() < deadline
        finished += runner.poll().finished
    return finished


@pytest.fixture
def make_runner(tmp_path):
    runners = []

    def make(*modes: str) -> JobRunner:
        runners.append(
            JobRunner(
                lambda: EngineClient(fake_engine_command(*modes), log_dir=tmp_path),
                api.EngineConfig(precision=api.Precision.INT8),
                tmp_path,
            )
        )
        return runners[-1]

    yield make
    for runner in runners:
        runner.close()


def test_process_prepares_and_profiles_then_ends(make_runner):
    runner = make_runner("full-prepare")
    runner.start(MODEL, TITLE, is_profiling=True)
    (done,) = run_until(runner, lambda finished: finished)
    assert done.step is JobStep.PROFILE
    assert runner._client is None


def test_process_is_paused_and_goes_on_after_a_restart(make_runner):
    first = make_runner("slow-prepare")
    first.start(MODEL, TITLE)
    run_until(first, lambda _: first.jobs[0].progress is not None)
    first.pause(MODEL)
    run_until(first, lambda _: first.jobs[0].state is JobState.PAUSED)
    first.close()
    second = make_runner()
    assert second.jobs[0].state is JobState.PAUSED
    second.resume(MODEL)
    assert run_until(second, lambda finished: finished)[0].model == MODEL


def test_process_that_fails_to_prepare_fails_the_job(make_runner):
    runner = make_runner("fail-prepare=DiskSpaceError")
    runner.start(MODEL, TITLE)
    run_until(runner, lambda _: runner.jobs[0].state is JobState.FAILED)
    assert isinstance(runner.jobs[0].error, api.DiskSpaceError)
    assert runner.jobs[0].error.hint == "Try later."
