"""Predicted experts: which of them are worth a place in STAGE before their layer comes.

Pure. Heads give each expert of a later layer its expected share of the routed tokens. An
expert is staged if it is likely enough to be used, is not there, and the link has room: a
record under way cannot be overtaken, so a wrong one delays whatever is missed meanwhile.
What finds no room waits in the order of the layers, the nearest first; what a later
prediction no longer expects, or what its layer has passed, is let go.

Source: Mira IV-E and IV-F (skips what is present, one request per expert and target layer,
declines what does not fit). The cap on what is under way and the waiting line are ours.
"""

from __future__ import annotations

import bisect
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..types import ExpertId, Phase
from .base import Action, Decline, DeclineReason, FetchReason, Skip, SkipReason
from .residency import ResidencyTable

MIN_PROBABILITY = 0.5
"""Of being used, below which an expert of layer i + 2 is not staged."""

MIN_FAR_PROBABILITY = 0.4
"""Of being used, below which a far head's guess is not worth moving a record for."""

_NEAR = 1
"""Layers behind the present one that heads of earlier layers have spoken about."""

FarPick = tuple[int, int, float]
"""Layer, expert, and how likely at least one token uses it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HeadQuestion:
    """What the heads of a layer are asked.

    Attributes:
        is_far: Whether its far head speaks of all later layers, rather than its near one of
            the next but one.
        is_last_token_only: Whether the pass's last token stands for all.
        is_unbounded: Whether every likely expert is wanted, not the likeliest few.
    """

    is_far: bool
    is_last_token_only: bool
    is_unbounded: bool


def question_for(phase: Phase, *, has_far_heads: bool) -> HeadQuestion:
    """Chooses what to ask in a phase.

    A prompt's tokens use most of a layer: there the next layer but one is enough, and all
    of it. In a verification the draft's routers told of all tokens but the last.
    """
    is_prompt = phase is Phase.PREFILL
    return HeadQuestion(
        is_far=has_far_heads and not is_prompt,
        is_last_token_only=phase is Phase.VERIFY,
        is_unbounded=is_prompt,
    )


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
        self._waiting: list[ExpertId] = []
        self._expected: set[ExpertId] = set()

    @property
    def expected(self) -> frozenset[ExpertId] | set[ExpertId]:
        """What this pass is likely to use still or used already: no victims for a guess."""
        return self._expected

    @property
    def is_waiting(self) -> bool:
        """Whether something waits for the link."""
        return bool(self._waiting)

    def begin_pass(self) -> list[Skip]:
        """Another pass begins: every expert may be asked for again. Returns who waited in vain."""
        skips = [Skip(expert, SkipReason.BYTE_CAP) for expert in self._waiting]
        self._requested.clear()
        self._waiting.clear()
        self._expected.clear()
        return skips

    def expect(
        self,
        layer: int,
        picks: Sequence[tuple[int, float]],
        num_tokens: int,
        residency: ResidencyTable,
    ) -> list[Skip]:
        """Takes in what a later layer's experts are likely to be.

        Args:
            layer: The layer that they are predicted for.
            picks: Experts and their expected shares of the routed tokens, likeliest first.
            num_tokens: Tokens of the pass.
            residency: To look at.

        Returns:
            Skips of what is there already.
        """
        skips: list[Skip] = []
        wanted: list[ExpertId] = []
        for index, share in picks:
            by_one = min(1.0, share * self._top_k)
            if 1.0 - (1.0 - by_one) ** num_tokens < self._min_probability:
                break
            expert = ExpertId(layer, index)
            self._expected.add(expert)
            if expert in self._requested:
                continue
            self._requested.add(expert)
            if residency.slot_of(expert) is not None:
                skips.append(Skip(expert, SkipReason.RESIDENT))
            elif expert not in self._waiting:
                wanted.append(expert)
        at = bisect.bisect_left(self._waiting, layer, key=lambda expert: expert.layer)
        self._waiting[at:at] = wanted
        return skips

    def expect_far(
        self, layer: int, picks: Sequence[FarPick], residency: ResidencyTable
    ) -> list[Skip]:
        """Takes in what all later layers are likely to use; replaces what was expected there.

        What nearer heads expect of the layers right behind this one stays: they know better.

        Args:
            layer: The layer that runs now.
            picks: Nearest layer first, likeliest first within it.
            residency: To look at.

        Returns:
            Skips of what is there already.
        """
        skips: list[Skip] = []
        self._waiting = [e for e in self._waiting if e.layer <= layer + _NEAR]
        known = set(self._waiting)
        self._expected = {e for e in self._expected if e.layer <= layer + _NEAR}
        for target, index, _ in picks:
            expert = ExpertId(target, index)
            self._expected.add(expert)
            if expert in known:
                continue
            if residency.slot_of(expert) is None:
                self._waiting.append(expert)
            elif expert not in self._requested:
                self._requested.add(expert)
                skips.append(Skip(expert, SkipReason.RESIDENT))
        return skips

    def enter_layer(self, layer: int) -> list[Skip]:
        """A layer has begun, and what it needs is known. Returns who waited for it in vain."""
        count = bisect.bisect_right(self._waiting, layer, key=lambda expert: expert.layer)
        skips = [Skip(expert, SkipReason.BYTE_CAP) for expert in self._waiting[:count]]
        del self._waiting[:count]
        return skips

    def fetch(
        self, residency: ResidencyTable, needed: Iterable[ExpertId], max_outstanding: int
    ) -> list[Action]:
        """Moves what waits, nearest layer first, while the link has room.

        Args:
            residency: Gives slots.
            needed: Experts that must keep theirs beside those that are expected.
            max_outstanding: Most predicted records under way at a time.

        Returns:
            Fetches to submit, and declines of what STAGE has no room for.
        """
        protected = self._expected.union(needed)
        actions: list[Action] = []
        while self._waiting:
            expert = self._next_wanted(residency, max_outstanding)
            if expert is None:
                break
            fetch = residency.admit(expert, FetchReason.PREDICTED, protected=protected)
            if fetch is not None:
                self._outstanding.add(expert)
            actions.append(fetch or Decline(expert, DeclineReason.STAGE_FULL))
        return actions

    def _next_wanted(self, residency: ResidencyTable, max_outstanding: int) -> ExpertId | None:
        """Returns whom to move now, `None` for nobody."""
        while self._waiting:
            if residency.slot_of(self._waiting[0]) is not None:
                self._waiting.pop(0)
            elif self._num_outstanding(residency, max_outstanding) >= max_outstanding:
                break
            else:
                return self._waiting.pop(0)
        return None

    def _num_outstanding(self, residency: ResidencyTable, limit: int) -> int:
        if len(self._outstanding) >= limit:
            self._outstanding = {
                expert
                for expert in self._outstanding
                if residency.slot_of(expert) is not None and not residency.is_ready(expert)
            }
        return len(self._outstanding)
