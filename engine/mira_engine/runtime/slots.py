"""Device memory for experts: the slot arena and the resident draft.

One allocation each, aligned to 4096 bytes, divided once; nothing is allocated on the
token path. What is inside a slot is the format's business: a slot's typed views are
built here once and reused for every expert that passes through.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch

from ..checkpoint.formats import BoundExpert, ExpertFormat
from ..checkpoint.store import ExpertStore
from ..errors import check_cancelled
from ..types import RECORD_ALIGNMENT, ExpertId, Plane
from .disk import open_for_records, read_exactly


def aligned_bytes(num_bytes: int) -> torch.Tensor:
    """Allocates `[num_bytes]` uint8 whose address is a multiple of 4096."""
    raw = torch.empty(num_bytes + RECORD_ALIGNMENT, dtype=torch.uint8)
    start = -raw.data_ptr() % RECORD_ALIGNMENT
    return raw[start : start + num_bytes]


class SlotArena:
    """`num_slots` equal slots, each with room for the given planes of one expert."""

    def __init__(self, num_slots: int, planes: Sequence[Plane], fmt: ExpertFormat) -> None:
        self.num_slots = num_slots
        self.planes = tuple(planes)
        self.plane_bytes = {plane: fmt.record_bytes(plane) for plane in self.planes}
        self.slot_bytes = sum(self.plane_bytes.values())
        self.num_bytes = num_slots * self.slot_bytes
        self._bytes = aligned_bytes(self.num_bytes)
        self.records: list[dict[Plane, torch.Tensor]] = []
        self.buffers: list[Mapping[Plane, memoryview]] = []
        for slot in range(num_slots):
            records, offset = {}, slot * self.slot_bytes
            for plane in self.planes:
                records[plane] = self._bytes[offset : offset + self.plane_bytes[plane]]
                offset += self.plane_bytes[plane]
            self.records.append(records)
            self.buffers.append({p: memoryview(r.numpy()) for p, r in records.items()})


class DraftArena:
    """The INT4 draft of every expert, resident for as long as the model is loaded.

    Args:
        store: Holds the draft plane (`nested`: its hi planes; else the `int4` store).
        plane: That plane.
        is_cancelled: Asked before each layer.

    Raises:
        CancelledError: `is_cancelled` said so.
    """

    def __init__(
        self, store: ExpertStore, plane: Plane, *, is_cancelled: Callable[[], bool]
    ) -> None:
        manifest = store.manifest
        self._num_experts = manifest.num_experts
        record_bytes = store.format.record_bytes(plane)
        layer_bytes = record_bytes * manifest.num_experts
        self.num_bytes = layer_bytes * manifest.num_layers
        self._bytes = aligned_bytes(self.num_bytes)
        self.records: list[torch.Tensor] = []
        self.bound: list[BoundExpert] = []
        for layer in range(manifest.num_layers):
            check_cancelled(is_cancelled)
            part = self._bytes[layer * layer_bytes : (layer + 1) * layer_bytes]
            self._read_layer(store, layer, plane, part)
            for expert in range(manifest.num_experts):
                record = part[expert * record_bytes : (expert + 1) * record_bytes]
                self.records.append(record)
                self.bound.append(store.format.bind_draft(record))

    @staticmethod
    def _read_layer(store: ExpertStore, layer: int, plane: Plane, part: torch.Tensor) -> None:
        path, offset, _ = store.record_location(layer, plane, 0)
        fd, _ = open_for_records(Path(path), is_direct=False)
        try:
            read_exactly(fd, memoryview(part.numpy()), offset, Path(path))
            if hasattr(os, "posix_fadvise"):
                os.posix_fadvise(fd, offset, part.numel(), os.POSIX_FADV_DONTNEED)
        finally:
            os.close(fd)

    def record(self, expert: ExpertId) -> torch.Tensor:
        """Returns the expert's draft record, uint8 `[record_bytes]`."""
        return self.records[expert.layer * self._num_experts + expert.expert]

    def expert(self, layer: int, expert: int) -> BoundExpert:
        """Returns the expert's INT4 weights."""
        return self.bound[layer * self._num_experts + expert]
