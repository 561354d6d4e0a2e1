"""The C++ products against the reference; bits that depend on neither rows nor threads."""

from __future__ import annotations

import pytest
import torch
from mira_kernels import cpu, dispatch, native, reference
from mira_kernels.weights import Int8Weight
from native_weights import (
    BF16,
    KINDS,
    LAYOUTS,
    Layer,
    assert_close,
    caches,
    make_weight,
    multiply,
    num_threads,
    random,
    weights_of,
)

ROWS = (1, 2, 3, 4, 5, 6, 7, 11, 16, 31, 48)


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
