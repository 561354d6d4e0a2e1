"""Round-to-nearest formulas of the quantised expert formats.

Owns arithmetic only: matrices in, codes and bfloat16 scales out. Codes are always
computed from the scale as it is stored. Knows no record and no layout. Pure; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import FormatError

SCALE_EPS = 1e-8
"""Stands in for the largest magnitude where all entries that share a scale are 0."""

INT8_MAX = 127
INT4_MAX = 7
NESTED_MAX = 119
"""Largest nested code: 16 * 7 + 7, so that both planes stay inside INT4."""

PLANE_BASE = 16
"""Weight of the nested high plane: `code = 16 * hi + lo`."""


@dataclass(frozen=True, slots=True, eq=False)
class GroupCodes:
    """A matrix quantised by groups along its inputs.

    Attributes:
        codes: `[N, K]` int16.
        scales: `[N, K / group_size]` bfloat16.
    """

    codes: Tensor
    scales: Tensor


def check_finite(name: str, values: Tensor) -> None:
    """Refuses nan and infinity.

    Raises:
        FormatError: `values` holds one.
    """
    if not bool(torch.isfinite(values).all()):
        raise FormatError(
            f"The expert's {name} holds nan or infinity, which no quantised format can store.",
            hint="The checkpoint is damaged, or use the unquantised format bf16.",
        )


def quantise_groups(weight: Tensor, group_size: int, max_code: int, min_code: int) -> GroupCodes:
    """Quantises `[N, K]` symmetrically, one scale for each `group_size` inputs of a row.

    `s = bf16(max|w| / max_code)`, code = `clamp(round(w / s), min_code, max_code)`; ties
    round to even.
    """
    num_outputs, num_inputs = weight.shape
    groups = weight.to(torch.float32).reshape(num_outputs, num_inputs // group_size, group_size)
    largest = groups.abs().amax(dim=2).clamp_min(SCALE_EPS)
    scales = (largest / max_code).to(torch.bfloat16)
    codes = torch.round(groups / scales.to(torch.float32)[:, :, None]).clamp(min_code, max_code)
    return GroupCodes(codes.to(torch.int16).view(num_outputs, num_inputs), scales)


def quantise_int4(weight: Tensor, group_size: int) -> GroupCodes:
    """INT4 round to nearest: `s = bf16(max|w| / 7)`, codes -8..7."""
    return quantise_groups(weight, group_size, INT4_MAX, -INT4_MAX - 1)


def quantise_nested(weight: Tensor, group_size: int) -> GroupCodes:
    """Nested codes before the split: `s = bf16(max|w| / 119)`, codes -119..119."""
    return quantise_groups(weight, group_size, NESTED_MAX, -NESTED_MAX)


def split_planes(codes: Tensor) -> tuple[Tensor, Tensor]:
    """Splits nested codes into `hi = floor((c + 8) / 16)` and `lo = c - 16 * hi`.

    Returns:
        hi in -7..7 and lo in -8..7, in the dtype of `codes`.
    """
    hi = torch.div(codes + PLANE_BASE // 2, PLANE_BASE, rounding_mode="floor")
    return hi, codes - PLANE_BASE * hi


def complete_planes(
    weight: Tensor, high: Tensor, high_scales: Tensor, group_size: int
) -> tuple[Tensor, Tensor]:
    """Splits a matrix into nested planes around high codes that are given.

    With `s = high_scales / 16`: `hi = clamp(high, -7, 7)`, `lo = clamp(round(w / s) - 16 * hi,
    -8, 7)`. Where the high code is the nearest one, both planes together are INT8; where it is
    not, the low plane stops at its bound, and the weight keeps what is beyond as an error.

    Args:
        weight: `[N, K]`.
        high: `[N, K]`, codes -8..7; -8 becomes -7, so that joined codes fit a signed byte.
        high_scales: `[N, K / group_size]` bfloat16, as stored.
        group_size: Inputs that share a scale.

    Returns:
        hi in -7..7 and lo in -8..7, int16.
    """
    scales = (high_scales.to(torch.float32) / PLANE_BASE).clamp_min(SCALE_EPS / NESTED_MAX)
    spread = scales.repeat_interleave(group_size, dim=1)
    hi = high.to(torch.int16).clamp(-INT4_MAX, INT4_MAX)
    lo = torch.round(weight.to(torch.float32) / spread) - PLANE_BASE * hi
    return hi, lo.clamp(-INT4_MAX - 1, INT4_MAX).to(torch.int16)


def shared_unit_scales(up: Tensor, down: Tensor) -> Tensor:
    """One scale per hidden unit r: `max(a_r, eps) / 127`, bfloat16 `[R]`.

    Args:
        up: `[num_parts, R, C]`, the first matrix's rows by part (gate and up) and unit.
        down: `[C, R]`.

    Source: Mira, INT8 expert format; a_r is the largest magnitude among the unit's rows of
    gate and up and its column of down. Unlike there the scale is stored in bfloat16.
    """
    largest = torch.maximum(up.abs().amax(dim=(0, 2)), down.abs().amax(dim=0))
    return (largest.clamp_min(SCALE_EPS) / INT8_MAX).to(torch.bfloat16)


def int8_codes(weight: Tensor, scale: Tensor) -> Tensor:
    """`clamp(round(w / s), -127, 127)` as int8; `scale` broadcasts against `weight`."""
    codes = torch.round(weight.to(torch.float32) / scale.to(torch.float32))
    return codes.clamp(-INT8_MAX, INT8_MAX).to(torch.int8)
