"""Random weights, experts and caches as the C++ operators take them, and their products."""

from __future__ import annotations

import contextlib

import torch
from mira_kernels import packing, reference
from mira_kernels.weights import DenseWeight, Int4Layout, Int4Weight, Int8Weight, NestedWeight
from torch.nn import functional

LAYOUTS = (Int4Layout.CPU_PACKED_AVX512, Int4Layout.CPU_PACKED_AVX2)
KINDS = ("dense", "int8", "int4", "nested")
BF16 = torch.bfloat16


@contextlib.contextmanager
def num_threads(count):
    """Lets torch use so many threads, inside."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rng(seed=0):
    """Returns a generator of its own."""
    return torch.Generator().manual_seed(seed)


def random(*shape, seed=1, dtype=BF16):
    """Draws normal numbers."""
    return torch.randn(shape, generator=rng(seed)).to(dtype)


def make_weight(kind, num_outputs, num_inputs, layout=LAYOUTS[0], group=32, seed=0):
    """Draws a weight of a kind, `[num_outputs, num_inputs]`."""
    generator, shape = rng(seed), (num_outputs, num_inputs)

    def codes(low, high):
        return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int16)

    def scales(*dims):
        return (torch.rand(*dims, generator=generator) * 0.01 + 0.001).to(BF16)

    if kind == "dense":
        return DenseWeight(random(*shape, seed=seed))
    if kind == "int8":
        return Int8Weight(codes(-127, 127).to(torch.int8), scales(num_outputs), 0)
    stored = packing.arrange_scales(scales(num_outputs, num_inputs // group), layout).contiguous()
    planes = [packing.pack_codes(codes(-7, 7), layout), packing.pack_codes(codes(-8, 7), layout)]
    hi = Int4Weight(planes[0].contiguous(), stored, group, shape, layout)
    return hi if kind == "int4" else NestedWeight(hi, planes[1].contiguous())


def multiply(ops, x, weight, bias=None):
    """Multiplies by the operator of the weight's kind."""
    match weight:
        case DenseWeight(data=data):
            return ops.dense_linear(x, data, bias)
        case Int8Weight(codes=codes, scale=scale):
            return ops.int8_linear(x, codes, scale.float(), bias)
        case Int4Weight():
            rows = weight.layout.block_rows
            return ops.int4_linear(x, weight.packed, weight.scales, weight.group_size, rows)
        case NestedWeight(hi=hi, lo=lo):
            rows = hi.layout.block_rows
            return ops.nested_linear(x, hi.packed, hi.scales, lo, hi.group_size, rows)


def weights_of(kind, shapes):
    """Makes weights of the shapes, packed ones in every layout that takes them."""
    for num_outputs, num_inputs in shapes:
        for layout in LAYOUTS if kind in ("int4", "nested") else LAYOUTS[:1]:
            if kind in ("dense", "int8") or num_outputs % layout.block_rows == 0:
                yield make_weight(kind, num_outputs, num_inputs, layout)


def assert_close(y, truth, tolerance=4e-3):
    """Compares the norm of the error with that of the truth."""
    assert y.shape == truth.shape
    assert (y.double() - truth.double()).norm() <= tolerance * truth.double().norm()


class Layer:
    """Random experts of one kind, their addresses and their reference."""

    def __init__(self, kind, num_experts, hidden, units, layout=LAYOUTS[0]):
        self.kind, self.hidden, self.units, self.layout = kind, hidden, units, layout
        self.pairs = []
        for e in range(num_experts):
            up = make_weight(kind, 2 * units, hidden, layout, seed=10 * e)
            down = make_weight(kind, hidden, units, layout, seed=10 * e + 1)
            if kind == "int8":
                scale = up.scale[:units].clone()
                up = Int8Weight(up.codes, scale[None, :].expand(2, -1), 0)
                down = Int8Weight(down.codes, scale, 1)
            self.pairs.append((up, down))
        self.addresses = torch.tensor(
            [[part.data_ptr() for part in self.parts(*pair)] for pair in self.pairs]
        ).view(num_experts, -1)
        self.sizes = (KINDS.index(kind), units, 32, layout.block_rows)

    def parts(self, up, down):
        match up:
            case DenseWeight():
                return up.data, down.data
            case Int8Weight():
                return up.codes, down.scale, down.codes
            case Int4Weight():
                return up.packed, up.scales, down.packed, down.scales
        return up.hi.packed, up.hi.scales, up.lo, down.hi.packed, down.hi.scales, down.lo

    def expert(self, e, x):
        up, down = self.pairs[e]
        gate, value = reference.linear(x, up).to(BF16).chunk(2, -1)
        return reference.linear(functional.silu(gate) * value, down)

    def run(self, ops, x, index, experts, dtype=torch.float32):
        out = torch.full((index.numel(), self.hidden), -77.0, dtype=dtype)
        addresses = self.addresses[experts].contiguous()
        ops.gated_experts_(out, x, index, experts, addresses, *self.sizes)
        return out


def caches(num_keys, groups=3, size=64, value_size=64, dtype=BF16):
    """Keys and values as views of a larger room whose rest is not a number."""
    keys, values = (
        torch.full((1, groups, num_keys + 50, width), float("nan"), dtype=dtype)
        for width in (size, value_size)
    )
    keys[:, :, :num_keys] = random(1, groups, num_keys, size, seed=5, dtype=dtype)
    values[:, :, :num_keys] = random(1, groups, num_keys, value_size, seed=6, dtype=dtype)
    return keys[:, :, :num_keys], values[:, :, :num_keys]
