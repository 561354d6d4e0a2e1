"""Batched decoding: several requests through the model in the same passes.

All running requests draft in one pass per draft token and are verified in one pass, so an
expert that several of them need is moved and read once. How many tokens a round drafts is
asked before it, as the number of running requests falls. What belongs to a request stays its
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

from ..errors import CancelledError
from ..events import MemoryPlan
from ..model.batch_state import BatchState
from ..model.sampling import DraftToken
from ..policy.speculation import KChoice, RoundObservation
from ..types import FinishReason, Phase
from .draft import DraftWindow
from .executor import ExpertExecutor
from .passes import ModelPasses
from .requests import BatchEvent, BatchToken, Request
from .room import check_room, spare_entries

COMPACT_ABOVE = 0.25
"""Share of removable entries in the cache above which it is compacted."""

_MAX_PROMPT_ENDS = 3
"""Most columns of a prefill pass whose logits are taken; a pass with more prompt ends is cut."""


class BatchDecoder:
    """Answers one batch.

    Args:
        requests: Fresh requests.
        config: The model's; it must be able to share a padded cache.
        plan: The engine's; gives the memory that the batch may use.
        choose_depth: Gives K, the plan's at most, for a round of so many running requests.
        context_length: Tokens that the plan's KV cache is for.
        passes: Forward passes.
        executor: Computes the experts.
        end_ids: End-of-text ids.
        chunk_tokens: Most tokens of one pass over prompts or candidates, all rows together.
        window: Told of every draft pass of the batch.
        compact_above: As `COMPACT_ABOVE`.
        on_round: Told what each round did.

    Raises:
        BudgetError: The plan has no memory for it. Nothing was allocated.
    """

    def __init__(
        self,
        requests: Sequence[Request],
        config: PreTrainedConfig,
        plan: MemoryPlan,
        *,
        choose_depth: Callable[[int], KChoice],
        context_length: int,
        passes: ModelPasses,
        executor: ExpertExecutor,
        end_ids: Collection[int],
        chunk_tokens: int,
        window: DraftWindow,
        compact_above: float = COMPACT_ABOVE,
        on_round: Callable[[RoundObservation], None] = lambda observation: None,
    ) -> None:
        self._passes = passes
        self._executor = executor
        self._end_ids = end_ids
        self._choose_depth = choose_depth
        self._chunk_tokens = chunk_tokens
        self._window = window
        self._compact_above = compact_above
        self._on_round = on_round
        self._rows = list(requests)
        """The requests by their rows in the cache; ended ones stay until a compaction."""
        num_words = config.get_text_config().vocab_size
        self._num_columns = batch_columns(
            requests, plan, num_words, context_length, compact_above=compact_above
        )
        self.state = BatchState(config, num_rows=len(requests), num_columns=self._num_columns)

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
            while num_running := sum(request.reason is None for request in self._rows):
                k = self._choose(num_running)
                self._compact(1 + max(self._draft_lengths(k)))
                yield from self._emit(self._round(k))
                for request in self._rows:
                    request.sampler.mark()  # What was told is not drawn once more.
        except CancelledError:
            for request in self._rows:
                if request.reason is None:
                    request.reason = FinishReason.CANCELLED
                    yield request.result()
        finally:
            self._executor.driver.end_reply()

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

    def _compact(self, num_new_columns: int) -> None:
        """Drops what is removable where it is much, or where the coming round needs its room."""
        running = [row for row, request in enumerate(self._rows) if request.reason is None]
        share = self.state.removable_share(running)
        is_full = self.state.num_columns + num_new_columns > self._num_columns
        if share > self._compact_above or is_full:
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
        driver, spans = self._executor.driver, self._prompt_spans()
        for number, (start, stop, lasts) in enumerate(spans):
            self._executor.obey(driver.begin_prefill(len(spans) - number))
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
        self._executor.obey(driver.end_prefill())

    def _prompt_spans(self) -> list[tuple[int, int, list[int]]]:
        """Returns each prefill pass's columns, and those in it that end some prompt."""
        lengths = [len(request.prompt) for request in self._rows]
        spans, start = [], 0
        while start < max(lengths):
            stop = min(start + self._pass_columns, max(lengths))
            ends = sorted({length for length in lengths if start < length <= stop})
            if len(ends) > _MAX_PROMPT_ENDS:
                stop = ends[_MAX_PROMPT_ENDS - 1]
            spans.append((start, stop, [end - 1 - start for end in ends[:_MAX_PROMPT_ENDS]]))
            start = stop
        return spans

    # -- rounds ----------------------------------------------------------------------------

    def _choose(self, num_running: int) -> int:
        """Returns K of the coming round, and notes why it is that."""
        choice, meter = self._choose_depth(num_running), self._executor.meter
        meter.num_draft_tokens, meter.governor_reason = choice.num_draft_tokens, choice.reason
        return choice.num_draft_tokens

    def _round(self, k: int) -> list[list[int]]:
        """One verification of all running rows, drafts before it. Returns their new tokens."""
        meter = self._executor.meter
        for request in self._rows:
            request.sampler.mark()
        before = meter.round_figures()
        drafted = self._draft(k)
        started = time.perf_counter()
        candidates = [
            [request.history[-1], *(d.token for d in drafts)] if request.reason is None else []
            for request, drafts in zip(self._rows, drafted, strict=True)
        ]
        phase = Phase.VERIFY if any(drafted) else Phase.DECODE
        logits = self._verify(candidates, phase)
        sampling_since = time.perf_counter()
        new_tokens = self._judge(drafted, logits)
        meter.sample_s += time.perf_counter() - sampling_since
        self.state.keep(logits.shape[1], list(map(len, new_tokens)))
        meter.verify_s += time.perf_counter() - started
        self._executor.end_pass(sum(map(len, new_tokens)))
        self._on_round(self._observed(before, drafted, new_tokens))
        return new_tokens

    def _judge(
        self, drafted: Sequence[Sequence[DraftToken]], logits: torch.Tensor
    ) -> list[list[int]]:
        """Returns each running row's accepted draft tokens and the one that follows them.

        Args:
            drafted: Draft tokens of each row.
            logits: The target's, `[B, T, V]`.
        """
        meter, new_tokens = self._executor.meter, []
        for row, (request, drafts) in enumerate(zip(self._rows, drafted, strict=True)):
            if request.reason is not None:
                new_tokens.append([])
                continue
            own = logits[row, : len(drafts) + 1]
            num_accepted, following = request.sampler.accept(request.history, drafts, own)
            new_tokens.append([*(d.token for d in drafts[:num_accepted]), following])
            if drafts:
                meter.num_rounds += 1
                meter.num_accepted += num_accepted
        return new_tokens

    def _observed(
        self,
        before: tuple[float, float, float, int],
        drafted: Sequence[Sequence[DraftToken]],
        new_tokens: Sequence[Sequence[int]],
    ) -> RoundObservation:
        """Says what a round did, after `before` was read."""
        draft_s, verify_s, stall_s, num_records = before
        now = self._executor.meter.round_figures()
        rows = zip(drafted, new_tokens, strict=True)
        running = [(len(drafts), len(new) - 1) for drafts, new in rows if new]
        return RoundObservation(
            num_draft=max(num_drafted for num_drafted, _ in running),
            num_accepted=sum(num_accepted for _, num_accepted in running),
            draft_s=now[0] - draft_s,
            verify_s=now[1] - verify_s,
            stall_s=now[2] - stall_s,
            num_records=now[3] - num_records,
            num_requests=len(running),
            num_judged=sum(min(accepted + 1, drafted) for drafted, accepted in running),
        )

    def _verify(self, candidates: Sequence[Sequence[int]], phase: Phase) -> torch.Tensor:
        """Runs the target. Returns `[B, T, V]`, T the most candidates of a row."""
        width, step = max(map(len, candidates)), self._pass_columns
        parts = []
        for start in range(0, width, step):
            piece = [tokens[start : start + step] for tokens in candidates]
            columns = range(min(step, width - start))
            parts.append(self._passes.forward_batch(self.state, piece, phase, logits_at=columns))
        return parts[0] if len(parts) == 1 else torch.cat(parts, dim=1)

    def _draft(self, k: int) -> list[list[DraftToken]]:
        """Drafts for all running rows together, each to its own end. The cache is as before."""
        wanted = self._draft_lengths(k)
        drafted: list[list[DraftToken]] = [[] for _ in self._rows]
        most = max(wanted)
        if not most:
            return drafted
        num_passes = 0
        sequences = [list(request.history) for request in self._rows]
        self._window.begin(most)
        while rows := self._unfinished(drafted, wanted):
            inputs = [[s[-1]] if row in rows else [] for row, s in enumerate(sequences)]
            logits = self._passes.forward_batch(self.state, inputs, Phase.DRAFT, logits_at=[0])
            num_passes += 1
            for row in rows:
                token = self._rows[row].sampler.draw(sequences[row], logits[row, 0])
                drafted[row].append(token)
                sequences[row].append(token.token)
            self._window.advance(num_passes)
        self.state.keep(num_passes, [0] * len(self._rows))
        self._window.end(num_passes, sum(map(len, drafted)))
        return drafted

    def _draft_lengths(self, k: int) -> list[int]:
        """Returns the draft tokens that each row may have in a round with this K."""
        return [
            min(k, request.num_left - 1) if request.reason is None else 0 for request in self._rows
        ]

    def _unfinished(
        self, drafted: Sequence[Sequence[DraftToken]], wanted: Sequence[int]
    ) -> list[int]:
        """Returns the rows whose draft goes on: not long enough, and no end of text in it."""
        return [
            row
            for row, drafts in enumerate(drafted)
            if len(drafts) < wanted[row] and not (drafts and drafts[-1].token in self._end_ids)
        ]


def batch_columns(
    requests: Sequence[Request],
    plan: MemoryPlan,
    num_words: int,
    context_length: int,
    *,
    compact_above: float,
) -> int:
    """Returns the columns of a batch's cache.

    Enough for the longest request, the holes beside it and one round; where the plan has
    less, what it has: the cache is then compacted more often.

    Raises:
        BudgetError: Not even the requests without holes fit.
    """
    num_rows, k = len(requests), plan.num_draft_tokens
    longest = max(request.max_tokens for request in requests)
    has_sampling = any(not request.sampling.is_greedy for request in requests)
    # Where tokens are sampled, the draft's distributions are kept beside the target's logits.
    num_logits = num_rows * max(_MAX_PROMPT_ENDS, (k + 1) * (2 if has_sampling else 1))
    # A round's candidates never go beyond their own request's end, but beyond another's.
    least = longest + (k if num_rows > 1 else 0)
    check_room(
        plan,
        num_entries=num_rows * least,
        num_logits=num_logits,
        num_words=num_words,
        context_length=context_length,
    )
    spare = spare_entries(
        plan, num_logits=num_logits, num_words=num_words, context_length=context_length
    )
    return min(int(longest / (1 - compact_above)) + 1 + k + 1, spare // num_rows)
