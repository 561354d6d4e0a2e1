"""Expert products on a GPU: dequantised inside the product, for all experts of a layer at once.

Two launches compute a layer. The first multiplies with the up-projection, applies what lies
between the matrices and writes one row per assignment (a token and one of its experts); the
second multiplies with the down-projection. Experts are found through a table from expert to
slot, so nothing is gathered and no full-precision weight is ever written to memory.

A row's result does not depend on which rows share the launch: tiles have one size, every row
of a tile is accumulated by itself, over the inputs in one order. Routing is read from device
memory; nothing here waits for the host.

Knows slots and sections by their offsets, nothing of stores or models. Needs triton; with
TRITON_INTERPRET=1 it also runs on CPU tensors. Any thread, one stream.

Source: Mira, INT8 expert kernel (dequantisation fused, weights never materialised); Specter,
fused multi-expert INT4 draft (one launch for all experts of a layer, reduction in a fixed
order, routing read from device memory, counters updated on the way).
"""

from __future__ import annotations

import enum
import os
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK_M = 16
"""Rows of a tile: the least that the matrix units take, and one size for every launch."""

BLOCK_N = 64
"""Outputs of a tile."""

MAX_BLOCK_K = 64
"""Most INT4 inputs taken at a time; never more than share a scale. With 128, registers spill on
every architecture (triton 3.9)."""

DENSE_BLOCK_K = 32
"""Inputs of wider weights taken at a time; 64 take nearly all registers there are."""

_IS_INTERPRETED = tl.constexpr(os.environ.get("TRITON_INTERPRET") == "1")
"""The interpreter multiplies the bits of bfloat16 (triton 3.9), so there operands are widened,
which is exact."""


class Stored(enum.IntEnum):
    """How an expert's matrices are stored."""

    DENSE = 0
    INT8 = 1
    INT4 = 2
    NESTED = 3


class Between(enum.IntEnum):
    """What lies between an expert's two matrices."""

    SILU_GATE = 0
    """`silu(gate) * up`."""
    GELU_GATE = 1
    """`gelu_tanh(gate) * up`."""
    CLAMPED_GATE = 2
    """`(up + 1) * gate * sigmoid(alpha * gate)`, both clamped. Source: gpt-oss."""
    SQUARED_RELU = 3
    """`relu(up) ** 2`, no gate. Source: Nemotron-H."""
    SILU = 4
    """`silu(up)`, no gate."""

    @property
    def has_gate(self) -> bool:
        """Whether the first matrix has gate rows beside the others."""
        return self < Between.SQUARED_RELU


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlaneArena:
    """Records of one plane, one behind the other, and which expert is where.

    Attributes:
        data: uint8 `[num_slots * record_bytes]` on the device.
        record_bytes: Of one record; a multiple of 4.
        sections: Offset in bytes of each section of a record: `up`, `down`, and what there
            is of `scale`, `up_scales`, `down_scales`, `up_bias`, `down_bias`.
        table: int32 `[num_experts]`: the slot of each of the layer's experts, -1 for none.
    """

    data: Tensor
    record_bytes: int
    sections: Mapping[str, int]
    table: Tensor


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class LayerExperts:
    """The experts of one layer as the kernels take them.

    Attributes:
        stored: How they are stored.
        between: What lies between the matrices.
        hidden_size: Inputs C.
        intermediate_size: Units R.
        main: The plane with the scales and biases: the only one, or `nested`'s high one.
        low: `nested`'s low plane.
        group_size: Inputs that share a scale, of `INT4` and `NESTED`.
        is_interleaved: Whether gate and up rows alternate.
        has_bias: Whether there are biases.
        is_bias_float32: Whether these are float32, else bfloat16.
        limit: Clamp of `CLAMPED_GATE`.
        alpha: Its factor.
    """

    stored: Stored
    between: Between
    hidden_size: int
    intermediate_size: int
    main: PlaneArena
    low: PlaneArena | None = None
    group_size: int = 0
    is_interleaved: bool = False
    has_bias: bool = False
    is_bias_float32: bool = True
    limit: float = 7.0
    alpha: float = 1.702

    def __post_init__(self) -> None:
        if (self.stored is Stored.NESTED) != (self.low is not None):
            raise ValueError("a low plane belongs to nested experts, and to no others")
        grouped = self.stored in (Stored.INT4, Stored.NESTED)
        if grouped and (self.group_size < 32 or self.group_size & (self.group_size - 1)):
            raise ValueError(f"groups of {self.group_size} inputs: 32, 64 or 128 are taken")
        if self.main.record_bytes % 4:
            raise ValueError("records need a size that is a multiple of 4 bytes")


@dataclass(frozen=True, slots=True, eq=False)
class Assignments:
    """A layer's routing, grouped by expert; all of it stays on the device.

    Attributes:
        top_k: Experts of a token.
        order: int32 `[T * k]`: assignments sorted by expert, each `token * k + place`.
        block_expert: int32 `[B]`: expert of each tile of rows, -1 behind the last.
        block_start: int32 `[B]`: its first row in `order`.
        expert_stop: int32 `[num_experts]`: where each expert's rows end.
    """

    top_k: int
    order: Tensor
    block_expert: Tensor
    block_start: Tensor
    expert_stop: Tensor

    @property
    def num_rows(self) -> int:
        """Assignments."""
        return self.order.shape[0]


def group_by_expert(top_k_index: Tensor, num_experts: int) -> Assignments:
    """Sorts a layer's routing by expert, without a word to the host.

    Args:
        top_k_index: `[T, k]` integers.
        num_experts: Experts of the layer.
    """
    num_tokens, top_k = top_k_index.shape
    flat = top_k_index.reshape(-1)
    num_rows = num_tokens * top_k
    _, order = torch.sort(flat, stable=True)
    counts = torch.zeros(num_experts, dtype=torch.int64, device=flat.device)
    counts.scatter_add_(0, flat.long(), torch.ones_like(flat, dtype=torch.int64))
    stop = torch.cumsum(counts, 0)
    num_blocks = (counts + BLOCK_M - 1) // BLOCK_M
    block_stop = torch.cumsum(num_blocks, 0)
    # As many tiles as there could be: each expert's last one may be short.
    most = num_rows // BLOCK_M + min(num_rows, num_experts)
    blocks = torch.arange(most, device=flat.device)
    expert = torch.searchsorted(block_stop, blocks, right=True)
    is_none = expert >= num_experts
    known = expert.clamp(max=num_experts - 1)
    within = blocks - (block_stop - num_blocks)[known]
    start = (stop - counts)[known] + within * BLOCK_M
    return Assignments(
        top_k,
        order.int(),
        # Not `where`: with a number it may bring that from the host, which no recording can.
        expert.masked_fill(is_none, -1).int(),
        start.masked_fill(is_none, 0).int(),
        stop.int(),
    )


def expert_outputs(
    hidden: Tensor,
    experts: LayerExperts,
    rows: Assignments,
    *,
    inner: Tensor | None = None,
    result: Tensor | None = None,
    misses: Tensor | None = None,
) -> Tensor:
    """Computes every assignment whose expert is in a slot.

    Args:
        hidden: `[T, C]`, bfloat16 (float32 and float16 are taken too).
        experts: The layer's.
        rows: From `group_by_expert`.
        inner: `[T * k, R]` in the dtype of `hidden`, written over; `None` takes new memory.
        result: `[T * k, C]`, of which rows of experts in slots are written; `None` takes
            new memory, zero elsewhere.
        misses: int32 `[1]`, to which the assignments without a slot are added; `None` counts
            nothing.

    Returns:
        `result`, by assignment.
    """
    if inner is None:
        inner = hidden.new_empty(rows.num_rows, experts.intermediate_size)
    if result is None:
        result = hidden.new_zeros(rows.num_rows, experts.hidden_size)
    blocks = rows.block_expert.shape[0]
    grid = (blocks, triton.cdiv(experts.intermediate_size, BLOCK_N))
    routing = (rows.order, rows.block_expert, rows.block_start, rows.expert_stop)
    up_kernel[grid](
        hidden, inner, *routing, rows.order if misses is None else misses,
        *_arena(experts, "up"), *_numbers(experts), rows.top_k, IS_DIRECT=False,
        HAS_COUNTS=False, HAS_MISSES=misses is not None, **_constants(experts, is_up=True),
    )  # fmt: skip
    grid = (blocks, triton.cdiv(experts.hidden_size, BLOCK_N))
    down_kernel[grid](
        inner, result, *routing, *_arena(experts, "down"), *_numbers(experts),
        **_constants(experts, is_up=False),
    )  # fmt: skip
    return result


def combine(outputs: Tensor, top_k_weights: Tensor) -> Tensor:
    """Weights the outputs and sums over top-k in the router's order.

    Args:
        outputs: `[T * k, C]` by assignment.
        top_k_weights: `[T, k]`.

    Returns:
        `[T, C]` in the dtype of `outputs`; summed in float32.
    """
    num_tokens, top_k = top_k_weights.shape
    hidden_size = outputs.shape[1]
    result = outputs.new_empty(num_tokens, hidden_size)
    grid = (num_tokens, triton.cdiv(hidden_size, 256))
    combine_kernel[grid](
        outputs, top_k_weights.contiguous(), result, hidden_size, TOP_K=top_k, BLOCK_N=256
    )
    return result


def draft_layer(
    hidden: Tensor,
    experts: LayerExperts,
    top_k_index: Tensor,
    top_k_weights: Tensor,
    counts: Tensor,
    inner: Tensor,
    result: Tensor,
) -> Tensor:
    """Computes a draft's layer in two launches, its buffers given, ready to be captured.

    Experts in no slot add nothing.

    Args:
        hidden: `[T, C]`.
        experts: `INT4` as a rule; any form is taken.
        top_k_index: `[T, k]` int32 or int64, read on the device.
        top_k_weights: `[T, k]`.
        counts: int32 `[num_experts]`, the Expert Lookahead Buffer's row of this layer; one is
            added for every assignment.
        inner: `[T * k, R]` in the dtype of `hidden`, written over.
        result: `[T, C]`, written over.

    Returns:
        `result`.
    """
    num_tokens, top_k = top_k_index.shape
    index = top_k_index.contiguous()
    grid = (num_tokens * top_k, triton.cdiv(experts.intermediate_size, BLOCK_N))
    up_kernel[grid](
        hidden, inner, index, index, counts, index, counts, *_arena(experts, "up"),
        *_numbers(experts), top_k, IS_DIRECT=True, HAS_COUNTS=True, HAS_MISSES=False,
        **_constants(experts, is_up=True),
    )  # fmt: skip
    grid = (num_tokens, triton.cdiv(experts.hidden_size, BLOCK_N))
    draft_down_kernel[grid](
        inner, result, index, top_k_weights.contiguous(), *_arena(experts, "down"),
        *_numbers(experts), TOP_K=top_k, **_constants(experts, is_up=False),
    )  # fmt: skip
    return result


def _arena(experts: LayerExperts, matrix: str) -> tuple[Tensor | int, ...]:
    """The planes' typed views, record sizes, tables and the matrix's offsets, in elements."""
    main, low = experts.main, experts.low or experts.main
    stored = experts.stored
    scales = "scale" if stored is Stored.INT8 else f"{matrix}_scales"
    codes = main.sections[matrix]
    bias_bytes = 4 if experts.is_bias_float32 else 2
    return (
        main.data,
        main.data.view(torch.int8),
        main.data.view(torch.bfloat16),
        main.data.view(torch.float32),
        low.data,
        main.table,
        low.table,
        main.record_bytes,
        low.record_bytes,
        codes // 2 if stored is Stored.DENSE else codes,
        main.sections.get(scales, 0) // 2,
        low.sections[matrix],
        main.sections.get(f"{matrix}_bias", 0) // bias_bytes,
    )


def _numbers(experts: LayerExperts) -> tuple[int | float, ...]:
    return experts.hidden_size, experts.intermediate_size, experts.limit, experts.alpha


def _constants(experts: LayerExperts, *, is_up: bool) -> dict[str, int]:
    return layer_constants(
        experts.stored,
        experts.between,
        group_size=experts.group_size,
        is_interleaved=experts.is_interleaved,
        has_bias=experts.has_bias,
        is_bias_float32=experts.is_bias_float32,
        is_up=is_up,
    )


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


@triton.jit
def _dot(a, codes):
    """`a @ codes.T`, accumulated in float32; codes of up to eight bits are exact in bfloat16."""
    b = tl.trans(codes.to(tl.float32))
    if _IS_INTERPRETED:
        return tl.dot(a.to(tl.float32), b, input_precision="ieee")
    return tl.dot(a, b.to(a.dtype), input_precision="ieee")


@triton.jit
def _product(
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
            place = out_rows[:, None] * (num_inputs // 2) + (start // 2 + half)[None, :]
            pair = tl.load(bytes8 + code_at + place, mask=is_out[:, None], other=0x88)
            left = (pair & 15).to(tl.int32) - 8
            right = (pair >> 4).to(tl.int32) - 8
            if STORED == 3:
                pair = tl.load(low8 + low_at + place, mask=is_out[:, None], other=0x88)
                left = 16 * left + (pair & 15).to(tl.int32) - 8
                right = 16 * right + (pair >> 4).to(tl.int32) - 8
            part = _dot(even, left)
            part += _dot(odd, right)
            scale = tl.load(
                values16 + scale_at + out_rows * (num_inputs // GROUP) + start // GROUP,
                mask=is_out,
                other=0.0,
            ).to(tl.float32)
            if STORED == 3:
                scale = scale * 0.0625
            total += part * scale[None, :]
    return total


@triton.jit
def _in_slot(
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
def _bias(values16, values32, bias_at, rows, is_out, IS_BIAS_FLOAT32: tl.constexpr):
    if IS_BIAS_FLOAT32:
        return tl.load(values32 + bias_at + rows, mask=is_out, other=0.0)
    return tl.load(values16 + bias_at + rows, mask=is_out, other=0.0).to(tl.float32)


@triton.jit
def _inner(gate, up, limit, alpha, BETWEEN: tl.constexpr):
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
    units = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    is_unit = units < num_units
    to = inner + row.to(tl.int64)[:, None] * num_units + units[None, :]
    is_out = is_row[:, None] & is_unit[None, :]
    slot = tl.load(table + expert).to(tl.int64)
    low_slot = tl.load(low_table + expert).to(tl.int64)
    if slot < 0 or low_slot < 0:
        if HAS_MISSES:  # noqa: SIM102 - as above
            if tl.program_id(1) == 0:
                tl.atomic_add(misses, tl.sum(is_row.to(tl.int32), 0))
        tl.store(to, tl.zeros([BLOCK_M, BLOCK_N], inner.dtype.element_ty), mask=is_out)
        return
    code_at, scale_at, low_at, bias_at = _in_slot(
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
    up = _product(
        x, token, is_row, up_rows, is_unit, num_inputs, bytes8, codes8, values16, low8,
        code_at, scale_at, low_at, STORED, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    gate = up
    if BETWEEN < 3:
        gate = _product(
            x, token, is_row, gate_rows, is_unit, num_inputs, bytes8, codes8, values16, low8,
            code_at, scale_at, low_at, STORED, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
        )  # fmt: skip
    scale = tl.zeros([BLOCK_N], tl.float32) + 1.0
    if STORED == 1:  # One scale for a unit's rows and its column.
        scale = tl.load(values16 + scale_at + units, mask=is_unit, other=0.0).to(tl.float32)
        up, gate = up * scale[None, :], gate * scale[None, :]
    if HAS_BIAS:
        up += _bias(values16, values32, bias_at, up_rows, is_unit, IS_BIAS_FLOAT32)[None, :]
        gate += _bias(values16, values32, bias_at, gate_rows, is_unit, IS_BIAS_FLOAT32)[None, :]
    value = _inner(gate, up, limit, alpha, BETWEEN) * scale[None, :]
    tl.store(to, value.to(inner.dtype.element_ty), mask=is_out)


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
    value = _down_tile(
        inner, row, is_row, outputs, is_output, num_units, bytes8, codes8, values16, values32,
        low8, slot, low_slot, record_bytes, low_record_bytes, code_at, scale_at, low_at, bias_at,
        STORED, GROUP, HAS_BIAS, IS_BIAS_FLOAT32, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    to = result + row.to(tl.int64)[:, None] * num_outputs + outputs[None, :]
    tl.store(to, value.to(result.dtype.element_ty), mask=is_row[:, None] & is_output[None, :])


@triton.jit
def _down_tile(
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
    code_at, scale_at, low_at, bias_at = _in_slot(
        slot, low_slot, record_bytes, low_record_bytes, code_at, scale_at, low_at, bias_at,
        STORED, IS_BIAS_FLOAT32,
    )  # fmt: skip
    value = _product(
        inner, row, is_row, outputs, is_output, num_units, bytes8, codes8, values16, low8,
        code_at, scale_at, low_at, STORED, GROUP, BLOCK_M, BLOCK_N, BLOCK_K,
    )  # fmt: skip
    if HAS_BIAS:
        value += _bias(values16, values32, bias_at, outputs, is_output, IS_BIAS_FLOAT32)[None, :]
    return value


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
            total += weight * _down_tile(
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
