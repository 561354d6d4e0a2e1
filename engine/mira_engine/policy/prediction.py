"""Predicted experts: which of them are worth a place in STAGE before their layer comes.

Pure. Heads give each expert of a later layer its expected share of the routed tokens. An
expert is staged if it is likely enough to be used, is not there, and the link has room: a
record under way cannot be overtaken, so a wrong one delays whatever is missed meanwhile.

Source: Mira IV-E and IV-F (skips what is present, one request per expert and target layer,
declines what does not fit). The cap on what is under way is ours.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..types import ExpertId
from .base import Skip, SkipReason
from .residency import ResidencyTable

MIN_PROBABILITY = 0.5
"""Of being used, below which an expert is not staged."""


class PredictiveStaging:
    """Chooses among predictions, over one pass of the model after another.

    Args:
        top_k: Experts of a token in a layer.
        min_probability: As `MIN_PROBABILITY`.
    """

    def __init__(self, top_k: int, *, min_probability: float = MIN_PROBABILITY) -> None:
        self._top_k = top_k
        self._min_probability = min_probability
        self._requested: set[ExpertId] = set()
        self._outstanding: set[ExpertId] = set()

    def begin_pass(self) -> None:
        """Another pass begins: every expert may be asked for again."""
        self._requested.clear()

    def choose(
        self,
        layer: int,
        picks: Sequence[tuple[int, float]],
        num_tokens: int,
        residency: ResidencyTable,
        max_outstanding: int,
    ) -> tuple[list[ExpertId], list[Skip]]:
        """Chooses which of a later layer's likely experts to stage.

        Args:
            layer: The layer that they are predicted for.
            picks: Experts and their expected shares of the routed tokens, likeliest first.
            num_tokens: Tokens of the pass.
            residency: To look at.
            max_outstanding: Most predicted records under way at a time.

        Returns:
            Experts to admit, in this order, and skips with their reasons.
        """
        room = max_outstanding - self._num_outstanding(residency, max_outstanding)
        wanted: list[ExpertId] = []
        skips: list[Skip] = []
        for index, share in picks:
            by_one = min(1.0, share * self._top_k)
            if 1.0 - (1.0 - by_one) ** num_tokens < self._min_probability:
                break
            expert = ExpertId(layer, index)
            if expert in self._requested:
                continue
            self._requested.add(expert)
            if residency.slot_of(expert) is not None:
                skips.append(Skip(expert, SkipReason.RESIDENT))
            elif len(wanted) >= room:
                skips.append(Skip(expert, SkipReason.BYTE_CAP))
            else:
                wanted.append(expert)
        return wanted, skips

    def begin(self, expert: ExpertId) -> None:
        """A chosen expert was given a slot, and its record is on its way."""
        self._outstanding.add(expert)

    def _num_outstanding(self, residency: ResidencyTable, limit: int) -> int:
        if len(self._outstanding) >= limit:
            self._outstanding = {
                expert
                for expert in self._outstanding
                if residency.slot_of(expert) is not None and not residency.is_ready(expert)
            }
        return len(self._outstanding)
