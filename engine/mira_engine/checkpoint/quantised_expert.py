"""One expert as INT4 codes and scales that somebody else has chosen.

What calibrated quantisation makes, and what checkpoints that are quantised already hold:
the codes are kept as they are instead of being rounded anew. Knows no file, record or
layout. Pure; any thread.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from ..errors import FormatError
from ..types import ExpertShape


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class QuantisedExpert:
    """Symmetric INT4 codes of both matrices, by groups along the inputs: `w = code * scale`.

    Attributes:
        up_codes: int8 `[up_rows, C]`, -8..7; rows in the module's own order.
        up_scales: float32 `[up_rows, C / group_size]`.
        down_codes: int8 `[C, R]`, -8..7.
        down_scales: float32 `[C, R / group_size]`.
        group_size: Inputs that share a scale.
        up_bias: `[up_rows]` or `None`.
        down_bias: `[C]` or `None`.
    """

    up_codes: Tensor
    up_scales: Tensor
    down_codes: Tensor
    down_scales: Tensor
    group_size: int
    up_bias: Tensor | None = None
    down_bias: Tensor | None = None


def check_quantised(expert: QuantisedExpert, shape: ExpertShape) -> None:
    """Refuses codes and scales that are not of an expert of `shape`.

    Raises:
        FormatError: A tensor has another shape or dtype, is missing or should not be there,
            a code is outside -8..7, or a scale is nan or infinity in bfloat16.
    """
    group = expert.group_size
    up_dims = (shape.up_rows, shape.hidden_size)
    down_dims = (shape.hidden_size, shape.intermediate_size)
    if group < 1 or shape.hidden_size % group or shape.intermediate_size % group:
        raise FormatError(f"Groups of {group} do not divide the inputs of both matrices.")
    expected = {
        "up_codes": up_dims,
        "up_scales": (up_dims[0], up_dims[1] // group),
        "down_codes": down_dims,
        "down_scales": (down_dims[0], down_dims[1] // group),
        "up_bias": (shape.up_rows,) if shape.has_bias else None,
        "down_bias": (shape.hidden_size,) if shape.has_bias else None,
    }
    for name, dims in expected.items():
        given = getattr(expert, name)
        found = None if given is None else tuple(given.shape)
        if found != dims:
            raise FormatError(f"The expert's {name} should have shape {dims}, but has {found}.")
    for name in ("up", "down"):
        codes, scales = getattr(expert, f"{name}_codes"), getattr(expert, f"{name}_scales")
        if codes.dtype is not torch.int8 or int(codes.min()) < -8 or int(codes.max()) > 7:
            raise FormatError(f"The expert's {name}_codes are no INT4 codes: int8 from -8 to 7.")
        if not bool(torch.isfinite(scales.to(torch.bfloat16)).all()):
            raise FormatError(f"The expert's {name}_scales hold nan or infinity.")
