"""Records routing: prompts and greedy replies in batches, through the loaded model.

A recorder stands between the model and the executor and keeps what passes by. Prompts
are read side by side, since only the routing of single tokens matters and a batch costs
little more than one sequence. Memory holds one batch; finished batches are files. Runs
in the thread that asks, on a model that nobody else uses.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from transformers import DynamicCache, PreTrainedModel

from ..errors import ConfigError
from ..model.attention import ATTENTION_IMPLEMENTATION
from ..model.experts import ExpertsFunction, stamp
from ..predictor.traces import RoutingTrace, TraceFolder
from ..types import Phase
from .executor import ExpertExecutor


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordingSettings:
    """Bounds of a recording.

    Attributes:
        max_reply_tokens: Most tokens that are generated after a prompt.
        max_prompt_tokens: Prompts are cut to this.
        max_batch_prompts: Most prompts side by side.
        max_batch_tokens: Most prompt tokens of a batch, padding included.
        max_batch_bytes: Most bytes of recorded states in memory.
        max_bytes: Most bytes of recorded states on the disk; prompts beyond are left out.
    """

    max_reply_tokens: int = 48
    max_prompt_tokens: int = 192
    max_batch_prompts: int = 32
    max_batch_tokens: int = 2048
    max_batch_bytes: int = 128 << 20
    max_bytes: int = 512 << 20

    def __post_init__(self) -> None:
        if self.max_reply_tokens < 1:
            raise ConfigError.for_field("reply tokens", self.max_reply_tokens, "Give at least 1.")


Batch = tuple[int, ...]
"""Positions of the prompts that are read side by side."""


def plan_batches(
    lengths: Sequence[int], token_bytes: int, settings: RecordingSettings
) -> tuple[Batch, ...]:
    """Puts prompts of similar length together.

    Args:
        lengths: Tokens of each prompt.
        token_bytes: Recorded bytes of one token.
        settings: Bounds. Two prompts are taken in any case: one to train on, one to check.
    """
    sizes = [min(n, settings.max_prompt_tokens) for n in lengths]
    taken, used_bytes = [], 0
    for prompt, size in enumerate(sizes):
        used_bytes += (size + settings.max_reply_tokens) * token_bytes
        if used_bytes > settings.max_bytes and len(taken) >= 2:
            break
        taken.append(prompt)
    batches: list[Batch] = []
    current: list[int] = []
    for prompt in sorted(taken, key=lambda one: (sizes[one], one)):
        count, longest = len(current) + 1, sizes[prompt]
        recorded = count * (longest + settings.max_reply_tokens) * token_bytes
        is_full = (
            count > settings.max_batch_prompts
            or count * longest > settings.max_batch_tokens
            or recorded > settings.max_batch_bytes
        )
        if current and is_full:
            batches.append(tuple(current))
            current = []
        current.append(prompt)
    if current:
        batches.append(tuple(current))
    return tuple(batches)


class RoutingRecorder:
    """Passes every layer's call on to the executor and keeps the rows that were asked for.

    Args:
        run: What computes the experts.
        num_layers: MoE layers.
    """

    def __init__(self, run: ExpertsFunction, num_layers: int) -> None:
        self._run = run
        self.rows: torch.Tensor | None = None
        """Rows of the flattened pass to keep, int64; `None` keeps nothing."""
        self.hidden: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
        self.ids: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]
        self.weights: list[list[torch.Tensor]] = [[] for _ in range(num_layers)]

    def __call__(
        self,
        module: torch.nn.Module,
        layer: int,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Computes as the executor does; same arguments, same result."""
        if self.rows is not None:
            self.hidden[layer].append(hidden[self.rows].to(torch.float16))
            self.ids[layer].append(top_k_index[self.rows].to(torch.int16))
            self.weights[layer].append(top_k_weights[self.rows].to(torch.float16))
        return self._run(module, layer, hidden, top_k_index, top_k_weights)


class BatchRecording:
    """Reads batches of prompts on one model.

    Args:
        model: The loaded model; its experts and attention are taken over for good.
        executor: Computes its experts.
        end_ids: Tokens that end a reply.
        settings: Bounds.
        most_pass_tokens: Prompt tokens of one pass, padding included, where a batch may have
            more than there is memory for; a prompt is not divided.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        executor: ExpertExecutor,
        end_ids: frozenset[int],
        settings: RecordingSettings,
        *,
        most_pass_tokens: int,
    ) -> None:
        if model.config._attn_implementation == ATTENTION_IMPLEMENTATION:
            model.set_attn_implementation("sdpa")  # Ours may leave a padding mask out.
        self._model = model
        self._executor = executor
        self._end_ids = torch.tensor(sorted(end_ids), dtype=torch.int64)
        self._settings = settings
        self._most_pass_tokens = most_pass_tokens
        self._num_layers = stamp(model, executor)

    def write(
        self,
        folder: TraceFolder,
        part: int,
        prompts: Sequence[Sequence[int]],
        sequences: Sequence[int],
        skipped: Sequence[int],
        *,
        on_pass: Callable[[int], None] = lambda num_tokens: None,
        on_prompts: Callable[[int], None] = lambda num_tokens: None,
    ) -> None:
        """Records a batch and writes it as one part.

        Args:
            folder: Takes the part.
            part: Its number.
            prompts: Tokens of each prompt.
            sequences: Number of each prompt in the whole recording.
            skipped: First tokens of each prompt that are not kept: what others begin with too.
            on_pass: Told the recorded tokens after each pass; raises to stop.
            on_prompts: Told the prompt tokens of a pass before it, padding included, and 0 after;
                0 for a prompt alone, which is not divided.
        """
        recorder = RoutingRecorder(self._executor, self._num_layers)
        cut = [list(prompt[: self._settings.max_prompt_tokens]) for prompt in prompts]
        found: list[tuple[torch.Tensor, torch.Tensor]] = []
        num_before = 0
        stamp(self._model, recorder)
        try:
            for group in groups_of(list(map(len, cut)), self._most_pass_tokens):

                def tell(num_tokens: int, num_before: int = num_before) -> None:
                    on_pass(num_before + num_tokens)

                found.append(
                    self._read(
                        recorder,
                        cut[group],
                        sequences[group],
                        skipped[group],
                        tell,
                        on_prompts,
                    )
                )
                num_before += len(found[-1][0])
        finally:
            stamp(self._model, self._executor)
        sequence, is_reply = (torch.cat(each) for each in zip(*found, strict=True))
        trace = RoutingTrace(
            ids=torch.stack([torch.cat(ids) for ids in recorder.ids], dim=1),
            weights=torch.stack([torch.cat(weights) for weights in recorder.weights], dim=1),
            sequence=sequence,
            is_reply=is_reply,
        )
        folder.write_part(part, trace, [torch.cat(states) for states in recorder.hidden])

    @torch.inference_mode()
    def _read(
        self,
        recorder: RoutingRecorder,
        prompts: Sequence[Sequence[int]],
        sequences: Sequence[int],
        skipped: Sequence[int],
        on_pass: Callable[[int], None],
        on_prompts: Callable[[int], None],
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Runs the passes. Returns each kept token's prompt, int32, and whether it was made."""
        tokens, mask = _pad_left(prompts)
        numbers = torch.tensor(list(sequences), dtype=torch.int32)
        positions = (mask.cumsum(dim=1) - 1).clamp_min(0)
        is_kept = (mask == 1) & (positions >= torch.tensor(list(skipped))[:, None])
        recorder.rows = is_kept.flatten().nonzero()[:, 0]
        cache = DynamicCache(config=self._model.config)
        on_prompts(tokens.numel() if len(tokens) > 1 else 0)
        following = self._pass(tokens, mask, positions, cache, Phase.PREFILL)
        on_prompts(0)
        kept = [numbers.repeat_interleave(is_kept.sum(dim=1))]
        num_prompt_tokens = len(kept[0])
        on_pass(num_prompt_tokens)
        is_open = ~torch.isin(following, self._end_ids)
        position = positions[:, -1:]
        for _ in range(self._settings.max_reply_tokens):
            if not bool(is_open.any()):
                break
            recorder.rows = is_open.nonzero()[:, 0]
            kept.append(numbers[is_open])
            mask = torch.cat((mask, torch.ones_like(mask[:, :1])), dim=1)
            position = position + 1
            following = self._pass(following[:, None], mask, position, cache, Phase.DECODE)
            on_pass(sum(map(len, kept)))
            is_open &= ~torch.isin(following, self._end_ids)
        sequence = torch.cat(kept)
        is_reply = torch.arange(len(sequence)) >= num_prompt_tokens
        return sequence, is_reply

    def _pass(
        self,
        tokens: torch.Tensor,
        mask: torch.Tensor,
        positions: torch.Tensor,
        cache: DynamicCache,
        phase: Phase,
    ) -> torch.Tensor:
        """Runs one pass of the batch. Returns the likeliest next tokens, `[B]`."""
        self._executor.phase = phase
        logits = self._model(
            input_ids=tokens,
            attention_mask=mask,
            position_ids=positions,
            cache=cache,
            use_cache=True,
            logits_to_keep=1,
        ).logits
        self._executor.end_pass(1)
        return logits[:, -1].argmax(dim=-1)


def groups_of(lengths: Sequence[int], most_tokens: int) -> tuple[slice, ...]:
    """Divides a batch into what is read at once: neighbours of few enough tokens, padded.

    Args:
        lengths: Tokens of each prompt.
        most_tokens: Of a group of more than one prompt.
    """
    starts, longest = [0], 0
    for number, length in enumerate(lengths):
        longest = max(longest, length)
        if number > starts[-1] and (number + 1 - starts[-1]) * longest > most_tokens:
            starts.append(number)
            longest = length
    ends = [*starts[1:], len(lengths)]
    return tuple(slice(start, end) for start, end in zip(starts, ends, strict=True))


def _pad_left(prompts: Sequence[Sequence[int]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns tokens and mask `[B, L]`; any token pads, the mask hides it."""
    width = max(map(len, prompts))
    tokens = torch.tensor(
        [[prompt[0]] * (width - len(prompt)) + list(prompt) for prompt in prompts]
    )
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    return tokens, mask


def shared_prefix_lengths(prompts: Sequence[Sequence[int]]) -> tuple[int, ...]:
    """Returns how many first tokens of each prompt an earlier one has too.

    Chat templates begin every chat alike; those tokens' routing is worth recording once.
    """
    lengths = []
    for number, prompt in enumerate(prompts):
        longest = 0
        for earlier in prompts[:number]:
            common = 0
            limit = min(len(earlier), len(prompt))
            while common < limit and earlier[common] == prompt[common]:
                common += 1
            longest = max(longest, common)
        lengths.append(longest)
    return tuple(lengths)
