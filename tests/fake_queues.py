"""Queues of a device that does not exist, with a check of every access.

Each lane and the host has a vector clock. Putting work into a lane takes what the host knows
along; an event carries a lane's clock to whoever waits for it. Two accesses to a slot, one of
them a write, have to be ordered by these clocks: then they are ordered on every device and in
every schedule. Source: happens-before races, as in Lamport 1978.
"""

from __future__ import annotations

from collections.abc import Callable

from mira_engine.runtime.streams import Lane
from torch import Tensor

HOST = "host"
Clock = dict[object, int]


class RaceError(AssertionError):
    """Two accesses that nothing orders."""


class FakeEvent:
    """A point in a lane, reached when the schedule says so."""

    def __init__(self, queues: FakeQueues) -> None:
        self._queues = queues
        self.clock: Clock = {}
        self.is_due = True

    def is_reached(self) -> bool:
        """Asks the schedule once more."""
        self.is_due = self.is_due or self._queues.decide()
        if self.is_due:
            self._queues.join(HOST, self.clock)
        return self.is_due

    def wait(self) -> None:
        """Waits: afterwards the host knows all that came before."""
        self.is_due = True
        self._queues.join(HOST, self.clock)


class FakeQueues:
    """Lanes whose work is only ordered, never timed.

    Args:
        decide: Says at each look whether an event has been reached by now.
    """

    def __init__(self, decide: Callable[[], bool] = lambda: True) -> None:
        self.decide = decide
        self._clocks: dict[object, Clock] = {name: {name: 0} for name in [*Lane, HOST]}
        self._writes: dict[int, tuple[object, int]] = {}
        self._reads: dict[int, dict[object, int]] = {}
        self.copies: list[tuple[int, Lane]] = []
        """Address and lane of each copy, in the order in which they were begun."""

    def join(self, name: object, clock: Clock) -> None:
        """`name` comes after all that the clock knows."""
        mine = self._clocks[name]
        for other, tick in clock.items():
            mine[other] = max(mine.get(other, 0), tick)

    def _put(self, lane: object) -> int:
        """Work is put into a lane: after what the host knows, and one tick later."""
        self.join(lane, self._clocks[HOST])
        clock = self._clocks[lane]
        clock[lane] = clock.get(lane, 0) + 1
        return clock[lane]

    def make_event(self) -> FakeEvent:
        """Makes an event that marks nothing yet."""
        return FakeEvent(self)

    def record(self, event: FakeEvent, lane: Lane) -> None:
        """Marks all that is in the lane."""
        self._put(lane)
        event.clock, event.is_due = dict(self._clocks[lane]), False

    def wait_for(self, event: FakeEvent, lane: Lane) -> None:
        """Orders the lane behind the event."""
        self.join(lane, event.clock)

    def copy(self, target: Tensor, source: Tensor, lane: Lane) -> None:
        """Copies at once, and checks that nothing can be in the way."""
        tick = self._put(lane)
        address = target.data_ptr()
        self._check(address, lane, self._reads.pop(address, {}), "written while it may be read")
        last = self._writes.get(address)
        self._check(address, lane, dict([last]) if last else {}, "written twice at a time")
        self._writes[address] = lane, tick
        self.copies.append((address, lane))
        target.copy_(source)

    def read(self, target: Tensor, lane: Lane = Lane.COMPUTE) -> None:
        """A kernel reads device memory."""
        tick = self._put(lane)
        address = target.data_ptr()
        last = self._writes.get(address)
        self._check(address, lane, dict([last]) if last else {}, "read before its copy ends")
        self._reads.setdefault(address, {})[lane] = tick

    def _check(self, address: int, lane: object, before: dict[object, int], what: str) -> None:
        known = self._clocks[lane]
        for other, tick in before.items():
            if other is not lane and known.get(other, 0) < tick:
                raise RaceError(f"memory at {address:#x} is {what}")
