"""Download and preparation of models as jobs: one at a time, paused, resumed, over restarts.

Each job is one `PrepareModel` request and, where wanted, one `ProfileModel` after it. They
run in an engine process of their own, which exists only while a job is under way: the
chat's engine does one thing at a time, and a reply must not wait for hours of download.
Two processes share the machine's cores, which slows both; memory is shared less, because
conversion holds a layer at most.

Pausing cancels the request; the engine keeps what is finished and goes on from there when
it is asked again. The state file says which jobs there are and which were paused, so that
a new app goes on with the others, also with those that were only put off for a chat. One
app at a time keeps that file: another one runs the jobs that its own user starts, and
leaves the file alone.

    WAITING --> RUNNING --> (done)        pause: RUNNING --> PAUSING --> PAUSED --> WAITING
                   |--> FAILED --> WAITING       cancel: any --> (gone)

Nothing here blocks but `close`: `poll`, called by a timer, moves the states.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import filelock
from mira_engine.api import (
    CancelledError,
    EngineConfig,
    EngineProcessError,
    Notice,
    Precision,
    PrepareModel,
    PrepareProgress,
    ProfileModel,
    ProfileProgress,
)

from .engine_call import EngineCall
from .engine_client import EngineClient
from .job import Job, JobNews, JobState, JobStep
from .rate import RateEstimator
from .state_files import read_json, write_json

JOBS_FILE = "jobs.json"
"""In the data directory."""

_FILE_VERSION = 1

_SPACE_NOTICE = "space"
"""Says what the disk will take; of no use once the model is ready, when notes are shown."""

_STEPS = {
    "download": JobStep.DOWNLOAD,
    "extract": JobStep.CHECK,
    "check": JobStep.CHECK,
    "verify": JobStep.CHECK,
    "predictors": JobStep.PREDICTORS,
}
"""By the engine's names of steps; all others are part of the conversion."""


class JobRunner:
    """Runs the jobs of one app, one at a time.

    Args:
        make_client: Makes the client of a new engine process.
        config: How models will be loaded; its precision is prepared.
        data_dir: Where the state file is.
        clock: Seconds, for rates.
    """

    def __init__(
        self,
        make_client: Callable[[], EngineClient],
        config: EngineConfig,
        data_dir: Path,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._make_client = make_client
        self._config = config
        self._path = data_dir / JOBS_FILE
        self._clock = clock
        self._client: EngineClient | None = None
        self._call: EngineCall | None = None
        self._running: str | None = None
        self._is_wanted_again = False
        self._is_changed = True
        self._rate = RateEstimator()
        self._lock = filelock.FileLock(
            data_dir / f".{JOBS_FILE}.lock", timeout=0, thread_local=False
        )
        self._is_keeper = self._claim_file()
        self._jobs: dict[str, Job] = self._read() if self._is_keeper else {}

    # -- what the person wants

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All jobs, the one under way first, then in the order they were started."""
        return tuple(sorted(self._jobs.values(), key=lambda job: job.model != self._running))

    def start(self, model: str, title: str, *, is_profiling: bool = False) -> None:
        """Adds a job; it runs when the ones before it are done. One that is there goes on."""
        if model in self._jobs:
            self.resume(model)
            return
        self._put(Job(model=model, title=title, is_profiling=is_profiling))

    def pause(self, model: str) -> None:
        """Stops a job; what is finished is kept, also over a restart."""
        self._halt(model, is_put_off=False)

    def put_off(self, model: str) -> None:
        """Stops a job that the chat with its model leaves no room for; a restart goes on."""
        self._halt(model, is_put_off=True)

    def _halt(self, model: str, *, is_put_off: bool) -> None:
        job = self._jobs.get(model)
        if job is None or not job.is_active:
            return
        state = JobState.PAUSED
        if model == self._running:
            self._is_wanted_again = False
            self._cancel_call()
            state = JobState.PAUSING
        self._put(replace(job, state=state, is_put_off=is_put_off))

    def resume(self, model: str) -> None:
        """Goes on with a job that is paused, put off or failed."""
        job = self._jobs.get(model)
        if job is None or job.state in (JobState.WAITING, JobState.RUNNING):
            return
        job = replace(job, is_put_off=False)
        if job.state is JobState.PAUSING:
            self._is_wanted_again = True
            self._put(job)
            return
        self._put(replace(job, state=JobState.WAITING, error=None))

    def cancel(self, model: str) -> None:
        """Gives a job up; what is finished stays on the disk until the model is removed."""
        if model == self._running:
            self._is_wanted_again = False
            self._cancel_call()
        if self._jobs.pop(model, None) is not None:
            self._is_changed = True
            self._write()

    def close(self, grace_s: float = 3.0) -> None:
        """Ends the process; jobs under way go on when the next app starts."""
        client, self._client, self._call, self._running = self._client, None, None, None
        if client is not None:
            client.close(grace_s)
        self._lock.release()

    # -- what the engine says

    def poll(self) -> JobNews:
        """Takes what the engine said, moves the states and starts what is next."""
        finished, failed = [], []
        call, model = self._call, self._running
        if call is not None and model is not None:
            is_done = call.is_done  # read before draining: then nothing can arrive after it
            for event in call.drain():
                self._take(model, event)
            if is_done:
                ended = self._finish(model, call)
                finished += [ended] if ended is not None and ended.error is None else []
                failed += [ended] if ended is not None and ended.error is not None else []
        if self._call is None:
            self._start_next()
        is_changed, self._is_changed = self._is_changed, False
        return JobNews(finished=tuple(finished), failed=tuple(failed), is_changed=is_changed)

    def _take(self, model: str, event: object) -> None:
        job = self._jobs.get(model)
        if job is None:
            return
        if isinstance(event, PrepareProgress):
            self._jobs[model] = self._advanced(job, event, self._step_of(event))
        elif isinstance(event, ProfileProgress):
            report = PrepareProgress(
                request_id=event.request_id, step=JobStep.PROFILE.value, done=event.done,
                total=event.total, unit="replies", detail=event.detail,
            )  # fmt: skip
            self._jobs[model] = self._advanced(job, report, JobStep.PROFILE)
        elif isinstance(event, Notice) and event.code != _SPACE_NOTICE:
            self._jobs[model] = replace(job, notes=(*job.notes, event.text))
        else:
            return
        self._is_changed = True

    def _advanced(self, job: Job, progress: PrepareProgress, step: JobStep) -> Job:
        before = job.progress
        if before is None or (before.step, before.unit) != (progress.step, progress.unit):
            self._rate.clear()
        self._rate.add(self._clock(), progress.done)
        return replace(
            job,
            progress=progress,
            step=step,
            rate_per_s=self._rate.per_s(),
            seconds_left=self._rate.seconds_left(progress.total),
        )

    def _step_of(self, progress: PrepareProgress) -> JobStep:
        step = _STEPS.get(progress.step, JobStep.CONVERT)
        # Formats that hold no draft get one beside them, as a second store in INT4.
        is_target = self._config.precision is Precision.INT4
        is_draft = step is JobStep.CONVERT and progress.detail.startswith("int4")
        return JobStep.DRAFT if is_draft and not is_target else step

    def _finish(self, model: str, call: EngineCall) -> Job | None:
        """Ends a call; returns the job where it is over, one way or the other."""
        self._call, self._running, self._is_changed = None, None, True
        is_wanted_again, self._is_wanted_again = self._is_wanted_again, False
        job, error = self._jobs.get(model), call.error
        if isinstance(error, EngineProcessError):
            self._release()
        if job is None:
            return None  # given up meanwhile
        is_halted = job.state is JobState.PAUSING and not is_wanted_again
        is_profile_due = job.is_profiling and job.step is not JobStep.PROFILE
        if isinstance(error, CancelledError) or (error is None and is_profile_due and is_halted):
            # One that was given up and started again meanwhile waits already.
            self._put(replace(job, state=JobState.PAUSED if is_halted else JobState.WAITING))
            return None
        if error is None and is_profile_due:
            self._submit_profile(job)
            return None
        if error is None or job.step is JobStep.PROFILE:
            # The model is ready all the same; what a profile failed of is told as a note.
            del self._jobs[model]
            self._write()
            notes = job.notes if error is None else (*job.notes, f"No profile: {error}")
            return replace(job, notes=notes)
        failed = replace(job, state=JobState.FAILED, error=error)
        self._put(failed)
        return failed

    # -- the process

    def _start_next(self) -> None:
        waiting = [job for job in self._jobs.values() if job.state is JobState.WAITING]
        if not waiting:
            self._release()
            return
        job = waiting[0]
        self._put(replace(job, state=JobState.RUNNING, error=None, progress=None, step=None))
        self._submit(
            job,
            lambda client: PrepareModel(
                request_id=client.new_request_id(),
                model=job.model,
                precision=self._config.precision,
                is_predicting=True,
            ),
        )

    def _submit_profile(self, job: Job) -> None:
        self._put(replace(job, state=JobState.RUNNING, step=JobStep.PROFILE, progress=None))
        self._submit(
            job,
            lambda client: ProfileModel(
                request_id=client.new_request_id(),
                model=job.model,
                config=self._config,
                is_quick=True,
            ),
        )

    def _submit(
        self, job: Job, request: Callable[[EngineClient], PrepareModel | ProfileModel]
    ) -> None:
        self._rate.clear()
        try:
            if self._client is None:
                self._client = self._make_client()
            self._call = self._client.submit(request(self._client))
            self._running = job.model
        except EngineProcessError as error:
            self._release()
            self._put(replace(job, state=JobState.FAILED, error=error))

    def _cancel_call(self) -> None:
        if self._client is not None and self._call is not None:
            self._client.cancel(self._call)

    def _release(self) -> None:
        """Ends the process in the background, so that no screen waits for it."""
        client, self._client = self._client, None
        if client is not None:
            threading.Thread(target=client.close, name="jobs-end").start()

    # -- the state file

    def _put(self, job: Job) -> None:
        self._jobs[job.model] = job
        self._is_changed = True
        self._write()

    def _claim_file(self) -> bool:
        try:
            self._path.parent.mkdir(parents=True, exist_ok=True)
            self._lock.acquire()
        except (OSError, filelock.Timeout):
            return False
        return True

    def _write(self) -> None:
        """Keeps which jobs there are; without that a restart forgets them, no more."""
        if not self._is_keeper:
            return
        halted = (JobState.PAUSING, JobState.PAUSED, JobState.FAILED)
        plain = [
            {
                "model": job.model,
                "title": job.title,
                "is_paused": job.state in halted and not (self._is_wanted_again or job.is_put_off),
                "is_profiling": job.is_profiling,
            }
            for job in self._jobs.values()
        ]
        write_json(self._path, {"version": _FILE_VERSION, "jobs": plain})

    def _read(self) -> dict[str, Job]:
        plain = read_json(self._path)
        jobs = plain.get("jobs", []) if isinstance(plain, dict) else []
        kept: dict[str, Job] = {}
        for fields in jobs if isinstance(jobs, list) else []:
            try:
                model, is_paused = str(fields["model"]), bool(fields["is_paused"])
                kept[model] = Job(
                    model=model,
                    title=str(fields["title"]),
                    state=JobState.PAUSED if is_paused else JobState.WAITING,
                    is_profiling=bool(fields.get("is_profiling", False)),
                )
            except (AttributeError, KeyError, TypeError):
                continue  # Not written by us: the others are taken.
        return kept
