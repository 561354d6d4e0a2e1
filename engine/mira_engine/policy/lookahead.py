"""Expert Lookahead Buffer (ELB) and Incremental Routing Pattern Analyzer.

The buffer counts, per MoE layer and expert, how often the draft's routers chose it in
this draft window; the analyzer ranks each layer's experts by that count. Pure.

Source: Specter, Incremental Routing Pattern Analyzer. The paper keeps the counters on
the GPU; on a machine whose device is host memory they are arrays that a kernel adds to.
A snapshot is what the paper's compact plan copied to the host is: one object per boundary.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..types import ExpertId


class ExpertLookaheadBuffer:
    """Counters `[num_layers][num_experts]` of one draft window."""

    def __init__(self, num_layers: int, num_experts: int) -> None:
        self.num_layers = num_layers
        self.num_experts = num_experts
        self._counts = [array("i", bytes(4 * num_experts)) for _ in range(num_layers)]

    def record(self, layer: int, experts: Iterable[int]) -> None:
        """Adds one routing decision of a draft token."""
        counts = self._counts[layer]
        for expert in experts:
            counts[expert] += 1

    def counters(self, layer: int) -> memoryview:
        """Returns the layer's counters `[num_experts]` themselves, 4 bytes each, to add to."""
        return memoryview(self._counts[layer])

    def snapshot(self) -> list[list[tuple[int, int]]]:
        """Returns by layer what was chosen, and how often: all that `restore` needs."""
        return [[(e, n) for e, n in enumerate(counts) if n] for counts in self._counts]

    def restore(self, snapshot: Sequence[Sequence[Sequence[int]]]) -> None:
        """Makes the counters what they were when the snapshot was taken."""
        self.clear()
        for counts, chosen in zip(self._counts, snapshot, strict=True):
            for expert, count in chosen:
                counts[expert] = count

    def count(self, expert: ExpertId) -> int:
        """Returns how often the expert was chosen in this window."""
        return self._counts[expert.layer][expert.expert]

    @property
    def is_empty(self) -> bool:
        """Whether nothing was recorded since the last `clear`."""
        return not any(map(any, self._counts))

    def clear(self) -> None:
        """Forgets the window; called at the end of each draft stage."""
        for counts in self._counts:
            for expert in range(self.num_experts):
                counts[expert] = 0

    def ranking(self, layer: int) -> list[tuple[ExpertId, int]]:
        """Returns the layer's chosen experts with counts, most first, ties by expert id."""
        chosen = [(ExpertId(layer, e), n) for e, n in enumerate(self._counts[layer]) if n]
        chosen.sort(key=lambda item: (-item[1], item[0].expert))
        return chosen


@dataclass(frozen=True, slots=True)
class RoutingSnapshot:
    """What the draft's routers have said up to one boundary of a draft window.

    Attributes:
        rankings: For each layer `(expert, count)` of the chosen experts, most first, ties by
            expert id.
        new: Experts that the boundary before did not know, layer by layer, most first.
    """

    rankings: tuple[tuple[tuple[int, int], ...], ...]
    new: tuple[ExpertId, ...]

    @property
    def needed(self) -> frozenset[ExpertId]:
        """Every expert that was chosen in this window."""
        return frozenset(
            ExpertId(layer, expert)
            for layer, ranking in enumerate(self.rankings)
            for expert, _ in ranking
        )


class IncrementalRoutingPatternAnalyzer:
    """Ranks each layer's experts at every boundary, and tells what came since the last one.

    Args:
        buffer: The counters; only read, but for `clear`.

    Source: Specter, Incremental Routing Pattern Analyzer: one snapshot a boundary instead
    of a transfer per token; cleared when the window ends.
    """

    def __init__(self, buffer: ExpertLookaheadBuffer) -> None:
        self._buffer = buffer
        self._known: frozenset[ExpertId] = frozenset()

    def snapshot(self) -> RoutingSnapshot:
        """Returns the window's routing so far. One call a boundary."""
        rankings = []
        for layer in range(self._buffer.num_layers):
            counts = self._buffer.counters(layer).tolist()
            chosen = [(expert, count) for expert, count in enumerate(counts) if count]
            chosen.sort(key=lambda item: -item[1])  # Stable, so ties stay in order of id.
            rankings.append(tuple(chosen))
        ranked = (
            ExpertId(layer, expert)
            for layer, ranking in enumerate(rankings)
            for expert, _ in ranking
        )
        new = tuple(expert for expert in ranked if expert not in self._known)
        self._known = self._known.union(new)
        return RoutingSnapshot(tuple(rankings), new)

    def clear(self) -> None:
        """Ends the window: what the final chunk's routers said is discarded with the rest."""
        self._buffer.clear()
        self._known = frozenset()
