"""Virtual time."""

from __future__ import annotations


class VirtualClock:
    """Seconds that pass only when somebody says so."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def advance(self, seconds: float) -> None:
        """Lets time pass.

        Raises:
            ValueError: Negative seconds.
        """
        if seconds < 0:
            raise ValueError(f"time cannot go back by {-seconds} s")
        self.now_s += seconds

    def advance_to(self, moment_s: float) -> float:
        """Goes to a moment. Returns the seconds that passed, 0 where it lies behind."""
        passed = max(0.0, moment_s - self.now_s)
        self.now_s += passed
        return passed
