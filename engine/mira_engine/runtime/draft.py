"""Drafting: K tokens with the draft's experts, while the target's experts are fetched.

The draft runs the target's own attention, norms and embeddings on the shared cache as a
scratch extension, which is removed at the end. Its router choices fill the lookahead
buffer; at each boundary the driver makes a batch of fetches of it. Measures what the driver
needs to know: seconds per drafted token and per record, and what batches were good for.

Source: Specter, State Manager, Incremental Routing Pattern Analyzer, and Layer-Aware
Prefetch Planner.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from ..model.sampling import DraftToken, Sampler
from ..policy.base import Action, DraftOn
from ..types import Phase
from .executor import ExpertExecutor
from .passes import ModelPasses
from .telemetry import TrafficCounters


class DraftStage:
    """Proposes tokens for verification.

    Args:
        passes: Forward passes.
        executor: Its driver plans the batches.
        is_prefetch_enabled: Whether to fetch what the draft's routing names.
    """

    def __init__(
        self, passes: ModelPasses, executor: ExpertExecutor, *, is_prefetch_enabled: bool
    ) -> None:
        self._passes = passes
        self._executor = executor
        self._driver = executor.driver
        self._is_prefetch_enabled = is_prefetch_enabled
        self._planning_s = 0.0
        self._seen: tuple[TrafficCounters, int, float] | None = None
        """Counters, and their bytes and seconds that the driver knows already."""
        self._before = (0, 0)
        """Records prefetched, and of those used, before this round."""

    def run(
        self,
        history: Sequence[int],
        num_tokens: int,
        sampler: Sampler,
        end_ids: Collection[int],
    ) -> list[DraftToken]:
        """Drafts up to `num_tokens` tokens after `history`, stopping at an end of text.

        Args:
            history: All tokens; the last one is not in the cache yet.
            num_tokens: K.
            sampler: Draws the tokens.
            end_ids: End-of-text ids.

        Returns:
            The drafted tokens. The cache is as it was before.
        """
        started = time.perf_counter()
        drafted: list[DraftToken] = []
        sequence = list(history)
        boundary = self._begin(num_tokens)
        num_passes = 0
        while len(drafted) < num_tokens:
            logits = self._passes.forward([sequence[-1]], Phase.DRAFT)
            num_passes += 1
            token = sampler.draw(sequence, logits[0])
            drafted.append(token)
            sequence.append(token.token)
            if len(drafted) == boundary:
                boundary = self._reach_boundary(len(drafted))
            if token.token in end_ids:
                break
        self._passes.state.rollback(num_passes)
        elapsed = time.perf_counter() - started
        self._executor.meter.draft_s += elapsed
        self._executor.meter.num_drafted += len(drafted)
        self._driver.end_draft(len(drafted), elapsed - self._planning_s)
        return drafted

    def settle(self) -> None:
        """Tells what this round's batches were good for. Called once it is verified."""
        traffic = self._executor.meter.decode
        num_prefetched, num_used = self._before
        self._driver.end_pass(
            traffic.num_prefetched - num_prefetched,
            traffic.num_prefetch_used - num_used,
            self._planning_s,
        )

    def _begin(self, num_tokens: int) -> int | None:
        """Begins a window. Returns its first boundary, `None` where there is none."""
        traffic = self._executor.meter.decode
        self._before = traffic.num_prefetched, traffic.num_prefetch_used
        self._planning_s = 0.0
        if self._seen is None or self._seen[0] is not traffic:  # Another reply's.
            self._seen = traffic, 0, 0.0
        _, num_bytes, transfer_s = self._seen
        self._seen = traffic, traffic.num_bytes, traffic.transfer_s
        actions = self._driver.begin_draft(
            num_tokens,
            self._is_prefetch_enabled,
            traffic.num_bytes - num_bytes,
            traffic.transfer_s - transfer_s,
        )
        return _boundary(0, actions)

    def _reach_boundary(self, num_drafted: int) -> int | None:
        """Plans and submits a batch. Returns the next boundary, `None` where there is none."""
        started = time.perf_counter()
        executor = self._executor
        executor.collect(executor.transfer.poll())
        actions = self._driver.reach_boundary(num_drafted, self._driver.lookahead.snapshot())
        executor.obey(actions)
        self._planning_s += time.perf_counter() - started
        return _boundary(num_drafted, actions)


def _boundary(num_drafted: int, actions: Sequence[Action]) -> int | None:
    chunks = [action.num_tokens for action in actions if isinstance(action, DraftOn)]
    return num_drafted + chunks[0] if chunks else None
