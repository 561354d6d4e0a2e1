"""Misses beside a card that the processor computes, from their records in host memory.

Owns a thread, and the staging memory between it and the card. The engine thread brings a
layer's tokens to the host, hands them to the thread, goes on to launch and to collect what
lands, and brings the results to their rows of the layer's outputs; all that the device does
is put into its lanes by the engine thread, in order. Which experts, `policy.host_misses` says.

Order of a shutdown: wait for what is being computed, end the thread.

Source: Fiddler (arXiv 2402.07033), activations go to the processor where a record would
take longer to come.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ..checkpoint.formats import ExpertFormat
from ..errors import GenerationError, check_cancelled
from ..policy.host_misses import HostSetup
from ..types import ExpertId, ExpertShape, Plane
from .cuda_transfer import CudaTransfer
from .host_memory import Allocate, pageable
from .module_expert import expert_output
from .streams import Lane, Queues

_SETTLE_TIMEOUT_S = 60.0
"""Longest wait for what an abandoned layer has begun: one layer's misses."""

_PROBE_EXPERTS = 4
_PROBE_TOKENS = 8
_PROBE_ROUNDS = 2
"""Of each figure the better one counts: what else ran meanwhile only makes it worse."""

_SLOW_S = 0.05
"""An expert that takes longer is measured once: the host will hardly be asked."""

Held = Callable[[ExpertId], Mapping[Plane, Tensor] | None]


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class HostDemand:
    """What a layer's pass wants of the host.

    Attributes:
        hidden: `[T, C]` on the card.
        flat_experts: The expert of each row of `outputs`, `[T * k]`.
        outputs: `[T * k, C]` on the card; the rows of `experts` are written.
        experts: At least one, all of one layer.
    """

    hidden: Tensor
    flat_experts: Sequence[int]
    outputs: Tensor
    experts: Sequence[ExpertId]

    def rows(self) -> list[list[int]]:
        """Returns the rows of `outputs` that are each expert's."""
        places: dict[int, list[int]] = {expert.expert: [] for expert in self.experts}
        for row, expert in enumerate(self.flat_experts):
            if expert in places:
                places[expert].append(row)
        return list(places.values())


class HostExperts:
    """Computes experts of one model on the processor.

    Args:
        fmt: Format of the records in host memory.
        held: Gives an expert's records there.
        queues: The card's lanes.
        allocate: Takes host memory that the card copies to and from without waiting.
        device: The card.
    """

    def __init__(
        self,
        fmt: ExpertFormat,
        held: Held,
        queues: Queues,
        allocate: Allocate,
        device: torch.device,
    ) -> None:
        self._fmt, self._held = fmt, held
        self._queues, self._allocate, self._device = queues, allocate, device
        self._pool = ThreadPoolExecutor(max_workers=1, thread_name_prefix="mira-host")
        self._arrived = queues.make_event()
        self._staging: dict[str, Tensor] = {}
        self._task: Future[float] | None = None
        self._demand: HostDemand | None = None
        self._rows: list[list[int]] = []

    # -- engine thread -----------------------------------------------------------------------

    def begin(self, module: nn.Module, demand: HostDemand) -> None:
        """Brings the tokens to the host and begins to compute; returns before that is done."""
        assert self._task is None, "a layer was left without a word"
        hidden = self._room("hidden", demand.hidden.shape, demand.hidden.dtype)
        self._queues.copy(hidden, demand.hidden, Lane.COMPUTE)
        self._queues.record(self._arrived, Lane.COMPUTE)
        self._arrived.wait()  # All that the layer before put into the lane is done, too.
        self._demand, self._rows = demand, demand.rows()
        top_k = len(demand.flat_experts) // len(hidden)
        tokens = [[row // top_k for row in rows] for rows in self._rows]
        results = self._results(demand)
        self._task = self._pool.submit(
            self._compute, module, hidden, demand.experts, tokens, results
        )

    @property
    def is_busy(self) -> bool:
        """Whether something was begun and not placed yet."""
        return self._task is not None

    def wait(self, timeout_s: float) -> bool:
        """Waits until what was begun is computed, or failed. Returns whether it is."""
        assert self._task is not None
        return bool(wait([self._task], timeout=timeout_s).done)

    def place(self) -> float:
        """Brings the results to their rows of the layer's outputs, in the compute lane.

        Returns:
            Seconds that computing them took.

        Raises:
            Exception: Whatever ended the computation.
        """
        task, demand = self._task, self._demand
        assert task is not None
        assert demand is not None
        self._task = self._demand = None
        seconds = task.result(timeout=0)
        results = self._results(demand)
        places = self._room("places", (len(results),), torch.int64)
        places.copy_(torch.tensor([row for rows in self._rows for row in rows]))
        outputs, queues = demand.outputs, self._queues
        found = self._room("results", results.shape, results.dtype, self._device)
        found_places = self._room("places", places.shape, torch.int64, self._device)
        queues.copy(found, results, Lane.COMPUTE)
        queues.copy(found_places, places, Lane.COMPUTE)
        outputs.index_copy_(0, found_places, found)
        return seconds

    def close(self) -> None:
        """Waits for what is being computed, and ends the thread."""
        self._task = self._demand = None
        self._pool.shutdown(wait=True, cancel_futures=True)

    def time_s(self, module: nn.Module, experts: Sequence[ExpertId], hidden: Tensor) -> float:
        """Returns the seconds in which the thread computes each expert for all of the tokens.

        Args:
            module: The experts' own.
            experts: Held in host memory.
            hidden: `[T, C]` on the CPU.
        """
        self.settle()
        tokens = [list(range(len(hidden)))] * len(experts)
        results = hidden.new_empty(len(experts) * len(hidden), hidden.shape[1])
        task = self._pool.submit(self._compute, module, hidden, experts, tokens, results)
        return task.result(timeout=_SETTLE_TIMEOUT_S)

    def settle(self) -> None:
        """Waits for what a layer began that was broken off, and forgets it.

        Raises:
            GenerationError: It does not end.
        """
        if self._task is not None and not self.wait(_SETTLE_TIMEOUT_S):
            raise GenerationError(
                "The processor does not come to an end with the experts of a layer.",
                hint="Try again with --deterministic, which leaves all experts to the card.",
            )
        self._task = self._demand = None

    def _results(self, demand: HostDemand) -> Tensor:
        """The staged results, `[rows, C]` on the host."""
        num_rows, width = sum(map(len, self._rows)), demand.hidden.shape[1]
        return self._room("results", (num_rows, width), demand.hidden.dtype)

    def _room(
        self,
        purpose: str,
        shape: Sequence[int],
        dtype: torch.dtype,
        device: torch.device | None = None,
    ) -> Tensor:
        """Returns memory that a purpose uses again and again: of the host, or of a device."""
        num_bytes = int(torch.Size(shape).numel()) * dtype.itemsize
        key = purpose if device is None else f"{purpose} there"
        buffer = self._staging.get(key)
        if buffer is None or buffer.numel() < num_bytes:
            with torch.inference_mode(False):
                buffer = self._take(num_bytes, device)
            self._staging[key] = buffer
        return buffer[:num_bytes].view(dtype).view(*shape)

    def _take(self, num_bytes: int, device: torch.device | None) -> Tensor:
        if device is not None:
            return torch.empty(num_bytes, dtype=torch.uint8, device=device)
        try:
            return self._allocate(num_bytes)
        except RuntimeError:
            return pageable(num_bytes)

    # -- the thread --------------------------------------------------------------------------

    def _compute(
        self,
        module: nn.Module,
        hidden: Tensor,
        experts: Sequence[ExpertId],
        tokens: Sequence[Sequence[int]],
        results: Tensor,
    ) -> float:
        """Computes experts for their tokens into `results`, one behind the other."""
        started = time.perf_counter()
        at = 0
        with torch.inference_mode():
            for expert, chosen in zip(experts, tokens, strict=True):
                records = self._held(expert)
                assert records is not None
                found = expert_output(module, hidden[chosen], self._fmt.bind(records))
                results[at : at + len(chosen)] = found
                at += len(chosen)
        return time.perf_counter() - started


def measure_host(
    host: HostExperts,
    transfer: CudaTransfer,
    module: nn.Module,
    shape: ExpertShape,
    dtype: torch.dtype,
    held: Sequence[ExpertId],
    *,
    is_cancelled: Callable[[], bool],
    clock: Callable[[], float] = time.perf_counter,
) -> HostSetup | None:
    """Measures what a miss costs on the processor, and what on the link, by a few real ones.

    Before anybody uses the slots, whose contents are void afterwards.

    Args:
        host: Computes.
        transfer: The link; an emulated rate is taken at its word.
        module: The experts of some layer.
        shape: Of every expert.
        dtype: Of the arithmetic.
        held: Experts that are whole in host memory, layer by layer.
        is_cancelled: Asked between records.
        clock: Monotonic seconds.

    Returns:
        The rates; `None` where nothing is held.

    Raises:
        CancelledError: `is_cancelled` said so.
    """
    if not held:
        return None
    # Far from each other, so that no cache of the processor holds what comes next.
    some = list(held[:: max(1, len(held) // _PROBE_EXPERTS)][:_PROBE_EXPERTS])
    num_entries = _PROBE_TOKENS * shape.hidden_size
    hidden = torch.linspace(-1.0, 1.0, num_entries).view(_PROBE_TOKENS, -1).to(dtype)
    one_s, many_s = _expert_s(host, module, some, hidden, is_cancelled)
    return HostSetup(
        expert_s=one_s,
        token_s=max(0.0, many_s - one_s) / (_PROBE_TOKENS - 1),
        record_s=_record_s(transfer, some, is_cancelled, clock),
        num_held=len(held),
    )


def _expert_s(
    host: HostExperts,
    module: nn.Module,
    experts: Sequence[ExpertId],
    hidden: Tensor,
    is_cancelled: Callable[[], bool],
) -> tuple[float, float]:
    """Seconds of the processor for an expert and one token, and for all tokens."""
    first_s = host.time_s(module, experts[:1], hidden)  # It takes the memory of the products, too.
    if first_s > _SLOW_S:
        return first_s, first_s
    one_s = many_s = float("inf")
    for _ in range(_PROBE_ROUNDS):
        check_cancelled(is_cancelled)
        one_s = min(one_s, host.time_s(module, experts, hidden[:1]) / len(experts))
        many_s = min(many_s, host.time_s(module, experts, hidden) / len(experts))
    return one_s, many_s


def _record_s(
    transfer: CudaTransfer,
    experts: Sequence[ExpertId],
    is_cancelled: Callable[[], bool],
    clock: Callable[[], float],
) -> float:
    """Seconds of the link for a record while others are behind it."""
    if transfer.bytes_per_s:
        return transfer.record_bytes / transfer.bytes_per_s
    experts = experts[: transfer.num_slots]
    best = float("inf")
    for _ in range(_PROBE_ROUNDS):
        started = clock()
        for slot, expert in enumerate(experts):
            transfer.submit(expert, slot, is_demand=True)
        num_left = len(experts)
        while num_left:
            check_cancelled(is_cancelled)
            num_left -= len(transfer.wait_any(1.0))
        best = min(best, (clock() - started) / len(experts))
    return best
