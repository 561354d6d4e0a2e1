"""The GPU's link: records from host memory into slots on copy streams of their own.

Copies are queued by the host a few at a time, demand first, so that a record somebody waits
for is behind no more than what is under way. Two events keep the order: before a slot is
written again, the copy waits for the last kernel that read it; before a kernel reads a slot
whose copy the host has not seen end, the compute stream waits for that copy. Events and
queues are made once; nothing is allocated on the token path.

Runs in the engine thread alone; readers of `RingSource` have threads of their own.

Order of a shutdown: drop what is queued, wait for the copies under way, close the source.

Source: Specter, Overlap-Oriented Parallelism Optimizer (transfer streams, explicit readiness
and reuse events); Mira IV-B (pinned host store, asynchronous copies).
"""

from __future__ import annotations

import time
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from ..errors import MiraError
from ..types import ExpertId, Plane
from .streams import Event, Lane, Queues
from .transfer import Completion

MAX_UNDER_WAY = 3
"""Copies in a lane at a time: the next begins without the host, and a demand waits for few."""

_NAP_S = 50e-6
"""Between two looks at a source that is still being read."""


class HostSource(Protocol):
    """Where records are before they are copied."""

    def begin(self, expert: ExpertId, *, is_demand: bool) -> None:
        """Asks for an expert's records; they may have to come from the disk."""

    def hurry(self, expert: ExpertId) -> None:
        """Somebody waits for an expert that was asked for."""

    def take(self, expert: ExpertId) -> Mapping[Plane, Tensor] | None:
        """Returns the records in host memory, `None` while they are not there.

        Raises:
            MiraError: They cannot be read.
        """

    def give_back(self, expert: ExpertId) -> None:
        """The copy is over: the memory may be used for others."""

    def close(self) -> None:
        """Stops reading."""


@dataclass(slots=True, eq=False)
class _Copy:
    """One expert's way into a slot."""

    expert: ExpertId
    slot: int
    lane: Lane
    ready_at: float = 0.0
    started_at: float = 0.0


class CudaTransfer:
    """Copies experts' records into slots.

    Args:
        queues: The device's.
        source: Where the records come from.
        slots: For each slot the device memory of its planes.
        bytes_per_s: Rate of an emulated link, `None` for the link's own.
        clock: Monotonic seconds.
        sleep: Waits that many seconds.
    """

    def __init__(
        self,
        queues: Queues,
        source: HostSource,
        slots: Sequence[Mapping[Plane, Tensor]],
        *,
        bytes_per_s: float | None = None,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._queues = queues
        self._source = source
        self._slots = slots
        self._clock = clock
        self._sleep = sleep
        self.bytes_per_s = bytes_per_s
        self.is_direct = True
        """Nothing here passes through a page cache of its own."""
        self.record_bytes = sum(part.numel() for part in slots[0].values())
        self._ready: list[Event] = [queues.make_event() for _ in slots]
        self._reuse: list[Event] = [queues.make_event() for _ in slots]
        self._is_read: list[bool] = [False] * len(slots)
        self._reuse_any = queues.make_event()
        self._is_any_read = False
        self._unseen: set[int] = set()
        """Slots whose copy the host has not seen end."""
        self._demand: OrderedDict[ExpertId, _Copy] = OrderedDict()
        self._ahead: OrderedDict[ExpertId, _Copy] = OrderedDict()
        self._under_way: dict[Lane, deque[_Copy]] = {Lane.DEMAND: deque(), Lane.AHEAD: deque()}
        self._failed: list[Completion] = []
        self._link_free_at = 0.0

    @property
    def num_slots(self) -> int:
        """Slots that can be filled."""
        return len(self._slots)

    # -- the link --------------------------------------------------------------------------

    def submit(self, expert: ExpertId, slot: int, *, is_demand: bool) -> None:
        """Queues a copy. Demand is served before everything that has not begun."""
        lane = Lane.DEMAND if is_demand else Lane.AHEAD
        queued = self._demand if is_demand else self._ahead
        queued[expert] = _Copy(expert, slot, lane)
        self._source.begin(expert, is_demand=is_demand)
        self._fill_lanes()

    def promote(self, expert: ExpertId) -> None:
        """Makes a prefetch a demand; one under way is as fast as it can be."""
        copy = self._ahead.pop(expert, None)
        if copy is not None:
            copy.lane = Lane.DEMAND
            self._demand[expert] = copy
            self._source.hurry(expert)
            self._fill_lanes()

    def poll(self) -> list[Completion]:
        """Returns what has landed since the last call, without waiting."""
        landed, self._failed = self._failed, []
        now = self._clock()
        for copies in self._under_way.values():
            while copies and copies[0].ready_at <= now:
                copy = copies[0]
                if not self._ready[copy.slot].is_reached():
                    break
                copies.popleft()
                self._unseen.discard(copy.slot)
                self._source.give_back(copy.expert)
                seconds = now - copy.started_at
                landed.append(Completion(copy.expert, copy.slot, self.record_bytes, seconds))
        self._fill_lanes()
        return landed + self._take_failed()

    def wait_any(self, timeout_s: float) -> list[Completion]:
        """Waits until something lands; an empty list after `timeout_s`."""
        deadline = self._clock() + timeout_s
        while True:
            landed = self.poll()
            now = self._clock()
            if landed or now >= deadline:
                return landed
            first = next((c[0] for c in self._under_way.values() if c), None)
            if first is not None and first.ready_at <= now:
                self._ready[first.slot].wait()
            elif first is not None:
                self._sleep(min(first.ready_at, deadline) - now)
            elif self._demand or self._ahead:
                self._sleep(_NAP_S)  # Its records come from the disk.
            else:
                return []

    def limit_rate(self, bytes_per_s: float | None) -> None:
        """Changes the emulated link's rate."""
        self.bytes_per_s = bytes_per_s

    def close(self) -> None:
        """Drops what is queued, waits for what is under way, and stops reading."""
        self._demand.clear()
        self._ahead.clear()
        for copies in self._under_way.values():
            while copies:
                self._ready[copies.popleft().slot].wait()
        self._source.close()

    # -- what computes ---------------------------------------------------------------------

    def acquire(self, slots: Iterable[int]) -> None:
        """Kernels that are launched from now on may read these slots."""
        for slot in slots:
            if slot in self._unseen:
                self._queues.wait_for(self._ready[slot], Lane.COMPUTE)

    def release(self, slots: Iterable[int]) -> None:
        """The kernels that read these slots have been launched."""
        for slot in slots:
            self._queues.record(self._reuse[slot], Lane.COMPUTE)
            self._is_read[slot] = True

    def release_all(self) -> None:
        """Kernels that read slots which only the device knows have been launched."""
        self._queues.record(self._reuse_any, Lane.COMPUTE)
        self._is_any_read = True

    # -- copying ---------------------------------------------------------------------------

    def _fill_lanes(self) -> None:
        """Begins what the lanes have room for; no prefetch while demands fill theirs.

        A demand that is still being read does not hold prefetches back: they may have the
        buffer that it waits for.
        """
        self._begin_some(self._demand, Lane.DEMAND)
        if len(self._under_way[Lane.DEMAND]) < MAX_UNDER_WAY:
            self._begin_some(self._ahead, Lane.AHEAD)

    def _begin_some(self, queued: OrderedDict[ExpertId, _Copy], lane: Lane) -> None:
        room = MAX_UNDER_WAY - len(self._under_way[lane])
        for expert in list(queued):
            if room <= 0:
                return
            try:
                records = self._source.take(expert)
            except MiraError as error:
                copy = queued.pop(expert)
                self._failed.append(Completion(expert, copy.slot, 0, 0.0, error))
                continue
            if records is not None:
                self._begin(queued.pop(expert), records)
                room -= 1

    def _begin(self, copy: _Copy, records: Mapping[Plane, Tensor]) -> None:
        slot, lane, queues = copy.slot, copy.lane, self._queues
        if self._is_read[slot]:
            queues.wait_for(self._reuse[slot], lane)
            self._is_read[slot] = False
        if self._is_any_read:
            queues.wait_for(self._reuse_any, lane)
        for plane, target in self._slots[slot].items():
            queues.copy(target, records[plane], lane)
        queues.record(self._ready[slot], lane)
        self._unseen.add(slot)
        copy.started_at = copy.ready_at = self._clock()
        if self.bytes_per_s:
            start = max(self._link_free_at, copy.started_at)
            self._link_free_at = copy.ready_at = start + self.record_bytes / self.bytes_per_s
        self._under_way[lane].append(copy)

    def _take_failed(self) -> list[Completion]:
        failed, self._failed = self._failed, []
        return failed
