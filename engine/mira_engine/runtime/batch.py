"""Batched decoding: several requests through the model in the same passes.

All running requests draft in one pass per draft token and are verified in one pass, so an
expert that several of them need is moved and read once. What belongs to a request stays its
own: tokens, positions, entries of the cache, random numbers, acceptance, its end. Each
request's answer is the one that it would get alone; where bfloat16 rounds by the shape of a
pass, a near-tie can fall otherwise.

Compiled steps take one row, so all passes run module by module. Runs in the engine thread.

Source: Specter, batched execution.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence

import torch
from transformers import PreTrainedConfig

from ..config import format_bytes
from ..errors import BudgetError, CancelledError
from ..events import MemoryPlan
from ..model.batch_state import BatchState
from ..model.sampling import DraftToken
from ..policy.base import Fetch
from ..policy.prefetch import first_boundary, plan_batch
from ..types import FinishReason, Phase
from .executor import ExpertExecutor
from .passes import ModelPasses
from .requests import BatchEvent, BatchToken, Request

COMPACT_ABOVE = 0.25
"""Share of removable entries in the cache above which it is compacted."""

_PLANNED_LOGITS = 3 * 34
"""Logits in float32, over the whole vocabulary, that a plan's workspace has room for."""


class BatchDecoder:
    """Answers one batch.

    Args:
        requests: Fresh requests.
        config: The model's; it must be able to share a padded cache.
        passes: Forward passes.
        executor: Computes the experts; its buffer and residency table are used.
        end_ids: End-of-text ids.
        num_draft_tokens: K.
        chunk_tokens: Most tokens of one pass over prompts or candidates, all rows together.
        num_reserved_slots: Slots a prefetch batch leaves for misses, `None` to prefetch nothing.
        compact_above: As `COMPACT_ABOVE`.
        on_round: Called after each round.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        config: PreTrainedConfig,
        *,
        passes: ModelPasses,
        executor: ExpertExecutor,
        end_ids: Collection[int],
        num_draft_tokens: int,
        chunk_tokens: int,
        num_reserved_slots: int | None,
        compact_above: float = COMPACT_ABOVE,
        on_round: Callable[[], None] = lambda: None,
    ) -> None:
        self._passes = passes
        self._executor = executor
        self._end_ids = end_ids
        self._num_draft_tokens = num_draft_tokens
        self._chunk_tokens = chunk_tokens
        self._num_reserved_slots = num_reserved_slots
        self._compact_above = compact_above
        self._on_round = on_round
        self._rows = list(requests)
        """The requests by their rows in the cache; ended ones stay until a compaction."""
        self._num_columns = num_columns(requests, num_draft_tokens, compact_above)
        self._num_words = config.get_text_config().vocab_size
        self.state = BatchState(config, num_rows=len(requests), num_columns=self._num_columns)

    def check_room(self, plan: MemoryPlan, context_length: int) -> None:
        """Refuses what the plan has no memory for. Nothing was allocated before.

        Raises:
            BudgetError: With the missing bytes.
        """
        num_rows, num_candidates = len(self._rows), self._num_draft_tokens + 1
        has_sampling = any(not request.sampling.is_greedy for request in self._rows)
        num_rounds_logits = num_candidates * (2 if has_sampling else 1)  # The draft's are kept.
        num_prompt_logits = max(len(lasts) for _, _, lasts in self._prompt_spans())
        check_room(
            plan,
            num_entries=num_rows * self._num_columns,
            num_logits=num_rows * max(num_rounds_logits, num_prompt_logits),
            num_words=self._num_words,
            context_length=context_length,
        )

    def run(self) -> Iterator[BatchEvent]:
        """Yields tokens as they come, and each request's result when it has ended.

        Raises:
            NonFiniteError: nan in some request's logits; it ends all of them.
            StoreError: A record cannot be read.
        """
        for request in self._rows:
            request.start_clock()
        self._executor.meter.num_prompt_tokens = sum(len(r.prompt) for r in self._rows)
        try:
            yield from self._read_prompts()
            while any(request.reason is None for request in self._rows):
                self._compact()
                yield from self._emit(self._round())
                self._on_round()
        except CancelledError:
            for request in self._rows:
                if request.reason is None:
                    request.reason = FinishReason.CANCELLED
                    yield request.result()
        finally:
            self._executor.abandon_failed()

    def _emit(self, new_tokens: Sequence[Sequence[int]]) -> Iterator[BatchEvent]:
        """Gives each row its new tokens up to its end."""
        for request, tokens in zip(self._rows, new_tokens, strict=True):
            for token in tokens:
                request.take(token, self._end_ids)
                self._executor.meter.on_token()
                yield BatchToken(request.number, token)
                if request.reason is not None:
                    yield request.result()
                    break

    def _compact(self) -> None:
        running = [row for row, request in enumerate(self._rows) if request.reason is None]
        if self.state.removable_share(running) > self._compact_above:
            self.state.compact(running)
            self._rows = [self._rows[row] for row in running]

    @property
    def _pass_columns(self) -> int:
        """Most columns of a pass, so that it needs no more room than a prompt's chunk."""
        return max(1, self._chunk_tokens // len(self._rows))

    # -- prompts ---------------------------------------------------------------------------

    def _read_prompts(self) -> Iterator[BatchEvent]:
        """Prefills all prompts side by side; each one's end gives its first token."""
        prompts = [request.prompt for request in self._rows]
        for start, stop, lasts in self._prompt_spans():
            logits = self._passes.forward_batch(
                self.state,
                [prompt[start:stop] for prompt in prompts],
                Phase.PREFILL,
                logits_at=lasts or [stop - start - 1],
            )
            first: list[list[int]] = [[] for _ in prompts]
            for row, request in enumerate(self._rows):
                last = len(request.prompt) - 1 - start
                if last in lasts:
                    scores = logits[row, lasts.index(last)]
                    first[row].append(request.sampler.draw(request.prompt, scores).token)
            yield from self._emit(first)

    def _prompt_spans(self) -> list[tuple[int, int, list[int]]]:
        """Returns each prefill pass's columns, and those in it that end some prompt."""
        lengths = [len(request.prompt) for request in self._rows]
        spans = []
        for start in range(0, max(lengths), self._pass_columns):
            stop = min(start + self._pass_columns, max(lengths))
            lasts = sorted({length - 1 - start for length in lengths if start < length <= stop})
            spans.append((start, stop, lasts))
        return spans

    # -- rounds ----------------------------------------------------------------------------

    def _round(self) -> list[list[int]]:
        """One verification of all running rows, drafts before it. Returns their new tokens."""
        meter = self._executor.meter
        drafted = self._draft()
        started = time.perf_counter()
        candidates = [
            [request.history[-1], *(d.token for d in drafts)] if request.reason is None else []
            for request, drafts in zip(self._rows, drafted, strict=True)
        ]
        phase = Phase.VERIFY if any(drafted) else Phase.DECODE
        logits = self._verify(candidates, phase)
        kept, new_tokens = [], []
        for row, (request, drafts) in enumerate(zip(self._rows, drafted, strict=True)):
            if request.reason is not None:
                kept.append(0)
                new_tokens.append([])
                continue
            own = logits[row, : len(drafts) + 1]
            num_accepted, following = request.sampler.accept(request.history, drafts, own)
            kept.append(1 + num_accepted)
            new_tokens.append([*(d.token for d in drafts[:num_accepted]), following])
            if drafts:
                meter.num_rounds += 1
                meter.num_accepted += num_accepted
        self.state.keep(logits.shape[1], kept)
        self._executor.residency.end_window()
        meter.verify_s += time.perf_counter() - started
        return new_tokens

    def _verify(self, candidates: Sequence[Sequence[int]], phase: Phase) -> torch.Tensor:
        """Runs the target. Returns `[B, T, V]`, T the most candidates of a row."""
        width, step = max(map(len, candidates)), self._pass_columns
        parts = []
        for start in range(0, width, step):
            piece = [tokens[start : start + step] for tokens in candidates]
            columns = range(min(step, width - start))
            parts.append(self._passes.forward_batch(self.state, piece, phase, logits_at=columns))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _draft(self) -> list[list[DraftToken]]:
        """Drafts for all running rows together, each to its own end. The cache is as before."""
        wanted = [
            min(self._num_draft_tokens, request.num_left - 1) if request.reason is None else 0
            for request in self._rows
        ]
        drafted: list[list[DraftToken]] = [[] for _ in self._rows]
        most = max(wanted)
        if not most:
            return drafted
        started, num_passes = time.perf_counter(), 0
        lookahead, meter = self._executor.lookahead, self._executor.meter
        sequences = [list(request.history) for request in self._rows]
        lookahead.clear()
        while rows := self._unfinished(drafted, wanted):
            inputs = [[s[-1]] if row in rows else [] for row, s in enumerate(sequences)]
            logits = self._passes.forward_batch(self.state, inputs, Phase.DRAFT, logits_at=[0])
            num_passes += 1
            for row in rows:
                token = self._rows[row].sampler.draw(sequences[row], logits[row, 0])
                drafted[row].append(token)
                sequences[row].append(token.token)
            if first_boundary(most) <= num_passes < most:
                self._prefetch()
        self.state.keep(num_passes, [0] * len(self._rows))
        lookahead.clear()
        meter.draft_s += time.perf_counter() - started
        meter.num_drafted += sum(map(len, drafted))
        return drafted

    def _unfinished(
        self, drafted: Sequence[Sequence[DraftToken]], wanted: Sequence[int]
    ) -> list[int]:
        """Returns the rows whose draft goes on: not long enough, and no end of text in it."""
        return [
            row
            for row, drafts in enumerate(drafted)
            if len(drafts) < wanted[row] and not (drafts and drafts[-1].token in self._end_ids)
        ]

    def _prefetch(self) -> None:
        """Submits what the routing of all rows' drafts names so far."""
        executor = self._executor
        if self._num_reserved_slots is None:
            return
        executor.collect(executor.transfer.poll())
        actions = plan_batch(
            executor.lookahead, executor.residency, num_reserved_slots=self._num_reserved_slots
        )
        for action in actions:
            if isinstance(action, Fetch):
                executor.transfer.submit(action.expert, action.slot, is_demand=False)
                executor.meter.decode.num_prefetched += 1


def num_columns(requests: Sequence[Request], num_draft_tokens: int, compact_above: float) -> int:
    """Returns columns for the longest request, the holes beside it, and one round."""
    longest = max(request.max_tokens for request in requests)
    return int(longest / (1 - compact_above)) + 1 + num_draft_tokens + 1


def check_room(
    plan: MemoryPlan, *, num_entries: int, num_logits: int, num_words: int, context_length: int
) -> None:
    """Refuses what the plan has no memory for: a batch may use what the plan has for one chat.

    Args:
        plan: The engine's.
        num_entries: Entries of the cache, rows times columns.
        num_logits: Logits in float32 that are held at a time.
        num_words: Words of the vocabulary.
        context_length: Tokens that the plan's KV cache is for.

    Raises:
        BudgetError: With the missing bytes.
    """
    cache_bytes = -(-plan.kv_bytes * num_entries // context_length)
    logits_bytes = 4 * num_words * max(0, num_logits - _PLANNED_LOGITS)
    missing = cache_bytes + logits_bytes - plan.kv_bytes
    if missing > 0:
        raise BudgetError(
            f"Together these need {format_bytes(cache_bytes + logits_bytes)} for their KV cache "
            f"and logits, the plan has {format_bytes(plan.kv_bytes)}: "
            f"{format_bytes(missing)} short.",
            hint="Give fewer prompts or beams, fewer new tokens, or a larger --context, whose "
            "memory they share.",
        )
