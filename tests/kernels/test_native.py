"""The C++ operators against the reference; bits that depend on neither rows nor threads."""

from __future__ import annotations

import contextlib

import pytest
import torch
from mira_engine.predictor.far import FarHead
from mira_kernels import cpu, dispatch, native, packing, reference
from mira_kernels.weights import DenseWeight, Int4Layout, Int4Weight, Int8Weight, NestedWeight
from torch.nn import functional

LAYOUTS = (Int4Layout.CPU_PACKED_AVX512, Int4Layout.CPU_PACKED_AVX2)
ROWS = (1, 2, 3, 4, 5, 6, 7, 11, 16, 31, 48)
KINDS = ("dense", "int8", "int4", "nested")
BF16 = torch.bfloat16


@contextlib.contextmanager
def num_threads(count):
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rng(seed=0):
    return torch.Generator().manual_seed(seed)


def random(*shape, seed=1, dtype=BF16):
    return torch.randn(shape, generator=rng(seed)).to(dtype)


def make_weight(kind, num_outputs, num_inputs, layout=LAYOUTS[0], group=32, seed=0):
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
    for num_outputs, num_inputs in shapes:
        for layout in LAYOUTS if kind in ("int4", "nested") else LAYOUTS[:1]:
            if kind in ("dense", "int8") or num_outputs % layout.block_rows == 0:
                yield make_weight(kind, num_outputs, num_inputs, layout)


def assert_close(y, truth, tolerance=4e-3):
    assert y.shape == truth.shape
    assert (y.double() - truth.double()).norm() <= tolerance * truth.double().norm()


@pytest.mark.parametrize("kind", ["dense", "int8"])
def test_row_products_agree_with_reference_at_odd_shapes(native_kernels, kind):
    shapes = ((1, 1), (1, 576), (3, 31), (33, 33), (130, 90), (65, 127), (7, 200))
    for weight in weights_of(kind, shapes):
        num_outputs, num_inputs = weight.shape
        for num_rows in ROWS:
            x, bias = random(num_rows, num_inputs), random(num_outputs, seed=2)
            assert_close(multiply(native_kernels, x, weight), reference.linear(x, weight))
            for dtype in (BF16, torch.float32):
                y = multiply(native_kernels, x, weight, bias.to(dtype))
                assert_close(y, reference.linear(x, weight, bias))


@pytest.mark.parametrize("kind", ["int4", "nested"])
def test_packed_products_agree_with_reference(native_kernels, kind):
    for weight in weights_of(kind, ((32, 32), (64, 32), (128, 576), (192, 96), (96, 160))):
        for num_rows in ROWS:
            x = random(num_rows, weight.shape[1])
            assert_close(multiply(native_kernels, x, weight), reference.linear(x, weight))


@pytest.mark.parametrize("group", [32, 64, 128])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_packed_products_take_every_group_size(native_kernels, layout, group):
    for kind in ("int4", "nested"):
        weight, x = make_weight(kind, 64, 256, layout, group), random(5, 256)
        assert_close(multiply(native_kernels, x, weight), reference.linear(x, weight))


@pytest.mark.parametrize("kind", KINDS)
def test_codes_are_read_exactly(native_kernels, kind):
    for weight in weights_of(kind, ((128, 32),)):
        x = torch.eye(32, dtype=BF16)
        y = multiply(native_kernels, x, weight)
        expected = reference.dequantise(weight).t()
        assert torch.equal(y, expected.to(BF16))


@pytest.mark.parametrize("kind", KINDS)
def test_rows_have_the_same_bits_in_any_company(native_kernels, kind):
    for weight in weights_of(kind, ((128, 160), (65, 75))):
        x = random(48, weight.shape[1])
        whole = multiply(native_kernels, x, weight)
        for num_rows in range(1, 49):
            part = multiply(native_kernels, x[48 - num_rows :], weight)
            assert torch.equal(part, whole[48 - num_rows :])


@pytest.mark.parametrize("kind", KINDS)
def test_products_have_the_same_bits_with_more_threads(native_kernels, kind):
    weight, x = make_weight(kind, 1024, 576), random(5, 576)
    results = []
    for count in (1, 2, 3):
        with num_threads(count):
            results.append(multiply(native_kernels, x, weight))
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


@pytest.mark.parametrize("kind", KINDS)
def test_more_rows_than_the_limit_agree_with_reference(native_kernels, kind):
    weight, x = make_weight(kind, 320, 96), random(native.MAX_ROWS + 7, 96)
    assert_close(multiply(native_kernels, x, weight), reference.linear(x, weight), 8e-3)
    if kind in ("dense", "int8"):
        bias = random(320, seed=2)
        y = multiply(native_kernels, x, weight, bias)
        assert_close(y, reference.linear(x, weight, bias), 8e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_products_take_strided_leading_and_empty_axes(native_kernels, kind):
    weight = make_weight(kind, 64, 96)
    strided = random(4, 192)[:, ::2]
    truth = reference.linear(strided, weight)
    assert_close(multiply(native_kernels, strided, weight), truth)
    assert_close(multiply(native_kernels, strided.view(2, 2, 96), weight), truth.view(2, 2, 64))
    assert multiply(native_kernels, strided[:0], weight).shape == (0, 64)
    with torch.inference_mode():
        assert_close(multiply(native_kernels, strided, weight), truth)


def test_products_refuse_what_they_cannot_do(native_kernels):
    with pytest.raises(RuntimeError, match="x has the wrong dtype"):
        native_kernels.dense_linear(random(1, 8, dtype=torch.float32), random(4, 8), None)
    with pytest.raises(RuntimeError, match="x must be"):
        native_kernels.dense_linear(random(1, 9), random(4, 8), None)
    weight = make_weight("int4", 64, 32)
    with pytest.raises(RuntimeError, match="block_rows"):
        native_kernels.int4_linear(random(1, 32), weight.packed, weight.scales, 32, 16)


# ---- experts -----------------------------------------------------------------------------


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


def layers():
    for kind in KINDS:
        yield Layer(kind, 6, 64, 96)
    yield Layer("dense", 6, 37, 19)
    yield Layer("int8", 6, 37, 75)
    yield Layer("int4", 6, 96, 64, LAYOUTS[1])
    yield Layer("nested", 6, 96, 64, LAYOUTS[1])


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_gated_experts_agree_with_each_expert(native_kernels, dtype):
    for layer in layers():
        for num_tokens in (1, 5, 60):
            x = random(num_tokens, layer.hidden)
            index = torch.randint(0, 6, (num_tokens, 3), generator=rng(3))
            index[0, 1] = index[0, 0]  # twice the same
            experts = [4, 0, 2]
            out = layer.run(native_kernels, x, index, experts, dtype)
            for row, e in enumerate(index.view(-1).tolist()):
                if e in experts:
                    assert_close(out[row], layer.expert(e, x[row // 3 : row // 3 + 1])[0], 2e-2)
                else:
                    assert bool((out[row] == -77).all())


def test_gated_experts_without_work_leave_everything(native_kernels):
    layer = Layer("nested", 2, 64, 32)
    index = torch.zeros(1, 2, dtype=torch.int64)
    assert bool((layer.run(native_kernels, random(1, 64), index, []) == -77).all())
    assert bool((layer.run(native_kernels, random(1, 64), index, [1]) == -77).all())
    empty = torch.zeros(0, 2, dtype=torch.int64)
    assert layer.run(native_kernels, random(0, 64), empty, [0]).shape == (0, 64)


def test_gated_experts_have_the_same_bits_in_any_company(native_kernels):
    for layer in layers():
        x = random(9, layer.hidden)
        index = torch.randint(0, 6, (9, 3), generator=rng(3))
        with num_threads(1):
            whole = layer.run(native_kernels, x, index, list(range(6))).view(9, 3, -1)
        with num_threads(2):
            for t in range(9):
                alone = layer.run(native_kernels, x[t : t + 1], index[t : t + 1], list(range(6)))
                assert torch.equal(alone, whole[t])
            halves = layer.run(native_kernels, x, index, [0, 1, 2])
            others = layer.run(native_kernels, x, index, [3, 4, 5])
        joined = torch.where((index.view(-1) < 3)[:, None], halves, others)
        assert torch.equal(joined.view_as(whole), whole)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_combine_experts_rounds_once(native_kernels, dtype):
    rows, weights = random(5 * 3, 37, dtype=dtype), random(5, 3, seed=4)
    for w in (weights, weights.float()):
        total = torch.zeros(5, 37)
        for j in range(3):
            total += rows.view(5, 3, 37)[:, j].float() * w[:, j : j + 1].float()
        y = native_kernels.combine_experts(rows, w)
        assert y.dtype == BF16
        assert_close(y, total)


def test_draft_experts_combine_and_count(native_kernels):
    for layer in layers():
        x, weights = random(5, layer.hidden), random(5, 2, seed=4, dtype=torch.float32)
        index = torch.tensor([[0, 1], [1, 5], [2, 1], [0, 0], [5, 3]])
        counts = torch.full((6,), 10, dtype=torch.int32)
        y = native_kernels.draft_experts(x, index, weights, layer.addresses, counts, *layer.sizes)
        rows = layer.run(native_kernels, x, index, list(range(6)))
        assert torch.equal(y, native_kernels.combine_experts(rows, weights))
        assert counts.tolist() == [13, 13, 11, 11, 10, 12]


def test_draft_experts_without_an_address_add_nothing_and_are_counted(native_kernels):
    for layer in layers():
        x, weights = random(5, layer.hidden), random(5, 2, seed=4, dtype=torch.float32)
        index = torch.tensor([[0, 1], [1, 5], [2, 1], [0, 0], [5, 3]])
        counts = torch.zeros(6, dtype=torch.int32)
        addresses = layer.addresses.clone()
        addresses[[1, 3]] = 0
        y = native_kernels.draft_experts(x, index, weights, addresses, counts, *layer.sizes)
        rows = layer.run(native_kernels, x, index, list(range(6)))
        rows[(index.view(-1) == 1) | (index.view(-1) == 3)] = 0
        assert torch.equal(y, native_kernels.combine_experts(rows, weights))
        assert counts.tolist() == [3, 3, 1, 1, 0, 2]
        addresses[:] = 0
        y = native_kernels.draft_experts(x, index, weights, addresses, counts, *layer.sizes)
        assert not y.any()


def test_draft_experts_unknown_expert_raises_and_counts_nothing(native_kernels):
    layer, counts = Layer("int4", 2, 64, 32), torch.zeros(2, dtype=torch.int32)
    index = torch.tensor([[0, 2]])
    with pytest.raises(RuntimeError, match="no such expert"):
        native_kernels.draft_experts(
            random(1, 64), index, random(1, 2), layer.addresses, counts, *layer.sizes
        )
    assert counts.tolist() == [0, 0]


# ---- predictions -------------------------------------------------------------------------


def head_parts(num_experts=5, num_inputs=37, num_units=3):
    width = num_experts + num_units + 1
    return (
        random(num_experts + 1, num_inputs, seed=1, dtype=torch.float32),
        random(num_experts + 1, seed=2, dtype=torch.float32),
        random(num_experts, width, seed=3, dtype=torch.float32),
        random(width, seed=4, dtype=torch.float32),
        random(num_experts, num_units, seed=5, dtype=torch.float32),
    )


def test_predict_experts_mixes_both_branches_by_the_gate(native_kernels):
    weight, bias, table, table_bias, outer = parts = head_parts()
    x, index = random(1, 37), torch.tensor([[4, 1]])
    selected = table_bias + table[4] + table[1]
    history = selected[:5] + outer @ torch.relu(selected[5:8])
    act = weight @ x[0].float() + bias
    gate = torch.sigmoid(act[5] + selected[8])
    shares = native_kernels.predict_experts(x, index, *parts, 5)
    assert_close(shares, torch.softmax(history + gate * (act[:5] - history), 0), 1e-4)
    alone = native_kernels.predict_experts(x, index, None, None, table, table_bias, outer, 5)
    assert_close(alone, torch.softmax(history, 0), 1e-4)
    router = native_kernels.predict_experts(x, index, weight[:5], bias[:5], None, None, None, 5)
    assert_close(router, torch.softmax(act[:5], 0), 1e-4)


def test_predict_experts_refuses_what_does_not_fit(native_kernels):
    parts, index = head_parts(), torch.tensor([[4, 1]])
    for x, ids, given, text in (
        (random(2, 37), index, parts, "one token"),
        (random(1, 36), index, parts, "weight has a wrong shape"),
        (random(1, 37), torch.tensor([[5]]), parts, "no such expert"),
        (random(1, 37), index, (None,) * 5, "needs a branch"),
        (random(1, 37), index, (*parts[:4], None), "come together"),
    ):
        with pytest.raises(RuntimeError, match=text):
            native_kernels.predict_experts(x, ids, *given, 5)


# ---- attention ---------------------------------------------------------------------------


def caches(num_keys, groups=3, size=64, value_size=64, dtype=BF16):
    """Keys and values as views of a larger room whose rest is not a number."""
    keys, values = (
        torch.full((1, groups, num_keys + 50, width), float("nan"), dtype=dtype)
        for width in (size, value_size)
    )
    keys[:, :, :num_keys] = random(1, groups, num_keys, size, seed=5, dtype=dtype)
    values[:, :, :num_keys] = random(1, groups, num_keys, value_size, seed=6, dtype=dtype)
    return keys[:, :, :num_keys], values[:, :, :num_keys]


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("size", "value_size"), [(64, 64), (96, 72), (24, 5), (192, 128)])
def test_attend_agrees_with_torch(native_kernels, size, value_size, dtype):
    for num_cached, num_queries in ((0, 1), (0, 5), (255, 1), (254, 5), (700, 3), (37, 60)):
        num_keys = num_cached + num_queries
        keys, values = caches(num_keys, size=size, value_size=value_size, dtype=dtype)
        query = random(1, num_queries, 9, size, dtype=dtype).transpose(1, 2)
        y = native_kernels.attend(query, keys, values, num_cached, 0.3)
        sees = torch.arange(num_keys) <= num_cached + torch.arange(num_queries)[:, None]
        wide = (t.double() for t in (query, keys, values))
        truth = functional.scaled_dot_product_attention(
            *wide, attn_mask=sees, scale=0.3, enable_gqa=True
        )
        assert y.dtype == dtype
        assert y.is_contiguous()
        assert_close(y, truth.transpose(1, 2), 4e-3 if dtype == BF16 else 2e-6)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_attend_has_the_same_bits_in_any_company(native_kernels, dtype):
    for num_cached in (0, 253, 600):
        keys, values = caches(num_cached + 60, dtype=dtype)
        query = random(1, 9, 60, 64, dtype=dtype)
        with num_threads(1):
            whole = native_kernels.attend(query, keys, values, num_cached, 0.125)
        with num_threads(2):
            for first, end in ((0, 1), (3, 8), (10, 26), (59, 60)):
                part = native_kernels.attend(
                    query[:, :, first:end],
                    keys[:, :, : num_cached + end],
                    values[:, :, : num_cached + end],
                    num_cached + first,
                    0.125,
                )
                assert torch.equal(part, whole[:, first:end])


# ---- tracing and dispatch ----------------------------------------------------------------


def test_operators_pass_torch_checks(native_kernels):
    layer, weight = Layer("nested", 3, 64, 32), make_weight("dense", 32, 64)
    x, index = random(2, 64), torch.tensor([[0, 1], [2, 1]])
    keys, values = caches(4)
    counts = torch.zeros(3, dtype=torch.int32)
    int8, int4, nested = (make_weight(kind, 64, 64) for kind in KINDS[1:])
    cases = (
        ("dense_linear", (x, weight.data, None)),
        ("int8_linear", (x, int8.codes, int8.scale.float(), None)),
        ("int4_linear", (x, int4.packed, int4.scales, 32, 64)),
        ("nested_linear", (x, nested.hi.packed, nested.hi.scales, nested.lo, 32, 64)),
        (
            "gated_experts_",
            (torch.zeros(4, 64), x, index, [0, 1, 2], layer.addresses, *layer.sizes),
        ),
        ("combine_experts", (random(4, 64), random(2, 2))),
        ("draft_experts", (x, index, random(2, 2), layer.addresses, counts, *layer.sizes)),
        ("attend", (random(1, 9, 2, 64), keys, values, 2, 0.125)),
    )
    for name, arguments in cases:
        operator = getattr(native_kernels, name).default
        torch.library.opcheck(operator, arguments, test_utils=("test_schema", "test_faketensor"))


def test_dispatch_uses_native_kernels_up_to_their_crossover(native_kernels):
    limits = {
        "dense": dispatch.MAX_ROWS_NATIVE_DENSE,
        "int8": dispatch.MAX_ROWS_NATIVE_INT8,
        "int4": dispatch.MAX_ROWS_NATIVE_INT4,
        "nested": dispatch.MAX_ROWS_NATIVE_NESTED,
    }
    for kind, limit in limits.items():
        weight, bias = make_weight(kind, 64, 96), random(64, seed=2)
        for num_rows in (1, limit):
            x = random(num_rows, 96)
            assert torch.equal(dispatch.linear(x, weight), multiply(native_kernels, x, weight))
            assert_close(dispatch.linear(x, weight, bias), reference.linear(x, weight, bias), 8e-3)
        x = random(limit + 1, 96)
        assert torch.equal(dispatch.linear(x, weight), cpu.unpacked_linear(x, weight))
        assert dispatch.linear(x[:0], weight).shape == (0, 64)
    assert "native kernel" in dispatch.describe()[0]


def test_dispatch_shared_int8_scales_agree_with_reference(native_kernels):
    codes = make_weight("int8", 64, 96).codes
    scale = random(32, seed=7).abs()
    for weight in (
        Int8Weight(codes, scale[None, :].expand(2, -1), 0),
        Int8Weight(codes, scale[:, None].expand(-1, 2), 0),
        Int8Weight(codes, random(96, seed=8).abs(), 1),
    ):
        x = random(5, 96)
        assert_close(dispatch.linear(x, weight), reference.linear(x, weight), 8e-3)


def test_far_head_expects_the_same_by_native_products(native_kernels):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "inner": torch.randn(12, 16, generator=generator),
        "inner_bias": torch.randn(12, generator=generator),
        "outer": torch.randn(3 * 8, 12, generator=generator) / 4,
        "outer_bias": torch.randn(3 * 8, generator=generator),
        "targets": torch.tensor([1, 2, 5]),
    }
    head = FarHead(tensors, top_k=2)
    state = torch.randn(1, 16, generator=generator).bfloat16()
    exact = head.probabilities(state.float())[0]
    found = head.expect(state, 0.02)
    assert len(found) > 10
    assert [layer for layer, *_ in found] == sorted(layer for layer, *_ in found)
    for layer, expert, share in found:
        row = [1, 2, 5].index(layer)
        assert share == pytest.approx(float(exact[row, expert]), abs=0.05)
