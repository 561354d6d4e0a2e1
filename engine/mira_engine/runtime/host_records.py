"""Fills host memory with a model's records, from which a graphics card copies them.

Takes memory for as many as it may, pinned as far as the system allows; the rest stays on
the disk and passes through a ring of buffers. Says what was not to be had. Runs in the
engine thread while a model is loaded; what it returns is used by the link.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping
from pathlib import Path

from mira_kernels.weights import Int4Layout
from torch import Tensor

from ..checkpoint.formats import ExpertFormat, make_format
from ..checkpoint.store import ExpertStore
from ..config import EngineConfig, format_bytes
from ..errors import check_cancelled
from ..system_memory import system_memory
from ..types import ExpertId, Plane
from .cards import look_at_limits
from .disk import cannot_open, open_for_records, read_exactly
from .host_memory import Allocate, PinnedSource, RingSource, allocate_chunks, pageable
from .host_system import look_at_host

HOST_SHARE = 0.8
"""Of the free host memory, what records may take: the system needs some for itself."""

NUM_RING_BUFFERS = 8
_ALIGNMENT = 4096

Tell = Callable[[str, str], None]


def card_format(store: ExpertStore) -> ExpertFormat:
    """Returns the store's format in the layout that kernels on a card read."""
    fmt = store.format
    if fmt.block_rows == 1:
        return fmt
    return make_format(fmt.precision, fmt.shape, layout=Int4Layout.ROWS.value)


class RecordReader:
    """Reads one record after another from a store, in the card's layout, to where it is wanted.

    Args:
        store: The records.
        is_cancelled: Asked between layers.
    """

    def __init__(self, store: ExpertStore, is_cancelled: Callable[[], bool]) -> None:
        self._store = store
        self._is_cancelled = is_cancelled
        self._layer = -1
        self._format = card_format(store)

    def __call__(self, expert: ExpertId, plane: Plane, target: Tensor) -> None:
        """Reads a record to `target`, uint8 `[record_bytes]` on any device.

        Raises:
            CancelledError: `is_cancelled` said so.
            StoreError: It cannot be read.
        """
        if expert.layer != self._layer:
            self._layer = expert.layer
            check_cancelled(self._is_cancelled)
        path, offset, num_bytes = self._store.record_location(expert.layer, plane, expert.expert)
        is_other = self._format is not self._store.format
        is_host = target.device.type == "cpu" and not is_other
        buffer = target if is_host else pageable(num_bytes)
        try:
            fd, _ = open_for_records(Path(path), is_direct=False)
        except OSError as error:
            raise cannot_open(Path(path), error.strerror) from error
        try:
            read_exactly(fd, memoryview(buffer.numpy()), offset, Path(path))
        finally:
            os.close(fd)
        if is_other:
            buffer = self._format.repack(plane, buffer, self._store.format)
        if not is_host:
            target.copy_(buffer)


def host_source(
    allocate: Allocate,
    plane_bytes: Mapping[Plane, int],
    config: EngineConfig,
    target: ExpertStore,
    *,
    is_cancelled: Callable[[], bool],
    tell: Tell,
) -> PinnedSource:
    """Reads what host memory has room for.

    Args:
        allocate: Takes memory that the card copies from without waiting.
        plane_bytes: Planes that move, with the bytes of one record.
        config: How what stays on the disk is read.
        target: The records.
        is_cancelled: Asked between layers.
        tell: Told code and text of every fallback.

    Returns:
        Where all records come from, to be closed by whom it is given to.

    Raises:
        CancelledError: `is_cancelled` said so.
        StoreError: A record cannot be read.
    """
    manifest = target.manifest
    experts = [
        ExpertId(layer, expert)
        for layer in range(manifest.num_layers)
        for expert in range(manifest.num_experts)
    ]
    record_bytes = sum(plane_bytes.values())
    wanted = len(experts) * record_bytes
    # A container that is full is killed: pinned memory cannot be taken from it again.
    free = int(HOST_SHARE * system_memory().available_bytes)
    room = min(wanted, free // record_bytes * record_bytes)
    chunks = allocate_chunks(room, record_bytes, allocate)
    held = sum(chunk.numel() for chunk in chunks)
    if held < room:
        tell(
            "pinned-memory",
            f"Only {format_bytes(held)} of {format_bytes(room)} could be pinned; the rest is "
            f"copied from ordinary memory, more slowly.{_pin_limit(room)}",
        )
        chunks += allocate_chunks(room - held, record_bytes, pageable)
        held = sum(chunk.numel() for chunk in chunks)
    below = None
    if held < wanted:
        tell(
            "host-memory",
            f"Host memory holds {format_bytes(held)} of {format_bytes(wanted)} of experts; the "
            "others come from the disk.",
        )
        below = _ring(allocate, plane_bytes, config, target)
    load = RecordReader(target, is_cancelled)
    try:
        return PinnedSource(chunks, experts, plane_bytes, load, below)
    except BaseException:
        if below is not None:
            below.close()
        raise


def _pin_limit(wanted_bytes: int) -> str:
    """What the system says of pinned memory, where that explains that there was too little."""
    if look_at_host().kind.is_wddm:
        return " Windows lets a program pin about half of the computer's memory."
    locked = look_at_limits().locked_bytes
    if locked is None or locked >= wanted_bytes:
        return ""
    return f" A process may lock {format_bytes(locked)} here: ulimit -l unlimited lifts that."


def _never() -> bool:
    return False


def _ring(
    allocate: Allocate, plane_bytes: Mapping[Plane, int], config: EngineConfig, target: ExpertStore
) -> RingSource:
    def locate(expert: ExpertId, plane: Plane) -> tuple[Path, int, int]:
        return target.record_location(expert.layer, plane, expert.expert)

    record_bytes = sum(plane_bytes.values())
    buffers = [_aligned(allocate, record_bytes) for _ in range(NUM_RING_BUFFERS)]
    return RingSource(
        locate,
        plane_bytes,
        buffers,
        num_threads=config.num_reader_threads,
        is_direct=config.is_direct_io,
        read=None if card_format(target) is target.format else RecordReader(target, _never),
    )


def _aligned(allocate: Allocate, num_bytes: int) -> Tensor:
    """Takes host memory that begins on a page, as direct reads ask for."""
    try:
        whole = allocate(num_bytes + _ALIGNMENT)
    except (RuntimeError, MemoryError):
        whole = pageable(num_bytes + _ALIGNMENT)
    start = -whole.data_ptr() % _ALIGNMENT
    return whole[start : start + num_bytes]
