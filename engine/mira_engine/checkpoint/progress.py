"""How long work tells where it stands and learns that it should stop."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from ..errors import CancelledError

OnProgress = Callable[[str, int, int, str, str], None]
"""Called with step, units done, units in all (0: unknown), unit, detail."""


def _ignore(step: str, done: int, total: int, unit: str, detail: str) -> None:
    """Takes a report and does nothing with it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Progress:
    """One job's two lines to whoever started it.

    Attributes:
        on_progress: Receives reports, in the thread that works.
        is_cancelled: Whether the job should stop; asked between small pieces of work.
    """

    on_progress: OnProgress = _ignore
    is_cancelled: Callable[[], bool] = lambda: False

    def report(self, step: str, done: int, total: int, unit: str, detail: str = "") -> None:
        """Passes on where a step stands; `unit` is `bytes`, `layers` or `files`.

        Raises:
            CancelledError: Somebody asked to stop.
        """
        self.on_progress(step, done, total, unit, detail)
        self.check()

    def check(self) -> None:
        """Stops the job if somebody asked for it.

        Raises:
            CancelledError: Somebody asked to stop.
        """
        if self.is_cancelled():
            raise CancelledError(
                "Preparation was cancelled.", hint="What is finished is kept; run it again."
            )
