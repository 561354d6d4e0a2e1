"""A target pass as recorded pieces between routers.

Piece 0 is all up to the first router's choice; piece l + 1 computes the experts of MoE layer l
from the device's own table of slots, and goes on to the next choice; the last one ends with the
logits. Each piece copies its choice to the host, and how many assignments found their expert in
no slot. All pieces read and write fixed places, keys and values go to where their position
says, so launching a piece again does no harm.

Where a layer may miss, the host waits for its choice, asks the driver as in a pass module by
module, and launches the next piece when all experts are there. Where residency already holds
what can be expected, pieces are launched on without waiting (`mira_engine.policy.launching`);
the driver is told of each layer in order as its choice arrives, and the count of misses says
whether the piece was right. If it was not, the layer is served and everything from there on is
launched again.

Runs in the engine thread.

Source: Specter, Overlap-Oriented Parallelism Optimizer, and Verification Expert Cache
Residency Manager; cutting the graph at the routers and repairing wrong launches are ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from mira_kernels.assignments import Assignments, group_by_expert
from torch import Tensor

from ..policy.launching import Launch, LaunchAhead
from ..types import ExpertId, Phase
from .captured_memory import BoundaryMemory
from .captured_model import RecordableModel, StepInputs
from .executor import ExpertExecutor
from .gpu_device import GpuHandle
from .gpu_experts import GpuExperts, demand_of
from .graphs import Cut
from .host_experts import HostDemand
from .streams import Lane


class TargetStep:
    """One forward pass of T tokens within one bucket.

    Args:
        model: Gives the work.
        executor: Asks the driver.
        experts: Computes.
        handle: The card; it has graphs.
        ahead: Says when not to wait.
        bucket: Places of the context that are looked at.
        tokens: The first pass's, on which the work is tried.
        num_cached: Tokens before them.

    Raises:
        UnsupportedModelError: The model does what no recording can hold.
        RuntimeError: The device cannot record it.
    """

    def __init__(
        self,
        *,
        model: RecordableModel,
        executor: ExpertExecutor,
        experts: GpuExperts,
        handle: GpuHandle,
        ahead: LaunchAhead,
        bucket: int,
        tokens: Sequence[int],
        num_cached: int,
    ) -> None:
        assert handle.graphs is not None
        self._executor, self._experts, self._queues = executor, experts, handle.queues
        self._ahead = ahead
        self._num_layers, self._modules = model.num_layers, model.modules
        self._inputs = StepInputs(len(tokens), model.device)
        self.places = _Places(model.num_layers, handle)
        self._hidden: dict[int, Tensor] = {}
        self._rows: dict[int, Assignments] = {}
        self._reached = [handle.queues.make_event() for _ in range(model.num_layers + 1)]
        self._launches: dict[int, Launch] = {}
        self._num_launched = 0
        self.num_ahead = 0
        """Pieces launched before their layer's choice was known."""
        self.num_repaired = 0
        """Those of them that found an expert missing."""
        self._inputs.fill(tokens, num_cached)
        memory = BoundaryMemory()

        def work(cut: Cut) -> None:
            nonlocal memory
            memory = BoundaryMemory()
            with memory:
                self._logits = model.run(self._inputs, bucket, _PieceMaker(self, memory, cut))

        self._recordings = handle.graphs.capture(work)
        self._kept = list(memory.kept.values())
        """What pieces read that earlier ones made: not to be taken for anything else."""

    # -- recording -------------------------------------------------------------------------

    def end_piece(self, layer: int, hidden: Tensor, index: Tensor) -> None:
        """The last of a piece: groups the routing and brings the choice to the host."""
        self._hidden[layer] = hidden
        self._rows[layer] = group_by_expert(index, self._experts.num_experts)
        self.places.choices[layer].copy_(index, non_blocking=True)

    def begin_piece(self, layer: int, weights: Tensor) -> Tensor:
        """The first of a piece: the layer's experts. Returns `[T, C]`."""
        from mira_kernels.triton_experts import combine

        places, hidden = self.places, self._hidden[layer]
        misses = places.misses[layer : layer + 1]
        self._experts.record_layer(layer, hidden, self._rows[layer], places.outputs, misses)
        places.host_misses[layer : layer + 1].copy_(misses, non_blocking=True)
        return combine(places.outputs, weights).to(hidden.dtype)

    # -- a pass ----------------------------------------------------------------------------

    def run(self, tokens: Sequence[int], num_cached: int) -> Tensor:
        """Runs `tokens` behind `num_cached` others. Returns logits `[T, V]` on the device.

        Raises:
            CancelledError: The cancel flag was raised.
            StoreError: A record could not be read.
        """
        self._inputs.fill(tokens, num_cached)
        self._launches.clear()
        self.launch(0)
        for layer in range(self._num_layers):
            self._launch_ahead(layer)
            self._settle(layer)
        return self._logits

    def launch(self, piece: int) -> None:
        """Launches a piece. What was launched of later ones is void."""
        self._recordings[piece].replay()
        self._experts.transfer.release_all()
        self._queues.record(self._reached[piece], Lane.COMPUTE)
        self._num_launched = piece + 1

    def compute(self, layer: int, experts: Sequence[tuple[ExpertId, int]]) -> None:
        """Computes some of a layer's experts where its piece will find what it cannot compute."""
        self._experts.compute(experts, self._hidden[layer], self._rows[layer], self.places.outputs)

    def host_demand(
        self, layer: int, flat_experts: Sequence[int], experts: Sequence[ExpertId]
    ) -> HostDemand:
        """Describes a layer's experts that the processor computes."""
        return HostDemand(
            hidden=self._hidden[layer],
            flat_experts=flat_experts,
            outputs=self.places.outputs,
            experts=experts,
        )

    def _launch_ahead(self, layer: int) -> None:
        """Launches pieces whose choice is not known, as far as that promises to be right.

        Args:
            layer: The one that the driver is told of next.
        """
        executor = self._executor
        drafted = executor.drafted if executor.phase is Phase.VERIFY else ()
        while self._num_launched <= self._num_layers:
            unknown = self._num_launched - 1
            launch = self._ahead.choose(
                unknown,
                num_ahead=unknown - layer,
                num_resident=self._experts.num_placed(unknown),
                num_experts=self._experts.num_experts,
                expected=drafted[unknown] if drafted else (),
                is_ready=executor.driver.residency.is_ready,
            )
            if launch is Launch.WAIT:
                return
            self._launches[unknown] = launch
            self.launch(self._num_launched)
            self.num_ahead += 1

    def _settle(self, layer: int) -> None:
        """Tells the driver of a layer, and has its piece right, whenever it was launched."""
        is_ahead = self._num_launched > layer + 1
        # The count of this layer's misses comes with the piece that computes it.
        self._reached[layer + is_ahead].wait()
        is_right = is_ahead and not int(self.places.host_misses[layer])
        if is_ahead:
            self._ahead.observe(self._launches[layer], is_right=is_right)
            self.num_repaired += not is_right
        choice = self.places.choices[layer]
        work = PieceWork(self, layer, choice.reshape(-1).tolist(), is_done=is_right)
        self._executor.settle_layer(self._modules[layer], layer, work, self._hidden[layer], choice)
        if not work.is_done:
            self.launch(layer + 1)


class PieceWork:
    """One layer's experts as the executor sees them.

    Where all are in slots, the piece computes them, launched before any of them can leave. Else
    they are computed one by one as they land, as in a pass module by module, and the piece
    takes from there what has left its slot again.

    Args:
        step: The pass.
        layer: MoE layer.
        flat_experts: Chosen experts of all tokens.
        is_done: Whether the piece was launched before and missed nothing.
    """

    def __init__(
        self, step: TargetStep, layer: int, flat_experts: Sequence[int], *, is_done: bool
    ) -> None:
        self._step = step
        self._layer = layer
        self._flat_experts = flat_experts
        self._demand = demand_of(flat_experts)
        self._is_begun = False
        self.is_done = is_done

    def demand(self) -> list[tuple[int, int]]:
        """Returns experts and how many tokens chose each, ascending by expert."""
        return self._demand

    def compute(self, experts: Sequence[tuple[ExpertId, int]]) -> None:
        """Launches what is in slots; returns before it is done."""
        if self.is_done or not experts:
            return
        if not self._is_begun and len(experts) == len(self._demand):
            self._step.launch(self._layer + 1)
            self.is_done = True
            return
        self._is_begun = True
        self._step.compute(self._layer, experts)

    def host_demand(self, experts: Sequence[ExpertId]) -> HostDemand:
        """Describes what the processor is to compute where the piece finds none."""
        return self._step.host_demand(self._layer, self._flat_experts, experts)


class _PieceMaker:
    """The experts function while recording: ends a piece and begins the next."""

    def __init__(self, step: TargetStep, memory: BoundaryMemory, cut: Cut) -> None:
        self._step = step
        self._memory = memory
        self._cut = cut

    def __call__(self, layer: int, hidden: Tensor, index: Tensor, weights: Tensor) -> Tensor:
        self._memory.leave_out(*self._step.places.take(hidden, index))
        self._step.end_piece(layer, hidden.contiguous(), index)
        self._memory.cut()
        self._cut()
        return self._step.begin_piece(layer, weights)


class _Places:
    """Fixed memory of a step: outputs by assignment, choices and counts of misses.

    Args:
        num_layers: MoE layers.
        handle: The card.
    """

    def __init__(self, num_layers: int, handle: GpuHandle) -> None:
        self._num_layers = num_layers
        self._handle = handle
        self.misses = torch.zeros(num_layers, dtype=torch.int32, device=handle.device)
        self.host_misses = handle.allocate(4 * num_layers).view(torch.int32)
        self.choices: Tensor
        """`[L, T, k]` int64 on the host."""
        self.outputs: Tensor
        """`[T * k, C]` of the layer at hand, by assignment. Not cleared between pieces."""
        self._is_taken = False

    def take(self, hidden: Tensor, index: Tensor) -> tuple[Tensor, ...]:
        """Takes the memory, when the shapes are known for the first time. Returns it."""
        if not self._is_taken:
            self._is_taken = True
            num_choices = self._num_layers * index.numel()
            host = self._handle.allocate(8 * num_choices).view(torch.int64)
            self.choices = host.view(self._num_layers, *index.shape)
            self.outputs = hidden.new_zeros(index.numel(), hidden.shape[-1])
        return self.choices, self.outputs
