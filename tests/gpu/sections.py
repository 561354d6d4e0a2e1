"""The check's time plan: sections one after another, each with a limit, cuts and failures named.

Knows nothing of what a section measures. A limit is kept between cases, never inside one; the
whole has one, too. What was found is written after every section, so a run that is broken off
leaves what it had.
"""

from __future__ import annotations

import enum
import json
import time
import traceback
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")


class State(enum.StrEnum):
    """How a section ended."""

    DONE = "done"
    CUT = "cut"
    FAILED = "failed"
    NEEDS_CARD = "needs a card"


class Deadline:
    """The time of one section.

    Args:
        limit_s: Seconds from now.
        clock: Monotonic seconds.
    """

    def __init__(self, limit_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._ends_at = clock() + limit_s
        self.left_out: list[str] = []
        """Cases for which there was no time, or no room."""

    @property
    def is_over(self) -> bool:
        """Whether the time is used up."""
        return self._clock() >= self._ends_at

    def each(self, cases: Iterable[T], name: Callable[[T], str] = str) -> Iterator[T]:
        """Yields cases while there is time, and notes the names of the others."""
        for case in cases:
            if self.is_over:
                self.left_out.append(name(case))
            else:
                yield case


Work = Callable[[dict[str, Any], Deadline], None]
"""Fills a section's results as it finds them, so that a failure leaves what came before."""


class Sections:
    """Runs sections and keeps what they found.

    Args:
        total_s: Seconds for all of them, from now.
        has_card: Whether sections that need a card are run.
        path: File that is written after each section, `None` for none.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        *,
        total_s: float,
        has_card: bool,
        path: Path | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._clock = clock
        self._ends_at = clock() + total_s
        self._has_card = has_card
        self._path = path
        self.document: dict[str, Any] = {"bench": "gpu-check", "sections": {}, "results": {}}

    @property
    def has_failed(self) -> bool:
        """Whether a section has."""
        return any(s["state"] == State.FAILED for s in self.document["sections"].values())

    def run(
        self,
        name: str,
        limit_s: float,
        work: Work,
        *,
        describe: Callable[[dict[str, Any]], Iterable[str]],
        needs_card: bool = False,
    ) -> dict[str, Any]:
        """Runs one section and prints what it found.

        Args:
            name: For people, and in the document.
            limit_s: Seconds for it; less where less is left of all.
            work: What it does.
            describe: Lines for its results.
            needs_card: Whether it says nothing without one.

        Returns:
            Its results.
        """
        results: dict[str, Any] = {}
        started = self._clock()
        deadline = Deadline(min(limit_s, self._ends_at - started), self._clock)
        about: dict[str, Any] = {"state": State.NEEDS_CARD}
        if self._has_card or not needs_card:
            about["state"] = State.CUT if deadline.is_over else State.DONE
        if about["state"] is State.DONE:
            try:
                work(results, deadline)
            except Exception as error:  # noqa: BLE001 - the other sections still say something
                traceback.print_exc()
                about |= {"state": State.FAILED, "error": f"{type(error).__name__}: {error}"}
            else:
                about["state"] = State.CUT if deadline.left_out else State.DONE
        about |= {"seconds": round(self._clock() - started, 1), "left_out": deadline.left_out}
        self.document["sections"][name] = about
        self.document["results"][name] = results
        print(f"\n{name}: {about['state']}, {about['seconds']} s of {limit_s:g}")
        for line in (*describe(results), *(f"  left out: {each}" for each in deadline.left_out)):
            print(line, flush=True)
        if "error" in about:
            print(f"  {about['error']}", flush=True)
        self.write()
        return results

    def write(self) -> None:
        """Writes the document, if there is a file for it."""
        if self._path is not None:
            self._path.write_text(json.dumps(self.document) + "\n", encoding="utf-8")
