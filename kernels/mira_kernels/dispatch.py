"""Which kernel multiplies: by weight, dtype, processor and number of rows.

`linear` is the only thing the engine calls. For the same weight, x and number of rows
the result is the same, bit for bit, at any time. Knows no model and no store. Any thread.
"""

from __future__ import annotations

import torch
from torch import Tensor

from . import cpu
from .packing import fits_layout
from .weights import Int4Layout, Int4Weight, Int8Weight, NestedWeight, Weight

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


def _bfloat16_linear(x: Tensor, weight: Weight) -> Tensor:
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
    native = cpu.native_int4_layout()
    if native is not None and fits_layout(native, num_outputs, num_inputs, group_size):
        return native
    return Int4Layout.ROWS


def is_native(layout: Int4Layout) -> bool:
    """Whether a packed layout's kernel runs here; elsewhere it is unpacked for each use."""
    return layout is cpu.native_int4_layout()


def describe() -> tuple[str, ...]:
    """One line per kind of weight: which kernel runs here, and up to how many rows."""
    native = cpu.native_int4_layout()
    capability = torch.backends.cpu.get_cpu_capability()
    if native is None:
        int4 = nested = f"unpacked for every product (no packed kernel for {capability})"
    else:
        int4 = f"packed kernel ({native}) up to {MAX_ROWS_INT4} rows, then unpacked"
        nested = f"two packed products ({native}) up to {MAX_ROWS_NESTED} rows, then unpacked"
    return (
        "dense: torch linear",
        f"int8: packed kernel ({capability}) up to {MAX_ROWS_INT8} rows, then unpacked",
        f"int4: {int4}",
        f"nested: {nested}",
        "float32 arithmetic: unpacked exactly for every product",
    )
