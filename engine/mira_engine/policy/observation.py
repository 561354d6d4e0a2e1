"""How what a driver is told and what it answers becomes known: one hook around each method.

Pure. Whoever listens (`mira_engine.policy.replay`, the simulator, a bench) gets the name of
the observation, its arguments and the actions, after the driver has decided.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Protocol, TypeVar

from .base import Action

OnDecision = Callable[[str, Sequence[Any], Sequence[Action]], None]
"""Told the name of an observation, its arguments, and the actions it was answered with."""

_Observation = TypeVar("_Observation", bound=Callable[..., list[Action]])


class Observed(Protocol):
    """Somebody whose decisions can be listened to."""

    on_decision: OnDecision | None


def observation(method: _Observation) -> _Observation:
    """Tells `on_decision` of every call, with the answer."""

    @functools.wraps(method)
    def observe(self: Observed, *arguments: Any) -> list[Action]:
        actions = method(self, *arguments)
        if self.on_decision is not None:
            self.on_decision(method.__name__, arguments, actions)
        return actions

    return observe  # type: ignore[return-value]
