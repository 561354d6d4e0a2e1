"""Random expert records, on the card and in host memory: what is measured does not read them.

Codes are any bits; scales are small, so that what is computed stays finite.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import psutil
import torch
from gpu.card import DEVICE, HAS_CARD
from mira_engine.checkpoint.expert import ExpertFormat
from mira_engine.runtime.host_memory import allocate_chunks, pageable, pinned
from mira_engine.runtime.host_records import HOST_SHARE
from mira_engine.types import Plane, Precision
from torch import Tensor

PINNING_S = 20.0
"""Seconds after which no more host memory is pinned."""


def fill_random(records: Tensor, fmt: ExpertFormat, plane: Plane) -> None:
    """Fills records `[N, record_bytes]`, uint8, with random codes and small scales."""
    records.random_(0, 256)
    sections = fmt.section_offsets(plane)
    ends = sorted([*sections.values(), records.shape[1]])
    for name, start in sections.items():
        if name in ("up", "down") and fmt.precision is not Precision.BF16:
            continue
        stop = ends[ends.index(start) + 1]
        part = records[:, start : stop - (stop - start) % 2]
        values = torch.rand(part.shape[0], part.shape[1] // 2, device=records.device) * 0.01
        part.copy_(values.to(torch.bfloat16).view(torch.uint8))


@dataclass(frozen=True, slots=True, kw_only=True)
class HostRecords:
    """Whole records of all planes in host memory.

    Attributes:
        chunks: As `PinnedSource` takes them.
        wanted_bytes: What all experts would take.
    """

    chunks: list[Tensor]
    wanted_bytes: int

    @property
    def held_bytes(self) -> int:
        """What was taken."""
        return sum(chunk.numel() for chunk in self.chunks)

    def for_all(self, num_bytes: int) -> list[Tensor]:
        """Returns chunks for so many bytes of records: the same again where there are fewer."""
        return self.chunks * -(-num_bytes // self.held_bytes)

    @property
    def note(self) -> str:
        """What stands for what."""
        share = self.held_bytes / self.wanted_bytes
        kind = "pinned" if HAS_CARD else "pageable"
        text = f"{self.held_bytes / 1e9:.1f} GB of {kind} records"
        return text if share >= 1 else f"{text} stand for all {self.wanted_bytes / 1e9:.1f} GB"


def make_host_records(fmt: ExpertFormat, num_experts: int) -> HostRecords:
    """Takes host memory for all experts' records, as much as there is and time allows.

    Raises:
        RuntimeError: Not even one record.
    """
    until = time.monotonic() + PINNING_S
    take = pinned if HAS_CARD else pageable

    def allocate(num_bytes: int) -> Tensor:
        if time.monotonic() > until:
            raise RuntimeError("enough time was spent on pinning")
        return take(num_bytes)

    sizes = {plane: fmt.record_bytes(plane) for plane in fmt.planes}
    record_bytes = sum(sizes.values())
    wanted = num_experts * record_bytes
    room = min(wanted, int(HOST_SHARE * psutil.virtual_memory().available))
    chunks = allocate_chunks(room, record_bytes, allocate)
    if not chunks:
        raise RuntimeError("no host memory for records")
    made = torch.empty(
        chunks[0].numel() // record_bytes, record_bytes, dtype=torch.uint8, device=DEVICE
    )
    offset = 0
    for plane, size in sizes.items():
        fill_random(made[:, offset : offset + size], fmt, plane)
        offset += size
    for chunk in chunks:
        chunk.copy_(made.view(-1)[: chunk.numel()])
    return HostRecords(chunks=chunks, wanted_bytes=wanted)
