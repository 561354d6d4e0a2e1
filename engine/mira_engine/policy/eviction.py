"""Eviction policies: in which order resident experts are given up.

Pure. A policy sees admissions, uses and removals and offers victims; whether one may
go (pins, loads, protection) is `mira_engine.policy.residency`'s to say. A new policy is
one class here and one line in `EVICTION_POLICIES`.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict
from collections.abc import Callable, Iterator
from typing import Protocol

from ..types import Eviction, ExpertId


class EvictionPolicy(Protocol):
    """Orders resident experts by how readily they are given up."""

    def on_admit(self, expert: ExpertId) -> None:
        """An expert was given a slot."""

    def on_use(self, expert: ExpertId) -> None:
        """A resident expert was routed to."""

    def on_miss(self, expert: ExpertId) -> None:
        """An expert that is not offered was routed to: it is fetched, or cannot go now."""

    def on_remove(self, expert: ExpertId) -> None:
        """An expert lost its slot, or is not to be offered for a while."""

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

    def on_miss(self, expert: ExpertId) -> None:
        """Changes nothing: admission makes it the most recent one."""

    def on_remove(self, expert: ExpertId) -> None:
        """Forgets the expert."""
        del self._order[expert]

    def victims(self) -> Iterator[ExpertId]:
        """Yields from the least to the most recently used."""
        return iter(self._order)


class LfuEviction:
    """Least often used first, by counts that fade; among equals the least recently used.

    A pass goes through all layers in order, so with fewer slots than a pass needs, what was
    used longest ago is what comes next, and LRU gives up exactly that. Counts keep the
    experts that most tokens choose. They outlive an expert's stay on the device, and are
    halved after every `fade_after` uses, so that a new text's experts take over. A miss is a
    use like any other: without it an expert that is fetched again and again never rises
    (measured 2026-11-30, built-in model, 75 %, K = 4: hit rate .844 without, .877 with).

    Source: LFU with dynamic aging, Arlitt et al. 2000; Mira IV-D for counting routed tokens.
    """

    def __init__(self, fade_after: int = 8192) -> None:
        self._fade_after = fade_after
        self._num_uses = 0
        self._counts: dict[ExpertId, int] = {}
        self._by_count: dict[int, OrderedDict[ExpertId, None]] = {}

    def on_admit(self, expert: ExpertId) -> None:
        """Ranks the expert by what it was used before."""
        self._counts.setdefault(expert, 0)
        self._enter(expert)

    def on_use(self, expert: ExpertId) -> None:
        """Counts a use."""
        self._leave(expert)
        self._counts[expert] += 1
        self._enter(expert)
        self._count_use()

    def on_miss(self, expert: ExpertId) -> None:
        """Counts a use."""
        self._counts[expert] = self._counts.get(expert, 0) + 1
        self._count_use()

    def on_remove(self, expert: ExpertId) -> None:
        """Takes the expert out; its count stays."""
        self._leave(expert)

    def victims(self) -> Iterator[ExpertId]:
        """Yields from the least to the most often used."""
        for count in sorted(self._by_count):
            yield from self._by_count[count]

    def _enter(self, expert: ExpertId) -> None:
        self._by_count.setdefault(self._counts[expert], OrderedDict())[expert] = None

    def _leave(self, expert: ExpertId) -> None:
        count = self._counts[expert]
        group = self._by_count[count]
        del group[expert]
        if not group:
            del self._by_count[count]

    def _count_use(self) -> None:
        self._num_uses += 1
        if self._num_uses >= self._fade_after:
            self._fade()

    def _fade(self) -> None:
        self._num_uses = 0
        residents = list(self.victims())
        self._counts = {expert: count // 2 for expert, count in self._counts.items() if count > 1}
        self._by_count = {}
        for expert in residents:
            self._counts.setdefault(expert, 0)
            self._enter(expert)


class LfruEviction:
    """Frequency and recency together: every use counts, the less the longer it is ago.

    An expert's weight is the sum over its uses of 2^-(age / half_life), age in uses of any
    expert. Kept is the weight's binary logarithm as of time 0: time changes all of them
    alike, so only uses do, and they only raise it. Hence a heap whose entries may lag behind
    and are put right when they come to the top: a use costs one dictionary entry.

    Source: LRFU, Lee et al. 2001, with half_life = 1 / λ. A baseline for the simulator.
    """

    def __init__(self, half_life: int = 4096) -> None:
        self._rate = 1.0 / half_life
        self._num_uses = 0
        self._weights: dict[ExpertId, float] = {}
        self._residents: set[ExpertId] = set()
        self._heap: list[tuple[float, ExpertId]] = []
        self._in_heap: set[ExpertId] = set()
        """Experts with an entry, which is never above their weight; one entry each."""

    def on_admit(self, expert: ExpertId) -> None:
        """Ranks the expert by the uses it had before; without any, as if used now."""
        weight = self._weights.setdefault(expert, self._num_uses * self._rate)
        self._residents.add(expert)
        if expert not in self._in_heap:
            self._in_heap.add(expert)
            heapq.heappush(self._heap, (weight, expert))

    def on_use(self, expert: ExpertId) -> None:
        """Adds a use of now to the expert's weight."""
        now = self._num_uses * self._rate
        before = self._weights.get(expert)
        if before is None:
            self._weights[expert] = now
        else:  # log2(2^before + 2^now), whose powers would overflow.
            faded = 2.0 ** -abs(now - before)
            self._weights[expert] = max(before, now) + math.log2(1.0 + faded)
        self._num_uses += 1

    def on_miss(self, expert: ExpertId) -> None:
        """Adds a use of now to the expert's weight."""
        self.on_use(expert)

    def on_remove(self, expert: ExpertId) -> None:
        """Takes the expert out; its weight stays."""
        self._residents.remove(expert)

    def victims(self) -> Iterator[ExpertId]:
        """Yields from the least to the greatest weight; among equals by expert id."""
        self._settle_top()
        heap, weights = self._heap, self._weights
        # Walks the heap in order: (weight, expert, its place, or -1 once its weight is known).
        ahead = [(*heap[0], 0)] if heap else []
        while ahead:
            weight, expert, place = heapq.heappop(ahead)
            if place >= 0:
                for child in range(2 * place + 1, min(2 * place + 3, len(heap))):
                    heapq.heappush(ahead, (*heap[child], child))
                if expert not in self._residents:
                    continue
                if weight < weights[expert]:
                    heapq.heappush(ahead, (weights[expert], expert, -1))
                    continue
            yield expert

    def _settle_top(self) -> None:
        """Corrects the heap until its first entry is a resident with its present weight."""
        heap = self._heap
        while heap:
            weight, expert = heap[0]
            if expert not in self._residents:
                heapq.heappop(heap)
                self._in_heap.remove(expert)
            elif weight < self._weights[expert]:
                heapq.heapreplace(heap, (self._weights[expert], expert))
            else:
                return


EVICTION_POLICIES: dict[Eviction, Callable[[], EvictionPolicy]] = {
    Eviction.LFU: LfuEviction,
    Eviction.LRU: LruEviction,
    Eviction.LFRU: LfruEviction,
}


def preferred_eviction(num_draft_tokens: int, *, is_draft_cached: bool = False) -> Eviction:
    """Returns what suits a speculation depth.

    A verification needs many experts of every layer, often more than there are slots; a
    plain step needs few, and often those of the step before. Measured 2026-11-30, built-in
    model, budget 75 %, hit rates: K = 4 LFU .849, LRU .632; K = 0 LFU .908, LRU .952.
    """
    has_few_slots = num_draft_tokens and not is_draft_cached
    return Eviction.LFU if has_few_slots else Eviction.LRU


def preferred_stage_order(num_stage_slots: int, num_pass_experts: int) -> Eviction:
    """Returns what suits STAGE, where HOT is beside it.

    A pass goes through all layers before it comes back, so a STAGE smaller than what one
    pass uses gives up by recency just what comes next. Measured 2026-11-30 with
    `tests/bench/regions.py` (one pool, half of it HOT, law / summary): room for 8 of 64, where
    STAGE holds 4 of a token's 6 a layer, LRU .175 / .205, LFRU .269 / .312; room for 16, where it
    holds 8, LRU .463 / .480, LFRU .441 / .495.

    Args:
        num_stage_slots: Slots for STAGE once HOT is full.
        num_pass_experts: Experts that a pass uses over all layers: top-k times layers for
            one token.
    """
    return Eviction.LRU if num_stage_slots >= num_pass_experts else Eviction.LFRU
