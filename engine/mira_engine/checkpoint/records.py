"""The bytes of one plane of one expert: named tensors at fixed offsets.

Owns offsets and padding. A section starts on a multiple of 64 bytes and a record is a
multiple of 4096, so that typed views and O_DIRECT both work. Pure; any thread.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import StoreError
from ..types import align_up

Sections = dict[str, tuple[torch.dtype, tuple[int, ...]]]
"""Name, dtype and shape of each section of a record, in storing order."""

SECTION_ALIGNMENT = 64
"""Bytes; one cache line, and enough for every vector load."""


class RecordLayout:
    """Named sections of a record, in the order in which they were given.

    Attributes:
        payload_bytes: Bytes up to the end of the last section.
        record_bytes: The same, padded to a multiple of 4096.
    """

    def __init__(self, sections: Sections) -> None:
        self._sections: dict[str, tuple[int, int, torch.dtype, tuple[int, ...]]] = {}
        end = 0
        for name, (dtype, shape) in sections.items():
            start = align_up(end, SECTION_ALIGNMENT)
            end = start + math.prod(shape) * dtype.itemsize
            self._sections[name] = (start, end, dtype, shape)
        self.payload_bytes = end
        self.record_bytes = align_up(end)

    def __contains__(self, name: str) -> bool:
        return name in self._sections

    @property
    def offsets(self) -> dict[str, int]:
        """Where each section begins, in bytes."""
        return {name: start for name, (start, *_) in self._sections.items()}

    def view(self, record: Tensor, name: str) -> Tensor:
        """Returns the section as a typed view of `record`, no copy."""
        start, end, dtype, shape = self._sections[name]
        return record[start:end].view(dtype).view(shape)

    def check(self, record: Tensor) -> None:
        """Refuses what is no record of this layout.

        Raises:
            StoreError: Not one contiguous uint8 vector of `record_bytes`.
        """
        fits = record.dtype == torch.uint8 and record.shape == (self.record_bytes,)
        if not fits or not record.is_contiguous():
            raise StoreError(
                f"A record should be {self.record_bytes} bytes in a row, "
                f"but it is {record.dtype} {tuple(record.shape)}.",
                hint="Prepare the model again.",
            )

    def pack(self, values: Mapping[str, Tensor]) -> Tensor:
        """Writes all sections into a new record; gaps and padding are 0."""
        record = torch.zeros(self.record_bytes, dtype=torch.uint8)
        for name in self._sections:
            target = self.view(record, name)
            if values[name].shape != target.shape or values[name].dtype != target.dtype:
                raise AssertionError(f"section {name} has another shape or dtype")
            target.copy_(values[name])
        return record
