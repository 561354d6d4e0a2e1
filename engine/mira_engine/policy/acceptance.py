"""How many of a draft's tokens the target accepts: what all governors of a draft share. Pure."""

from __future__ import annotations

from .averages import MovingAverage

_PRIOR_ACCEPTANCE = 0.7


class AcceptanceRate:
    """Moving share of judged draft tokens that were accepted.

    What follows a rejected token is not judged.
    """

    def __init__(self) -> None:
        self._accepted = MovingAverage(0.02)
        self._judged = MovingAverage(0.02)

    @property
    def value(self) -> float:
        """The share, 0 to 1."""
        accepted, judged = self._accepted.value, self._judged.value
        return (accepted or 0.0) / judged if judged else _PRIOR_ACCEPTANCE

    def add(self, num_accepted: int, num_judged: int) -> None:
        """Takes a round in; one of more requests counts for more."""
        self._accepted.add(num_accepted)
        self._judged.add(num_judged)
