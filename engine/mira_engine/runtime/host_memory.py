"""Records in host memory, pinned as far as the system allows: where a GPU copies from.

`PinnedSource` holds all records it has room for, in chunks; `RingSource` reads the others
from the disk into a few pinned buffers, one expert each. How much can be pinned shows only
when memory is taken, so `allocate_chunks` takes it piece by piece until there is no more.
"""

from __future__ import annotations

import os
import queue
import threading
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from ..errors import MiraError
from ..types import ExpertId, Plane
from .disk import WHILE_READING, RecordLocation, cannot_open, open_for_records, read_exactly
from .shortage import as_shortage

CHUNK_BYTES = 256 << 20
"""One pinned allocation. Larger ones fail in whole where a smaller one would still fit."""

Allocate = Callable[[int], Tensor]
Locate = Callable[[ExpertId, Plane], RecordLocation]

_CLOSE_TIMEOUT_S = 10.0


def pinned(num_bytes: int) -> Tensor:
    """Allocates pinned host memory, uint8 `[num_bytes]`.

    Raises:
        RuntimeError: The system gives none, or there is no GPU to pin it for.
    """
    return torch.empty(num_bytes, dtype=torch.uint8, pin_memory=True)


def pageable(num_bytes: int) -> Tensor:
    """Allocates ordinary host memory, uint8 `[num_bytes]`."""
    return torch.empty(num_bytes, dtype=torch.uint8)


def allocate_chunks(
    wanted_bytes: int, record_bytes: int, allocate: Allocate = pinned
) -> list[Tensor]:
    """Takes memory for whole records in chunks, as much of it as there is.

    Args:
        wanted_bytes: Most that is useful.
        record_bytes: Of one expert's records; a chunk holds whole ones.
        allocate: How memory is taken.

    Returns:
        The chunks; fewer than wanted where the system gave no more.
    """
    per_chunk = max(1, CHUNK_BYTES // record_bytes) * record_bytes
    chunks: list[Tensor] = []
    left = wanted_bytes // record_bytes * record_bytes
    while left:
        size = min(left, per_chunk)
        try:
            chunks.append(allocate(size))
        except (RuntimeError, MemoryError):
            break
        left -= size
    return chunks


class PinnedSource:
    """Experts' records that stay in host memory; the others are asked of `below`.

    Args:
        chunks: From `allocate_chunks`.
        experts: In the order in which they are worth a place.
        plane_bytes: Record size of each plane that moves.
        load: Fills a buffer with an expert's record of a plane; called here for each expert.
        below: Serves what finds no place, `None` where everything does.
    """

    def __init__(
        self,
        chunks: Sequence[Tensor],
        experts: Sequence[ExpertId],
        plane_bytes: Mapping[Plane, int],
        load: Callable[[ExpertId, Plane, Tensor], None],
        below: RingSource | None = None,
    ) -> None:
        self._below = below
        self._records: dict[ExpertId, dict[Plane, Tensor]] = {}
        record_bytes = sum(plane_bytes.values())
        places = [
            chunk[start : start + record_bytes]
            for chunk in chunks
            for start in range(0, chunk.numel() // record_bytes * record_bytes, record_bytes)
        ]
        for expert, place in zip(experts, places, strict=False):
            parts, offset = {}, 0
            for plane, num_bytes in plane_bytes.items():
                parts[plane] = place[offset : offset + num_bytes]
                load(expert, plane, parts[plane])
                offset += num_bytes
            self._records[expert] = parts

    @property
    def num_held(self) -> int:
        """Experts whose records are here."""
        return len(self._records)

    @property
    def experts(self) -> list[ExpertId]:
        """Those experts, in the order in which they were given."""
        return list(self._records)

    def held(self, expert: ExpertId) -> Mapping[Plane, Tensor] | None:
        """Returns records that stay here, `None` for those that come from the disk."""
        return self._records.get(expert)

    def begin(self, expert: ExpertId, *, is_demand: bool) -> None:
        """Asks for an expert's records."""
        if expert not in self._records and self._below is not None:
            self._below.begin(expert, is_demand=is_demand)

    def hurry(self, expert: ExpertId) -> None:
        """Somebody waits for an expert that was asked for."""
        if expert not in self._records and self._below is not None:
            self._below.hurry(expert)

    def take(self, expert: ExpertId) -> Mapping[Plane, Tensor] | None:
        """Returns the records, `None` while the disk is read.

        Raises:
            MiraError: They cannot be read.
            KeyError: Nobody has them.
        """
        found = self._records.get(expert)
        if found is not None:
            return found
        if self._below is None:
            raise KeyError(expert)
        return self._below.take(expert)

    def give_back(self, expert: ExpertId) -> None:
        """The copy is over."""
        if expert not in self._records and self._below is not None:
            self._below.give_back(expert)

    def close(self) -> None:
        """Stops reading."""
        if self._below is not None:
            self._below.close()


class RingSource:
    """Reads experts' records from the disk into a ring of host buffers.

    Args:
        locate: Where an expert's record of a plane is.
        plane_bytes: Record size of each plane.
        buffers: uint8 `[record bytes of all planes]` each, pinned if that was possible; as
            many experts can be between disk and device at a time.
        num_threads: Reader threads.
        is_direct: Whether to ask for O_DIRECT; buffers are then aligned to 4096 bytes.
        read: Reads a record into a buffer some other way, `None` for as it is in the file.
    """

    def __init__(
        self,
        locate: Locate,
        plane_bytes: Mapping[Plane, int],
        buffers: Sequence[Tensor],
        *,
        num_threads: int,
        is_direct: bool,
        read: Callable[[ExpertId, Plane, Tensor], None] | None = None,
    ) -> None:
        self._read_record = read or self._read_plain
        self._locate = locate
        self._plane_bytes = dict(plane_bytes)
        self._is_direct = is_direct
        self._free = list(buffers)
        self._waiting: list[ExpertId] = []
        self._taken: dict[ExpertId, Tensor] = {}
        self._orders: queue.SimpleQueue[tuple[ExpertId, Tensor] | None] = queue.SimpleQueue()
        self._read: queue.SimpleQueue[tuple[ExpertId, MiraError | None]] = queue.SimpleQueue()
        self._done: dict[ExpertId, MiraError | None] = {}
        self._threads = [
            threading.Thread(target=self._serve, name=f"mira-ring-{i}", daemon=True)
            for i in range(num_threads)
        ]
        for thread in self._threads:
            thread.start()

    def begin(self, expert: ExpertId, *, is_demand: bool) -> None:
        """Queues an expert to be read; a demand before all that has not begun."""
        self._waiting.insert(0 if is_demand else len(self._waiting), expert)
        self._order_some()

    def hurry(self, expert: ExpertId) -> None:
        """Reads an expert next, where it is still queued."""
        if expert in self._waiting:
            self._waiting.remove(expert)
            self._waiting.insert(0, expert)

    def take(self, expert: ExpertId) -> Mapping[Plane, Tensor] | None:
        """Returns the records, `None` while they are being read.

        Raises:
            MiraError: They cannot be read.
        """
        while not self._read.empty():
            done, error = self._read.get()
            self._done[done] = error
        if expert not in self._done:
            return None
        error = self._done.pop(expert)
        if error is not None:
            self.give_back(expert)
            raise error
        return self._parts(self._taken[expert])

    def give_back(self, expert: ExpertId) -> None:
        """The copy is over: its buffer takes the next."""
        self._free.append(self._taken.pop(expert))
        self._order_some()

    def close(self) -> None:
        """Stops the readers."""
        self._waiting.clear()
        for _ in self._threads:
            self._orders.put(None)
        for thread in self._threads:
            thread.join(timeout=_CLOSE_TIMEOUT_S)

    def _order_some(self) -> None:
        while self._waiting and self._free:
            expert, buffer = self._waiting.pop(0), self._free.pop()
            self._taken[expert] = buffer
            self._orders.put((expert, buffer))

    def _parts(self, buffer: Tensor) -> dict[Plane, Tensor]:
        parts, offset = {}, 0
        for plane, num_bytes in self._plane_bytes.items():
            parts[plane] = buffer[offset : offset + num_bytes]
            offset += num_bytes
        return parts

    # -- reader threads ----------------------------------------------------------------------

    def _serve(self) -> None:
        while (order := self._orders.get()) is not None:
            expert, buffer = order
            try:
                for plane, part in self._parts(buffer).items():
                    self._read_record(expert, plane, part)
            except MiraError as error:
                self._read.put((expert, error))
            except (RuntimeError, MemoryError) as error:
                shortage = as_shortage(error, WHILE_READING)
                if shortage is None:
                    raise
                self._read.put((expert, shortage))
            else:
                self._read.put((expert, None))

    def _read_plain(self, expert: ExpertId, plane: Plane, part: Tensor) -> None:
        path, offset, _ = self._locate(expert, plane)
        try:
            fd, _ = open_for_records(path, is_direct=self._is_direct)
        except OSError as error:
            raise cannot_open(path, error.strerror) from error
        try:
            read_exactly(fd, memoryview(part.numpy()), offset, path)
        finally:
            os.close(fd)
