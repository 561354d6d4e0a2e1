"""The GPU kernels: each program of a launch computes one tile.

What they are given, `triton_experts` says, which launches them. Experts are found through a
table from expert to slot; routing is read from device memory. Needs triton.

Source: Mira, INT8 expert kernel; Specter, fused multi-expert INT4 draft (one launch for all
experts of a layer, reduction in a fixed order, counters updated on the way).
"""

from __future__ import annotations

import triton
import triton.language as tl

from .triton_tiles import apply_between, down_tile, in_slot, load_bias, tile_product


@triton.jit
def up_kernel(
    x,  # [T, C]
    inner,  # [T * k, R]
    order,
    block_expert,
    block_start,
    expert_stop,
    misses,
    bytes8,
    codes8,
    values16,
    values32,
    low8,
    table,
    low_table,
    record_bytes,
    low_record_bytes,
    code_at,
    scale_at,
    low_at,
    bias_at,
    num_inputs,
    num_units,
    limit,
    alpha,
    top_k,
    STORED: tl.constexpr,
    BETWEEN: tl.constexpr,
    GROUP: tl.constexpr,
    IS_INTERLEAVED: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_BIAS_FLOAT32: tl.constexpr,
    IS_DIRECT: tl.constexpr,
    HAS_COUNTS: tl.constexpr,
    HAS_MISSES: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """First matrix and what follows it, one tile of rows by one of units.

    Rows of experts in no slot are left as they are: the second matrix does not read them.
    Direct: each tile is one assignment, `block_expert` its expert and `block_start` the
    lookahead counters.
    """
    block = tl.program_id(0)
    expert = tl.load(block_expert + block).to(tl.int32)
    if expert < 0:
        return
    if HAS_COUNTS:  # noqa: SIM102 - this one is decided when the kernel is built
        if tl.program_id(1) == 0:
            tl.atomic_add(block_start + expert, 1)
    lane = tl.arange(0, BLOCK_M)
    if IS_DIRECT:
        row = tl.zeros([BLOCK_M], tl.int32) + block
        is_row = lane == 0
    else:
        at = tl.load(block_start + block) + lane
        is_row = at < tl.load(expert_stop + expert)
        row = tl.load(order + at, mask=is_row, other=0)
    slot = tl.load(table + expert).to(tl.int64)
    low_slot = tl.load(low_table + expert).to(tl.int64)
    if slot < 0 or low_slot < 0:
        if HAS_MISSES:  # noqa: SIM102 - as above
            if tl.program_id(1) == 0:
                tl.atomic_add(misses, tl.sum(is_row.to(tl.int32), 0))
        return
    units = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_unit = units < num_units
    code_at, scale_at, low_at, bias_at = in_slot(
        slot, low_slot, record_bytes, low_record_bytes, code_at, scale_at, low_at, bias_at,
        STORED, IS_BIAS_FLOAT32,
    )  # fmt: skip
    gate_rows, up_rows = units, units
    if BETWEEN < 3:
        if IS_INTERLEAVED:
            gate_rows, up_rows = 2 * units, 2 * units + 1
        else:
            up_rows = num_units + units
    token = row // top_k
    up = tile_product(
        x, token, is_row, up_rows, is_unit, num_inputs, bytes8, codes8, values16, low8,
        code_at, scale_at, low_at, STORED, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    gate = up
    if BETWEEN < 3:
        gate = tile_product(
            x, token, is_row, gate_rows, is_unit, num_inputs, bytes8, codes8, values16, low8,
            code_at, scale_at, low_at, STORED, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    scale = tl.zeros([BLOCK_N], tl.float32) + 1.0
    if STORED == 1:  # One scale for a unit's rows and its column.
        scale = tl.load(values16 + scale_at + units, mask=is_unit, other=0.0).to(tl.float32)
        up, gate = up * scale[None, :], gate * scale[None, :]
    if HAS_BIAS:
        bias = load_bias(values16, values32, bias_at, up_rows, is_unit, IS_BIAS_FLOAT32)
        up += bias[None, :]
        bias = load_bias(values16, values32, bias_at, gate_rows, is_unit, IS_BIAS_FLOAT32)
        gate += bias[None, :]
    value = apply_between(gate, up, limit, alpha, BETWEEN) * scale[None, :]
    to = inner + row.to(tl.int64)[:, None] * num_units + units[None, :]
    tl.store(to, value.to(inner.dtype.element_ty), mask=is_row[:, None] & is_unit[None, :])


@triton.jit
def down_kernel(
    inner,  # [T * k, R]
    result,  # [T * k, C]
    order,
    block_expert,
    block_start,
    expert_stop,
    bytes8,
    codes8,
    values16,
    values32,
    low8,
    table,
    low_table,
    record_bytes,
    low_record_bytes,
    code_at,
    scale_at,
    low_at,
    bias_at,
    num_outputs,
    num_units,
    limit,
    alpha,
    STORED: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_BIAS_FLOAT32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Second matrix, one tile of rows by one of outputs."""
    block = tl.program_id(0)
    expert = tl.load(block_expert + block)
    if expert < 0:
        return
    slot = tl.load(table + expert).to(tl.int64)
    low_slot = tl.load(low_table + expert).to(tl.int64)
    if slot < 0 or low_slot < 0:
        return
    at = tl.load(block_start + block) + tl.arange(0, BLOCK_M)
    is_row = at < tl.load(expert_stop + expert)
    row = tl.load(order + at, mask=is_row, other=0)
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < num_outputs
    value = down_tile(
        inner, row, is_row, outputs, is_output, num_units, bytes8, codes8, values16, values32,
        low8, slot, low_slot, record_bytes, low_record_bytes, code_at, scale_at, low_at, bias_at,
        STORED, GROUP, HAS_BIAS, IS_BIAS_FLOAT32, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    to = result + row.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(to, value.to(result.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def draft_down_kernel(
    inner,  # [T * k, R]
    result,  # [T, C]
    top_k_index,
    top_k_weights,
    bytes8,
    codes8,
    values16,
    values32,
    low8,
    table,
    low_table,
    record_bytes,
    low_record_bytes,
    code_at,
    scale_at,
    low_at,
    bias_at,
    num_outputs,
    num_units,
    limit,
    alpha,
    TOP_K: tl.constexpr,
    STORED: tl.constexpr,
    GROUP: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    IS_BIAS_FLOAT32: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Second matrices of a token's experts, weighted and summed in the router's order."""
    token = tl.program_id(0)
    lane = tl.arange(0, BLOCK_M)
    is_row = lane == 0
    outputs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_output = outputs < num_outputs
    total = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for place in range(TOP_K):
        assignment = token * TOP_K + place
        expert = tl.load(top_k_index + assignment).to(tl.int32)
        weight = tl.load(top_k_weights + assignment).to(tl.float32)
        slot = tl.load(table + expert).to(tl.int64)
        low_slot = tl.load(low_table + expert).to(tl.int64)
        if slot >= 0 and low_slot >= 0:
            row = tl.zeros([BLOCK_M], tl.int32) + assignment
            total += weight * down_tile(
                inner, row, is_row, outputs, is_output, num_units, bytes8, codes8, values16,
                values32, low8, slot, low_slot, record_bytes, low_record_bytes, code_at,
                scale_at, low_at, bias_at, STORED, GROUP, HAS_BIAS, IS_BIAS_FLOAT32, BLOCK_M,
                BLOCK_N, BLOCK_K,
            )  # fmt: skip
    to = result + (token + lane).to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(to, total.to(result.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def combine_kernel(
    outputs, weights, result, num_outputs, TOP_K: tl.constexpr, BLOCK_N: tl.constexpr
):
    """Weighted sum over a token's experts, in the router's order."""
    token = tl.program_id(0)
    columns = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_in = columns < num_outputs
    total = tl.zeros([BLOCK_N], tl.float32)
    for place in range(TOP_K):
        assignment = (token * TOP_K + place).to(tl.int64)
        value = tl.load(outputs + assignment * num_outputs + columns, mask=is_in, other=0.0)
        total += tl.load(weights + assignment).to(tl.float32) * value.to(tl.float32)
    to = result + token.to(tl.int64) * num_outputs + columns
    tl.store(to, total.to(result.dtype.element_ty), mask=is_in)
