"""A model's module tree as work that can be recorded: fixed places in, logits out.

What differs from pass to pass, the tokens and where they stand, is read from two fixed places
in device memory; everything else of a recording is the same at every replay.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor
from transformers import PreTrainedModel

from ..checkpoint.experts import expert_modules_of
from ..errors import UnsupportedModelError
from ..model.bucketed import BucketCache, attending_in_buckets, bucket_mask
from ..model.experts import stamp
from ..model.kv import StateManager
from .executor import ExpertExecutor

RunExperts = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""`(layer, hidden [T, C], index [T, k], weights [T, k]) -> [T, C]`."""


class StepInputs:
    """Where a step finds its tokens.

    Args:
        num_tokens: T.
        device: The card.

    Attributes:
        num_tokens: T.
        ids: Tokens, int64 `[1, T]`.
        positions: Their places in the context, int64 `[1, T]`.
    """

    def __init__(self, num_tokens: int, device: torch.device) -> None:
        self.num_tokens = num_tokens
        self._both = torch.zeros(2, num_tokens, dtype=torch.int64, device=device)
        self.ids, self.positions = self._both[:1], self._both[1:]

    def fill(self, tokens: Sequence[int], num_cached: int) -> None:
        """Puts tokens there that stand behind `num_cached` others."""
        places = range(num_cached, num_cached + len(tokens))
        self._both.copy_(torch.tensor([list(tokens), list(places)]))


class RecordableModel:
    """The loaded model, run on fixed places.

    Args:
        model: Without its experts.
        executor: What its experts are stamped with otherwise.
        state: Has the room of keys and values.
    """

    def __init__(
        self, model: PreTrainedModel, executor: ExpertExecutor, state: StateManager
    ) -> None:
        self._model = model
        self._executor = executor
        self._state = state
        self.modules = [module for _, module in expert_modules_of(model)]
        """Experts modules by MoE layer."""
        self.num_layers = len(self.modules)
        self.device = model.device

    def run(self, inputs: StepInputs, bucket: int, run_experts: RunExperts) -> Tensor:
        """Runs the pass. The counters of the room are left as they are.

        Args:
            inputs: Where the tokens are.
            bucket: Places of the room that are looked at.
            run_experts: Called for each MoE layer, in order.

        Returns:
            Logits `[T, V]`.

        Raises:
            UnsupportedModelError: The model does what no recording can hold.
        """
        positions = inputs.positions[0]
        with attending_in_buckets(self._model), self._running(run_experts):
            return self._model(
                input_ids=inputs.ids,
                position_ids=inputs.positions,
                attention_mask=bucket_mask(positions, bucket),
                cache=BucketCache(self._state.cache.layers, positions, bucket),
                use_cache=True,
                logits_to_keep=inputs.num_tokens,
            ).logits[0]

    @contextmanager
    def _running(self, run_experts: RunExperts) -> Iterator[None]:
        """Has the experts modules call `run_experts` inside, each once and in order."""
        num_run = 0

        def run(
            module: torch.nn.Module, layer: int, hidden: Tensor, index: Tensor, weights: Tensor
        ) -> Tensor:
            nonlocal num_run
            del module
            if layer != num_run:
                raise UnsupportedModelError("its layers do not run one after another")
            num_run += 1
            return run_experts(layer, hidden, index, weights)

        stamp(self._model, run)
        try:
            yield
        finally:
            stamp(self._model, self._executor)
        if num_run != self.num_layers:
            raise UnsupportedModelError("not all of its layers run in every pass")
