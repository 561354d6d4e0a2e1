"""Float values of weights that a checkpoint stores in FP8 or MXFP4, or as GPTQ's codes.

Owns arithmetic only: stored tensors in, values out. transformers has converters of its
own for the first two; its FP8 one takes the size of a block from the number of scales, which
is wrong for every matrix whose last block is cut off at the edge (576 rows of 128: five
scales), so blocks of the stated size are multiplied here. Where it is right, the values are
the same. Pure; any thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

MXFP4_GROUP = 32
"""Inputs that share a power of two."""

_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_FP4_VALUES = (*_FP4, *(-value for value in _FP4))
_FP4_PAIRS = torch.tensor(
    [(_FP4_VALUES[byte & 15], _FP4_VALUES[byte >> 4]) for byte in range(256)],
    dtype=torch.bfloat16,
)
"""Both values of a byte, the low four bits first: `[256, 2]`."""

_POWERS = torch.tensor(
    [2.0 ** (code - 127) for code in range(255)] + [float("nan")], dtype=torch.float32
)
"""What a stored exponent (E8M0) stands for: float32 `[256]`; the last code is nan."""

_NIBBLES = torch.arange(0, 32, 4, dtype=torch.int32)
"""Shifts of the eight codes in a word of 32 bits, the first code lowest."""


def scales_to_float(scales: Tensor) -> Tensor:
    """Returns scales as float32; bytes and E8M0 are exponents of two."""
    if scales.dtype in (torch.uint8, torch.float8_e8m0fnu):
        codes = scales.contiguous().view(torch.uint8)
        return _POWERS[codes.reshape(-1).to(torch.int32)].view(codes.shape)
    return scales.to(torch.float32)


def grid_of(rows: int, columns: int, block: tuple[int, int]) -> tuple[int, int]:
    """Returns how many blocks cover a matrix, those that are cut off at the edge included."""
    return -(-rows // block[0]), -(-columns // block[1])


def dequantise_fp8(weight: Tensor, scales: Tensor, block: tuple[int, int]) -> Tensor:
    """Multiplies FP8 values by the scales of their blocks.

    Holds float32 of one row of blocks at a time.

    Args:
        weight: float8 `[..., N, K]`.
        scales: float32 `[..., N / block rows, K / block columns]`, rounded up.
        block: Rows and columns that share a scale.

    Returns:
        bfloat16 `[..., N, K]`: the product in float32, rounded once.
    """
    block_rows, block_columns = block
    rows, columns = weight.shape[-2:]
    by_column = scales.repeat_interleave(block_columns, dim=-1)[..., :columns]
    values = torch.empty(weight.shape, dtype=torch.bfloat16)
    for number, start in enumerate(range(0, rows, block_rows)):
        part = weight[..., start : start + block_rows, :].to(torch.float32)
        values[..., start : start + block_rows, :] = part * by_column[..., number, None, :]
    return values


def dequantise_mxfp4(blocks: Tensor, scales: Tensor) -> Tensor:
    """Unpacks FP4 values and multiplies each group of 32 by its power of two; exact.

    Args:
        blocks: uint8 `[..., N, G, 16]`, two values a byte, the low four bits first.
        scales: float32 `[..., N, G]`, powers of two.

    Returns:
        bfloat16 `[..., N, 32 G]`.
    """
    pairs = _FP4_PAIRS.index_select(0, blocks.reshape(-1).to(torch.int32))
    values = pairs.view(*blocks.shape[:-1], MXFP4_GROUP)
    return values.mul_(scales.to(torch.bfloat16)[..., None]).flatten(-2)


def unpack_gptq_codes(packed: Tensor) -> Tensor:
    """Unpacks GPTQ's codes of a linear layer, eight inputs to a word.

    Args:
        packed: int32 `[K / 8, N]`.

    Returns:
        int8 `[N, K]`, 0 to 15.
    """
    nibbles = (packed[:, None, :] >> _NIBBLES[None, :, None]) & 15
    return nibbles.to(torch.int8).flatten(0, 1).t()


def unpack_gptq_zeros(packed: Tensor) -> Tensor:
    """Unpacks GPTQ's stored zero points, eight outputs to a word.

    Args:
        packed: int32 `[G, N / 8]`.

    Returns:
        int8 `[G, N]`, 0 to 15, as stored.
    """
    nibbles = (packed[:, :, None] >> _NIBBLES) & 15
    return nibbles.to(torch.int8).flatten(1, 2)
