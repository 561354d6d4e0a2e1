"""The reference's predictions, kept on the disk until the others are compared with them.

They are too many for memory: 4096 positions of a vocabulary of 150 thousand are 2.4 GB in
float32. The file has no name, so that nothing is left of it however the process ends. Used by
one thread.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import torch
from torch import Tensor

from ..checkpoint.writing import disk_errors, require_space


class KeptLogits:
    """Logits of windows by place; closed by `with`.

    Args:
        folder: Whose disk takes the file.
        lengths: Rows of each window.
    """

    def __init__(self, folder: Path, lengths: Sequence[int]) -> None:
        self._folder = folder
        self._first_rows = list(accumulate(lengths, initial=0))
        self._width, self._dtype = 0, torch.float32
        with disk_errors(folder):
            # Closed by `__exit__`; it outlives this block on purpose.
            self._file = tempfile.TemporaryFile(dir=folder)  # noqa: SIM115

    def __enter__(self) -> KeptLogits:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    @property
    def _row_bytes(self) -> int:
        return self._width * self._dtype.itemsize

    def write(self, window: int, start: int, logits: Tensor) -> None:
        """Keeps rows `[T, V]` of a window from `start` on, in their own type.

        Raises:
            DiskSpaceError: There is no room for all windows, told at the first row, or the
                disk is full.
        """
        if not self._width:
            self._width, self._dtype = logits.shape[-1], logits.dtype
            require_space(
                self._folder, self._first_rows[-1] * self._row_bytes, "Keeping the reference"
            )
        data = logits.contiguous().view(torch.uint8).numpy()
        with disk_errors(self._folder):
            self._file.seek((self._first_rows[window] + start) * self._row_bytes)
            self._file.write(memoryview(data).cast("B"))

    def read(self, window: int, start: int, num_rows: int) -> Tensor:
        """Returns rows as they were written, `[num_rows, V]`."""
        with disk_errors(self._folder):
            self._file.seek((self._first_rows[window] + start) * self._row_bytes)
            data = bytearray(self._file.read(num_rows * self._row_bytes))
        return torch.frombuffer(data, dtype=self._dtype).view(num_rows, self._width)
