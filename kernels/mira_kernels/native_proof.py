"""What torch has to know of the C++ operators, and whether they compute what they should.

Both are asked once, by `native`, when a library has just been loaded.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import packing, reference
from .split import join_draft, split
from .weights import Int4Layout, Int4Weight, NestedWeight


def find_wrong() -> str | None:
    """Multiplies small matrices of every kind, and says what is wrong, if anything is."""
    ops = torch.ops.mira

    def differs(y: Tensor, truth: Tensor) -> bool:
        error = (y.double() - truth.double()).norm()
        return not bool(error <= 1e-2 * truth.double().norm())

    x = (torch.arange(3 * 64) * 37 % 101 / 50 - 1).view(3, 64).to(torch.bfloat16)
    entries = (torch.arange(64 * 64) * 73 % 255 - 127).view(64, 64)
    dense = (entries / 127).to(torch.bfloat16)
    if differs(ops.dense_linear(x, dense, None), x.double() @ dense.double().t()):
        return "their dense product is wrong"
    planes = split(dense)
    parts = (planes.bases, planes.exceptions, planes.exception_values)
    if not ops.split_rows(torch.arange(64), planes.high, planes.low, *parts).equal(dense):
        return "their rows from two planes are wrong"
    y = ops.split_linear(x, planes.high, planes.low, *parts, None)
    if not y.equal(ops.dense_linear(x, dense, None)):
        return "their product with two planes is wrong"
    y = ops.split_linear(x, planes.high, None, *parts, None)
    if differs(y, x.double() @ join_draft(planes, 0, 64).double().t()):
        return "their product with a high plane is wrong"
    factors = torch.arange(1, 65) / 512
    y = ops.int8_linear(x, entries.to(torch.int8), factors, None)
    if differs(y, x.double() @ (entries * factors[:, None]).double().t()):
        return "their INT8 product is wrong"
    for layout in (Int4Layout.CPU_PACKED_AVX512, Int4Layout.CPU_PACKED_AVX2):
        scales = torch.stack((factors, factors.flip(0)), 1).to(torch.bfloat16)
        stored = packing.arrange_scales(scales, layout)
        codes = (entries % 15 - 7, entries % 16 - 8)
        planes = [packing.pack_codes(plane, layout).contiguous() for plane in codes]
        hi = Int4Weight(planes[0], stored, 32, (64, 64), layout)
        nested = NestedWeight(hi, planes[1])
        y = ops.int4_linear(x, hi.packed, stored, 32, layout.block_rows)
        if differs(y, reference.linear(x, hi)):
            return "their INT4 product is wrong"
        y = ops.nested_linear(x, hi.packed, stored, nested.lo, 32, layout.block_rows)
        if differs(y, reference.linear(x, nested)):
            return "their nested product is wrong"
    states = x.view(1, 1, 3, 64)
    y = ops.attend(states, states, states, 0, 0.125)
    truth = torch.nn.functional.scaled_dot_product_attention(
        states.float(), states.float(), states.float(), is_causal=True, scale=0.125
    )
    return "their attention is wrong" if differs(y, truth.transpose(1, 2)) else None


def register_shapes() -> None:
    """Tells torch the shapes of results, for tracing."""

    def product(x: Tensor, weight: Tensor, *_: object) -> Tensor:
        return x.new_empty(*x.shape[:-1], weight.shape[0])

    def attend(query: Tensor, _keys: Tensor, values: Tensor, *_: object) -> Tensor:
        num_heads, num_queries = query.shape[1], query.shape[2]
        return query.new_empty(1, num_queries, num_heads, values.shape[3])

    fakes = {
        "dense_linear": product,
        "int8_linear": product,
        "split_linear": product,
        "split_rows": lambda ids, high, *_: high.new_empty(
            *ids.shape, high.shape[1], dtype=torch.bfloat16
        ),
        "int4_linear": product,
        "nested_linear": product,
        "gated_experts_": lambda *_: None,
        "combine_experts": lambda rows, weights: rows.new_empty(
            weights.shape[0], rows.shape[1], dtype=torch.bfloat16
        ),
        "draft_experts": lambda x, *_: torch.empty_like(x, memory_format=torch.contiguous_format),
        "predict_experts": lambda x, *rest: x.new_empty(rest[-1], dtype=torch.float32),
        "attend": attend,
        "attend_cached_": lambda query, _k, _v, keys, values, *_: attend(query, keys, values),
    }
    for name, fake in fakes.items():
        torch.library.register_fake(f"mira::{name}", fake)
