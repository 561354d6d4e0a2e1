"""Where every expert is and how busy it is, as rows of characters for people to look at.

Reads the residency table and counts what the target's routers choose; decides nothing, and
no decision depends on it. Called by the engine thread only.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..policy.residency import ResidencyTable
from ..policy.slot_table import SlotState
from ..types import Region

HALF_LIFE_TOKENS = 256
"""Tokens after which what was routed before counts half: the interval of a rebalance."""

HOT, STAGE, LOADING, ABSENT = b"HSs."


class RoutingHeat:
    """Tokens routed to each expert lately, older ones fading.

    Args:
        num_layers: MoE layers.
        num_experts: Experts of a layer.
        top_k: Experts of a token in a layer.
    """

    def __init__(self, num_layers: int, num_experts: int, top_k: int) -> None:
        self._choices_per_token = num_layers * top_k
        self._counts = [[0.0] * num_experts for _ in range(num_layers)]
        self._new = [[0] * num_experts for _ in range(num_layers)]
        self._num_new_choices = 0

    def record(self, layer: int, demand: Iterable[tuple[int, int]]) -> None:
        """Counts one layer's pass: experts, and how many tokens chose each."""
        counts = self._new[layer]
        for expert, num_tokens in demand:
            counts[expert] += num_tokens
            self._num_new_choices += num_tokens

    def rows(self) -> tuple[str, ...]:
        """Fades what the last call knew, adds what came since, and returns `heat`."""
        self._fade()
        most = max(map(max, self._counts))
        scale = 9 / most if most else 0.0
        # Rounded up: who was chosen at all is told from who was not.
        return tuple(
            "".join("0123456789"[min(9, -int(-count * scale // 1))] for count in counts)
            for counts in self._counts
        )

    def _fade(self) -> None:
        num_tokens = self._num_new_choices / self._choices_per_token
        keep = 0.5 ** (num_tokens / HALF_LIFE_TOKENS)
        for counts, new in zip(self._counts, self._new, strict=True):
            for expert, count in enumerate(new):
                counts[expert] = counts[expert] * keep + count
                new[expert] = 0
        self._num_new_choices = 0


def region_rows(residency: ResidencyTable, num_layers: int, num_experts: int) -> tuple[str, ...]:
    """Returns `regions`: a row a layer, a character an expert."""
    rows = [bytearray([ABSENT]) * num_experts for _ in range(num_layers)]
    for expert, slot in residency.residents():
        mark = STAGE
        if residency.state(slot) is SlotState.LOADING:
            mark = LOADING
        elif residency.regions is not None and residency.region(slot) is Region.HOT:
            mark = HOT
        rows[expert.layer][expert.expert] = mark
    return tuple(row.decode("ascii") for row in rows)
