"""The CPU machine's link: reader threads move records from the disk into RAM slots.

Each reader takes one expert at a time, demand first, and reads its planes with
`os.preadv` straight into the slot (which releases the interpreter lock). Files are
opened with O_DIRECT where the file system allows it; where not, reads go through the
page cache and the caller is told (`is_direct`).

Shut-down order: `close` marks the queue closed, wakes the readers, joins them, then
closes the files.
"""

from __future__ import annotations

import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from ..errors import StoreError
from ..types import ExpertId, Plane
from .transfer import Completion, LinkThrottle

_CLOSE_TIMEOUT_S = 10.0

RecordLocation = tuple[Path, int, int]
"""File, offset and length of one record, in bytes."""


def open_for_records(path: Path, *, is_direct: bool) -> tuple[int, bool]:
    """Opens a store file for reading.

    Returns:
        The descriptor, and whether O_DIRECT is in force.
    """
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0)
    direct = getattr(os, "O_DIRECT", 0)
    if is_direct and direct:
        try:
            return os.open(path, flags | direct), True
        except OSError:
            pass  # The file system refuses O_DIRECT; the caller sees it in the second value.
    return os.open(path, flags), False


def read_exactly(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fills `buffer` from `offset`.

    Raises:
        StoreError: The file ends before, or cannot be read.
    """
    done = 0
    while done < len(buffer):
        try:
            got = os.preadv(fd, [buffer[done:]], offset + done)
        except OSError as error:
            raise StoreError(
                f"Reading {path.name} failed: {error.strerror}.",
                hint="Check the disk, or remove the model and prepare it again.",
            ) from error
        if got == 0:
            raise StoreError(
                f"{path.name} ends before byte {offset + len(buffer)}.",
                hint="The store is damaged: remove the model and prepare it again.",
            )
        done += got


class DiskTransfer:
    """Reads experts' records into slots with a pool of threads.

    Args:
        locate: Where an expert's record of a plane is.
        planes: Planes that a slot holds, in the order of its buffers.
        slot_buffers: For each slot, one writable buffer a plane, aligned to 4096 bytes.
        num_threads: Reader threads.
        is_direct: Whether to ask for O_DIRECT.
        throttle: Emulated link, `None` for the disk's own speed.
    """

    def __init__(
        self,
        *,
        locate: Callable[[ExpertId, Plane], RecordLocation],
        planes: Sequence[Plane],
        slot_buffers: Sequence[Mapping[Plane, memoryview]],
        num_threads: int,
        is_direct: bool,
        throttle: LinkThrottle | None = None,
    ) -> None:
        self._locate = locate
        self._planes = tuple(planes)
        self._buffers = slot_buffers
        self._throttle = throttle
        self._wants_direct = is_direct
        self._fds: dict[Path, int] = {}
        self.is_direct = is_direct and hasattr(os, "O_DIRECT")
        self.record_bytes = sum(len(b) for b in slot_buffers[0].values())
        self._lock = threading.Condition()
        self._demand: OrderedDict[ExpertId, int] = OrderedDict()
        self._ahead: OrderedDict[ExpertId, int] = OrderedDict()
        self._is_closed = False
        self._landed: queue.SimpleQueue[Completion] = queue.SimpleQueue()
        self._threads = [
            threading.Thread(target=self._serve, name=f"mira-reader-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    # -- engine thread -------------------------------------------------------------------

    def submit(self, expert: ExpertId, slot: int, *, is_demand: bool) -> None:
        """Queues the expert's planes to be read into the slot."""
        with self._lock:
            (self._demand if is_demand else self._ahead)[expert] = slot
            self._lock.notify()

    def promote(self, expert: ExpertId) -> None:
        """Moves a queued prefetch to the end of the demand queue."""
        with self._lock:
            slot = self._ahead.pop(expert, None)
            if slot is not None:
                self._demand[expert] = slot

    def poll(self) -> list[Completion]:
        """Returns what has landed, without waiting."""
        landed = []
        while True:
            try:
                landed.append(self._landed.get_nowait())
            except queue.Empty:
                return landed

    def wait_any(self, timeout_s: float) -> list[Completion]:
        """Waits for the next record to land, at most `timeout_s`."""
        try:
            first = self._landed.get(timeout=timeout_s)
        except queue.Empty:
            return []
        return [first, *self.poll()]

    def close(self) -> None:
        """Stops the readers and closes the files."""
        with self._lock:
            self._is_closed = True
            self._demand.clear()
            self._ahead.clear()
            self._lock.notify_all()
        for thread in self._threads:
            thread.join(timeout=_CLOSE_TIMEOUT_S)
        for fd in self._fds.values():
            os.close(fd)
        self._fds.clear()

    # -- reader threads ------------------------------------------------------------------

    def _serve(self) -> None:
        while True:
            with self._lock:
                while not (self._demand or self._ahead or self._is_closed):
                    self._lock.wait()
                if self._is_closed:
                    return
                pending = self._demand or self._ahead
                expert, slot = pending.popitem(last=False)
            started = time.perf_counter()
            failure = None
            try:
                self._read(expert, slot)
            except StoreError as error:
                failure = error
            if self._throttle is not None:
                self._throttle.hold(self.record_bytes, started)
            elapsed = time.perf_counter() - started
            self._landed.put(Completion(expert, slot, self.record_bytes, elapsed, failure))

    def _read(self, expert: ExpertId, slot: int) -> None:
        for plane in self._planes:
            path, offset, num_bytes = self._locate(expert, plane)
            buffer = self._buffers[slot][plane]
            read_exactly(self._fd(path), buffer[:num_bytes], offset, path)

    def _fd(self, path: Path) -> int:
        fd = self._fds.get(path)
        if fd is not None:
            return fd
        with self._lock:
            fd = self._fds.get(path)
            if fd is None:
                try:
                    fd, is_direct = open_for_records(path, is_direct=self._wants_direct)
                except OSError as error:
                    raise StoreError(
                        f"{path.name} cannot be opened: {error.strerror}.",
                        hint="Remove the model and prepare it again.",
                    ) from error
                self.is_direct = self.is_direct and is_direct
                self._fds[path] = fd
        return fd
