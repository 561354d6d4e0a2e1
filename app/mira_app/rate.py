"""How fast something goes and when it will be done, from what was seen lately. Pure."""

from __future__ import annotations

from collections import deque

_MIN_SPAN_S = 1.0
"""Below it a rate says more about the reports than about the work."""


class RateEstimator:
    """A rate over a sliding window, in units of whatever is counted.

    Args:
        window_s: Seconds that count; a stall longer than that shows as rate 0.
    """

    def __init__(self, window_s: float = 20.0) -> None:
        self._window_s = window_s
        self._samples: deque[tuple[float, float]] = deque()

    def add(self, now_s: float, done: float) -> None:
        """Takes how much is done by now; less than before begins anew."""
        if self._samples and done < self._samples[-1][1]:
            self._samples.clear()
        self._samples.append((now_s, done))
        # One sample from before the window stays, so that slow reports still give a rate.
        while len(self._samples) > 2 and self._samples[1][0] <= now_s - self._window_s:
            self._samples.popleft()

    def clear(self) -> None:
        """Forgets everything, for another step or another unit."""
        self._samples.clear()

    def per_s(self) -> float | None:
        """Returns units per second; `None` before enough was seen."""
        if len(self._samples) < 2:
            return None
        (start_s, before), (end_s, after) = self._samples[0], self._samples[-1]
        span_s = end_s - start_s
        return (after - before) / span_s if span_s >= _MIN_SPAN_S else None

    def seconds_left(self, total: float) -> float | None:
        """Returns seconds until `total` is done; `None` where no one can tell."""
        rate = self.per_s()
        if not self._samples or not rate or total <= 0:
            return None
        return max(0.0, total - self._samples[-1][1]) / rate


def duration_text(seconds: float) -> str:
    """Formats seconds for people: `40 s`, `12 min`, `3 h 20 min`."""
    if seconds < 90:
        return f"{max(1, round(seconds))} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    return f"{minutes // 60} h {minutes % 60:02d} min"
