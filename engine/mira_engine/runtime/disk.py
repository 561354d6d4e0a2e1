"""The CPU machine's link: reader threads move records from the disk into RAM slots.

Each reader takes one expert at a time, demand first, and reads its planes with
`os.preadv` straight into the slot (which releases the interpreter lock). Where the system
has no reads at a position (Windows), every reader opens the files for itself, and seeks.
A prefetch is read in pieces of about a millisecond and steps aside between two of them
while a demand is served, so that a wrong guess costs a miss almost nothing. Files are
opened with O_DIRECT where the file system allows it; where not, reads go through the page
cache and the caller is told (`is_direct`).

Shut-down order: `close` marks the queue closed, wakes the readers, joins them, then
closes the files.
"""

from __future__ import annotations

import io
import os
import queue
import threading
import time
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from ..errors import StoreError
from ..types import ExpertId, Plane
from .shortage import as_shortage
from .transfer import Completion, LinkThrottle

WHILE_READING = "while experts were read"

_CLOSE_TIMEOUT_S = 10.0

_PIECE_S = 0.75e-3
"""How long a piece of a prefetch takes: about as long as a demand waits for it."""

_MIN_PIECE_BYTES = 128 << 10
_PAGE_BYTES = 4096

RecordLocation = tuple[Path, int, int]
"""File, offset and length of one record, in bytes."""


def cannot_open(path: Path, reason: str) -> StoreError:
    """Returns the error for a store file that does not open."""
    return StoreError(
        f"{path.name} cannot be opened: {reason}.", hint="Remove the model and prepare it again."
    )


def cannot_read(path: Path, reason: str) -> StoreError:
    """Returns the error for a store file that the system fails to read."""
    return StoreError(
        f"Reading {path.name} failed: {reason}.",
        hint="Check the disk, or remove the model and prepare it again.",
    )


def ends_before(path: Path, stop_byte: int) -> StoreError:
    """Returns the error for a store file that is too short."""
    return StoreError(
        f"{path.name} ends before byte {stop_byte}.",
        hint="The store is damaged: remove the model and prepare it again.",
    )


def open_for_records(path: Path, *, is_direct: bool) -> tuple[int, bool]:
    """Opens a store file for reading.

    Returns:
        The descriptor, and whether O_DIRECT is in force.
    """
    # Windows would translate line ends, and end a file at a byte 26.
    flags = os.O_RDONLY | getattr(os, "O_CLOEXEC", 0) | getattr(os, "O_BINARY", 0)
    direct = getattr(os, "O_DIRECT", 0)
    if is_direct and direct:
        try:
            return os.open(path, flags | direct), True
        except OSError:
            pass  # The file system refuses O_DIRECT; the caller sees it in the second value.
    return os.open(path, flags), False


def has_direct_reads() -> bool:
    """Whether the system knows O_DIRECT; a file system may still refuse it."""
    return hasattr(os, "O_DIRECT")


def has_positioned_reads() -> bool:
    """Whether a read can say where, so that several threads may share a descriptor."""
    return hasattr(os, "preadv")


def _read_at(fd: int, buffer: memoryview, offset: int) -> int:
    """Reads once; the interpreter lock is free meanwhile. Returns the bytes read."""
    if has_positioned_reads():
        return os.preadv(fd, [buffer], offset)
    with io.FileIO(fd, closefd=False) as file:
        file.seek(offset)
        return file.readinto(buffer) or 0


def read_exactly(fd: int, buffer: memoryview, offset: int, path: Path) -> None:
    """Fills `buffer` from `offset`.

    Without `has_positioned_reads` the descriptor must be the calling thread's own.

    Raises:
        StoreError: The file ends before, or cannot be read.
    """
    done = 0
    while done < len(buffer):
        try:
            got = _read_at(fd, buffer[done:], offset + done)
        except OSError as error:
            raise cannot_read(path, error.strerror) from error
        if got == 0:
            raise ends_before(path, offset + len(buffer))
        done += got


@dataclass(slots=True)
class _Move:
    """One expert on its way into a slot.

    Attributes:
        is_urgent: Whether somebody waits for it.
        num_done: Bytes that are there, planes in order.
        seconds: Time that moving took so far, pauses left out.
    """

    expert: ExpertId
    slot: int
    is_urgent: bool
    num_done: int = 0
    seconds: float = 0.0


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
        self._fds: dict[tuple[Path, int], int] = {}
        self.is_direct = is_direct and has_direct_reads()
        self.record_bytes = sum(len(b) for b in slot_buffers[0].values())
        self._lock = threading.Condition()
        self._demand: OrderedDict[ExpertId, _Move] = OrderedDict()
        self._ahead: OrderedDict[ExpertId, _Move] = OrderedDict()
        self._under_way: dict[ExpertId, _Move] = {}
        self._num_urgent = 0
        """Of those under way, what somebody waits for."""
        self._bytes_per_s = 0.0
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
            queued = self._demand if is_demand else self._ahead
            queued[expert] = _Move(expert, slot, is_demand)
            self._lock.notify()

    def promote(self, expert: ExpertId) -> None:
        """Makes a prefetch a demand, whether it is queued, set aside or under way."""
        with self._lock:
            move = self._ahead.pop(expert, None)
            if move is not None:
                move.is_urgent = True
                self._demand[expert] = move
                self._lock.notify()
                return
            move = self._under_way.get(expert)
            if move is not None and not move.is_urgent:
                move.is_urgent = True
                self._num_urgent += 1

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

    def limit_rate(self, bytes_per_s: float | None) -> None:
        """Changes the emulated link's rate. There has to be such a link."""
        assert self._throttle is not None
        self._throttle.bytes_per_s = bytes_per_s

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
                while not self._is_closed and not self._may_begin:
                    self._lock.wait()
                if self._is_closed:
                    return
                _, move = (self._demand or self._ahead).popitem(last=False)
                self._under_way[move.expert] = move
                self._num_urgent += move.is_urgent
            failure, is_whole = None, True
            try:
                is_whole = self._read(move)
            except StoreError as error:
                failure = error
            except MemoryError as error:  # A reader that ended would be waited for for ever.
                failure = as_shortage(error, WHILE_READING)
            with self._lock:
                del self._under_way[move.expert]
                self._num_urgent -= move.is_urgent
                if not is_whole:  # It gave way to a demand, and is the first to go on.
                    queued = self._demand if move.is_urgent else self._ahead
                    queued[move.expert] = move
                    queued.move_to_end(move.expert, last=False)
                if self._ahead or self._demand:
                    self._lock.notify()
            if is_whole:
                self._landed.put(
                    Completion(move.expert, move.slot, self.record_bytes, move.seconds, failure)
                )

    @property
    def _may_begin(self) -> bool:
        return bool(self._demand) or (bool(self._ahead) and not self._num_urgent)

    def _read(self, move: _Move) -> bool:
        """Reads what is missing of a move. Returns whether it is whole now."""
        begin = 0
        for plane in self._planes:
            path, offset, num_bytes = self._locate(move.expert, plane)
            buffer = self._buffers[move.slot][plane]
            fd = self._fd(path)
            while move.num_done < begin + num_bytes:
                done = move.num_done - begin
                size = num_bytes - done if move.is_urgent else self._piece_bytes(num_bytes - done)
                started = time.perf_counter()
                read_exactly(fd, buffer[done : done + size], offset + done, path)
                move.num_done += size
                is_end = move.num_done >= self.record_bytes
                if self._throttle is not None:
                    self._throttle.hold(size, started, is_end=is_end)
                elapsed = time.perf_counter() - started
                move.seconds += elapsed
                self._note_rate(size, elapsed)
                if not move.is_urgent and not is_end and self._must_give_way(move):
                    return False
            begin += num_bytes
        return True

    def _must_give_way(self, move: _Move) -> bool:
        with self._lock:
            return not move.is_urgent and bool(self._demand or self._num_urgent)

    def _piece_bytes(self, num_left: int) -> int:
        """How much of a prefetch is read before it looks whether it is in the way."""
        size = int(self._bytes_per_s * _PIECE_S) // _PAGE_BYTES * _PAGE_BYTES
        size = max(size, _MIN_PIECE_BYTES)
        return num_left if num_left < 2 * size else size

    def _note_rate(self, num_bytes: int, seconds: float) -> None:
        rate = num_bytes / max(seconds, 1e-6)
        self._bytes_per_s += 0.2 * (rate - self._bytes_per_s) if self._bytes_per_s else rate

    def _fd(self, path: Path) -> int:
        key = (path, 0 if has_positioned_reads() else threading.get_ident())
        fd = self._fds.get(key)
        if fd is not None:
            return fd
        with self._lock:
            fd = self._fds.get(key)
            if fd is None:
                try:
                    fd, is_direct = open_for_records(path, is_direct=self._wants_direct)
                except OSError as error:
                    raise cannot_open(path, error.strerror) from error
                self.is_direct = self.is_direct and is_direct
                self._fds[key] = fd
        return fd
