"""Room for weights in huge pages, where the system has them.

A step reads every weight once, in order, so with ordinary pages of 4 KiB each page costs
a look-up that nothing hides. Measured 2026-11-30 on two virtual Zen 4 cores, one thread,
108 MB of high planes in 211 products: 7.5 ms in ordinary pages, 5.5 ms in huge ones.

Private anonymous memory, given back when no tensor uses it. Any thread.
"""

from __future__ import annotations

import contextlib
import mmap

import torch

HUGE_PAGE_BYTES = 2 << 20


def huge_bytes(num_bytes: int) -> torch.Tensor:
    """Allocates `[num_bytes]` uint8, zero, aligned to 2 MiB; in huge pages where there are any."""
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        raw = torch.zeros(num_bytes + HUGE_PAGE_BYTES, dtype=torch.uint8)
    else:
        room = mmap.mmap(
            -1, num_bytes + HUGE_PAGE_BYTES, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        with contextlib.suppress(OSError):  # Built without them, a kernel has ordinary pages.
            room.madvise(mmap.MADV_HUGEPAGE)
        raw = torch.frombuffer(room, dtype=torch.uint8)
    start = -raw.data_ptr() % HUGE_PAGE_BYTES
    return raw[start : start + num_bytes]


class Arena:
    """Hands out pieces of one block, each aligned to 64 bytes."""

    def __init__(self, num_bytes: int) -> None:
        self._room = huge_bytes(num_bytes)
        self._next = 0

    @staticmethod
    def padded(num_bytes: int) -> int:
        """Returns what a piece takes of the block."""
        return -(-num_bytes // 64) * 64

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
        """Returns uninitialised room of this shape.

        Raises:
            ValueError: The block is used up.
        """
        num_bytes = torch.Size(shape).numel() * dtype.itemsize
        stop = self._next + num_bytes
        if stop > self._room.numel():
            raise ValueError("the arena is used up")
        piece = self._room[self._next : stop].view(dtype).view(shape)
        self._next += self.padded(num_bytes)
        return piece
