"""Forward passes of the loaded model: prefill chunks, single steps, verification.

Each pass sets the executor's phase, runs a compiled or captured step where there is one for
that many tokens, else transformers' module tree, and returns the logits of the last
positions. Runs in the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch.nn import functional
from transformers import PreTrainedModel

from ..checkpoint.experts import expert_modules_of
from ..model.attention import cached_attention
from ..model.batch_state import BatchState, attending_padded
from ..model.experts import only_rows
from ..model.kv import StateManager
from ..model.linear import DenseSwitch
from ..model.operators import StepBinding
from ..model.steps import StepSpec
from ..types import DraftDense, Phase
from .capture import CompiledStep
from .captured import CapturedSteps
from .executor import ExpertExecutor

_CPU = torch.device("cpu")


class ModelPasses:
    """Runs tokens through the model.

    Args:
        model: The loaded model without its experts.
        executor: Computes the routed experts.
        state: Tokens and KV cache; grows with every pass.
        switch: Tells the dense layers whether a draft is running.
        device: Where the model computes.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        executor: ExpertExecutor,
        state: StateManager,
        switch: DenseSwitch,
        device: torch.device = _CPU,
    ) -> None:
        self._device = device
        self._model = model
        self._executor = executor
        self._switch = switch
        self.state = state
        self.captured: CapturedSteps | None = None
        """Steps recorded on a card, where there are some."""
        self._steps: dict[tuple[bool, int], CompiledStep] = {}
        self._num_words = model.config.get_text_config().vocab_size
        self._modules = [module for _, module in expert_modules_of(model)]

    def add_steps(self, steps: dict[StepSpec, CompiledStep]) -> None:
        """Uses compiled steps from now on. Between replies only: roundings differ.

        Where a draft multiplies as the target does, both run the same step.
        """
        for spec, step in steps.items():
            self._steps[spec.is_draft, spec.num_tokens] = step
            if spec.draft_dense is DraftDense.TARGET:
                self._steps[True, spec.num_tokens] = step

    @torch.inference_mode()
    def forward(self, tokens: Sequence[int], phase: Phase, *, num_logits: int = 1) -> torch.Tensor:
        """Runs `tokens` after what is cached.

        Returns:
            `[num_logits, V]`: logits of the last positions, in the model's dtype.
        """
        self.enter(phase)
        is_draft = phase is Phase.DRAFT
        meter = self._executor.meter
        step = self._step_for(len(tokens), is_draft)
        recorded = self.captured.run(tokens, phase) if self.captured is not None else None
        if recorded is not None:
            meter.num_compiled_passes += 1
            logits = recorded[-num_logits:]
        elif step is not None:
            meter.num_compiled_passes += 1
            logits = self._run_step(step, tokens)[-num_logits:]
        else:
            meter.num_eager_passes += 1
            if phase is Phase.VERIFY:
                self.state.begin_verification()
            logits = (
                self._model(
                    input_ids=torch.tensor([list(tokens)], device=self._device),
                    cache=self.state.cache,
                    use_cache=True,
                    logits_to_keep=num_logits,
                )
                .logits[0]
                .cpu()
            )
        self.state.commit(tokens)
        missing = self._num_words - logits.shape[-1]
        if missing > 0:  # A draft that chooses among the first words only.
            logits = functional.pad(logits, (0, missing), value=float("-inf"))
        return logits

    def _step_for(self, num_tokens: int, is_draft: bool) -> CompiledStep | None:
        """Returns the step for that many tokens, else the verification of a few more.

        A round at the end of a reply, or with fewer draft tokens than usual, is short; a
        longer compiled step with places left empty is several times faster than none.
        """
        step = self._steps.get((is_draft, num_tokens))
        if step is not None or is_draft or num_tokens == 1:
            return step
        room = self.state.capacity - self.state.num_cached
        longer = [n for d, n in self._steps if not d and num_tokens < n <= room]
        return self._steps[False, min(longer)] if longer else None

    def _run_step(self, step: CompiledStep, tokens: Sequence[int]) -> torch.Tensor:
        """Runs a compiled step, its last places empty where it takes more than `tokens`.

        An empty place repeats the last token, gets no routed experts, and leaves keys and
        values that nothing before it attends to; they are taken back here.

        Returns:
            Logits `[len(tokens), V]`.
        """
        count, surplus = len(tokens), step.num_tokens - len(tokens)
        run = self._run_experts if not surplus else partial(self._run_some_experts, count)
        binding = self._binding(run)
        padded = [*tokens, *[tokens[-1]] * surplus]
        logits = step(padded, self.state.num_cached, binding)
        if surplus:
            self.state.cache.crop(-surplus)
        return logits[:count]

    @torch.inference_mode()
    def forward_batch(
        self,
        state: BatchState,
        tokens: Sequence[Sequence[int]],
        phase: Phase,
        *,
        logits_at: Sequence[int],
    ) -> torch.Tensor:
        """Runs each row's tokens after what the batch has cached, always module by module.

        Inputs go to where the model computes; nothing is read from there but the logits.

        Args:
            state: The batch's own cache; `self.state` is not touched.
            tokens: Of each row, T at most; a row that waits has none.
            phase: As for `forward`.
            logits_at: Columns of the pass whose logits are wanted.

        Returns:
            `[B, len(logits_at), V]`, in the model's dtype, on the host.
        """
        self.enter(phase)
        self._executor.meter.num_eager_passes += 1
        inputs = state.extend(tokens).to(self._device)
        with attending_padded(self._model), only_rows(self._modules, inputs.real):
            logits = self._model(
                input_ids=inputs.ids,
                attention_mask=inputs.mask,
                position_ids=inputs.positions,
                cache=state.cache,
                use_cache=True,
                logits_to_keep=torch.tensor(logits_at, device=self._device),
            ).logits.cpu()
        missing = self._num_words - logits.shape[-1]
        return functional.pad(logits, (0, missing), value=float("-inf")) if missing > 0 else logits

    def enter(self, phase: Phase) -> None:
        """Sets what experts and dense layers do in passes that somebody else runs."""
        self._executor.phase = phase
        self._switch.is_drafting = phase is Phase.DRAFT

    def _binding(self, run_experts: Callable[..., torch.Tensor]) -> StepBinding:
        return StepBinding(run_experts, self.state.cache.layers, cached_attention)

    def _run_experts(
        self,
        layer: int,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        module = self._modules[layer]
        return self._executor(module, layer, hidden, top_k_index, top_k_weights)

    def _run_some_experts(
        self,
        count: int,
        layer: int,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        top_k_weights: torch.Tensor,
    ) -> torch.Tensor:
        """Computes the first `count` tokens' experts; the other rows are zero."""
        result = self._run_experts(
            layer, hidden[:count], top_k_index[:count], top_k_weights[:count]
        )
        return functional.pad(result, (0, 0, 0, len(hidden) - count))
