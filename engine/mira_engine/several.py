"""Several answers at once: batches of requests, and the beams of a search.

Says whether requests share passes or are answered in turn, and gives `runtime.batch` and
`runtime.beam` what they need of a loaded model. Runs in the engine thread, between replies.
"""

from __future__ import annotations

from collections.abc import Callable, Generator, Iterator, Sequence
from functools import partial

from .config import SamplingConfig
from .errors import MemoryShortageError
from .loaded import LoadedModel
from .model.batch_state import can_pad
from .policy.batch_speculation import BatchGovernor
from .policy.speculation import FixedDepth, RoundObservation, SpeculationGovernor
from .runtime.batch import BatchDecoder
from .runtime.beam import BeamResult, beam_search
from .runtime.reply_so_far import ReplySoFar
from .runtime.requests import BatchEvent, Request, in_turn, make_requests
from .runtime.shortage import as_shortage, smaller_chunk
from .runtime.telemetry import ReplyMeter

Reply = Callable[
    [Sequence[int], SamplingConfig, ReplySoFar | None], Iterator[int | tuple[int, int]]
]


class SeveralAtOnce:
    """Batches and beams on a loaded model.

    Args:
        loaded: The model.
        reply: Answers one prompt by itself, where a model cannot share its cache.
        begin: Told the samplings of what begins; gives the K that a batch with them keeps,
            `None` where it chooses its own.
        tell_once: Told code and text of a fallback.
        on_round: Told what each round of a batch did.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        reply: Reply,
        begin: Callable[[Sequence[SamplingConfig]], FixedDepth | None],
        tell_once: Callable[[str, str], None],
        on_round: Callable[[RoundObservation], None],
    ) -> None:
        self._loaded = loaded
        self._reply = reply
        self._begin = begin
        self._tell_once = tell_once
        self._on_round = on_round
        self._governor: BatchGovernor | None = None
        self._beside: SpeculationGovernor | None = None
        """The conversation's governor, whose depths it has."""
        self._was_native = False
        """Whether the governor's seconds are those of native kernels."""

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig | Sequence[SamplingConfig],
    ) -> Iterator[BatchEvent]:
        """Answers up to 32 prompts together, each as `reply` would alone.

        K is chosen round by round, and what was learnt of it kept for later batches, but where
        somebody gave it, or a request has a seed: then it stays. The batch takes the room of
        the conversation's cache: the next reply reads its chat again. `stats` gives the figures
        of all requests together, and K of the last round; those of the last request, where they
        are answered in turn. `cancel` ends them all.

        Args:
            prompts: Token lists.
            sampling: For all, or one for each.

        Returns:
            An iterator over each request's tokens as they come, and its result at its end.

        Raises:
            ConfigError: No prompt, more than 32, or not one sampling for each.
            ContextLengthError: A prompt does not fit the context.
            BudgetError: The plan has no memory for so many tokens.
        """
        loaded = self._loaded
        requests = make_requests(prompts, sampling, loaded.context_length)
        if not can_pad(loaded.model.config, max(request.max_tokens for request in requests)):
            self._tell_once(
                "batch-in-turn",
                f"{loaded.model.config.model_type} models answer one request after another: their "
                "cache, or their positions at this length, cannot be shared by a batch.",
            )
            return in_turn(requests, self._finish)
        loaded.take_compiled()
        kept = self._begin([request.sampling for request in requests])
        governor = self._governor_in_force() if kept is None else None
        decoder = BatchDecoder(
            requests,
            loaded.model.config,
            loaded.plan,
            choose_depth=governor.choose if governor is not None else lambda _: kept.choose(),
            context_length=loaded.context_length,
            passes=loaded.passes,
            executor=loaded.executor,
            end_ids=loaded.end_ids,
            chunk_tokens=loaded.config.prefill_chunk_tokens,
            window=loaded.draft_stage.window,
            on_round=partial(self._end_round, governor),
        )
        loaded.give_room_back()
        loaded.executor.meter = ReplyMeter()
        return self._together(decoder, requests)

    def _end_round(self, governor: BatchGovernor | None, observation: RoundObservation) -> None:
        if governor is not None:
            governor.observe(observation)
        self._on_round(observation)

    def _governor_in_force(self) -> BatchGovernor:
        """Returns the governor of batches; a new one where the conversation has a new one."""
        loaded = self._loaded
        assert loaded.governor is not None
        is_native = loaded.native_path is not None and loaded.native_path.is_native
        if self._governor is None or self._beside is not loaded.governor:
            self._governor = BatchGovernor(
                loaded.governor.candidates, initial=loaded.governor.current
            )
        elif is_native is not self._was_native:
            self._governor.forget_costs()
        self._beside, self._was_native = loaded.governor, is_native
        return self._governor

    def _finish(self, request: Request) -> Iterator[int | tuple[int, int]]:
        """Answers a request alone, or what is left of it."""
        return self._reply(request.prompt, request.sampling, ReplySoFar.of_request(request))

    def _together(
        self, decoder: BatchDecoder, requests: Sequence[Request]
    ) -> Generator[BatchEvent, None, None]:
        """Answers requests in one batch; where memory runs out, one after another."""
        try:
            return (yield from decoder.run())
        except Exception as error:
            if as_shortage(error, "in a batch") is None:
                raise
        del decoder  # Its cache; that of one conversation was planned.
        self._loaded.free_temporaries()
        self._tell_once(
            "batch-in-turn",
            "Memory ran out in a batch: its requests go on one after another.",
        )
        yield from in_turn([r for r in requests if r.reason is None], self._finish)

    def beam_search(
        self, prompt: Sequence[int], *, num_beams: int, max_new_tokens: int
    ) -> BeamResult:
        """Searches with transformers' own beams.

        The conversation keeps its state, but on a card: there the room of its cache is taken
        as a whole, so that the next reply reads its chat again.

        Raises:
            ConfigError: A width below 1 or above 32.
            ContextLengthError: Prompt and answer do not fit the context.
            BudgetError: The plan has no memory for so many beams.
            MemoryShortageError: Memory ran out twice, the second time with small passes.
            CancelledError: `cancel` was called.
        """
        loaded = self._loaded
        if loaded.config.gpu is not None:
            loaded.give_room_back()
        loaded.take_compiled()
        loaded.executor.meter = ReplyMeter()
        self._begin([])
        chunk = loaded.config.prefill_chunk_tokens
        try:
            return self._search(prompt, num_beams, max_new_tokens, chunk)
        except MemoryShortageError:
            self._tell_once(
                "beams-again", "Memory ran out in a beam search: it is begun anew with less."
            )
        loaded.free_temporaries()
        return self._search(prompt, num_beams, max_new_tokens, smaller_chunk(chunk))

    def _search(
        self, prompt: Sequence[int], num_beams: int, max_new_tokens: int, chunk_tokens: int
    ) -> BeamResult:
        loaded = self._loaded
        try:
            return beam_search(
                loaded.model,
                loaded.passes,
                prompt,
                loaded.plan,
                num_beams=num_beams,
                max_new_tokens=max_new_tokens,
                end_ids=loaded.end_ids,
                chunk_tokens=chunk_tokens,
                context_length=loaded.context_length,
            )
        except Exception as error:
            shortage = as_shortage(error, f"in a search with {num_beams} beams", loaded.plan)
            if shortage is None:
                raise
        finally:
            loaded.executor.driver.end_reply()
        loaded.state.reset()  # The next reply reads its chat again.
        loaded.free_temporaries()
        shortage.hint = "Close other programs, or give fewer beams."
        raise shortage
