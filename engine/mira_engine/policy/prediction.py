"""Predicted experts: which of them are worth a place in STAGE before their layer comes.

Pure. Heads give each expert of a later layer its expected share of the routed tokens. An
expert is staged if it is likely enough to be used, is not there, and the link has room: a
record under way cannot be overtaken, so a wrong one delays whatever is missed meanwhile.

Source: Mira IV-E and IV-F (skips what is present, one request per expert and target layer,
declines what does not fit). The cap on what is under way is ours.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from ..types import ExpertId
from .base import Action, Decline, DeclineReason, Fetch, FetchReason, Skip, SkipReason
from .residency import ResidencyTable

MIN_PROBABILITY = 0.5
"""Of being used, below which an expert is not staged."""


class PredictiveStaging:
    """Turns predictions into fetches, over one pass of the model after another.

    Args:
        top_k: Experts of a token in a layer.
        max_outstanding: Most predicted records under way at a time.
        min_probability: As `MIN_PROBABILITY`.
    """

    def __init__(
        self, top_k: int, *, max_outstanding: int, min_probability: float = MIN_PROBABILITY
    ) -> None:
        self._top_k = top_k
        self._max_outstanding = max_outstanding
        self._min_probability = min_probability
        self._requested: set[ExpertId] = set()
        self._outstanding: set[ExpertId] = set()

    def begin_pass(self) -> None:
        """Another pass begins: every expert may be asked for again."""
        self._requested.clear()

    def stage(
        self,
        layer: int,
        picks: Sequence[tuple[int, float]],
        num_tokens: int,
        residency: ResidencyTable,
        protected: Collection[ExpertId],
    ) -> list[Action]:
        """Stages a later layer's likely experts.

        Args:
            layer: The layer that they are predicted for.
            picks: Experts and their expected shares of the routed tokens, likeliest first.
            num_tokens: Tokens of the pass.
            residency: Slots; staged experts are LOADING afterwards.
            protected: Experts that are computed now and must stay.
        """
        actions: list[Action] = []
        for index, share in picks:
            by_one = min(1.0, share * self._top_k)
            if 1.0 - (1.0 - by_one) ** num_tokens < self._min_probability:
                break
            expert = ExpertId(layer, index)
            if expert in self._requested:
                continue
            self._requested.add(expert)
            action = self._request(expert, residency, protected)
            actions.append(action)
        return actions

    def _request(
        self, expert: ExpertId, residency: ResidencyTable, protected: Collection[ExpertId]
    ) -> Fetch | Skip | Decline:
        if residency.slot_of(expert) is not None:
            return Skip(expert, SkipReason.RESIDENT)
        if self._num_outstanding(residency) >= self._max_outstanding:
            return Skip(expert, SkipReason.BYTE_CAP)
        fetch = residency.admit(expert, FetchReason.PREDICTED, protected=protected)
        if fetch is None:
            return Decline(expert, DeclineReason.STAGE_FULL)
        self._outstanding.add(expert)
        return fetch

    def _num_outstanding(self, residency: ResidencyTable) -> int:
        if len(self._outstanding) >= self._max_outstanding:
            self._outstanding = {
                expert
                for expert in self._outstanding
                if residency.slot_of(expert) is not None and not residency.is_ready(expert)
            }
        return len(self._outstanding)
