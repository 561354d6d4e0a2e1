"""Dense bfloat16 matrices as two planes of bytes, of which the first alone is a draft.

Owns what the planes mean. Knows no kernel but for the operators' order of arguments:
`torch.ops.mira.split_linear` and `split_rows` read the planes. Torch only; no state; any
thread.

A row has a base: its largest biased exponent less 7, at least 0. For a weight of biased
exponent e with seven bits of mantissa,

- `high` holds the sign (bit 7), e less the base held to 0..7 (bits 6 to 4), and the
  mantissa's upper four bits;
- `low` holds d, by how much e lies below the base, 0..30 (bits 7 to 3), and the mantissa's
  lower three bits. d = 31 means zero.

Both together are the weight's bits. `high` alone is the weight within 3.125 % where e is at
least the base, and within twice the row's largest weight over 2 ** 7 elsewhere. Of eight
bits, three for the exponent are best for weights whose rows are near to normal: measured
2026-11-30, built-in model, K = 4, 8 prompts x 96 tokens, acceptance .733 with four and
.767 where the draft has all sixteen bits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

MAX_EXCEPTIONS = 4096
"""Most weights of one matrix that may lie outside the planes."""

_BLOCK_ENTRIES = 1 << 18  # of about 24 bytes each while they are split
_LARGEST, _INFINITE = 7, 255
_LEAST, _ZERO = 30, 31  # what d can be


@dataclass(frozen=True, slots=True, eq=False)
class SplitWeight:
    """An unquantised bfloat16 matrix in two planes.

    Attributes:
        high: `[N, K]` uint8, what a draft reads.
        low: `[N, K]` uint8, what the exact weights need besides.
        bases: `[N]` int16, each row's least exponent of the high plane, 0 to 247.
        exceptions: `[m, 2]` int32, (row, column) in rising order, of weights that are
            nearer to zero than the planes can tell; these hold zero there.
        exception_values: `[m]` float32.
    """

    high: Tensor
    low: Tensor
    bases: Tensor
    exceptions: Tensor
    exception_values: Tensor

    @property
    def shape(self) -> tuple[int, int]:
        """Outputs N and inputs K."""
        return self.high.shape[0], self.high.shape[1]


@torch.no_grad()
def split(weight: Tensor) -> SplitWeight | None:
    """Splits a matrix `[N, K]`; holds at most 32 MiB besides the result up to K = 2 ** 20.

    Returns:
        None where it has to stay dense: it is not bfloat16, not finite, or more than
        `MAX_EXCEPTIONS` weights would be exceptions.
    """
    if weight.dtype != torch.bfloat16 or weight.dim() != 2:
        return None
    num_outputs, num_inputs = weight.shape
    high, low = (weight.new_empty(weight.shape, dtype=torch.uint8) for _ in range(2))
    bases = weight.new_zeros(num_outputs, dtype=torch.int16)
    places, values = [], []
    rows = max(1, _BLOCK_ENTRIES // max(num_inputs, 1))
    for start in range(0, num_outputs if num_inputs else 0, rows):
        block = weight[start : start + rows].contiguous()
        bits = block.view(torch.int16)
        exponents = (bits >> 7).bitwise_and_(0xFF)
        top = exponents.amax(1)
        if int(top.max()) == _INFINITE:
            return None
        base = bases[start : start + rows].copy_(top.sub_(_LARGEST).clamp_(min=0))
        above = exponents.sub_(base[:, None])
        is_exception = (above < -_LEAST).logical_and_((bits & 0x7FFF) != 0)
        upper = (bits >> 8).bitwise_and_(0x80).bitwise_or_(above.clamp(min=0) << 4)
        upper.bitwise_or_((bits & 0x78) >> 3).masked_fill_(is_exception, 0)
        lower = above.neg_().clamp_(0, _ZERO).mul_(8).bitwise_or_(bits & 0x07)
        high[start : start + rows] = upper
        low[start : start + rows] = lower.masked_fill_(is_exception, _ZERO << 3)
        if bool(is_exception.any()):
            if sum(map(len, places)) + int(is_exception.sum()) > MAX_EXCEPTIONS:
                return None
            place = is_exception.nonzero()
            values.append(block[is_exception].float())
            places.append(place.add_(place.new_tensor([start, 0])).int())
    return SplitWeight(
        high,
        low,
        bases,
        torch.cat(places) if places else bases.new_empty(0, 2, dtype=torch.int32),
        torch.cat(values) if values else bases.new_empty(0, dtype=torch.float32),
    )


@torch.no_grad()
def join(weight: SplitWeight, start: int, stop: int) -> Tensor:
    """Returns rows `start` to `stop` as they were, bfloat16 `[stop - start, K]`."""
    high, low = (plane[start:stop].to(torch.int16) for plane in (weight.high, weight.low))
    below = low >> 3
    offset = (weight.bases[start:stop, None] - below).masked_fill_(below == _ZERO, 0) << 7
    bits = ((high & 0x7F) << 3 | (low & 0x07)) + offset
    rows = _signed(bits, high).view(torch.bfloat16)
    row, column = weight.exceptions.long().unbind(1)
    is_here = (row >= start) & (row < stop)
    rows[row[is_here] - start, column[is_here]] = weight.exception_values[is_here].to(rows.dtype)
    return rows


@torch.no_grad()
def join_draft(weight: SplitWeight, start: int, stop: int) -> Tensor:
    """Returns rows `start` to `stop` as a draft sees them, bfloat16 `[stop - start, K]`.

    The three missing bits of mantissa are taken in the middle. Rows of base 0, all below
    2 ** -119, count as zero.
    """
    high, base = weight.high[start:stop].to(torch.int16), weight.bases[start:stop, None]
    bits = ((high & 0x7F) << 3) + (base << 7 | 4)
    return _signed(bits, high).masked_fill_(base == 0, 0).view(torch.bfloat16)


def _signed(bits: Tensor, high: Tensor) -> Tensor:
    """Sets the sign bit of int16 `bits` where the high plane has it."""
    return torch.where(high >= 0x80, bits | -0x8000, bits)
