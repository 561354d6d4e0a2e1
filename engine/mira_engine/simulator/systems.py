"""The systems that are compared: whose cache, whose prefetch, with a draft or without.

Mira and the plain caches run the engine's own driver with its own eviction policies; the
others run the same driver with the order of victims and the predictions that their papers
describe.
"""

from __future__ import annotations

import enum
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from operator import itemgetter

from ..policy.eviction import EVICTION_POLICIES, preferred_eviction
from ..types import Eviction, ExpertId
from .workload import Round, demand_of


class Lead(enum.StrEnum):
    """Where a system's prefetches come from."""

    NONE = "none"
    NEXT_LAYER = "next-layer"
    ACTIVATION_TRACE = "activation-trace"
    COUNT_TABLE = "count-table"
    DRAFT = "draft"


class Special(enum.StrEnum):
    """Orders of victims that the engine does not have."""

    STATIC = "static"
    BELADY = "belady"


class Memory(enum.StrEnum):
    """How many slots a system without a draft has beside one with a draft.

    `USUAL` is the whole budget where a budget was given, else the slots that were given.
    """

    USUAL = "usual"
    SAME_CACHE = "same-cache"
    SAME_MEMORY = "same-memory"


@dataclass(frozen=True, slots=True, kw_only=True)
class System:
    """One row of a comparison.

    Attributes:
        name: For tables and `--policy`.
        about: One line.
        eviction: Order of victims.
        is_per_layer: Whether each layer has slots of its own.
        lead: Where prefetches come from.
        is_drafting: Whether rounds have a draft and a verification.
        is_draft_resident: Whether the draft takes the memory of an INT4 copy of the experts.
        num_microbatches: Parts of a verification that go through a layer one by one.
        memory: What slots it has where it has no draft.
    """

    name: str
    about: str
    eviction: Eviction | Special
    is_per_layer: bool = False
    lead: Lead = Lead.NONE
    is_drafting: bool = False
    is_draft_resident: bool = False
    num_microbatches: int = 1
    memory: Memory = Memory.USUAL


_PLAIN = {
    Eviction.LRU: "least recently used first, on demand",
    Eviction.LFU: "least often used first, on demand",
}


def all_systems() -> tuple[System, ...]:
    """Returns every system, the plain caches first; one for each eviction policy there is."""
    plain = [
        System(name=str(e), about=_PLAIN.get(e, "the engine's policy, on demand"), eviction=e)
        for e in sorted(EVICTION_POLICIES, key=lambda e: (e is not Eviction.LRU, str(e)))
    ]
    speculating = preferred_eviction(4)
    return (
        *plain,
        System(
            name="static",
            about="popular experts by a profile stay, as in Fiddler; others pass through",
            eviction=Special.STATIC,
        ),
        System(
            name="mixtral-offloading-sc",
            about="LRU a layer, next layer guessed; same cache",
            eviction=Eviction.LRU,
            is_per_layer=True,
            lead=Lead.NEXT_LAYER,
            memory=Memory.SAME_CACHE,
        ),
        System(
            name="mixtral-offloading-sm",
            about="LRU a layer, next layer guessed; same memory",
            eviction=Eviction.LRU,
            is_per_layer=True,
            lead=Lead.NEXT_LAYER,
            memory=Memory.SAME_MEMORY,
        ),
        System(
            name="moe-infinity",
            about="LRU, next layer by the most similar text seen before",
            eviction=Eviction.LRU,
            lead=Lead.ACTIVATION_TRACE,
        ),
        System(
            name="specmoeoff",
            about="a small draft of its own; two microbatches share a cache",
            eviction=Eviction.LRU,
            is_drafting=True,
            num_microbatches=2,
            memory=Memory.SAME_MEMORY,
        ),
        System(
            name="mira",
            about="the engine's driver at K = 0, no predictor",
            eviction=preferred_eviction(0),
        ),
        System(
            name="mira+predictor",
            about="the same with layer i + 2 predicted (a count table in place of the heads)",
            eviction=preferred_eviction(0),
            lead=Lead.COUNT_TABLE,
        ),
        System(
            name="mira+lookahead",
            about="INT4 draft, its routing fetches ahead of the verification",
            eviction=speculating,
            lead=Lead.DRAFT,
            is_drafting=True,
            is_draft_resident=True,
        ),
        System(
            name="belady",
            about="whose next use is furthest goes first: the bound of caches on demand",
            eviction=Special.BELADY,
        ),
    )


class StaticEviction:
    """Gives up only experts that are not in the set, the longest resident first.

    Source: Fiddler, placement of experts by popularity.
    """

    def __init__(self, kept: Collection[ExpertId]) -> None:
        self._kept = frozenset(kept)
        self._passing: OrderedDict[ExpertId, None] = OrderedDict()

    def on_admit(self, expert: ExpertId) -> None:
        """Notes an expert that only passes through."""
        if expert not in self._kept:
            self._passing[expert] = None

    def on_use(self, expert: ExpertId) -> None:
        """Changes nothing."""

    def on_miss(self, expert: ExpertId) -> None:
        """Nothing follows from it here."""

    def on_remove(self, expert: ExpertId) -> None:
        """Forgets the expert."""
        self._passing.pop(expert, None)

    def victims(self) -> Iterator[ExpertId]:
        """Yields those that pass through."""
        return iter(self._passing)


class BeladyEviction:
    """Gives up first whose next use is furthest. Knows the future.

    Args:
        rounds: All that will be simulated.

    Attributes:
        now: Layers that have been entered; moved by who simulates.
    """

    def __init__(self, rounds: Sequence[Round]) -> None:
        self.now = 0
        self._uses: dict[ExpertId, list[int]] = {}
        self._next: dict[ExpertId, int] = {}
        moment = 0
        for item in rounds:
            for layer, rows in enumerate(item.target):
                moment += 1
                for expert, _ in demand_of(rows):
                    self._uses.setdefault(ExpertId(layer, expert), []).append(moment)
        self._never = moment + 1

    def on_admit(self, expert: ExpertId) -> None:
        """Notes a resident and its next use."""
        uses = self._uses.get(expert, [])
        position = bisect_right(uses, self.now)
        self._next[expert] = uses[position] if position < len(uses) else self._never

    def on_use(self, expert: ExpertId) -> None:
        """Looks the next use up."""
        self.on_admit(expert)

    def on_miss(self, expert: ExpertId) -> None:
        """Nothing follows from it here."""

    def on_remove(self, expert: ExpertId) -> None:
        """Forgets the expert."""
        del self._next[expert]

    def victims(self) -> Iterator[ExpertId]:
        """Yields from the furthest to the nearest next use."""
        if self._next:
            yield max(self._next.items(), key=itemgetter(1))[0]  # Almost always enough.
            yield from sorted(self._next, key=lambda e: (-self._next[e], e))
