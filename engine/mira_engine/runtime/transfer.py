"""The link: how records get from below into device slots.

`Transfer` is what the executor sees; `mira_engine.runtime.disk` and `native_disk` implement
it for the machine without a GPU. Requests are served by reader threads, demand before prefetch;
completions are collected by the one engine thread through `poll` and `wait_any`, so the
residency table has a single writer.

Source: Specter, Overlap-Oriented Parallelism Optimizer (transfers apart from compute,
explicit readiness).
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from ..errors import MiraError
from ..types import ExpertId


@dataclass(frozen=True, slots=True)
class Completion:
    """The end of one expert's move: its records are in the slot, or `error` says why not."""

    expert: ExpertId
    slot: int
    num_bytes: int
    seconds: float
    error: MiraError | None = None


class Transfer(Protocol):
    """Moves experts' records into slots, asynchronously."""

    record_bytes: int
    """Bytes moved for one expert."""

    def submit(self, expert: ExpertId, slot: int, *, is_demand: bool) -> None:
        """Queues a move. Demand is served before everything that is not."""

    def promote(self, expert: ExpertId) -> None:
        """Makes a prefetch a demand: nothing overtakes it any more."""

    def poll(self) -> list[Completion]:
        """Returns what has landed since the last call, without waiting."""

    def wait_any(self, timeout_s: float) -> list[Completion]:
        """Waits until something lands; an empty list after `timeout_s`."""

    def close(self) -> None:
        """Stops the threads; queued moves are dropped."""


class LinkThrottle:
    """Holds a link to a rate and adds latency to each record, for emulation.

    Records pass one after another: each occupies the link for `num_bytes / bytes_per_s`
    and lands `latency_s` later. Thread-safe; the waiting happens in the reader thread.

    Args:
        bytes_per_s: Rate, `None` for unlimited; may be set later.
        latency_s: Seconds from the end of a record's transfer until it is ready.
        clock: Monotonic seconds.
        sleep: Waits that many seconds.
    """

    def __init__(
        self,
        *,
        bytes_per_s: float | None,
        latency_s: float,
        clock: Callable[[], float] = time.perf_counter,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.bytes_per_s = bytes_per_s
        self.latency_s = latency_s
        self._clock = clock
        self._sleep = sleep
        self._lock = threading.Lock()
        self._free_at = 0.0

    def hold(self, num_bytes: int, started_at: float, *, is_end: bool = True) -> None:
        """Returns once so many bytes, begun at `started_at`, would have landed.

        Args:
            num_bytes: Of a record, or of a piece of one.
            started_at: Seconds of the clock.
            is_end: Whether the record ends with them: its latency comes then.
        """
        with self._lock:
            start = max(self._free_at, started_at)
            duration = num_bytes / self.bytes_per_s if self.bytes_per_s else 0.0
            self._free_at = start + duration
            ready_at = self._free_at + (self.latency_s if is_end else 0.0)
        remaining = ready_at - self._clock()
        if remaining > 0:
            self._sleep(remaining)
