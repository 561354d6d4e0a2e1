"""Drafting: K tokens with the INT4 experts, while the target's experts are fetched.

The draft runs the target's own attention, norms and embeddings on the shared cache as a
scratch extension, which is removed at the end. Its router choices fill the lookahead
buffer; at the boundary one batch of fetches is planned from it and submitted.

Source: Specter, State Manager and Layer-Aware Prefetch Planner.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence

from ..model.sampling import DraftToken, Sampler
from ..policy.prefetch import first_boundary
from ..types import Phase
from .executor import ExpertExecutor
from .passes import ModelPasses


class DraftStage:
    """Proposes tokens for verification.

    Args:
        passes: Forward passes.
        executor: Its driver plans the batches.
        is_prefetch_enabled: Whether to fetch what the draft's routing names.
    """

    def __init__(
        self,
        passes: ModelPasses,
        executor: ExpertExecutor,
        *,
        is_prefetch_enabled: bool,
    ) -> None:
        self._passes = passes
        self._executor = executor
        self._is_prefetch_enabled = is_prefetch_enabled

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
        boundary = first_boundary(num_tokens)
        self._executor.driver.begin_draft()
        num_passes = 0
        while len(drafted) < num_tokens:
            logits = self._passes.forward([sequence[-1]], Phase.DRAFT)
            num_passes += 1
            token = sampler.draw(sequence, logits[0])
            drafted.append(token)
            sequence.append(token.token)
            if boundary <= len(drafted) < num_tokens and self._is_prefetch_enabled:
                self._submit_batch()
            if token.token in end_ids:
                break
        self._passes.state.rollback(num_passes)
        self._executor.driver.end_draft()
        self._executor.meter.draft_s += time.perf_counter() - started
        self._executor.meter.num_drafted += len(drafted)
        return drafted

    def _submit_batch(self) -> None:
        executor = self._executor
        executor.collect(executor.transfer.poll())
        driver = executor.driver
        executor.obey(driver.reach_boundary(driver.lookahead.snapshot()))
