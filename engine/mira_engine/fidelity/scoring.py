"""Who predicts a text: the loaded engine, or a model whose experts come from the checkpoint.

Both read windows of tokens and give the logits of every next one. Run in the engine process,
in the thread that asked.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple, Protocol

import torch
from torch import Tensor
from torch.nn import functional
from transformers import PreTrainedModel

from ..checkpoint.expert import ExpertTensors
from ..checkpoint.experts import expert_modules_of
from ..errors import check_cancelled
from ..events import MemoryPlan
from ..model.experts import only_rows, stamp
from ..model.sampling import check_finite
from ..runtime.executor import ExpertExecutor
from ..runtime.passes import ModelPasses
from ..types import Phase
from .measures import MAX_ROWS

OnTokens = Callable[[int], None]
"""Told the tokens that were read so far, those of the window under way in part."""

LoadExpert = Callable[[int, int], ExpertTensors]
"""Gives an expert by its MoE layer and its number there, matrices `[out, in]`."""

_BATCH_LOGITS_BYTES = 512 << 20
"""Most bytes of the logits of one pass over several windows."""


class ScoredRows(NamedTuple):
    """Logits `[T, V]` of the tokens behind places `start` to `start + T - 1` of a window."""

    window: int
    start: int
    logits: Tensor


class Scorer(Protocol):
    """Predicts texts."""

    def score(
        self, windows: Sequence[Sequence[int]], on_tokens: OnTokens = lambda done: None
    ) -> Iterator[ScoredRows]:
        """Yields the logits of every token of each window but its first, in any order.

        Raises:
            CancelledError: Somebody asked to stop.
            NonFiniteError: nan in the logits.
        """


def logit_rows(
    plan: MemoryPlan,
    *,
    num_words: int,
    itemsize: int,
    context_length: int,
    window_tokens: int,
) -> int:
    """Returns how many positions' logits may be held at a time, `window_tokens` at most.

    They take the room that the plan has for the KV cache of a longer context; the workspace
    has room for `MAX_ROWS` and their copies in any case.

    Args:
        plan: The engine's.
        num_words: Words of the vocabulary.
        itemsize: Bytes of one logit.
        context_length: Tokens that the plan's KV cache is for.
        window_tokens: Tokens that are read in one piece.
    """
    spare = plan.kv_bytes * max(0, context_length - window_tokens) // context_length
    return max(MAX_ROWS, min(window_tokens, spare // (num_words * itemsize)))


class PassScorer:
    """Predicts texts with a loaded engine; the conversation's cache is given up.

    Args:
        passes: The engine's.
        executor: The engine's.
        max_tokens: Most tokens of one pass.
    """

    def __init__(self, passes: ModelPasses, executor: ExpertExecutor, *, max_tokens: int) -> None:
        self._passes = passes
        self._executor = executor
        self._max_tokens = max_tokens

    def score(
        self, windows: Sequence[Sequence[int]], on_tokens: OnTokens = lambda done: None
    ) -> Iterator[ScoredRows]:
        """See `Scorer.score`; in the order of the windows."""
        done = 0
        for number, tokens in enumerate(windows):
            self._passes.state.reset()
            for start, logits in self.rows(tokens[:-1]):
                yield ScoredRows(number, start, logits)
                on_tokens(done + start + len(logits))
            done += len(tokens) - 1

    def rows(self, tokens: Sequence[int], first: int = 0) -> Iterator[tuple[int, Tensor]]:
        """Yields logits `[T, V]` and the place of their first, from the place `first` on.

        What the cache holds of the beginning of `tokens` is not read again, up to `first`.
        """
        state, executor = self._passes.state, self._executor
        state.reuse_prefix(tokens[: first + 1])
        try:
            while state.num_cached < len(tokens):
                start = state.num_cached
                size = self._max_tokens
                piece = tokens[start : start + size]
                num_passes = -(-(len(tokens) - start) // size)
                executor.obey(executor.driver.begin_prefill(num_passes))
                wanted = start + len(piece) - max(first, start)
                logits = self._passes.forward(piece, Phase.PREFILL, num_logits=max(1, wanted))
                state.rollback(0)
                if wanted > 0:
                    check_finite(logits)
                    yield start + len(piece) - wanted, logits
            executor.obey(executor.driver.end_prefill())
        except BaseException:
            state.reset()  # It may hold half a pass, or what comes behind is not wanted any more.
            raise
        finally:
            executor.driver.end_reply()


class CheckpointScorer:
    """Predicts texts with experts that are read one at a time, layer by layer.

    Several windows go through the model side by side, so that a pass reads every expert that
    they need once, and holds one of them. Nothing of what makes the engine fast or small is
    in it: it says what the model itself says.

    Args:
        model: The backbone, without experts.
        load: Gives the experts.
        is_cancelled: Asked before every expert.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        load: LoadExpert,
        *,
        is_cancelled: Callable[[], bool] = lambda: False,
    ) -> None:
        self._model = model
        self._load = load
        self._is_cancelled = is_cancelled
        self._modules = [module for _, module in expert_modules_of(model)]
        self._on_layer: Callable[[int], None] = lambda layer: None
        stamp(model, self._run_experts)

    def score(
        self, windows: Sequence[Sequence[int]], on_tokens: OnTokens = lambda done: None
    ) -> Iterator[ScoredRows]:
        """See `Scorer.score`; windows of like length together."""
        num_layers, done = len(self._modules), 0
        for batch in self._batches(windows):
            num_tokens = sum(len(windows[number]) - 1 for number in batch)

            def tell(layer: int, done: int = done, num_tokens: int = num_tokens) -> None:
                on_tokens(done + num_tokens * layer // num_layers)

            self._on_layer = tell
            logits = self._pass([windows[number][:-1] for number in batch])
            for row, number in enumerate(batch):
                scored = logits[row, : len(windows[number]) - 1]
                check_finite(scored)
                yield ScoredRows(number, 0, scored)
            done += num_tokens
            on_tokens(done)

    def _batches(self, windows: Sequence[Sequence[int]]) -> list[list[int]]:
        """Groups windows so that padded ones fit `_BATCH_LOGITS_BYTES`, one in any case."""
        row_bytes = self._model.config.get_text_config().vocab_size * self._model.dtype.itemsize
        most = max(1, _BATCH_LOGITS_BYTES // row_bytes)
        batches: list[list[int]] = []
        for number in sorted(range(len(windows)), key=lambda one: (-len(windows[one]), one)):
            longest = len(windows[batches[-1][0]]) if batches else 0
            if not batches or (len(batches[-1]) + 1) * longest > most:
                batches.append([])
            batches[-1].append(number)
        return batches

    @torch.inference_mode()
    def _pass(self, inputs: Sequence[Sequence[int]]) -> Tensor:
        """Reads windows side by side. Returns `[B, T, V]`.

        Shorter ones are padded behind their end, where nothing that came before attends to.
        """
        width = max(map(len, inputs))
        tokens = torch.tensor([[*one, *[one[-1]] * (width - len(one))] for one in inputs])
        is_real = torch.arange(width) < torch.tensor([len(one) for one in inputs])[:, None]
        rows = None if bool(is_real.all()) else is_real.flatten().nonzero()[:, 0]
        with only_rows(self._modules, rows):
            return self._model(input_ids=tokens, use_cache=False).logits

    def _run_experts(
        self,
        module: torch.nn.Module,
        layer: int,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
    ) -> Tensor:
        """Computes one layer's experts, `[T, C]`, one expert after another."""
        self._on_layer(layer)
        result = torch.zeros(hidden.shape, dtype=torch.promote_types(hidden.dtype, torch.float32))
        for expert in top_k_index.unique().tolist():
            check_cancelled(self._is_cancelled)
            token, place = torch.where(top_k_index == expert)
            outputs = _run_expert(module, hidden[token], self._load(layer, expert))
            weighted = outputs * top_k_weights[token, place, None]
            result.index_add_(0, token, weighted.to(result.dtype))
        return result.to(hidden.dtype)


def _run_expert(module: torch.nn.Module, rows: Tensor, expert: ExpertTensors) -> Tensor:
    """Computes one expert on `[T, C]`, in the dtype of the rows."""

    def product(x: Tensor, matrix: Tensor, bias: Tensor | None) -> Tensor:
        return functional.linear(x, matrix.to(x.dtype), None if bias is None else bias.to(x.dtype))

    inner = product(rows, expert.up, expert.up_bias)
    inner = module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
    return product(inner, expert.down, expert.down_bias)
