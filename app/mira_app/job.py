"""One job of download and preparation: where it is, and how that is told. Pure."""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import Protocol

from mira_engine.api import MiraError, PrepareProgress, format_bytes

from .rate import duration_text


class JobState(enum.StrEnum):
    """Where a job is."""

    WAITING = "waiting"
    RUNNING = "running"
    PAUSING = "pausing"
    PAUSED = "paused"
    FAILED = "failed"


class JobStep(enum.StrEnum):
    """What a job is at, in its order; a model may need only some."""

    DOWNLOAD = "download"
    CHECK = "check"
    CONVERT = "convert"
    DRAFT = "draft"
    PREDICTORS = "predictors"
    PROFILE = "profile"


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """One model's download and preparation.

    Attributes:
        model: What the engine calls it.
        title: Its name for people.
        state: Where it is.
        is_profiling: Whether the fastest K is measured at the end.
        is_put_off: Whether it was paused for a chat with its model, and not by a person.
        progress: The engine's last report, `None` before the first.
        step: What it is at.
        rate_per_s: Units of `progress` per second; `None` where unknown.
        seconds_left: Of this step; `None` where unknown.
        error: Why it failed.
        notes: What the engine had to say, for example that there are no predictors.
    """

    model: str
    title: str
    state: JobState = JobState.WAITING
    is_profiling: bool = False
    is_put_off: bool = False
    progress: PrepareProgress | None = None
    step: JobStep | None = None
    rate_per_s: float | None = None
    seconds_left: float | None = None
    error: MiraError | None = None
    notes: tuple[str, ...] = ()

    @property
    def share(self) -> float | None:
        """How much of the step is done, from 0 to 1; `None` where unknown."""
        if self.progress is None or not self.progress.total:
            return None
        return min(1.0, self.progress.done / self.progress.total)

    @property
    def is_active(self) -> bool:
        """Whether it goes on without anybody doing anything."""
        return self.state in (JobState.WAITING, JobState.RUNNING, JobState.PAUSING)


def job_text(job: Job) -> str:
    """Formats a job's progress on one line: step, amount, rate, time left."""
    progress = job.progress
    if job.state is JobState.WAITING:
        return "waiting for the job before it"
    if job.state is JobState.FAILED:
        return job.error.message if job.error is not None else "failed"
    if job.state is JobState.PAUSING:
        return "pausing ..."
    halted = "put off while you chat" if job.is_put_off else "paused"
    if progress is None or job.step is None:
        return halted if job.state is JobState.PAUSED else "starting the engine ..."
    is_bytes = progress.unit == "bytes"
    done = format_bytes(progress.done) if is_bytes else str(progress.done)
    total = format_bytes(progress.total) if is_bytes else f"{progress.total} {progress.unit}"
    parts = [job.step.value, f"{done} of {total}" if progress.total else done]
    if job.state is JobState.PAUSED:
        return " · ".join([halted, *parts])
    if is_bytes and job.rate_per_s is not None:
        parts.append(f"{format_bytes(round(job.rate_per_s))}/s")
    if job.seconds_left is not None:
        parts.append(f"{duration_text(job.seconds_left)} left")
    return " · ".join(parts)


class Jobs(Protocol):
    """What a menu needs of the jobs."""

    @property
    def jobs(self) -> tuple[Job, ...]:
        """All jobs, the one under way first."""
        ...

    def start(self, model: str, title: str, *, is_profiling: bool = False) -> None:
        """Adds a job; it runs when the ones before it are done."""
        ...

    def pause(self, model: str) -> None:
        """Stops a job; what is finished is kept, also over a restart."""
        ...

    def put_off(self, model: str) -> None:
        """Pauses a job for a chat with its model; a restart goes on with it."""
        ...

    def resume(self, model: str) -> None:
        """Goes on with a job that is paused, put off or failed."""
        ...

    def cancel(self, model: str) -> None:
        """Gives a job up; what is finished stays on the disk."""
        ...

    def poll(self) -> JobNews:
        """Takes what the engine said and moves the states. Never blocks."""
        ...

    def close(self, grace_s: float = 3.0) -> None:
        """Ends the process; jobs under way go on when the next app starts."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class JobNews:
    """What one `poll` brought.

    Attributes:
        finished: Jobs that are done and gone; their models are ready.
        failed: Jobs that failed now.
        is_changed: Whether anything is to be drawn anew.
    """

    finished: tuple[Job, ...] = ()
    failed: tuple[Job, ...] = ()
    is_changed: bool = False
