"""Speculation governor of batches: K of each round, by how many requests share it.

Every draft token is verified for all running requests, so what a round costs, and which K
is the best, depends on how many they are: there is a `SpeculationGovernor` for each width,
and widths are powers of two. All of them share what is known of acceptance. Inside a width
seconds are compared as they are, not by request: as requests end, the K in force is the
first to be seen cheaper, and stays. Pure and deterministic.

Source: Specter, batched execution and selection of K, which is offline and one for all
widths there.
"""

from __future__ import annotations

from collections.abc import Collection

from .acceptance import AcceptanceRate
from .speculation import KChoice, RoundObservation, SpeculationGovernor


def width_of(num_requests: int) -> int:
    """Returns the least power of two that is not below `num_requests`."""
    return 1 << (num_requests - 1).bit_length()


class BatchGovernor:
    """Chooses K for each round of a batch, and remembers from batch to batch.

    A width that comes up the first time begins with the K of the nearest known one. Where
    none is known, one request begins as a conversation would. Several begin without a
    draft: what drafting costs them is soon tried, and too much of it would cost them all.

    Args:
        candidates: K's to choose from, 0 among them.
        initial: K that a conversation begins with.
    """

    def __init__(self, candidates: Collection[int], *, initial: int) -> None:
        self.candidates = tuple(sorted(candidates))
        self._initial = initial
        self._acceptance = AcceptanceRate()
        self._of_width: dict[int, SpeculationGovernor] = {}

    def choose(self, num_requests: int) -> KChoice:
        """Returns K for the next round of so many requests. The same until one is observed."""
        return self._governor(num_requests).choose()

    def observe(self, observation: RoundObservation) -> None:
        """Takes in a round, whatever its K was."""
        self._governor(observation.num_requests).observe(observation)

    def forget_costs(self) -> None:
        """Drops all measured seconds, for example when other kernels are taken up."""
        for governor in self._of_width.values():
            governor.forget_costs()

    def _governor(self, num_requests: int) -> SpeculationGovernor:
        width = width_of(num_requests)
        if width not in self._of_width:
            self._of_width[width] = self._make(width)
        return self._of_width[width]

    def _make(self, width: int) -> SpeculationGovernor:
        initial, origin = 0, "batches begin without a draft"
        if self._of_width:
            nearest = self._nearest(width)
            initial = self._of_width[nearest].current
            origin = "as with one request" if nearest == 1 else f"as with up to {nearest} requests"
        elif width == 1:
            initial, origin = self._initial, "as in conversations"
        return SpeculationGovernor(
            self.candidates,
            initial=initial,
            acceptance=self._acceptance,
            origin=origin,
        )

    def _nearest(self, width: int) -> int:
        """Returns the known width nearest to one that is not; the wider of two."""

        def distance(known: int) -> tuple[int, int]:
            return abs(known.bit_length() - width.bit_length()), -known

        return min(self._of_width, key=distance)
