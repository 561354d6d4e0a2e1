"""A trace's experts in the routers' place, in launched passes and in recorded ones."""

from __future__ import annotations

from typing import Any

import torch
from gpu.card import DEVICE
from gpu.timeline import Recorder
from gpu.trace_routing import Routing
from mira_engine.model.kv import StateManager
from mira_engine.runtime.captured_model import RecordableModel, RunExperts, StepInputs
from mira_engine.runtime.executor import ExpertExecutor
from mira_engine.runtime.gpu_records import GpuSlotDraft
from mira_engine.runtime.streams import Lane
from mira_engine.types import ExpertId, Phase
from torch import Tensor, nn
from transformers import PreTrainedModel


class ReplayedRouting:
    """Stands between a model and the executor: the trace chooses in the routers' place.

    What it records as `rest` lasts from one layer's experts to the next layer's: attention,
    norms and router, and what the card waits for their launches.

    Args:
        executor: Computes what is chosen.
        routing: A row for each position of the text.
        recorder: Told of a draft's experts and of what lies between layers, if anybody.
    """

    def __init__(
        self, executor: ExpertExecutor, routing: Routing, recorder: Recorder | None
    ) -> None:
        self._executor = executor
        self._recorder = recorder
        self._ids = {
            is_draft: torch.from_numpy(ids).long().transpose(0, 1).contiguous().to(DEVICE)
            for is_draft, ids in ((False, routing.target), (True, routing.draft))
        }
        self._draft_ids = routing.draft.tolist()
        self.state: StateManager | None = None
        """Says at which position a pass begins; set before the first pass."""
        self.num_drafted = self.num_present = 0
        """Experts of draft passes, and those of them that were there, since last cleared."""
        self._last: Any = None

    def __call__(
        self,
        module: nn.Module,
        layer: int,
        hidden: Tensor,
        top_k_index: Tensor,
        top_k_weights: Tensor,
    ) -> Tensor:
        """Computes a layer's routed experts, other ones than the router's; its weights stay."""
        assert self.state is not None
        executor, start = self._executor, self.state.num_cached
        is_draft = executor.phase is Phase.DRAFT
        chosen = self._ids[is_draft][layer, start : start + hidden.shape[0]]
        if is_draft:
            self.count_present(start, layer)
        recorder = self._recorder
        if recorder is None or not recorder.is_on:
            return executor(module, layer, hidden, chosen, top_k_weights)
        if layer and self._last is not None:
            recorder.add(Lane.COMPUTE, "rest", self._last)
        begun = recorder.mark(Lane.COMPUTE)
        result = executor(module, layer, hidden, chosen, top_k_weights)
        if is_draft:
            self._last = recorder.add(Lane.COMPUTE, "draft", begun)
        else:
            self._last = recorder.mark(Lane.COMPUTE)
        return result

    def count_present(self, position: int, layer: int) -> None:
        """Counts which of a drafted token's experts are there, where a draft can lack some."""
        executor = self._executor
        if isinstance(executor.draft, GpuSlotDraft):
            residency = executor.driver.residency
            experts = self._draft_ids[position][layer]
            self.num_drafted += len(experts)
            self.num_present += sum(residency.is_ready(ExpertId(layer, e)) for e in experts)

    def chosen(self, layer: int, positions: Tensor, *, is_draft: bool) -> Tensor:
        """Returns the trace's choice at positions that only the device knows, `[T, k]`."""
        return self._ids[is_draft][layer].index_select(0, positions)

    def take_share_present(self) -> float:
        """Returns the share of a draft's experts that were there, and begins anew."""
        share = self.num_present / self.num_drafted if self.num_drafted else 1.0
        self.num_drafted = self.num_present = 0
        return share


class RoutedModel(RecordableModel):
    """A model whose recorded passes compute the trace's experts.

    Args:
        model: The backbone.
        routing: Chooses; the model is stamped with it while nothing is recorded.
        executor: Says whether a draft is recorded.
        state: Has the room of keys and values.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        routing: ReplayedRouting,
        executor: ExpertExecutor,
        state: StateManager,
    ) -> None:
        super().__init__(model, routing, state)
        self._routing = routing
        self._asked = executor

    def run(self, inputs: StepInputs, bucket: int, run_experts: RunExperts) -> Tensor:
        """Runs the pass, with the trace's choice in the routers' place."""
        is_draft, positions = self._asked.phase is Phase.DRAFT, inputs.positions[0]

        def run_chosen(layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
            chosen = self._routing.chosen(layer, positions, is_draft=is_draft)
            return run_experts(layer, hidden, chosen, weights)

        return super().run(inputs, bucket, run_chosen)
