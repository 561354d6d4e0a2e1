"""Expert Lookahead Buffer (ELB) and Incremental Routing Pattern Analyzer.

The buffer counts, per MoE layer and expert, how often the draft's routers chose it in
this draft window; the analyzer ranks each layer's experts by that count. Pure.

Source: Specter, Incremental Routing Pattern Analyzer. The paper keeps the counters on
the GPU; on a machine whose device is host memory they are arrays that a kernel adds to.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Sequence

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
