"""Whether prefetching pays: what it saved against what it cost, with hysteresis.

Pure. One observation a round. Prefetching that costs more than it saves is switched off;
from then on a round is tried now and then, and it comes back when those pay again.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

_WINDOW_ROUNDS = 64
_MIN_ROUNDS = 8
_MIN_RECORDS = 48
"""Rounds with a batch, and records in them, before prefetching can be switched off: a round
of plain decoding moves one or two, and a dozen of those say nothing yet."""

_MIN_PROBES = 4
"""Rounds tried before it can be switched on again."""

_ROUNDS_BETWEEN_PROBES = 32
_BACK_ON_RATIO = 1.25
"""What it must save for each second it costs to come back; to stay, 1 is enough."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PrefetchRound:
    """What one round's batches were good for.

    Attributes:
        num_prefetched: Records submitted ahead.
        num_used: Of those, used by the verification that followed.
        saved_s: Seconds of loading that nobody had to wait for.
        spent_s: Seconds of the link for records that nobody used, and of planning.
    """

    num_prefetched: int
    num_used: int
    saved_s: float
    spent_s: float


class PrefetchPayoff:
    """Switches prefetching off where it does not pay, and says why."""

    def __init__(self) -> None:
        self._rounds: deque[PrefetchRound] = deque(maxlen=_WINDOW_ROUNDS)
        self._num_idle = 0
        self.is_on = True
        self.reason = "Prefetching is on: nothing says yet that it does not pay."

    def begin_round(self) -> bool:
        """Returns whether the coming round prefetches; a probe now and then while it is off."""
        if self.is_on:
            return True
        self._num_idle += 1
        if self._num_idle < _ROUNDS_BETWEEN_PROBES:
            return False
        self._num_idle = 0
        return True

    def observe(self, outcome: PrefetchRound) -> None:
        """Takes in a round; one without a batch says nothing."""
        if not outcome.num_prefetched:
            return
        self._rounds.append(outcome)
        saved_s = sum(each.saved_s for each in self._rounds)
        spent_s = sum(each.spent_s for each in self._rounds)
        if self.is_on:
            num_records = sum(each.num_prefetched for each in self._rounds)
            is_early = len(self._rounds) < _MIN_ROUNDS or num_records < _MIN_RECORDS
            is_on = is_early or saved_s >= spent_s
        else:
            is_on = len(self._rounds) >= _MIN_PROBES and saved_s > _BACK_ON_RATIO * spent_s
        if is_on == self.is_on and not self.is_on:
            return
        self.reason = self._describe(is_on, saved_s, spent_s)
        if is_on != self.is_on:
            self.is_on = is_on
            self._rounds.clear()

    def _describe(self, is_on: bool, saved_s: float, spent_s: float) -> str:
        num_prefetched = sum(each.num_prefetched for each in self._rounds)
        share = sum(each.num_used for each in self._rounds) / num_prefetched
        return (
            f"Prefetching is {'on' if is_on else 'off'}: {share:.0%} of the records it brought "
            f"were used; it saved {1e3 * saved_s:.1f} ms and cost {1e3 * spent_s:.1f} ms in "
            f"{len(self._rounds)} rounds."
        )
