"""Device memory for experts: the slot arena and the resident draft.

One allocation each, in huge pages where there are any, divided once; nothing is allocated
on the token path. What is inside a slot is the format's business: a slot's typed views are
built here once and reused for every expert that passes through.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from mira_kernels.pages import huge_bytes

from ..checkpoint.formats import BoundExpert, ExpertFormat, NestedFormat
from ..checkpoint.store import ExpertStore
from ..errors import check_cancelled
from ..types import ExpertId, Plane, Precision
from .disk import open_for_records, read_exactly


class SlotArena:
    """`num_slots` equal slots, each with room for the given planes of one expert."""

    def __init__(self, num_slots: int, planes: Sequence[Plane], fmt: ExpertFormat) -> None:
        self.num_slots = num_slots
        self.planes = tuple(planes)
        self.plane_bytes = {plane: fmt.record_bytes(plane) for plane in self.planes}
        self.slot_bytes = sum(self.plane_bytes.values())
        self.num_bytes = num_slots * self.slot_bytes
        self._bytes = huge_bytes(self.num_bytes)
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

    is_in_slots = False

    def __init__(
        self, store: ExpertStore, plane: Plane, *, is_cancelled: Callable[[], bool]
    ) -> None:
        manifest = store.manifest
        self._num_experts = manifest.num_experts
        record_bytes = store.format.record_bytes(plane)
        layer_bytes = record_bytes * manifest.num_experts
        self.num_bytes = layer_bytes * manifest.num_layers
        self._bytes = huge_bytes(self.num_bytes)
        self.bound: list[BoundExpert] = []
        for layer in range(manifest.num_layers):
            check_cancelled(is_cancelled)
            part = self._bytes[layer * layer_bytes : (layer + 1) * layer_bytes]
            self._read_layer(store, layer, plane, part)
            for expert in range(manifest.num_experts):
                record = part[expert * record_bytes : (expert + 1) * record_bytes]
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

    def position(self, expert: ExpertId) -> int:
        """Returns where in `bound` the expert's INT4 weights are."""
        return expert.layer * self._num_experts + expert.expert


class SlotDraft:
    """A draft that computes with what the slots hold, and leaves out what they do not.

    Takes no memory of its own. Of `nested` it reads the hi planes, other formats whole.

    Args:
        fmt: The target's format.
        slots: The arena.
    """

    is_in_slots = True
    num_bytes = 0

    def __init__(self, fmt: ExpertFormat, slots: SlotArena) -> None:
        if fmt.draft_plane is not None:
            plane = fmt.draft_plane
            self.bound = [fmt.bind_draft(records[plane]) for records in slots.records]
        else:
            self.bound = [fmt.bind(records) for records in slots.records]


def slot_planes(fmt: ExpertFormat, *, has_draft: bool) -> tuple[Plane, ...]:
    """Returns the planes that move: a resident draft already holds `nested`'s hi planes."""
    if has_draft and fmt.precision is Precision.NESTED:
        return (Plane.LO,)
    return fmt.planes


class SlotBinder:
    """Gives the weights of an expert in a slot; a slot's views are built once.

    Args:
        fmt: The target's format.
        slots: The arena.
        draft: The resident draft; with `nested` its hi planes complete a slot's lo plane.
    """

    def __init__(
        self, fmt: ExpertFormat, slots: SlotArena, draft: DraftArena | SlotDraft | None
    ) -> None:
        self._draft: DraftArena | None = None
        if isinstance(draft, DraftArena) and isinstance(fmt, NestedFormat):
            self._draft = draft
            self._combine = fmt.combine
            self._low = [fmt.bind_low(records[Plane.LO]) for records in slots.records]
        else:
            self._whole = [fmt.bind(records) for records in slots.records]

    @property
    def joins_draft(self) -> bool:
        """Whether a slot holds only what completes the resident draft."""
        return self._draft is not None

    def __call__(self, expert: ExpertId, slot: int) -> BoundExpert:
        """Returns the expert's weights, which are in the slot."""
        if self._draft is not None:
            return self._combine(self._draft.bound[self._draft.position(expert)], self._low[slot])
        return self._whole[slot]
