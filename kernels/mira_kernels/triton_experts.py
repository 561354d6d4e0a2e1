"""Launches of expert products on a GPU, for all experts of a layer at once.

Two launches compute a layer. The first multiplies with the up-projection, applies what lies
between the matrices and writes one row per assignment (a token and one of its experts); the
second multiplies with the down-projection. Experts are found through a table from expert to
slot and dequantised inside the product, so nothing is gathered and no full-precision weight
is ever written to memory.

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

import torch
import triton
from torch import Tensor

from .assignments import Assignments
from .gpu_layer import LayerExperts, Stored
from .tiles import BLOCK_N, layer_constants
from .triton_kernels import combine_kernel, down_kernel, draft_down_kernel, up_kernel


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
        inner: `[T * k, R]` in the dtype of `hidden`, of which rows of experts in slots are
            written; `None` takes new memory.
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
        inner: `[T * k, R]` in the dtype of `hidden`; rows of experts in slots are written.
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
