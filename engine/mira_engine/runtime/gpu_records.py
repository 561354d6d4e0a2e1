"""A card's memory for expert records: the slots, and the draft's records beside them.

Owns the allocations and says which record lies where; fills and reads none of them, but for
the draft's, once. Engine thread only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from mira_kernels.gpu_layer import PlaneArena
from torch import Tensor

from ..checkpoint.formats import ExpertFormat
from ..types import ExpertId, Plane


class GpuArena:
    """Device memory for records, one allocation a plane, divided once.

    Args:
        num_records: Of each plane.
        planes: What a record consists of.
        fmt: Gives their sizes.
        device: Where.
    """

    def __init__(
        self, num_records: int, planes: Sequence[Plane], fmt: ExpertFormat, device: torch.device
    ) -> None:
        self.planes = tuple(planes)
        self.plane_bytes = {plane: fmt.record_bytes(plane) for plane in planes}
        self.num_bytes = num_records * sum(self.plane_bytes.values())
        self.data = {
            plane: torch.empty(num_records * size, dtype=torch.uint8, device=device)
            for plane, size in self.plane_bytes.items()
        }
        self.records: list[Mapping[Plane, Tensor]] = [
            {
                plane: self.data[plane][index * size : (index + 1) * size]
                for plane, size in self.plane_bytes.items()
            }
            for index in range(num_records)
        ]


class GpuDraft:
    """The INT4 draft of every expert on the device.

    Args:
        fmt: Format of the records.
        plane: The one that is a draft.
        num_layers: MoE layers.
        num_experts: Experts of each.
        load: Fills device memory with an expert's record.
        device: Where.
    """

    is_in_slots = False

    def __init__(
        self,
        fmt: ExpertFormat,
        plane: Plane,
        num_layers: int,
        num_experts: int,
        load: Callable[[ExpertId, Plane, Tensor], None],
        device: torch.device,
    ) -> None:
        self.format, self.plane, self.num_experts = fmt, plane, num_experts
        self.arena = GpuArena(num_layers * num_experts, (plane,), fmt, device)
        self.num_bytes = self.arena.num_bytes
        for layer in range(num_layers):
            for expert in range(num_experts):
                record = self.arena.records[layer * num_experts + expert][plane]
                load(ExpertId(layer, expert), plane, record)
        positions = torch.arange(num_layers * num_experts, dtype=torch.int32, device=device)
        self.tables = list(positions.view(num_layers, num_experts))


class GpuSlotDraft:
    """A draft that computes with what the slots hold, and leaves out what they do not."""

    is_in_slots = True
    num_bytes = 0


def plane_arena(arena: GpuArena, plane: Plane, fmt: ExpertFormat, table: Tensor) -> PlaneArena:
    """Describes one plane of an arena to the kernels.

    Args:
        arena: Holds the plane's records.
        plane: Which.
        fmt: Says where a record's sections are.
        table: int32 `[num_experts]` on the device: each expert's record, -1 for none.
    """
    return PlaneArena(
        data=arena.data[plane],
        record_bytes=arena.plane_bytes[plane],
        sections=fmt.section_offsets(plane),
        table=table,
    )
