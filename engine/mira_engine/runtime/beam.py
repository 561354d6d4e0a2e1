"""Beam search by transformers' own `generate`, on the engine's experts.

Everything about beams is the library's: scores, reordering of the cache, the end. Here the
phase of each pass is set, the attention is one that knows rows, and the cache is counted.
The engine's own conversation keeps its state. Runs in the engine thread.

Source: Mira, evaluation of beam widths.
"""

from __future__ import annotations

import time
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from transformers import GenerationConfig, PreTrainedModel

from ..errors import ConfigError, ContextLengthError
from ..events import MemoryPlan
from ..model.batch_state import attending_padded
from ..types import Phase
from .passes import ModelPasses
from .room import check_room

MAX_BEAMS = 32

_LOGITS_OF_A_BEAM = 4
"""Over the whole vocabulary and in float32: logits, their logarithms, sums, and what the
processors make of them."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BeamResult:
    """The best beam.

    Attributes:
        tokens: Its new tokens, the end of text included.
        num_passes: Passes of the model, that of the prompt included.
        prompt_s: Seconds until all beams had read the prompt.
        decode_s: Seconds after that.
    """

    tokens: tuple[int, ...]
    num_passes: int
    prompt_s: float
    decode_s: float


class _PassHook:
    """Tells the engine what a pass of `generate` is, before it runs.

    Args:
        passes: Told the phase.
        num_prompt_tokens: Tokens of the prompt, which one or several passes read.
    """

    def __init__(self, passes: ModelPasses, num_prompt_tokens: int) -> None:
        self._passes = passes
        self._num_unread = num_prompt_tokens
        self.num_passes = 0
        self.first_decode_at: float | None = None

    def __call__(
        self, module: torch.nn.Module, args: tuple[object, ...], kwargs: dict[str, torch.Tensor]
    ) -> None:
        self.num_passes += 1
        if self._num_unread > 0:
            self._passes.enter(Phase.PREFILL)
            self._num_unread -= kwargs["input_ids"].shape[1]
            return
        if self.first_decode_at is None:
            self.first_decode_at = time.perf_counter()
        self._passes.enter(Phase.DECODE)


@torch.inference_mode()
def beam_search(
    model: PreTrainedModel,
    passes: ModelPasses,
    prompt: Sequence[int],
    plan: MemoryPlan,
    *,
    num_beams: int,
    max_new_tokens: int,
    end_ids: Collection[int],
    chunk_tokens: int,
    context_length: int,
) -> BeamResult:
    """Finds the likeliest continuation of `prompt` that a beam search meets.

    Args:
        model: The loaded model, its experts stamped.
        passes: Its passes.
        prompt: Tokens.
        plan: The engine's; beams and the conversation share what it has for a KV cache.
        num_beams: Width, 1 for greedy.
        max_new_tokens: Most new tokens.
        end_ids: End-of-text ids, none to go on to the last token.
        chunk_tokens: Most prompt tokens of one pass, all beams together. A model with
            recurrent state reads its prompt in one pass whatever this says.
        context_length: Tokens that the plan's KV cache is for.

    Raises:
        ConfigError: The width is below 1 or above 32, or there is no prompt.
        ContextLengthError: More tokens than the context holds.
        BudgetError: With the missing bytes.
        CancelledError: The engine was told to stop.
    """
    _check_beams(
        model,
        plan,
        prompt=prompt,
        num_beams=num_beams,
        max_new_tokens=max_new_tokens,
        num_cached=passes.state.num_cached,
        context_length=context_length,
    )
    ids = torch.tensor([list(prompt)], device=model.device)
    # No word has this id; without any, transformers would take the checkpoint's own.
    no_end = model.config.get_text_config().vocab_size
    columns = max(1, chunk_tokens // num_beams)
    config = GenerationConfig(
        num_beams=num_beams,
        do_sample=False,
        max_new_tokens=max_new_tokens,
        eos_token_id=sorted(end_ids) or [no_end],
        pad_token_id=0,
        prefill_chunk_size=columns if passes.state.is_static and columns < len(prompt) else None,
    )
    hook = _PassHook(passes, len(prompt))
    handle = model.register_forward_pre_hook(hook, with_kwargs=True)
    started = time.perf_counter()
    try:
        with attending_padded(model):
            found = model.generate(
                ids, attention_mask=torch.ones_like(ids), generation_config=config
            )
    finally:
        handle.remove()
    ended = time.perf_counter()
    decode_from = hook.first_decode_at or ended
    return BeamResult(
        tokens=tuple(found[0, len(prompt) :].tolist()),
        num_passes=hook.num_passes,
        prompt_s=decode_from - started,
        decode_s=ended - decode_from,
    )


def _check_beams(
    model: PreTrainedModel,
    plan: MemoryPlan,
    *,
    prompt: Sequence[int],
    num_beams: int,
    max_new_tokens: int,
    num_cached: int,
    context_length: int,
) -> None:
    """Refuses a search that the context or the plan has no room for."""
    if not 1 <= num_beams <= MAX_BEAMS:
        raise ConfigError.for_field("beams", num_beams, f"Give 1 to {MAX_BEAMS}.")
    if not prompt or max_new_tokens < 1:
        raise ConfigError("A search needs a prompt and room for an answer.", hint="Give both.")
    num_tokens = len(prompt) + max_new_tokens
    if num_tokens > context_length:
        raise ContextLengthError(
            f"Prompt and answer have {num_tokens} tokens, the context holds {context_length}.",
            hint="Give fewer, or a larger --context.",
        )
    check_room(
        plan,
        num_entries=num_beams * num_tokens + num_cached,
        num_logits=_LOGITS_OF_A_BEAM * num_beams,
        num_words=model.config.get_text_config().vocab_size,
        context_length=context_length,
    )
