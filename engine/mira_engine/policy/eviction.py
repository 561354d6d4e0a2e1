"""Eviction policies: in which order resident experts are given up.

Pure. A policy sees admissions, uses and removals and offers victims; whether one may
go (pins, loads, protection) is `mira_engine.policy.residency`'s to say. A new policy is
one class here and one line in `EVICTION_POLICIES`.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from ..types import ExpertId


class EvictionPolicy(Protocol):
    """Orders resident experts by how readily they are given up."""

    def on_admit(self, expert: ExpertId) -> None:
        """An expert was given a slot."""

    def on_use(self, expert: ExpertId) -> None:
        """A resident expert was routed to."""

    def on_remove(self, expert: ExpertId) -> None:
        """An expert lost its slot."""

    def victims(self) -> Iterator[ExpertId]:
        """Yields resident experts, first the one to give up first."""


class LruEviction:
    """Least recently used first, over all layers. The baseline."""

    def __init__(self) -> None:
        self._order: OrderedDict[ExpertId, None] = OrderedDict()

    def on_admit(self, expert: ExpertId) -> None:
        """Makes the expert the most recent one."""
        self._order[expert] = None
        self._order.move_to_end(expert)

    def on_use(self, expert: ExpertId) -> None:
        """Makes the expert the most recent one."""
        self._order.move_to_end(expert)

    def on_remove(self, expert: ExpertId) -> None:
        """Forgets the expert."""
        del self._order[expert]

    def victims(self) -> Iterator[ExpertId]:
        """Yields from the least to the most recently used."""
        return iter(self._order)


EVICTION_POLICIES: dict[str, Callable[[], EvictionPolicy]] = {"lru": LruEviction}
