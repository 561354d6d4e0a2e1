"""Writing down what a driver saw and said, and holding another driver against it.

A log is lines of JSON: `[observation, arguments, actions]`. Pure: the lines are kept, and
whoever wants a file writes one.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterable, Sequence
from typing import Any

from .base import Action
from .driver import ExpertCacheDriver


class DecisionLog:
    """What a driver saw and said, one observation a line. Give it as `on_decision`."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def __call__(self, name: str, arguments: Sequence[Any], actions: Sequence[Action]) -> None:
        """Writes one observation down."""
        told = [[type(action).__name__, *dataclasses.astuple(action)] for action in actions]
        self.lines.append(json.dumps([name, arguments, told], separators=(",", ":")))


def replay(lines: Iterable[str], driver: ExpertCacheDriver) -> int | None:
    """Tells a fresh driver what another one saw.

    Args:
        lines: Of a `DecisionLog`.
        driver: Set up as the other one was; its `on_decision` is replaced.

    Returns:
        The number of the first line that it answers otherwise, byte for byte; `None` where
        there is none.
    """
    log = DecisionLog()
    driver.on_decision = log
    for number, line in enumerate(lines):
        name, arguments, _ = json.loads(line)
        getattr(driver, name)(*arguments)
        if log.lines.pop() != line:
            return number
    return None
