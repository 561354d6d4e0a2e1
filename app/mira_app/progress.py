"""Progress of a preparation on a plain stream: as lines, or as bars.

Of what is counted in bytes the rate and the time left are told too.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Protocol, TextIO

from mira_engine.api import PrepareProgress, format_bytes

_MIN_RATE_S = 0.5
"""Seconds of a step before its rate means something."""


class ProgressDisplay(Protocol):
    """Shows preparation; ended by `close`."""

    def show(self, progress: PrepareProgress) -> None:
        """Shows one report."""
        ...

    def close(self) -> None:
        """Leaves the screen tidy."""
        ...


class RateMeter:
    """Bytes per second of a step, from its reports.

    What was there before the first report (a download that is taken up again) cost no time
    and does not count.
    """

    def __init__(self, now: Callable[[], float]) -> None:
        self._now = now
        self._step = ""
        self._start = (0.0, 0)

    def add(self, progress: PrepareProgress) -> float | None:
        """Takes a report. Returns bytes per second, `None` where it is too early to say."""
        now = self._now()
        if progress.step != self._step or progress.done < self._start[1]:
            self._step, self._start = progress.step, (now, progress.done)
        elapsed_s, done = now - self._start[0], progress.done - self._start[1]
        is_known = progress.unit == "bytes" and elapsed_s >= _MIN_RATE_S and done > 0
        return done / elapsed_s if is_known else None


class LineProgress:
    """Progress as plain lines: each step once, and each tenth of it."""

    def __init__(self, out: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._meter = RateMeter(now)
        self._tenths: dict[str, int] = {}

    def show(self, progress: PrepareProgress) -> None:
        """Prints a line when a new step or a new tenth of it begins; steps may take turns."""
        rate = self._meter.add(progress)
        tenth = 10 * progress.done // progress.total if progress.total else 0
        if self._tenths.get(progress.step) != tenth:
            self._tenths[progress.step] = tenth
            print(f"prepare: {progress_text(progress, rate)}", file=self._out, flush=True)

    def close(self) -> None:
        """Does nothing: each line is complete."""


class BarProgress:
    """Progress as bars of rich, one per step."""

    def __init__(self, out: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._meter = RateMeter(now)
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeRemainingColumn(),
            console=Console(file=out),
        )
        self._tasks: dict[str, object] = {}
        self._progress.start()

    def show(self, progress: PrepareProgress) -> None:
        """Moves the step's bar."""
        rate = self._meter.add(progress)
        if progress.step not in self._tasks:
            self._tasks[progress.step] = self._progress.add_task(progress.step, amount="")
        self._progress.update(
            self._tasks[progress.step],  # type: ignore[arg-type]
            completed=progress.done,
            total=progress.total or None,
            amount=amount_text(progress) + (f" · {format_bytes(rate)}/s" if rate else ""),
        )

    def close(self) -> None:
        """Stops drawing; the bars stay."""
        self._progress.stop()


def amount_text(progress: PrepareProgress) -> str:
    """Formats `done` of `total`: `3 of 30 layers`, `12.0 MiB of 93.8 MiB`."""
    if progress.unit == "bytes":
        done, total, unit = format_bytes(progress.done), format_bytes(progress.total), ""
    else:
        done, total, unit = str(progress.done), str(progress.total), f" {progress.unit}"
    return f"{done} of {total}{unit}" if progress.total else f"{done}{unit}"


def duration_text(seconds: float) -> str:
    """Formats a time that is left: `40 s`, `12 min`, `2 h 05 min`."""
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    return f"{minutes} min" if minutes < 90 else f"{minutes // 60} h {minutes % 60:02d} min"


def progress_text(progress: PrepareProgress, bytes_per_s: float | None = None) -> str:
    """Formats a whole report on one line."""
    parts = [f"{progress.step}, {amount_text(progress)}"]
    if bytes_per_s:
        parts.append(f"{format_bytes(bytes_per_s)}/s")
        if progress.total > progress.done:
            parts.append(f"{duration_text((progress.total - progress.done) / bytes_per_s)} left")
    if progress.detail:
        parts.append(progress.detail)
    return " · ".join(parts)
