"""Several answers at once: batches of requests, and the beams of a search.

Says whether requests share passes or are answered in turn, and gives `runtime.batch` and
`runtime.beam` what they need of a loaded model. Runs in the engine thread, between replies.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from .config import SamplingConfig
from .loaded import LoadedModel
from .model.batch_state import can_pad
from .runtime.batch import BatchDecoder
from .runtime.beam import BeamResult, beam_search
from .runtime.requests import BatchEvent, in_turn, make_requests
from .runtime.telemetry import ReplyMeter

Reply = Callable[[Sequence[int], SamplingConfig], Iterator[int | tuple[int, int]]]


class SeveralAtOnce:
    """Batches and beams on a loaded model.

    Args:
        loaded: The model.
        reply: Answers one prompt by itself, where a model cannot share its cache.
        choose_depth: Gives K of a batch with these samplings.
        tell_once: Told code and text of a fallback.
        on_round: Called after each round of a batch.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        *,
        reply: Reply,
        choose_depth: Callable[[Sequence[SamplingConfig]], int],
        tell_once: Callable[[str, str], None],
        on_round: Callable[[], None],
    ) -> None:
        self._loaded = loaded
        self._reply = reply
        self._choose_depth = choose_depth
        self._tell_once = tell_once
        self._on_round = on_round

    def generate(
        self,
        prompts: Sequence[Sequence[int]],
        sampling: SamplingConfig | Sequence[SamplingConfig],
    ) -> Iterator[BatchEvent]:
        """Answers up to 32 prompts together, each as `reply` would alone.

        The batch takes the room of the conversation's cache: the next reply reads its chat
        again. `stats` gives the figures of all requests together. `cancel` ends them all.

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
            return in_turn(requests, self._reply)
        decoder = BatchDecoder(
            requests,
            loaded.model.config,
            loaded.plan,
            num_draft_tokens=self._choose_depth([request.sampling for request in requests]),
            context_length=loaded.context_length,
            passes=loaded.passes,
            executor=loaded.executor,
            end_ids=loaded.end_ids,
            chunk_tokens=loaded.config.prefill_chunk_tokens,
            window=loaded.draft_stage.window,
            on_round=self._on_round,
        )
        loaded.take_compiled()
        loaded.state.reset()
        loaded.executor.meter = ReplyMeter()
        return decoder.run()

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
            CancelledError: `cancel` was called.
        """
        loaded = self._loaded
        if loaded.config.gpu is not None:
            loaded.state.reset()
        loaded.take_compiled()
        loaded.executor.meter = ReplyMeter()
        try:
            return beam_search(
                loaded.model,
                loaded.passes,
                prompt,
                loaded.plan,
                num_beams=num_beams,
                max_new_tokens=max_new_tokens,
                end_ids=loaded.end_ids,
                chunk_tokens=loaded.config.prefill_chunk_tokens,
                context_length=loaded.context_length,
            )
        finally:
            loaded.executor.driver.end_reply()
