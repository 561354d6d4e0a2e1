"""Jobs of download and preparation, against a scripted client."""

from __future__ import annotations

import json

import pytest
from app_fakes import FakeEngineClient
from mira_app.job import Job, JobState, JobStep, job_text
from mira_app.jobs import JOBS_FILE, JobRunner
from mira_app.model_rows import steps_line
from mira_app.rate import RateEstimator, duration_text
from mira_engine import api

MODEL, TITLE = "owner/moe", "A MoE"


class FakeClock:
    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Bench:
    """A runner whose engine the test speaks for."""

    def __init__(self, folder, **config) -> None:
        self.clients: list[FakeEngineClient] = []
        self.clock = FakeClock()
        self.runner = JobRunner(
            self.make_client, api.EngineConfig(**config), folder, clock=self.clock
        )

    def make_client(self) -> FakeEngineClient:
        self.clients.append(FakeEngineClient())
        return self.clients[-1]

    @property
    def client(self) -> FakeEngineClient:
        return self.clients[-1]

    @property
    def call(self):
        return self.client.calls[-1]

    def job(self, model: str = MODEL) -> Job:
        return next(job for job in self.runner.jobs if job.model == model)

    def begin(self, model: str = MODEL, **options) -> None:
        self.runner.start(model, TITLE, **options)
        self.runner.poll()

    def progress(self, step: str, done: int, total: int, unit: str = "bytes", detail: str = ""):
        self.call.deliver(
            api.PrepareProgress(
                request_id=self.call.request_id, step=step, done=done, total=total,
                unit=unit, detail=detail,
            )
        )  # fmt: skip
        return self.runner.poll()

    def done(self):
        self.call.deliver(
            api.PrepareDone(
                request_id=self.call.request_id, model=MODEL, precision=api.Precision.NESTED
            )
        )
        return self.runner.poll()

    def fail(self, error: api.MiraError):
        self.call.fail(error)
        return self.runner.poll()


@pytest.fixture
def make_bench(tmp_path):
    benches = []

    def make(**config) -> Bench:
        benches.append(Bench(tmp_path, **config))
        return benches[-1]

    yield make
    for bench in benches:
        bench.runner.close()


# -- rates


def test_rate_over_steady_work_tells_rate_and_time_left():
    rate = RateEstimator(window_s=10)
    for second in range(6):
        rate.add(second, 100 * second)
    assert rate.per_s() == 100
    assert rate.seconds_left(1500) == 10


def test_rate_forgets_what_left_the_window():
    rate = RateEstimator(window_s=10)
    rate.add(0, 0)
    rate.add(5, 5000)
    for second in range(6, 30):
        rate.add(second, 5000 + 10 * (second - 5))
    assert rate.per_s() == pytest.approx(10)


def test_rate_of_a_stall_is_zero_and_has_no_time_left():
    rate = RateEstimator(window_s=10)
    for second in (0, 1, 20, 40, 60):
        rate.add(second, min(second, 1) * 100)
    assert rate.per_s() == 0
    assert rate.seconds_left(200) is None


@pytest.mark.parametrize("samples", [[], [(0, 5)], [(0, 5), (0.2, 900)], [(0, 9), (5, 3)]])
def test_rate_without_enough_samples_is_unknown(samples):
    rate = RateEstimator()
    for sample in samples:
        rate.add(*sample)
    assert rate.per_s() is None
    assert rate.seconds_left(100) is None


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.2, "1 s"), (42, "42 s"), (600, "10 min"), (12_000, "3 h 20 min")]
)
def test_duration_is_formatted_for_people(seconds, text):
    assert duration_text(seconds) == text


# -- a job


def test_job_asks_for_preparation_with_predictors(make_bench):
    bench = make_bench(precision=api.Precision.INT8)
    bench.begin()
    (request,) = bench.client.requests
    assert isinstance(request, api.PrepareModel)
    assert (request.model, request.precision) == (MODEL, api.Precision.INT8)
    assert request.is_predicting
    assert bench.job().state is JobState.RUNNING


def test_job_progress_tells_step_bytes_rate_and_time_left(make_bench):
    bench = make_bench()
    bench.begin()
    for second in range(4):
        bench.clock.now_s = second
        bench.progress("download", second * 2**30, 10 * 2**30)
    job = bench.job()
    assert job.step is JobStep.DOWNLOAD
    assert job.share == pytest.approx(0.3)
    assert job_text(job) == "download · 3.0 GiB of 10.0 GiB · 1.0 GiB/s · 7 s left"
    bench.clock.now_s = 5
    bench.progress("check", 1, 4, "files")
    assert job_text(bench.job()) == "check · 1 of 4 files"


@pytest.mark.parametrize(
    ("precision", "step", "detail", "expected"),
    [
        ("nested", "download", "", JobStep.DOWNLOAD),
        ("nested", "extract", "", JobStep.CHECK),
        ("nested", "convert", "nested, layer 1 of 2", JobStep.CONVERT),
        ("nested", "backbone", "", JobStep.CONVERT),
        ("int8", "convert", "int8, layer 1 of 2", JobStep.CONVERT),
        ("int8", "convert", "int4, layer 1 of 2", JobStep.DRAFT),
        ("int4", "convert", "int4, layer 1 of 2", JobStep.CONVERT),
        ("nested", "predictors", "", JobStep.PREDICTORS),
    ],
)
def test_job_step_follows_what_the_engine_reports(make_bench, precision, step, detail, expected):
    bench = make_bench(precision=api.Precision(precision))
    bench.begin()
    bench.progress(step, 1, 2, detail=detail)
    assert bench.job().step is expected
    assert f"[{expected}]" in steps_line(bench.job().step)


def test_job_that_is_done_is_gone_and_its_process_ended(make_bench, tmp_path):
    bench = make_bench()
    bench.begin()
    news = bench.done()
    assert [job.model for job in news.finished] == [MODEL]
    assert bench.runner.jobs == ()
    assert json.loads((tmp_path / JOBS_FILE).read_text())["jobs"] == []
    bench.begin("owner/other")
    assert len(bench.clients) == 2


def test_second_job_waits_for_the_first(make_bench):
    bench = make_bench()
    bench.begin()
    bench.begin("owner/other")
    assert bench.job("owner/other").state is JobState.WAITING
    assert len(bench.client.requests) == 1
    bench.done()
    assert bench.client.requests[-1].model == "owner/other"


def test_started_again_while_it_runs_stays_one_job(make_bench):
    bench = make_bench()
    bench.begin()
    bench.begin()
    assert len(bench.client.requests) == len(bench.runner.jobs) == 1


def test_pause_cancels_and_resume_asks_again(make_bench):
    bench = make_bench()
    bench.begin()
    bench.progress("download", 1, 10)
    bench.runner.pause(MODEL)
    assert bench.client.cancelled == [bench.call]
    assert bench.job().state is JobState.PAUSING
    bench.fail(api.CancelledError("Preparation was cancelled."))
    assert bench.job().state is JobState.PAUSED
    assert "paused · download" in job_text(bench.job())
    assert len(bench.client.requests) == 1
    bench.runner.resume(MODEL)
    bench.runner.poll()
    assert isinstance(bench.client.requests[-1], api.PrepareModel)
    assert bench.job().state is JobState.RUNNING


def test_resumed_before_the_pause_took_effect_goes_on(make_bench):
    bench = make_bench()
    bench.begin()
    bench.runner.pause(MODEL)
    bench.runner.resume(MODEL)
    bench.fail(api.CancelledError("Preparation was cancelled."))
    assert bench.job().state is JobState.RUNNING
    assert len(bench.client.requests) == 2


def test_pause_after_resume_before_it_took_effect_stays_paused(make_bench):
    bench = make_bench()
    bench.begin()
    bench.runner.pause(MODEL)
    bench.runner.resume(MODEL)
    bench.runner.pause(MODEL)
    bench.fail(api.CancelledError("Preparation was cancelled."))
    assert bench.job().state is JobState.PAUSED


def test_job_that_was_put_off_goes_on_when_it_is_resumed(make_bench):
    bench = make_bench()
    bench.begin()
    bench.runner.put_off(MODEL)
    assert bench.client.cancelled == [bench.call]
    bench.fail(api.CancelledError("Preparation was cancelled."))
    assert (bench.job().state, bench.job().is_put_off) == (JobState.PAUSED, True)
    assert job_text(bench.job()) == "put off while you chat"
    bench.runner.resume(MODEL)
    assert not bench.job().is_put_off
    bench.runner.poll()
    assert bench.job().state is JobState.RUNNING


def test_job_that_was_put_off_goes_on_after_a_restart(make_bench):
    first = make_bench()
    first.begin()
    first.runner.put_off(MODEL)
    first.runner.close()
    second = make_bench()
    second.runner.poll()
    assert second.job().state is JobState.RUNNING


def test_paused_waiting_job_never_starts(make_bench):
    bench = make_bench()
    bench.begin()
    bench.begin("owner/other")
    bench.runner.pause("owner/other")
    bench.done()
    assert bench.job("owner/other").state is JobState.PAUSED


def test_cancel_forgets_the_job_and_starts_the_next(make_bench, tmp_path):
    bench = make_bench()
    bench.begin()
    bench.begin("owner/other")
    bench.runner.cancel(MODEL)
    assert bench.client.cancelled == [bench.call]
    news = bench.fail(api.CancelledError("Preparation was cancelled."))
    assert news.finished == news.failed == ()
    assert [job.model for job in bench.runner.jobs] == ["owner/other"]
    assert bench.job("owner/other").state is JobState.RUNNING


def test_cancelled_and_started_again_at_once_runs(make_bench):
    bench = make_bench()
    bench.begin()
    bench.runner.cancel(MODEL)
    bench.begin()
    bench.fail(api.CancelledError("Preparation was cancelled."))
    assert bench.job().state is JobState.RUNNING
    assert len(bench.client.requests) == 2


@pytest.mark.parametrize(
    "error",
    [
        api.IndexUnreachableError("The hub does not answer.", hint="Try later."),
        api.DiskSpaceError("2.0 GiB are missing.", hint="Make room."),
        api.UnsupportedModelError("The terms were not accepted.", hint="Accept them."),
    ],
)
def test_failed_job_says_why_and_can_be_retried(make_bench, error):
    bench = make_bench()
    bench.begin()
    bench.progress("download", 1, 10)
    news = bench.fail(error)
    assert [job.error for job in news.failed] == [error]
    assert job_text(bench.job()) == error.message
    bench.runner.resume(MODEL)
    bench.runner.poll()
    assert bench.job().state is JobState.RUNNING
    assert bench.job().error is None


def test_engine_that_dies_fails_the_job_and_the_next_has_a_new_process(make_bench):
    bench = make_bench()
    bench.begin()
    bench.begin("owner/other")
    bench.fail(api.EngineProcessError("The engine process was killed by SIGKILL."))
    assert bench.job().state is JobState.FAILED
    assert bench.job("owner/other").state is JobState.RUNNING
    assert len(bench.clients) == 2


def test_engine_that_cannot_start_fails_the_job(tmp_path):
    def refuse():
        raise api.EngineProcessError("It cannot be started.")

    runner = JobRunner(refuse, api.EngineConfig(), tmp_path)
    runner.start(MODEL, TITLE)
    runner.poll()
    assert runner.jobs[0].state is JobState.FAILED
    runner.close()


def test_notice_of_a_job_is_kept_with_it(make_bench):
    bench = make_bench()
    bench.begin()
    bench.call.deliver(api.Notice(code="no-predictors", text="No predictors were made."))
    (done,) = bench.done().finished
    assert done.notes == ("No predictors were made.",)


def test_room_that_a_job_takes_is_no_note_of_a_ready_model(make_bench):
    bench = make_bench()
    bench.begin()
    bench.call.deliver(api.Notice(code="space", text="space: at most 1 GiB."))
    bench.call.deliver(api.Notice(code="download-deleted", text="The disk has no room."))
    (done,) = bench.done().finished
    assert done.notes == ("The disk has no room.",)


# -- a profile at the end


def test_profile_follows_preparation_where_asked_for(make_bench):
    bench = make_bench()
    bench.begin(is_profiling=True)
    assert bench.done().finished == ()
    request = bench.client.requests[-1]
    assert isinstance(request, api.ProfileModel)
    assert request.is_quick
    assert bench.job().step is JobStep.PROFILE
    bench.call.deliver(
        api.ProfileProgress(request_id=bench.call.request_id, done=2, total=9, detail="K 4")
    )
    bench.runner.poll()
    assert job_text(bench.job()) == "profile · 2 of 9 replies"


def test_profile_that_fails_leaves_the_model_ready(make_bench):
    bench = make_bench()
    bench.begin(is_profiling=True)
    bench.done()
    (done,) = bench.fail(api.BudgetError("There is no room.")).finished
    assert done.error is None
    assert "There is no room" in done.notes[0]


def test_pause_as_preparation_ends_keeps_the_profile_for_later(make_bench):
    bench = make_bench()
    bench.begin(is_profiling=True)
    bench.runner.pause(MODEL)
    bench.done()
    assert bench.job().state is JobState.PAUSED


# -- over a restart


def test_job_under_way_goes_on_after_a_restart(make_bench):
    first = make_bench()
    first.begin()
    first.runner.close()
    second = make_bench()
    second.runner.poll()
    assert second.job().title == TITLE
    assert second.client.requests[-1].model == MODEL


@pytest.mark.parametrize("ending", ["paused", "failed"])
def test_halted_job_is_there_after_a_restart_and_does_not_start(make_bench, ending):
    first = make_bench()
    first.begin()
    if ending == "paused":
        first.runner.pause(MODEL)
    else:
        first.fail(api.DiskSpaceError("The disk is full."))
    first.runner.close()
    second = make_bench()
    second.runner.poll()
    assert second.job().state is JobState.PAUSED
    assert second.clients == []


@pytest.mark.parametrize("text", ["", "{", "[]", '{"jobs": 3}', '{"jobs": [3, {"model": "m"}]}'])
def test_damaged_state_file_is_no_job(make_bench, tmp_path, text):
    (tmp_path / JOBS_FILE).write_text(text)
    assert make_bench().runner.jobs == ()


def test_second_app_leaves_the_first_ones_jobs_alone(make_bench, tmp_path):
    first, second = make_bench(), make_bench()
    first.begin()
    assert second.runner.jobs == ()
    second.begin("owner/other")
    kept = json.loads((tmp_path / JOBS_FILE).read_text())["jobs"]
    assert [job["model"] for job in kept] == [MODEL]


def test_directory_that_cannot_be_written_still_runs_jobs(tmp_path):
    (tmp_path / "file").touch()
    bench = Bench(tmp_path / "file")
    bench.begin()
    assert bench.job().state is JobState.RUNNING
    bench.runner.close()
