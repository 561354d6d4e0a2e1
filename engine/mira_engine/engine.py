"""The engine: a loaded model that answers. Stream, cancel; several at once.

`Engine.reply` is the one loop to read top to bottom. How the model came to be loaded is in
`mira_engine.loaded`. Everything runs in the thread that calls it, except the disk readers;
`cancel` may be called from any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Generator, Iterator, Sequence
from dataclasses import replace
from functools import cached_property
from pathlib import Path

import torch

from .config import SamplingConfig
from .conversing import ChatStream, Replier, ReplyEvent
from .errors import CancelledError, ContextLengthError
from .events import ChatMessage, ReplyStats, ResidencySample
from .fallbacks import round_fallbacks
from .loaded import LoadedModel
from .model.sampling import Sampler
from .policy.speculation import DepthPolicy, FixedDepth, RoundObservation
from .runtime.beam import BeamResult
from .runtime.expert_map import RoutingHeat, region_rows
from .runtime.reply_so_far import ReplySoFar
from .runtime.requests import BatchEvent
from .runtime.shortage import as_shortage
from .runtime.telemetry import LiveSamples
from .several import SeveralAtOnce
from .trace import TracedRound
from .types import DraftExperts, FinishReason, Phase


class Engine(LoadedModel):
    """One loaded model that answers.

    Build with `Engine.load`. Not thread-safe but for `cancel`.
    """

    on_round: Callable[[RoundObservation], None] | None = None
    """Told what each round did, in the thread that asked for the reply."""

    _num_reading = 0
    """Prompt tokens of the pass under way, 0 in any other."""

    _num_verified = 0
    """Cached tokens whose state the target made; a draft in progress adds others."""

    # -- replies ---------------------------------------------------------------------------

    @cached_property
    def _chats(self) -> ChatStream:
        return ChatStream(self._tokenizer)

    def render(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Returns a chat's tokens, ready for the assistant's turn."""
        return self._chats.render(messages)

    def cancel(self) -> None:
        """Stops the running reply at the next layer or draft step. Any thread."""
        self._cancelled.set()

    def clear_cancel(self) -> None:
        """Allows the next reply. Called before a reply is asked for, not inside it."""
        self._cancelled.clear()

    def stream(
        self,
        request_id: str,
        messages: Sequence[ChatMessage],
        sampling: SamplingConfig,
        *,
        is_residency_wanted: bool = False,
        replier: Replier | None = None,
    ) -> Iterator[ReplyEvent]:
        """Answers a chat.

        Args:
            request_id: Given in every event.
            messages: The chat.
            sampling: How tokens are chosen.
            is_residency_wanted: Whether pictures of the expert cache are wanted, too.
            replier: Makes the tokens; `None` for this engine. The iterator holds on to nobody
                else, so another engine may take this one's place under it.

        Returns:
            An iterator: `ContextTrimmed` first where the oldest turns were left out, prompt
            progress, text deltas, figures as often as `LiveSamples` says, and at the end
            `GenerationDone`, also when it was cancelled.

        Raises:
            ContextLengthError: System prompt and last question alone do not fit the context.
            GenerationError: The chat template refuses the chat.
            NonFiniteError: nan in the logits.
            StoreError: A record cannot be read.
            MemoryShortageError: Memory ran out; the engine can be used on.
        """
        answering = replier or self
        if is_residency_wanted:
            self._count_heat()
        live = LiveSamples(
            request_id,
            stats=answering.stats,
            residency=answering.residency_sample if is_residency_wanted else None,
        )
        return self._chats.stream(request_id, messages, sampling, live, answering)

    def reply(
        self,
        prompt: Sequence[int],
        sampling: SamplingConfig,
        so_far: ReplySoFar | None = None,
    ) -> Generator[int | tuple[int, int], None, FinishReason]:
        """Generates tokens after `prompt`.

        Args:
            prompt: Tokens.
            sampling: How new ones are chosen.
            so_far: A reply to this prompt to go on with, `None` to begin one. What was told
                of it is read and not told again.

        Yields:
            `(done, total)` while the prompt is read, then each new token, the end of
            text included.

        Returns:
            Why it ended.

        Raises:
            MemoryShortageError: Memory ran out. The conversation's state and what passes keep
                are given back; `so_far` can be gone on with, here or in another engine.
        """
        self._num_reading = 0
        try:
            self.take_compiled()
            return (yield from self._new_tokens(so_far or ReplySoFar(prompt, sampling)))
        except Exception as error:
            shortage = as_shortage(error, "in a reply", self.plan)
            if shortage is None:
                raise
        shortage.num_prompt_tokens = self._num_reading
        self.free_temporaries()
        raise shortage

    def limit_chunks(self, num_tokens: int) -> None:
        """Reads prompts in passes of at most so many tokens from now on. Between replies."""
        self.config = replace(self.config, prefill_chunk_tokens=num_tokens)

    def _new_tokens(
        self, so_far: ReplySoFar
    ) -> Generator[int | tuple[int, int], None, FinishReason]:
        """Makes a reply's tokens, or the rest of them; the one loop."""
        sampling, sampler, history = so_far.sampling, so_far.sampler, so_far.history
        num_prompt, is_begun = so_far.num_prompt_tokens, so_far.num_new_tokens > 0
        meter = so_far.meter
        self.executor.go_on_with(meter)
        room = self.context_length - num_prompt
        if room < 1:
            raise ContextLengthError(
                f"The chat has {num_prompt} tokens, the context holds {self.context_length}.",
                hint="Shorten the prompt, start a new chat, or give a larger --context "
                f"(this model reads up to {self.longest_context} tokens).",
            )
        limit = min(room, sampling.max_new_tokens or room)
        self._allow_host([sampling])
        sampler.rewind()
        depth: DepthPolicy | None = self._kept_depth([sampling]) or self.governor
        assert depth is not None
        meter.num_prompt_tokens = num_prompt
        num_cached = self.state.reuse_prefix(history)
        recorder = self.executor.recorder
        if recorder is not None:
            recorder.start_reply(len(history) - is_begun)
        self._num_verified = self.state.num_cached
        try:
            if is_begun:
                yield from self._read(history[:-1])
            else:
                meter.num_cached_tokens = num_cached
                logits = yield from self._read(history)
                assert logits is not None
                history.append(sampler.draw(history, logits[-1]).token)
                meter.on_token()
                yield history[-1]
            while history[-1] not in self._end_ids:
                made = so_far.num_new_tokens
                if made >= limit:
                    return FinishReason.CONTEXT if limit == room else FinishReason.LENGTH
                num_draft = min(self._num_draft_tokens(depth), limit - made - 1)
                for token in self._round(history, num_draft, sampler):
                    history.append(token)
                    meter.on_token()
                    yield token
                    if token in self._end_ids:
                        break
            return FinishReason.STOP
        except CancelledError:
            self.state.recover(self._num_verified)
            return FinishReason.CANCELLED
        except Exception:
            self.state.reset()  # What it holds may be the cause, nan, or may be half a pass.
            raise
        finally:
            self.executor.driver.end_reply()
            if recorder is not None and self.config.trace_path is not None:
                recorder.write(Path(self.config.trace_path))

    def _kept_depth(self, samplings: Sequence[SamplingConfig]) -> FixedDepth | None:
        """Returns the K that replies with these keep; `None` where a governor may choose it."""
        if any(map(self._is_seed_at_stake, samplings)):
            reason = "a seed was given, and the draft depends on the cache"
            if self.config.num_draft_tokens:
                self._tell_once(
                    "seed-without-draft",
                    f"-k {self.config.num_draft_tokens} is not used: {reason}; "
                    "--draft-experts all drafts with a seed, too.",
                )
            return FixedDepth(0, reason)
        if self.governor is None or any(not s.is_greedy and s.seed is not None for s in samplings):
            return self._fixed_depth  # A seed gives the same text only if K does not change.
        return None

    def _is_seed_at_stake(self, sampling: SamplingConfig) -> bool:
        """Whether drafting would make the text depend on more than the seed.

        A draft with the cached experts proposes by what is in the slots, and random numbers
        are drawn for what it proposes.
        """
        is_repeatable = not sampling.is_greedy and sampling.seed is not None
        return is_repeatable and self.plan.draft_experts is DraftExperts.CACHED

    def _allow_host(self, samplings: Sequence[SamplingConfig]) -> None:
        """Leaves misses to the processor, but for a seed: its text must not depend on time."""
        if self.executor.host is not None:
            is_repeatable = any(not s.is_greedy and s.seed is not None for s in samplings)
            self.executor.obey(self.executor.driver.allow_host(not is_repeatable))

    def _read(self, tokens: Sequence[int]) -> Generator[tuple[int, int], None, torch.Tensor | None]:
        """Prefills what is not cached.

        Yields:
            `(done, total)`.

        Returns:
            Logits `[1, V]` of the last token, `None` where all were cached.
        """
        total, chunk = len(tokens), self.config.prefill_chunk_tokens
        logits = None
        while self.state.num_cached < total:
            start = self.state.num_cached
            self._num_reading = min(chunk, total - start)
            num_passes = -(-(total - start) // chunk)
            self.executor.obey(self.executor.driver.begin_prefill(num_passes))
            self.state.mark()
            logits = self.passes.forward(tokens[start : start + chunk], Phase.PREFILL)
            self.state.rollback(0)
            self._num_verified = self.state.num_cached
            yield (self.state.num_cached, total)
        self._num_reading = 0
        if logits is not None:
            self.executor.obey(self.executor.driver.end_prefill())
        return logits

    def _num_draft_tokens(self, depth: DepthPolicy) -> int:
        """K in force: what `depth` says, or 0 where this model's cache cannot be rolled back."""
        choice = depth.choose()
        k, reason = choice.num_draft_tokens, choice.reason
        if self.plan.num_draft_tokens and not self.state.can_roll_back:
            self._tell_once(
                "speculation-off",
                f"Speculation is off: the cache of {self.model.config.model_type} models "
                "keeps a running state that cannot be rolled back.",
            )
            k, reason = 0, "K 0: this model's cache cannot be rolled back."
        meter = self.executor.meter
        meter.num_draft_tokens, meter.governor_reason = k, reason
        return k

    def _round(self, history: list[int], num_draft: int, sampler: Sampler) -> list[int]:
        """One target pass, with a draft before it where `num_draft` is above 0."""
        meter, recorder = self.executor.meter, self.executor.recorder
        sampler.mark()
        before = meter.round_figures()
        drafted = []
        if num_draft > 0:
            drafted = self.draft_stage.run(history, num_draft, sampler, self._end_ids)
        started = time.perf_counter()
        candidates = [history[-1], *(d.token for d in drafted)]
        phase = Phase.VERIFY if drafted else Phase.DECODE
        logits = self.passes.forward(candidates, phase, num_logits=len(candidates))
        sampling_since = time.perf_counter()
        num_accepted, following = sampler.accept(history, drafted, logits)
        meter.sample_s += time.perf_counter() - sampling_since
        self.state.rollback(len(drafted) - num_accepted)
        self._num_verified = self.state.num_cached
        meter.verify_s += time.perf_counter() - started
        if drafted:
            meter.num_rounds += 1
            meter.num_accepted += num_accepted
        self.executor.end_pass(num_accepted + 1)
        if recorder is not None:
            recorder.end_round(
                TracedRound(
                    num_drafted=len(drafted),
                    num_accepted=num_accepted,
                    draft_s=meter.draft_s - before[0],
                    verify_s=meter.verify_s - before[1],
                    stall_s=meter.decode.stall_s - before[2],
                )
            )
        self._observe_round(len(drafted), num_accepted, before)
        self._tell_fallbacks()
        return [*(d.token for d in drafted[:num_accepted]), following]

    def _observe_round(
        self, num_draft: int, num_accepted: int, before: tuple[float, float, float, int]
    ) -> None:
        is_recorded = self.captured is not None and self.captured.take_new()
        if self.governor is None and self.on_round is None:
            return
        draft_s, verify_s, stall_s, num_records = before
        now = self.executor.meter.round_figures()
        observation = RoundObservation(
            num_draft=num_draft,
            num_accepted=num_accepted,
            draft_s=now[0] - draft_s,
            verify_s=now[1] - verify_s,
            stall_s=now[2] - stall_s,
            num_records=now[3] - num_records,
        )
        if self.governor is not None and is_recorded:
            # Recording is in this round's times alone; before the first, steps took longer.
            if not self._has_recorded:
                self.governor.forget_costs()
            self._has_recorded = True
        elif self.governor is not None:
            self.governor.observe(observation)
        if self.on_round is not None:
            self.on_round(observation)

    # -- several at once -------------------------------------------------------------------

    @cached_property
    def _several(self) -> SeveralAtOnce:
        return SeveralAtOnce(
            self,
            reply=self.reply,
            begin=self._begin_several,
            tell_once=self._tell_once,
            on_round=self._end_shared_round,
        )

    def _begin_several(self, samplings: Sequence[SamplingConfig]) -> FixedDepth | None:
        """Says who computes misses, and who chooses K, of all requests of a batch."""
        self._allow_host(samplings)
        return self._kept_depth(samplings)

    def _end_shared_round(self, observation: RoundObservation) -> None:
        if self.on_round is not None:
            self.on_round(observation)
        self._tell_fallbacks()

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig | Sequence[SamplingConfig],
    ) -> Iterator[BatchEvent]:
        """Answers up to 32 prompts together; see `SeveralAtOnce.generate`."""
        return self._several.generate(prompts, sampling)

    def beam_search(
        self, prompt: Sequence[int], *, num_beams: int, max_new_tokens: int
    ) -> BeamResult:
        """Searches with transformers' own beams; see `SeveralAtOnce.beam_search`."""
        return self._several.beam_search(prompt, num_beams=num_beams, max_new_tokens=max_new_tokens)

    # -- figures ---------------------------------------------------------------------------

    def _tell_fallbacks(self) -> None:
        spill = self._spill.look() if self._spill is not None else None
        for notice in round_fallbacks(self.config, self.executor, spill):
            self._tell_once(notice.code, notice.text)

    def stats(self) -> ReplyStats:
        """Returns the figures of the running or the last reply."""
        return self.executor.meter.snapshot(
            expert_peak_bytes=self.executor.expert_bytes,
            peak_memory_bytes=self._peak_bytes(),
            planned_memory_bytes=self.plan.total_bytes,
        )

    def residency_sample(self, request_id: str) -> ResidencySample:
        """Returns where every expert is, and how busy: counted since the first call."""
        setup, residency = self.cache_setup, self.executor.driver.residency
        return ResidencySample(
            request_id=request_id,
            regions=region_rows(residency, setup.num_layers, setup.num_experts),
            heat=self._count_heat().rows(),
        )

    def _count_heat(self) -> RoutingHeat:
        setup, executor = self.cache_setup, self.executor
        if executor.heat is None:
            executor.heat = RoutingHeat(setup.num_layers, setup.num_experts, setup.top_k)
        return executor.heat
