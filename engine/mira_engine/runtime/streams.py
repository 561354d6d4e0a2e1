"""What a device with queues can do: the few operations that overlapped copies are made of.

`Queues` is what `CudaTransfer` sees. The real one is torch's CUDA streams and events; tests
put one in its place that checks the order of every access. All calls come from the engine
thread and return at once, `Event.wait` excepted.
"""

from __future__ import annotations

import enum
from typing import Any, Protocol

import torch
from torch import Tensor


class Lane(enum.Enum):
    """A queue of the device: what is put into one runs in order."""

    COMPUTE = "compute"
    DEMAND = "demand"
    """Copies that somebody waits for; of high priority."""
    AHEAD = "ahead"
    """Copies for later."""


class Event(Protocol):
    """A point in a lane's work."""

    def is_reached(self) -> bool:
        """Whether the work up to the point is done."""

    def wait(self) -> None:
        """Holds the host until it is."""


class Queues(Protocol):
    """Lanes of one device."""

    def make_event(self) -> Event:
        """Makes an event that marks nothing yet."""

    def record(self, event: Event, lane: Lane) -> None:
        """Makes the event mark all that was put into the lane so far."""

    def wait_for(self, event: Event, lane: Lane) -> None:
        """Lets what is put into the lane from now on begin after the event."""

    def copy(self, target: Tensor, source: Tensor, lane: Lane) -> None:
        """Copies host memory to the device, or back, in the lane."""


class CudaEvent:
    """A CUDA event without timing.

    Args:
        event: torch's own.
    """

    def __init__(self, event: Any) -> None:
        self.event = event

    def is_reached(self) -> bool:
        """Whether the work up to the point is done."""
        return bool(self.event.query())

    def wait(self) -> None:
        """Holds the host until it is."""
        self.event.synchronize()


class CudaQueues:
    """Streams of one card: torch's current one to compute, two of their own to copy.

    Args:
        device: The card.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        # A lower number is a higher priority.
        self._copying = {
            Lane.DEMAND: torch.cuda.Stream(device, priority=-1),
            Lane.AHEAD: torch.cuda.Stream(device, priority=0),
        }

    def _stream(self, lane: Lane) -> Any:
        return self._copying.get(lane) or torch.cuda.current_stream(self._device)

    def make_event(self) -> CudaEvent:
        """Makes an event that marks nothing yet."""
        return CudaEvent(torch.cuda.Event())

    def record(self, event: CudaEvent, lane: Lane) -> None:
        """Makes the event mark all that was put into the lane so far."""
        event.event.record(self._stream(lane))

    def wait_for(self, event: CudaEvent, lane: Lane) -> None:
        """Lets what is put into the lane from now on begin after the event."""
        self._stream(lane).wait_event(event.event)

    def copy(self, target: Tensor, source: Tensor, lane: Lane) -> None:
        """Copies to the device or back, in the lane; overlaps where the host's is pinned."""
        with torch.cuda.stream(self._stream(lane)):
            target.copy_(source, non_blocking=True)
