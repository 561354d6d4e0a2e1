"""What each target pass took, out of counters that go on through a whole reply.

Has no clock of its own. Runs in the engine thread.
"""

from __future__ import annotations

from typing import NamedTuple

from .telemetry import TrafficCounters


class PassFigures(NamedTuple):
    """What one target pass took, with the draft before it; in the order the driver takes them.

    Attributes:
        link_bytes: Bytes that landed.
        link_s: Seconds that moving them took, each record's counted for itself.
        planning_s: Seconds that planning a draft's batches took.
        predicting_s: Seconds that heads took.
        round_s: Seconds since the pass before ended, 0 where that is not known.
        host_s: Seconds in which the processor computed misses.
    """

    link_bytes: int
    link_s: float
    planning_s: float
    predicting_s: float
    round_s: float
    host_s: float


_Sums = tuple[int, float, float, float, float]
"""Figures of `PassFigures` over a reply so far, without `round_s`."""

_NOTHING: _Sums = (0, 0.0, 0.0, 0.0, 0.0)


class PassAccount:
    """Knows what of a reply's counters belongs to passes that are over."""

    def __init__(self) -> None:
        self._counters: TrafficCounters | None = None
        self._sums = _NOTHING
        self._carried: TrafficCounters | None = None
        """Counters of a reply that has begun in another engine."""
        self._carried_sums = _NOTHING
        self._closed_at = 0.0

    def carry(self, counters: TrafficCounters) -> None:
        """What these hold by now belongs to no pass of this engine."""
        self._carried = counters
        self._carried_sums = _sums_of(counters)

    def close(self, counters: TrafficCounters, num_tokens: int, now: float) -> PassFigures:
        """A pass is over.

        Args:
            counters: Those that it has added to.
            num_tokens: Tokens that the text went on by.
            now: Seconds, on any clock that goes on evenly.

        Returns:
            What it took.
        """
        is_same_reply = self._counters is counters
        before = self._sums
        if not is_same_reply:
            before = self._carried_sums if self._carried is counters else _NOTHING
        self._counters = counters
        num_bytes, link_s, planning_s, predicting_s, host_s = self._sums = _sums_of(counters)
        round_s = now - self._closed_at if is_same_reply and num_tokens else 0.0
        self._closed_at = now
        return PassFigures(
            num_bytes - before[0],
            link_s - before[1],
            planning_s - before[2],
            predicting_s - before[3],
            round_s,
            host_s - before[4],
        )


def _sums_of(counters: TrafficCounters) -> _Sums:
    return (
        counters.num_bytes,
        counters.transfer_s,
        counters.planning_s,
        counters.predicting_s,
        counters.host_s,
    )
