"""The CPU machine's link with native readers: moving a record takes no interpreter.

Does what `mira_engine.runtime.disk` does, in threads of C++ (`mira_kernels.reader`): a
Python reader costs the one computing thread some 150 us a record, in which it waits for the
interpreter. Here the engine thread alone runs Python: a call to ask for a record, and one
for all that have landed.

Shut-down order: `close` drops what is queued, waits for the reads under way, ends the
threads and closes the files. A read that hangs keeps its memory for ever.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from mira_kernels.reader import Failure, Landed, ReaderLibrary, RecordReader, Span

from ..errors import StoreError
from ..types import ExpertId, Plane
from .disk import RecordLocation, cannot_open, cannot_read, ends_before
from .transfer import Completion, LinkThrottle


class NativeDiskTransfer:
    """Reads experts' records into slots with a pool of native threads.

    Args:
        library: The readers.
        locate: Where an expert's record of a plane is; asked once an expert.
        planes: Planes that a slot holds, in the order of its buffers.
        slot_buffers: For each slot, one writable buffer a plane, aligned to 4096 bytes.
        num_threads: Reader threads.
        is_direct: Whether to ask for O_DIRECT.
        throttle: Emulated link, `None` for the disk's own speed. Only its figures are used.
        on_piece: See `RecordReader`.

    Raises:
        OSError: The threads could not be started.
    """

    def __init__(
        self,
        library: ReaderLibrary,
        *,
        locate: Callable[[ExpertId, Plane], RecordLocation],
        planes: Sequence[Plane],
        slot_buffers: Sequence[Mapping[Plane, memoryview]],
        num_threads: int,
        is_direct: bool,
        throttle: LinkThrottle | None = None,
        on_piece: Callable[[int, bool], None] | None = None,
    ) -> None:
        self._locate = locate
        self._planes = tuple(planes)
        self._num_planes = len(self._planes)
        self._plane_bytes = [len(slot_buffers[0][plane]) for plane in self._planes]
        self._wants_direct = is_direct
        self.record_bytes = sum(self._plane_bytes)
        self._addresses = self._slot_addresses(slot_buffers)
        self._slots = [ctypes.addressof(slot) for slot in self._addresses]
        self._files: dict[Path, int] = {}
        self._paths: list[Path] = []
        self._experts: list[ExpertId] = []
        """By key."""
        self._spans: list[ctypes.Array[Span]] = []
        """By key; what `_known` points at."""
        self._known: dict[ExpertId, tuple[int, int]] = {}
        """Key, and address of the spans."""
        self._reader = RecordReader(
            library,
            num_threads=num_threads,
            bytes_per_s=throttle.bytes_per_s if throttle is not None else None,
            latency_s=throttle.latency_s if throttle is not None else 0.0,
            on_piece=on_piece,
            kept=slot_buffers,
        )

    def _slot_addresses(
        self, slot_buffers: Sequence[Mapping[Plane, memoryview]]
    ) -> list[ctypes.Array[ctypes.c_uint64]]:
        found = []
        for buffers in slot_buffers:
            parts = [buffers[plane] for plane in self._planes]
            if [len(part) for part in parts] != self._plane_bytes:
                raise ValueError("slots differ in size")
            at = [ctypes.addressof(ctypes.c_char.from_buffer(part)) for part in parts]
            found.append((ctypes.c_uint64 * self._num_planes)(*at))
        return found

    @property
    def is_direct(self) -> bool:
        """Whether all files so far were opened with O_DIRECT."""
        return self._wants_direct and hasattr(os, "O_DIRECT") and not self._reader.is_any_buffered

    def submit(self, expert: ExpertId, slot: int, *, is_demand: bool) -> None:
        """Queues the expert's planes to be read into the slot."""
        known = self._known.get(expert)
        key, spans_at = known if known is not None else self._learn(expert)
        self._reader.submit(key, slot, spans_at, self._slots[slot], self._num_planes, is_demand)

    def _learn(self, expert: ExpertId) -> tuple[int, int]:
        """Lays out where an expert's record is, for all its moves."""
        spans = (Span * self._num_planes)()
        for i, plane in enumerate(self._planes):
            path, offset, num_bytes = self._locate(expert, plane)
            if num_bytes != self._plane_bytes[i]:  # It would be written beside its slot.
                raise ValueError(f"a record of {num_bytes} bytes for {self._plane_bytes[i]}")
            spans[i] = Span(self._file(path), offset, num_bytes)
        found = len(self._experts), ctypes.addressof(spans)
        self._experts.append(expert)
        self._spans.append(spans)
        self._known[expert] = found
        return found

    def _file(self, path: Path) -> int:
        file = self._files.get(path)
        if file is None:
            file = self._reader.add_file(path, is_direct=self._wants_direct)
            self._files[path] = file
            self._paths.append(path)
        return file

    def promote(self, expert: ExpertId) -> None:
        """Makes a prefetch a demand, whether it is queued, set aside or under way."""
        known = self._known.get(expert)
        if known is not None:
            self._reader.promote(known[0])

    def poll(self) -> list[Completion]:
        """Returns what has landed, without waiting."""
        landed = self._reader.poll()
        if not landed:
            return []
        return self._completions(landed)

    def wait_any(self, timeout_s: float) -> list[Completion]:
        """Waits for the next record to land, at most `timeout_s`."""
        return self._completions(self._reader.wait(timeout_s))

    def _completions(self, landed: Sequence[Landed]) -> list[Completion]:
        found: list[Completion] = []
        while landed:
            for item in landed:
                error = self._error(item) if item.failure else None
                expert = self._experts[item.key]
                found.append(Completion(expert, item.slot, self.record_bytes, item.seconds, error))
            landed = self._reader.poll()
        return found

    def _error(self, item: Landed) -> StoreError:
        path = self._paths[item.file]
        if item.failure == Failure.ENDS_BEFORE:
            return ends_before(path, item.stop_byte)
        make = cannot_open if item.failure == Failure.CANNOT_OPEN else cannot_read
        return make(path, os.strerror(item.code))

    def limit_rate(self, bytes_per_s: float | None) -> None:
        """Changes the emulated link's rate."""
        self._reader.set_rate(bytes_per_s)

    def close(self) -> None:
        """Stops the readers and closes the files."""
        self._reader.close()
