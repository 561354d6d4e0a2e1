"""Drafting: K tokens with the INT4 experts, while the target's experts are fetched.

The draft runs the target's own attention, norms and embeddings on the shared cache as a
scratch extension, which is removed at the end. Its router choices fill the lookahead
buffer; at each boundary of the planner the analyzer's snapshot becomes a batch of fetches.
Measures what the planner needs to know: seconds per drafted token and per record.

Source: Specter, State Manager, Incremental Routing Pattern Analyzer, and Layer-Aware
Prefetch Planner.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from ..model.sampling import DraftToken, Sampler
from ..policy.lookahead import IncrementalRoutingPatternAnalyzer
from ..policy.payoff import PrefetchPayoff, PrefetchRound
from ..policy.prefetch import LayerAwarePrefetchPlanner
from ..types import Phase
from .executor import ExpertExecutor
from .passes import ModelPasses
from .telemetry import TrafficCounters


class DraftStage:
    """Proposes tokens for verification.

    Args:
        passes: Forward passes.
        executor: Its lookahead buffer and residency table are used.
        is_prefetch_enabled: Whether to fetch what the draft's routing names.
        num_reserved_slots: Slots a prefetch batch leaves for misses.
        num_links: Records that move at the same time.
        max_window_bytes: Most bytes prefetched in one window, `None` for no cap.
    """

    def __init__(
        self,
        passes: ModelPasses,
        executor: ExpertExecutor,
        *,
        is_prefetch_enabled: bool,
        num_reserved_slots: int,
        num_links: int = 1,
        max_window_bytes: int | None = None,
    ) -> None:
        self._passes = passes
        self._executor = executor
        self._is_prefetch_enabled = is_prefetch_enabled
        self._num_links = num_links
        self._analyzer = IncrementalRoutingPatternAnalyzer(executor.lookahead)
        self.planner = LayerAwarePrefetchPlanner(
            executor.transfer.record_bytes,
            num_reserved_slots=num_reserved_slots,
            max_window_bytes=max_window_bytes,
        )
        self.payoff = PrefetchPayoff()
        self._planning_s = 0.0
        self._seen: tuple[TrafficCounters, int, float] | None = None
        """Counters, and their bytes and seconds that the planner knows already."""
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
        self._analyzer.clear()
        boundary = self._begin(num_tokens)
        num_passes = 0
        while len(drafted) < num_tokens:
            logits = self._passes.forward([sequence[-1]], Phase.DRAFT)
            num_passes += 1
            token = sampler.draw(sequence, logits[0])
            drafted.append(token)
            sequence.append(token.token)
            if len(drafted) == boundary < num_tokens:
                boundary += self._submit_batch(len(drafted))
            if token.token in end_ids:
                break
        self._passes.state.rollback(num_passes)
        self._analyzer.clear()
        elapsed = time.perf_counter() - started
        self._executor.meter.draft_s += elapsed
        self._executor.meter.num_drafted += len(drafted)
        self.planner.observe_draft(len(drafted), elapsed - self._planning_s)
        return drafted

    def settle(self) -> None:
        """Judges what this round's batches were good for. Called once it is verified."""
        record_s = self.planner.record_s
        traffic = self._executor.meter.decode
        num_prefetched = traffic.num_prefetched - self._before[0]
        if record_s is None or num_prefetched <= 0:
            return
        num_used = traffic.num_prefetch_used - self._before[1]
        self.payoff.observe(
            PrefetchRound(
                num_prefetched=num_prefetched,
                num_used=num_used,
                # Whoever misses one record waits for all of its time, links beside it or not.
                saved_s=num_used * record_s * self._num_links,
                spent_s=(num_prefetched - num_used) * record_s + self._planning_s,
            )
        )

    def _begin(self, num_tokens: int) -> int:
        """Begins a window. Returns its first boundary, the draft's end where none comes."""
        traffic = self._executor.meter.decode
        self._before = traffic.num_prefetched, traffic.num_prefetch_used
        self._planning_s = 0.0
        if not self._is_prefetch_enabled or not self.payoff.begin_round():
            return num_tokens
        self._observe_link()
        return self.planner.begin(num_tokens)

    def _submit_batch(self, num_drafted: int) -> int:
        """Plans and submits one boundary's batch. Returns the next chunk's tokens."""
        started = time.perf_counter()
        executor = self._executor
        executor.collect(executor.transfer.poll())
        batch = self.planner.plan(
            self._analyzer.snapshot(), executor.residency, num_drafted=num_drafted
        )
        for fetch in batch.fetches:
            executor.transfer.submit(fetch.expert, fetch.slot, is_demand=False)
            executor.meter.decode.num_prefetched += 1
        self._planning_s += time.perf_counter() - started
        return batch.next_chunk

    def _observe_link(self) -> None:
        """Tells the planner how fast records landed since the last window."""
        traffic = self._executor.meter.decode
        if self._seen is None or self._seen[0] is not traffic:  # Another reply's.
            self._seen = traffic, 0, 0.0
        _, num_bytes, transfer_s = self._seen
        self.planner.observe_transfer(
            traffic.num_bytes - num_bytes, (traffic.transfer_s - transfer_s) / self._num_links
        )
        self._seen = traffic, traffic.num_bytes, traffic.transfer_s
