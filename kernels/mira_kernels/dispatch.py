"""Which kernel multiplies: by weight, dtype, processor and number of rows.

`linear` is the only thing the engine calls. For the same weight, x and number of rows
the result is the same, bit for bit, at any time, provided that `native.load` comes before
the first product or between replies. Knows no model and no store. Any thread.
"""

from __future__ import annotations

import time
from collections.abc import Callable

import torch
from torch import Tensor

from . import cpu, native
from .packing import fits_layout
from .weights import DenseWeight, Int4Layout, Int4Weight, Int8Weight, NestedWeight, Weight

# Crossovers, measured 2026-11-29 on one thread of an EPYC (Zen 4, AVX512), both matrices of
# an expert, hidden / intermediate 576 / 512 (group 64) and 2048 / 1408 (group 128), packed
# time over unpacked time:
#            rows   8          16         20         24         32         40         48
#   int4          .23 / .25  .42 / .47  .51 / .52  .59 / .57  .72 / .73  .84 / .83  .94 / .87
#   nested        .41 / .40  .74 / .78  .89 / .92  1.04 / .99 1.31 / 1.30
#   int8          .68 / .80  1.17 / 1.39 (12 rows: .98 / 1.03)

MAX_ROWS_INT4 = 48
"""Most rows for the INT4 kernel; above, unpacking once and one bfloat16 product win."""

MAX_ROWS_NESTED = 22
"""Most rows for two INT4 products."""

MAX_ROWS_INT8 = 11
"""Most rows for the INT8 kernel."""

# The C++ kernels, measured 2026-11-30 on the same machine in the same way, their time over
# that of the fastest of the others, up-projections of both sizes:
#            rows   8          16         22         32         48
#   dense         .75 / .74  .93 / .81  1.03 / .86 1.13 / .98 1.19 / .98
#   int8          .71 / .59  .71 / .60  .85 / .71  1.03 / .86 1.19 / 1.38
#   int4          .52 / .48  .52 / .50  .48 / .46  .49 / .47  .48 / .47
#   nested        .38 / .35  .37 / .36  .37 / .20  .48 / .25  .62 / .35
# They hold until `use_native_limit` says what was measured on the machine at hand.
# With weights that no cache holds a single row gains more: `tests/bench/kernels.py`.

MAX_ROWS_NATIVE_DENSE = 22
"""Most rows for the native dense kernel."""

MAX_ROWS_NATIVE_INT8 = 32
"""Most rows for the native INT8 kernel."""

MAX_ROWS_NATIVE_INT4 = 48
"""Most rows for the native INT4 kernel."""

MAX_ROWS_NATIVE_NESTED = 48
"""Most rows for the native nested kernel."""


_native_limits: dict[type[Weight], int] = {
    DenseWeight: MAX_ROWS_NATIVE_DENSE,
    Int8Weight: MAX_ROWS_NATIVE_INT8,
    Int4Weight: MAX_ROWS_NATIVE_INT4,
    NestedWeight: MAX_ROWS_NATIVE_NESTED,
}


def use_native_limit(kind: type[Weight], num_rows: int) -> None:
    """Sets the most rows for the native kernel of a kind of weight.

    Results are rounded otherwise afterwards: before the first product or between replies.
    """
    _native_limits[kind] = num_rows


def measure_native_limit(weight: Weight, dtype: torch.dtype = torch.bfloat16) -> int:
    """Measures up to how many rows the native kernel is the fastest for this matrix.

    The fastest of three products each, some 20 ms for half a million weights. Returns a
    multiple of 8, at most 48; 0 where the native kernel does not take the weight.
    """
    best = 0
    for num_rows in range(8, native.MAX_ROWS + 1, 8):
        x = torch.ones(num_rows, weight.shape[1], dtype=dtype)
        if _native_product(x, weight) is None:
            return best
        own = _fastest(lambda x=x: _native_product(x, weight))
        if own > _fastest(lambda x=x: _other_product(x, weight)):
            return best
        best = num_rows
    return best


def _fastest(product: Callable[[], object]) -> float:
    times = []
    for _ in range(3):
        started = time.perf_counter()
        product()
        times.append(time.perf_counter() - started)
    return min(times)


def linear(x: Tensor, weight: Weight, bias: Tensor | None = None) -> Tensor:
    """Returns `x @ W.T + bias`.

    Args:
        x: `[M, K]`, bfloat16 or float32, on the CPU.
        weight: `[N, K]`.
        bias: `[N]`, any float dtype.

    Returns:
        `[M, N]` in x's dtype, newly allocated. In float32 quantised weights are exact
        (code times scale, in float32).

    Raises:
        TypeError: x is neither bfloat16 nor float32.
    """
    if x.dtype is torch.bfloat16:
        y = _bfloat16_linear(x, weight)
    elif x.dtype is torch.float32:
        y = cpu.unpacked_linear(x, weight)
    else:
        raise TypeError(f"linear takes bfloat16 or float32, not {x.dtype}")
    return y if bias is None else y.add_(bias)


def _native_product(x: Tensor, weight: Weight) -> Tensor | None:
    """`x @ W.T` by the C++ kernels, `None` where they do not take the weight."""
    ops = torch.ops.mira
    match weight:
        case DenseWeight(data=data):
            if data.dtype is not torch.bfloat16:
                return None
            return ops.dense_linear(x, data, None) if data.is_contiguous() else None
        case Int8Weight(codes=codes, scale=scale):
            if not codes.is_contiguous():
                return None
            if weight.scale_axis == 1:
                scaled = x * scale.reshape(-1)
                return ops.int8_linear(scaled, codes, cpu.ones(codes.shape[0]), None)
            return ops.int8_linear(x, codes, scale.reshape(-1).float(), None)
        case Int4Weight(layout=layout):
            if not layout.is_packed:
                return None
            packed, scales = weight.packed.contiguous(), weight.scales.contiguous()
            return ops.int4_linear(x, packed, scales, weight.group_size, layout.block_rows)
        case NestedWeight(hi=hi):
            if not hi.layout.is_packed:
                return None
            packed, scales, lo = hi.packed.contiguous(), hi.scales.contiguous(), weight.lo
            block_rows = hi.layout.block_rows
            return ops.nested_linear(x, packed, scales, lo.contiguous(), hi.group_size, block_rows)


def _bfloat16_linear(x: Tensor, weight: Weight) -> Tensor:
    if native.is_loaded() and x.shape[0] <= _native_limits[type(weight)]:
        y = _native_product(x, weight)
        if y is not None:
            return y
    return _other_product(x, weight)


def _other_product(x: Tensor, weight: Weight) -> Tensor:
    """`x @ W.T` in bfloat16 without the C++ kernels."""
    kind, num_rows = type(weight), x.shape[0]
    if kind is NestedWeight:
        if num_rows <= MAX_ROWS_NESTED and weight.hi.layout is cpu.native_int4_layout():
            return cpu.nested_linear(x.contiguous(), weight)
    elif kind is Int4Weight:
        if num_rows <= MAX_ROWS_INT4 and weight.layout is cpu.native_int4_layout():
            return cpu.int4_linear(x.contiguous(), weight)
    elif kind is Int8Weight and 0 < num_rows <= MAX_ROWS_INT8:
        return cpu.int8_linear(x.contiguous(), weight)
    return cpu.unpacked_linear(x, weight)


def preferred_int4_layout(num_outputs: int, num_inputs: int, group_size: int) -> Int4Layout:
    """The fastest layout on this machine for a matrix `[num_outputs, num_inputs]`."""
    layout = cpu.native_int4_layout()
    if layout is not None and fits_layout(layout, num_outputs, num_inputs, group_size):
        return layout
    return Int4Layout.ROWS


def is_native(layout: Int4Layout) -> bool:
    """Whether a packed layout's kernel runs here; elsewhere it is unpacked for each use."""
    return layout is cpu.native_int4_layout()


def describe() -> tuple[str, ...]:
    """One line per kind of weight: which kernel runs here, and up to how many rows."""
    layout = cpu.native_int4_layout()
    capability = torch.backends.cpu.get_cpu_capability()
    if layout is None:
        int4 = nested = f"unpacked for every product (no packed kernel for {capability})"
    else:
        int4 = f"packed kernel ({layout}) up to {MAX_ROWS_INT4} rows, then unpacked"
        nested = f"two packed products ({layout}) up to {MAX_ROWS_NESTED} rows, then unpacked"
    dense = "torch linear"
    int8 = f"packed kernel ({capability}) up to {MAX_ROWS_INT8} rows, then unpacked"
    if native.is_loaded():
        dense = f"native kernel up to {_native_limits[DenseWeight]} rows, then torch linear"
        int8 = f"native kernel up to {_native_limits[Int8Weight]} rows, then unpacked"
        packed = "native kernel (packed layouts) up to"
        int4 = f"{packed} {_native_limits[Int4Weight]} rows, then unpacked"
        nested = f"{packed} {_native_limits[NestedWeight]} rows, then unpacked"
    return (
        f"dense: {dense}",
        f"int8: {int8}",
        f"int4: {int4}",
        f"nested: {nested}",
        "float32 arithmetic: unpacked exactly for every product",
    )
