"""Orders of INT4 codes and scales in memory: to a layout and back, in plain tensor code.

Every layout can be written and read on every machine; only multiplying with a packed
layout needs the processor it is named after. Torch only; no state; any thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .weights import Int4Layout

CODE_OFFSET = 8
"""Added to a code in -8..7 to make the stored nibble 0..15."""


def fits_layout(layout: Int4Layout, num_outputs: int, num_inputs: int, group_size: int) -> bool:
    """Whether a matrix `[num_outputs, num_inputs]` can be stored in `layout`."""
    if num_inputs % group_size or group_size % 2:
        return False
    # The kernel takes these groups only (torch 2.13).
    if layout.is_packed and group_size not in (32, 64, 128, 256):
        return False
    return num_outputs % layout.block_rows == 0


def pack_codes(codes: Tensor, layout: Int4Layout) -> Tensor:
    """Packs codes `[N, K]` (any integer dtype, -8..7) into uint8 `[N, K / 2]`.

    `ROWS`: row-major, the even column in the low nibble. Packed: for every block of B rows
    and every column, B / 2 bytes; byte j has row j low and row j + B / 2 high.

    Raises:
        ValueError: A code is outside -8..7, or N or K do not fit the layout.
    """
    num_outputs, num_inputs = codes.shape
    if num_inputs % 2 or num_outputs % layout.block_rows:
        raise ValueError(f"codes {tuple(codes.shape)} do not fit layout {layout}")
    if codes.numel() and (int(codes.min()) < -CODE_OFFSET or int(codes.max()) >= CODE_OFFSET):
        raise ValueError("an INT4 code is outside -8..7")
    nibbles = (codes + CODE_OFFSET).to(torch.uint8)
    if layout.is_packed:
        half = layout.block_rows // 2
        blocks = nibbles.view(-1, 2, half, num_inputs).transpose(2, 3)
        low, high = blocks[:, 0], blocks[:, 1]
    else:
        low, high = nibbles[:, 0::2], nibbles[:, 1::2]
    return (low | (high << 4)).reshape(num_outputs, num_inputs // 2)


def unpack_codes(packed: Tensor, layout: Int4Layout, shape: tuple[int, int]) -> Tensor:
    """Undoes `pack_codes`: int8 `[N, K]` with codes -8..7."""
    low, high = packed & 15, packed >> 4
    if layout.is_packed:
        half = layout.block_rows // 2
        blocks = torch.stack((low.view(-1, shape[1], half), high.view(-1, shape[1], half)), 1)
        nibbles = blocks.transpose(2, 3).reshape(shape)
    else:
        nibbles = torch.stack((low.view(shape[0], -1), high.view(shape[0], -1)), 2).view(shape)
    return nibbles.to(torch.int8) - CODE_OFFSET


def scales_shape(
    layout: Int4Layout, num_outputs: int, num_inputs: int, group_size: int
) -> tuple[int, ...]:
    """Shape of the stored scales of a matrix `[num_outputs, num_inputs]`."""
    num_groups = num_inputs // group_size
    return (num_groups, num_outputs, 2) if layout.is_packed else (num_outputs, num_groups)


def arrange_scales(scales: Tensor, layout: Int4Layout) -> Tensor:
    """Brings scales `[N, K / g]` into the stored order of `layout`."""
    if not layout.is_packed:
        return scales.contiguous()
    columns = scales.t()
    return torch.stack((columns, torch.zeros_like(columns)), 2)


def plain_scales(stored: Tensor, layout: Int4Layout) -> Tensor:
    """Undoes `arrange_scales`: `[N, K / g]`, a view."""
    return stored[:, :, 0].t() if layout.is_packed else stored
