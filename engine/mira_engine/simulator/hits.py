"""Hit rates without time: each layer a cache of its own, its experts touched one by one.

The policies are the engine's own eviction objects. No expert is fetched ahead here, so
`belady_hits` bounds everything in this module; prefetching can beat it, and is what
`mira_engine.simulator.simulate` is for.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ..policy.eviction import EvictionPolicy
from ..types import ExpertId
from .workload import TokenTrace


def touches(trace: TokenTrace) -> list[list[int]]:
    """Returns by layer the experts in the order of their use, tokens and texts in a row."""
    return [trace.ids[:, layer].reshape(-1).tolist() for layer in range(trace.ids.shape[1])]


def policy_hits(
    layers: Sequence[Sequence[int]], num_slots: int, make: Callable[[], EvictionPolicy]
) -> float:
    """Returns the share of touches that find their expert, caches cold at first.

    Args:
        layers: Of `touches`.
        num_slots: Slots of each layer, at least 1.
        make: Makes a fresh policy.
    """
    num_hits = 0
    for layer, sequence in enumerate(layers):
        policy = make()
        resident: set[int] = set()
        for expert in sequence:
            name = ExpertId(layer, expert)
            if expert in resident:
                num_hits += 1
                policy.on_use(name)
                continue
            if len(resident) >= num_slots:
                victim = next(policy.victims())
                policy.on_remove(victim)
                resident.discard(victim.expert)
            policy.on_admit(name)
            resident.add(expert)
    return num_hits / _num_touches(layers)


def belady_hits(layers: Sequence[Sequence[int]], num_slots: int) -> float:
    """Returns the hit rate of the best policy there can be for caches that fetch on demand.

    What is used again last gives way, the new expert itself included (it then passes
    through), and the caches hold at first what is used first: so the bound holds as well
    for sets that were loaded beforehand.

    Source: Belady 1966, with bypass and a warm start.
    """
    num_hits = 0
    for sequence in layers:
        next_use = _next_uses(sequence)
        resident: set[int] = set(list(dict.fromkeys(sequence))[:num_slots])
        # Furthest next use first; entries of older uses are skipped when they come up. Those
        # that are resident at first are all used, and entered, before any gives way.
        heap: list[tuple[int, int]] = []
        due: dict[int, int] = {}
        for position, expert in enumerate(sequence):
            following = next_use[position]
            if expert in resident:
                num_hits += 1
            else:
                while due.get(heap[0][1]) != -heap[0][0]:
                    heapq.heappop(heap)
                if following >= -heap[0][0]:
                    continue
                _, victim = heapq.heappop(heap)
                resident.discard(victim)
                del due[victim]
                resident.add(expert)
            due[expert] = following
            heapq.heappush(heap, (-following, expert))
    return num_hits / _num_touches(layers)


def _next_uses(sequence: Sequence[int]) -> list[int]:
    """Returns for each position when its expert comes again; past the end by its id if never."""
    found = [0] * len(sequence)
    upcoming: dict[int, int] = {}
    for position in range(len(sequence) - 1, -1, -1):
        expert = sequence[position]
        found[position] = upcoming.get(expert, len(sequence) + expert)
        upcoming[expert] = position
    return found


def popular_sets(trace: TokenTrace, num_slots: int) -> list[frozenset[int]]:
    """Returns by layer the experts that most tokens chose; ties by expert id."""
    return [
        frozenset(np.argsort(-counts, kind="stable")[:num_slots].tolist())
        for counts in expert_counts(trace)
    ]


def expert_counts(trace: TokenTrace) -> np.ndarray:
    """Returns how many tokens chose each expert, `[num_layers, num_experts]`."""
    num_layers = trace.ids.shape[1]
    return np.stack(
        [
            np.bincount(trace.ids[:, layer].reshape(-1), minlength=trace.num_experts)
            for layer in range(num_layers)
        ]
    )


def static_hits(layers: Sequence[Sequence[int]], sets: Sequence[Iterable[int]]) -> float:
    """Returns the hit rate of sets that never change.

    Source: Fiddler's placement, popular experts by a profile made beforehand.
    """
    num_hits = 0
    for sequence, held in zip(layers, sets, strict=True):
        held = frozenset(held)
        num_hits += sum(expert in held for expert in sequence)
    return num_hits / _num_touches(layers)


def split_hits(
    layers: Sequence[Sequence[int]],
    sets: Sequence[frozenset[int]],
    num_slots: int,
    make: Callable[[], EvictionPolicy],
) -> float:
    """Returns the hit rate of static sets beside a cache for everything else.

    Args:
        layers: Of `touches`.
        sets: By layer, experts that stay; they take their part of the slots.
        num_slots: Slots of each layer, more than the largest set.
        make: Makes the policy of the other slots.
    """
    rest = [
        [expert for expert in sequence if expert not in held]
        for sequence, held in zip(layers, sets, strict=True)
    ]
    num_misses = 0.0
    for layer, (sequence, held) in enumerate(zip(rest, sets, strict=True)):
        if sequence:
            found = policy_hits([[]] * layer + [sequence], num_slots - len(held), make)
            num_misses += (1 - found) * len(sequence)
    return 1 - num_misses / _num_touches(layers)


def _num_touches(layers: Sequence[Sequence[int]]) -> int:
    return sum(map(len, layers))
