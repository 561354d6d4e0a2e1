"""Drafting: K tokens with the draft's experts, while the target's experts are fetched.

The draft runs the target's own attention, norms and embeddings on the shared cache as a
scratch extension, which is removed at the end. Its router choices fill the lookahead
buffer; at each boundary the driver makes a batch of fetches of it. Measures what the driver
needs to know: seconds per drafted token.

Source: Specter, State Manager, Incremental Routing Pattern Analyzer, and Layer-Aware
Prefetch Planner.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from ..model.sampling import DraftToken, Sampler
from ..policy.base import next_boundary
from ..types import Phase
from .executor import ExpertExecutor
from .passes import ModelPasses


class DraftWindow:
    """One draft window after another, as the driver sees them.

    Args:
        executor: Its driver plans the batches, it submits them.
        is_prefetch_enabled: Whether to fetch what the draft's routing names.
    """

    def __init__(self, executor: ExpertExecutor, *, is_prefetch_enabled: bool) -> None:
        self._executor = executor
        self._driver = executor.driver
        self._is_prefetch_enabled = is_prefetch_enabled
        self._boundary: int | None = None
        self._started = 0.0
        self._planning_s = 0.0

    def begin(self, num_passes: int) -> None:
        """A window of so many draft passes begins."""
        self._started = time.perf_counter()
        self._planning_s = 0.0
        self._executor.begin_window()
        actions = self._driver.begin_draft(num_passes, self._is_prefetch_enabled)
        self._boundary = next_boundary(0, actions)

    def advance(self, num_passes: int) -> None:
        """So many passes are done; at a boundary, a batch is planned and submitted."""
        if num_passes != self._boundary:
            return
        started = time.perf_counter()
        executor = self._executor
        executor.collect(executor.transfer.poll())
        executor.gather_lookahead()
        actions = self._driver.reach_boundary(num_passes, self._driver.lookahead.snapshot())
        executor.obey(actions)
        self._planning_s += time.perf_counter() - started
        executor.meter.decode.planning_s += time.perf_counter() - started
        self._boundary = next_boundary(num_passes, actions)

    def end(self, num_passes: int, num_drafted: int) -> None:
        """The window has ended, after so many passes, with so many tokens."""
        elapsed = time.perf_counter() - self._started
        self._executor.meter.draft_s += elapsed
        self._executor.meter.num_drafted += num_drafted
        self._executor.keep_drafted()
        self._driver.end_draft(num_passes, elapsed - self._planning_s)


class DraftStage:
    """Proposes tokens for verification.

    Args:
        passes: Forward passes.
        window: Told of every pass.
    """

    def __init__(self, passes: ModelPasses, window: DraftWindow) -> None:
        self._passes = passes
        self.window = window

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
        drafted: list[DraftToken] = []
        sequence = list(history)
        self._passes.state.mark()
        self.window.begin(num_tokens)
        while len(drafted) < num_tokens:
            logits = self._passes.forward([sequence[-1]], Phase.DRAFT)
            token = sampler.draw(sequence, logits[0])
            drafted.append(token)
            sequence.append(token.token)
            self.window.advance(len(drafted))
            if token.token in end_ids:
                break
        self._passes.state.rollback(len(drafted))
        self.window.end(len(drafted), len(drafted))
        return drafted
