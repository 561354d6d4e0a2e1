"""What was moved ahead of its use, and what that was good for.

Pure. Follows each record from its fetch to the end of the pass that it was made for, and
tells `mira_engine.policy.payoff` what came of it: one ledger for what drafts announce, one
for what heads predict.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from ..types import ExpertId
from .base import Action, Await, Compute, Fetch, FetchReason
from .payoff import PrefetchPayoff, PrefetchRound


class MovedAhead:
    """The records moved ahead for the running pass.

    Args:
        num_links: Records that move at the same time.

    Attributes:
        unused: Those that nobody has used yet, and why each was moved.
        payoffs: By reason, whether moving ahead is worth it.
    """

    def __init__(self, num_links: int) -> None:
        self._num_links = num_links
        self.payoffs = {
            FetchReason.LOOKAHEAD: PrefetchPayoff(),
            FetchReason.PREDICTED: PrefetchPayoff(),
        }
        self.unused: dict[ExpertId, FetchReason] = {}
        self._num_moved = dict.fromkeys(self.payoffs, 0)
        self._num_used = dict.fromkeys(self.payoffs, 0)

    def add(self, actions: Sequence[Action]) -> None:
        """Takes in the fetches among actions that were decided ahead."""
        for action in actions:
            if isinstance(action, Fetch):
                self.unused[action.expert] = action.reason
                self._num_moved[action.reason] += 1

    def use(self, actions: Sequence[Action]) -> None:
        """Takes in a layer's experts that were found in a slot or on their way to one."""
        for action in actions:
            if isinstance(action, Compute | Await):
                reason = self.unused.pop(action.expert, None)
                if reason is not None:
                    self._num_used[reason] += 1

    def end_pass(
        self,
        spent_s: Mapping[FetchReason, float],
        *,
        record_s: float | None,
        num_missed: int,
        round_s: float,
    ) -> None:
        """Tells what the records were good for: the pass is over, and those unused stay so.

        Args:
            spent_s: By reason, seconds that deciding took.
            record_s: Seconds of the link for a record, `None` where nothing was measured yet.
            num_missed: Records fetched on demand in the round.
            round_s: Seconds of the round, 0 where that is not known.
        """
        self.unused.clear()
        for reason in self.payoffs:
            num_moved, self._num_moved[reason] = self._num_moved[reason], 0
            num_used, self._num_used[reason] = self._num_used[reason], 0
            if not num_moved or record_s is None:
                continue
            # A record that nobody used costs the time of the misses that came while it moved:
            # all of its time, where the length of the round is not known.
            busy = min(1.0, num_missed * record_s / round_s) if round_s else 1.0
            num_idle = num_moved - num_used
            self.payoffs[reason].observe(
                PrefetchRound(
                    num_prefetched=num_moved,
                    num_used=num_used,
                    # Whoever misses one waits for all of its time, links beside it or not.
                    saved_s=num_used * record_s * self._num_links,
                    spent_s=num_idle * record_s * busy + spent_s[reason],
                )
            )

    def forget(self) -> None:
        """A reply has ended inside a pass: what was moved for it has no claim."""
        self.unused.clear()
