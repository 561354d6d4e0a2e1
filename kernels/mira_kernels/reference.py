"""Plain arithmetic: what every kernel has to agree with.

Written for reading, not for speed: each weight becomes a float32 matrix exactly as its
definition says, and products are taken in float64. Torch only; no state; any thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from .packing import plain_scales, unpack_codes
from .weights import DenseWeight, Int4Weight, Int8Weight, NestedWeight, Weight


def codes(weight: Int8Weight | Int4Weight | NestedWeight) -> Tensor:
    """Returns the integer codes `[N, K]`, int16."""
    match weight:
        case Int8Weight():
            return weight.codes.to(torch.int16)
        case Int4Weight():
            return unpack_codes(weight.packed, weight.layout, weight.shape).to(torch.int16)
        case NestedWeight():
            hi = codes(weight.hi)
            return 16 * hi + unpack_codes(weight.lo, weight.hi.layout, weight.shape)


def dequantise(weight: Weight) -> Tensor:
    """Returns the matrix that the weight stands for, float32 `[N, K]`, newly allocated."""
    match weight:
        case DenseWeight():
            return weight.data.to(torch.float32, copy=True)
        case Int8Weight():
            scale = weight.scale.to(torch.float32).reshape(-1)
            scale = scale[:, None] if weight.scale_axis == 0 else scale[None, :]
            return codes(weight) * scale
        case Int4Weight():
            return codes(weight) * _spread(weight)
        case NestedWeight():
            return codes(weight) * (_spread(weight.hi) / 16)


def _spread(weight: Int4Weight) -> Tensor:
    """The scale of every entry, float32 `[N, K]`."""
    scales = plain_scales(weight.scales, weight.layout).to(torch.float32)
    return scales.repeat_interleave(weight.group_size, dim=1)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Returns `x @ W.T + bias` in float64, `[M, N]` for x `[M, K]`."""
    y = x.double() @ dequantise(weight).double().t()
    return y if bias is None else y + bias.double()
