"""Sizes of the tiles that GPU kernels compute, and what a layer's form makes of a kernel.

Numbers alone, the same for launches, for grouping and for builds ahead of time. Any thread.
"""

from __future__ import annotations

from .gpu_layer import Between, Stored

BLOCK_M = 16
"""Rows of a tile: the least that the matrix units take, and one size for every launch."""

BLOCK_N = 64
"""Outputs of a tile."""

MAX_BLOCK_K = 64
"""Most INT4 inputs taken at a time; never more than share a scale. With 128, registers spill on
every architecture where nothing is known of alignment (triton 3.9). As launched none do (112 to
152 on sm_86 and sm_90): which is faster, no card has said yet."""

DENSE_BLOCK_K = 32
"""Inputs of wider weights taken at a time; 64 take nearly all registers there are where nothing is
known of alignment, and 72 to 80 as launched."""


def layer_constants(
    stored: Stored,
    between: Between,
    *,
    group_size: int = 0,
    is_interleaved: bool = False,
    has_bias: bool = False,
    is_bias_float32: bool = True,
    is_up: bool,
) -> dict[str, int]:
    """Returns what a kernel is specialised by; ahead-of-time builds take the same."""
    grouped = stored in (Stored.INT4, Stored.NESTED)
    constants = {
        "STORED": int(stored),
        "GROUP": group_size if grouped else 1,
        "HAS_BIAS": has_bias,
        "IS_BIAS_FLOAT32": is_bias_float32,
        "BLOCK_M": BLOCK_M,
        "BLOCK_N": BLOCK_N,
        "BLOCK_K": min(group_size, MAX_BLOCK_K) if grouped else DENSE_BLOCK_K,
    }
    if is_up:
        constants |= {"BETWEEN": int(between), "IS_INTERLEAVED": is_interleaved}
    return constants
