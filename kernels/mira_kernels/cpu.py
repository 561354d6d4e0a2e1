"""Kernels for CPUs: torch's packed products, and unpacking into a reused matrix.

Owns one workspace per thread; results never depend on what it held before. Knows what a
weight looks like, not when a kernel is worth using: that is `dispatch`. Any thread.
"""

from __future__ import annotations

import functools
import math
import threading

import torch
from torch import Tensor
from torch.nn import functional

from .packing import CODE_OFFSET, pack_codes
from .weights import DenseWeight, Int4Layout, Int4Weight, Int8Weight, NestedWeight, Weight

_int4_mm = torch._weight_int4pack_mm_for_cpu
_int8_mm = torch._weight_int8pack_mm

_LAYOUT_OF_CAPABILITY = {
    "AVX2": Int4Layout.CPU_PACKED_AVX2,
    "AVX512": Int4Layout.CPU_PACKED_AVX512,
}


@functools.cache
def native_int4_layout() -> Int4Layout | None:
    """The layout that torch's INT4 kernel reads here, `None` where it has none.

    Guessed from the processor and then proved once: torch packs a small matrix, and a
    product with our own packing of it is compared with plain arithmetic.
    """
    layout = _LAYOUT_OF_CAPABILITY.get(torch.backends.cpu.get_cpu_capability())
    if layout is None or not _reads_layout(layout):
        return None
    return layout


def _reads_layout(layout: Int4Layout) -> bool:
    """Whether torch packs as `layout` says and multiplies what we pack."""
    num_outputs, num_inputs, group_size = 128, 64, 32
    entries = torch.arange(num_outputs * num_inputs).view(num_outputs, num_inputs)
    codes = (entries * 7 + entries // num_inputs * 3) % 16 - CODE_OFFSET
    packed = pack_codes(codes, layout)
    stored = (codes + CODE_OFFSET).to(torch.int32)
    if not torch.equal(packed, torch.ops.aten._convert_weight_to_int4pack_for_cpu(stored, 1)):
        return False
    scales = torch.zeros(num_inputs // group_size, num_outputs, 2, dtype=torch.bfloat16)
    scales[..., 0] = 0.5
    x = torch.eye(num_inputs, dtype=torch.bfloat16)
    product = _int4_mm(x, packed, group_size, scales)
    return torch.equal(product.float(), codes.t() * 0.5)


class _Workspace(threading.local):
    """Grow-only buffers of one thread, by purpose."""

    def __init__(self) -> None:
        self._buffers: dict[tuple[str, torch.dtype], Tensor] = {}

    def take(self, purpose: str, dtype: torch.dtype, num_entries: int) -> Tensor:
        """Returns `num_entries` of uninitialised room, valid until asked for again."""
        buffer = self._buffers.get((purpose, dtype))
        if buffer is None or buffer.numel() < num_entries:
            # Outside of any inference mode: such a tensor may be written to in both.
            with torch.inference_mode(False):
                buffer = torch.empty(num_entries, dtype=dtype)
            self._buffers[purpose, dtype] = buffer
        return buffer[:num_entries]


_workspace = _Workspace()


@functools.cache
def _ones(num_entries: int) -> Tensor:
    with torch.inference_mode(False):
        return torch.ones(num_entries, dtype=torch.bfloat16)


@functools.cache
def ones(num_entries: int) -> Tensor:
    """Scales of one, float32, for the native INT8 product."""
    with torch.inference_mode(False):
        return torch.ones(num_entries)


def int4_linear(x: Tensor, weight: Int4Weight) -> Tensor:
    """`x @ W.T` by torch's INT4 kernel; x contiguous bfloat16 `[M, K]`, native layout."""
    return _int4_mm(x, weight.packed, weight.group_size, weight.scales)


def nested_linear(x: Tensor, weight: NestedWeight) -> Tensor:
    """`x @ W.T` as the sum of two INT4 products; x contiguous bfloat16, native layout.

    Both planes are multiplied with the high plane's scales; the low product is then
    divided by 16, which is exact.
    """
    hi = weight.hi
    y = _int4_mm(x, hi.packed, hi.group_size, hi.scales)
    return y.add_(_int4_mm(x, weight.lo, hi.group_size, hi.scales), alpha=0.0625)


def int8_linear(x: Tensor, weight: Int8Weight) -> Tensor:
    """`x @ W.T` by torch's INT8 kernel; x contiguous bfloat16 `[M, K]`."""
    codes = weight.codes
    if weight.scale_axis == 1:
        return _int8_mm(x * weight.scale.reshape(-1), codes, _ones(codes.shape[0]))
    return _scale_columns(_int8_mm(x, codes, _ones(codes.shape[0])), weight.scale)


def _scale_columns(y: Tensor, scale: Tensor) -> Tensor:
    """Multiplies columns of y `[M, N]` in place; `scale` has N entries in any shape."""
    y.view(y.shape[0], *scale.shape).mul_(scale)
    return y


def unpacked_linear(x: Tensor, weight: Weight) -> Tensor:
    """`x @ W.T` with the weight unpacked into the workspace in x's dtype.

    float32 is exact up to the product itself. In bfloat16 an INT4 or nested entry is
    rounded once (`code * scale`), an INT8 code is exact and its scale goes to x or y.
    """
    match weight:
        case DenseWeight(data=data):
            if data.dtype == x.dtype:
                return functional.linear(x, data)
            wide = data if data.dtype == torch.float32 else data.float()
            return functional.linear(x.float(), wide).to(x.dtype)
        case Int8Weight(codes=codes, scale=scale):
            matrix = _workspace.take("matrix", x.dtype, codes.numel()).view(codes.shape)
            matrix.copy_(codes)
            if x.dtype == torch.float32:
                wide = scale.reshape(-1).float()
                matrix.mul_(wide[:, None] if weight.scale_axis == 0 else wide)
                return functional.linear(x, matrix)
            if weight.scale_axis == 1:
                return functional.linear(x * scale.reshape(-1), matrix)
            return _scale_columns(functional.linear(x, matrix), scale)
        case Int4Weight():
            return functional.linear(x, unpack(weight, x.dtype))
        case NestedWeight():
            return functional.linear(x, unpack(weight, x.dtype))


def unpack(weight: Int4Weight | NestedWeight, dtype: torch.dtype) -> Tensor:
    """Returns `code * scale` as `[N, K]` in the thread's workspace.

    The result is overwritten by this thread's next call; for packed layouts it is a
    transposed view.
    """
    hi = weight.hi if isinstance(weight, NestedWeight) else weight
    num_outputs, num_inputs = hi.shape
    layout, group = hi.layout, hi.group_size
    codes = _workspace.take("codes", torch.uint8, num_outputs * num_inputs)
    matrix = _workspace.take("matrix", dtype, num_outputs * num_inputs)
    if layout.is_packed:
        half = layout.block_rows // 2
        halves = codes.view(-1, 2, num_inputs, half)
        _unpack_bytes(weight, halves[:, 0], halves[:, 1])
        blocks = matrix.view(-1, group, num_outputs // half, half).permute(2, 0, 1, 3)
        scales = _scales(weight, dtype, hi.scales[:, :, 0].view(-1, num_outputs // half, half))
        grouped = halves.view(torch.int8).view(blocks.shape)
        torch.mul(grouped, scales.transpose(0, 1)[:, :, None], out=blocks)
        return matrix.view(num_inputs, num_outputs).t()
    pairs = codes.view(num_outputs, -1, 2)
    _unpack_bytes(weight, pairs[:, :, 0], pairs[:, :, 1])
    grouped = codes.view(torch.int8).view(num_outputs, -1, group)
    scales = _scales(weight, dtype, hi.scales)
    torch.mul(grouped, scales[:, :, None], out=matrix.view(grouped.shape))
    return matrix.view(num_outputs, num_inputs)


def _scales(weight: Int4Weight | NestedWeight, dtype: torch.dtype, stored: Tensor) -> Tensor:
    """Scales of the codes, contiguous (ten times faster to multiply with) in `dtype`."""
    scales = stored.to(dtype).contiguous()
    return scales / 16 if isinstance(weight, NestedWeight) else scales


def _unpack_bytes(weight: Int4Weight | NestedWeight, low: Tensor, high: Tensor) -> None:
    """Writes the codes of low and high nibbles, two's complement, to `low` and `high`."""
    if isinstance(weight, Int4Weight):
        source = weight.packed.view(low.shape)
        torch.bitwise_and(source, 15, out=low)
        torch.bitwise_right_shift(source, 4, out=high)
        low.sub_(CODE_OFFSET)
        high.sub_(CODE_OFFSET)
        return
    # 16 * (hi + 8) + (lo + 8) = code + 136 fits a byte; 136 off again, modulo 256.
    hi, lo = weight.hi.packed.view(low.shape), weight.lo.view(low.shape)
    torch.bitwise_left_shift(hi, 4, out=low)
    low.bitwise_or_(lo & 15).sub_(17 * CODE_OFFSET)
    torch.bitwise_and(hi, 240, out=high)
    high.bitwise_or_(lo >> 4).sub_(17 * CODE_OFFSET)


def workspace_bytes(shapes: list[tuple[int, int]], dtype: torch.dtype) -> int:
    """Most bytes one thread's workspace holds after unpacking matrices of these shapes."""
    largest = max((math.prod(shape) for shape in shapes), default=0)
    return largest * (dtype.itemsize + 1)
