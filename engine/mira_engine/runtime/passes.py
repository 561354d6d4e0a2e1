"""Forward passes of the loaded model: prefill chunks, single steps, verification.

Each pass sets the executor's phase, runs transformers' module tree and returns the
logits of the last positions. Runs in the engine thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from transformers import PreTrainedModel

from ..model.kv import StateManager
from ..types import Phase
from .executor import ExpertExecutor


class ModelPasses:
    """Runs tokens through the model.

    Args:
        model: The loaded model without its experts.
        executor: Computes the routed experts.
        state: Tokens and KV cache; grows with every pass.
    """

    def __init__(
        self, model: PreTrainedModel, executor: ExpertExecutor, state: StateManager
    ) -> None:
        self._model = model
        self._executor = executor
        self.state = state

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], phase: Phase, *, num_logits: int = 1) -> torch.Tensor:
        """Runs `tokens` after what is cached.

        Returns:
            `[num_logits, V]`: logits of the last positions, in the model's dtype.
        """
        self._executor.phase = phase
        output = self._model(
            input_ids=torch.tensor([list(tokens)]),
            cache=self.state.cache,
            use_cache=True,
            logits_to_keep=num_logits,
        )
        self.state.commit(tokens)
        return output.logits[0]
