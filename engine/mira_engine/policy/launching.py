"""When a piece of a captured step is launched before its layer's choice is known. Pure.

A piece that was launched too early finds an expert in no slot and counts it; then it is
launched again, with all that followed. So a wrong guess costs time and nothing else, and this
only weighs: it sees which experts are in slots and what a draft's routers chose.

Source: Specter, Overlap-Oriented Parallelism Optimizer, "without waiting for the host"; the
paper does not say when that is safe. Here it is checked by a count on the device.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Collection

from ..types import ExpertId
from .averages import MovingAverage

MAX_AHEAD = 8
"""Pieces launched beyond the layer whose choice the host has seen: what a wrong guess wastes."""

MIN_RIGHT_SHARE = 0.5
"""Guesses by a draft's routing go on while at least this share of them was right."""

_TRIAL_INTERVAL = 32
"""Of the guesses that would be left out, every so many one is made, to see."""


class Launch(enum.Enum):
    """Whether a piece is launched now, and on what ground."""

    WAIT = "wait"
    CERTAIN = "certain"
    """All experts of the layer are in slots."""
    EXPECTED = "expected"
    """Those that a draft's routers chose are."""


class LaunchAhead:
    """Decides for one model's steps."""

    def __init__(self) -> None:
        self._right = MovingAverage(weight=0.1)
        self._num_left_out = 0

    def choose(
        self,
        layer: int,
        *,
        num_ahead: int,
        num_resident: int,
        num_experts: int,
        expected: Collection[int],
        is_ready: Callable[[ExpertId], bool],
    ) -> Launch:
        """Says whether a layer's experts are computed before its choice is known.

        Args:
            layer: MoE layer.
            num_ahead: Pieces launched beyond the choice that the host sees next.
            num_resident: Experts of the layer that are in slots.
            num_experts: Experts of the layer.
            expected: Experts that a draft's routers chose here; empty where none ran.
            is_ready: Whether an expert is in a slot.
        """
        if num_ahead >= MAX_AHEAD:
            return Launch.WAIT
        if num_resident >= num_experts:
            return Launch.CERTAIN
        if not expected or not all(is_ready(ExpertId(layer, expert)) for expert in expected):
            return Launch.WAIT
        share = self._right.value
        if share is None or share >= MIN_RIGHT_SHARE:
            return Launch.EXPECTED
        self._num_left_out += 1
        return Launch.WAIT if self._num_left_out % _TRIAL_INTERVAL else Launch.EXPECTED

    def observe(self, launch: Launch, *, is_right: bool) -> None:
        """A piece launched ahead has been checked."""
        if launch is Launch.EXPECTED:
            self._right.add(float(is_right))
