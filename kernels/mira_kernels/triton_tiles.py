"""What the GPU kernels are made of: a tile's product with stored weights, and what follows it.

Weights are dequantised inside the product. A row's result does not depend on which rows share
its tile: every row is accumulated by itself, over the inputs in one order. Runs on the device
inside the kernels of `triton_kernels`. Needs triton.

Source: Mira, INT8 expert kernel (dequantisation fused, weights never materialised).
"""

from __future__ import annotations

import os

import triton
import triton.language as tl

_IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""The interpreter multiplies the bits of bfloat16 (triton 3.9), so there operands are widened,
which is exact."""


@triton.jit
def _dot(a, codes):
    """`a @ codes.T`, accumulated in float32; codes of up to eight bits are exact in bfloat16."""
    b = tl.trans(codes.to(tl.float32))
    if _IS_INTERPRETED:
        return tl.dot(a.to(tl.float32), b, input_precision="ieee")
    return tl.dot(a, b.to(a.dtype), input_precision="ieee")


@triton.jit
def tile_product(
    x,  # [*, K]
    x_rows,  # [BLOCK_M] rows of x
    is_row,  # [BLOCK_M]
    out_rows,  # [BLOCK_N] rows of the matrix
    is_out,  # [BLOCK_N]
    num_inputs,
    bytes8,
    codes8,
    values16,
    low8,
    code_at,
    scale_at,
    low_at,
    STORED: tl.constexpr,
    GROUP: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """`x @ W.T` of one tile, `[BLOCK_M, BLOCK_N]` float32; INT8 codes come unscaled."""
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    x_rows = x_rows.to(tl.int64)
    out_rows = out_rows.to(tl.int64)
    for start in range(0, num_inputs, BLOCK_K):
        if STORED == 0 or STORED == 1:
            columns = start + tl.arange(0, BLOCK_K)
            is_in = columns < num_inputs
            tile = tl.load(
                x + x_rows[:, None] * num_inputs + columns[None, :],
                mask=is_row[:, None] & is_in[None, :],
                other=0.0,
            )
            source = codes8 if STORED == 1 else values16
            weight = tl.load(
                source + code_at + out_rows[:, None] * num_inputs + columns[None, :],
                mask=is_out[:, None] & is_in[None, :],
                other=0,
            )
            total += _dot(tile, weight)
        else:
            half = tl.arange(0, BLOCK_K // 2)
            columns = start + 2 * half
            at = x + x_rows[:, None] * num_inputs + columns[None, :]
            even = tl.load(at, mask=is_row[:, None], other=0.0)
            odd = tl.load(at + 1, mask=is_row[:, None], other=0.0)
            # A group has 32 inputs or more. From `num_inputs` alone the compiler knows a multiple
            # of 8, and copies 8 bytes where it could copy 16.
            row_bytes = tl.multiple_of(num_inputs // 2, 16)
            place = out_rows[:, None] * row_bytes + (start // 2 + half)[None, :]
            pair = tl.load(bytes8 + code_at + place, mask=is_out[:, None], other=0x88)
            left = (pair & 15).to(tl.int32) - 8
            right = (pair >> 4).to(tl.int32) - 8
            if STORED == 3:
                pair = tl.load(low8 + low_at + place, mask=is_out[:, None], other=0x88)
                left = 16 * left + (pair & 15).to(tl.int32) - 8
                right = 16 * right + (pair >> 4).to(tl.int32) - 8
            # Asked for before the products, which take their time; behind them sm_80 spills.
            scale = tl.load(
                values16 + scale_at + out_rows * (num_inputs // GROUP) + start // GROUP,
                mask=is_out,
                other=0.0,
            ).to(tl.float32)
            part = _dot(even, left)
            part += _dot(odd, right)
            if STORED == 3:
                scale = scale * 0.0625
            total += part * scale[None, :]
    return total


@triton.jit
def in_slot(
    slot,
    low_slot,
    record_bytes,
    low_record_bytes,
    code_at,
    scale_at,
    low_at,
    bias_at,
    STORED: tl.constexpr,
    IS_BIAS_FLOAT32: tl.constexpr,
):
    """Offsets of an expert's sections in its arena, each in elements of its own view."""
    code_step = record_bytes // 2 if STORED == 0 else record_bytes
    bias_step = record_bytes // 4 if IS_BIAS_FLOAT32 else record_bytes // 2
    return (
        code_at + slot * code_step,
        scale_at + slot * (record_bytes // 2),
        low_at + low_slot * low_record_bytes,
        bias_at + slot * bias_step,
    )


@triton.jit
def load_bias(values16, values32, bias_at, rows, is_out, IS_BIAS_FLOAT32: tl.constexpr):
    """An expert's biases of some rows of a matrix, `[BLOCK_N]` float32."""
    if IS_BIAS_FLOAT32:
        return tl.load(values32 + bias_at + rows, mask=is_out, other=0.0)
    return tl.load(values16 + bias_at + rows, mask=is_out, other=0.0).to(tl.float32)


@triton.jit
def apply_between(gate, up, limit, alpha, BETWEEN: tl.constexpr):
    """What lies between the matrices; `gate` is ignored where there is none."""
    if BETWEEN == 0:
        return gate * tl.sigmoid(gate) * up
    if BETWEEN == 1:
        cubic = 0.7978845608028654 * (gate + 0.044715 * gate * gate * gate)
        return gate * tl.sigmoid(2.0 * cubic) * up
    if BETWEEN == 2:
        gate = tl.minimum(gate, limit)
        up = tl.minimum(tl.maximum(up, -limit), limit)
        return (up + 1.0) * gate * tl.sigmoid(gate * alpha)
    if BETWEEN == 3:
        kept = tl.maximum(up, 0.0)
        return kept * kept
    return up * tl.sigmoid(up)


@triton.jit
def down_tile(
    inner,
    row,
    is_row,
    outputs,
    is_output,
    num_units,
    bytes8,
    codes8,
    values16,
    values32,
    low8,
    slot,
    low_slot,
    record_bytes,
    low_record_bytes,
    code_at,
    scale_at,
    low_at,
    bias_at,
    STORED: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_BIAS_FLOAT32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """One expert's outputs of some rows, `[BLOCK_M, BLOCK_N]` float32."""
    code_at, scale_at, low_at, bias_at = in_slot(
        slot, low_slot, record_bytes, low_record_bytes, code_at, scale_at, low_at, bias_at,
        STORED, IS_BIAS_FLOAT32,
    )  # fmt: skip
    value = tile_product(
        inner, row, is_row, outputs, is_output, num_units, bytes8, codes8, values16, low8,
        code_at, scale_at, low_at, STORED, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        bias = load_bias(values16, values32, bias_at, outputs, is_output, IS_BIAS_FLOAT32)
        value += bias[None, :]
    return value
