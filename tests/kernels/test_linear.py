"""Every kernel against the reference, and the reference against arithmetic written out."""

from __future__ import annotations

import threading

import pytest
import torch
from mira_kernels import cpu, dispatch, packing, reference
from mira_kernels.weights import DenseWeight, Int4Layout, Int4Weight, Int8Weight, NestedWeight

ROWS = (1, 2, 5, 16, 33)
SHAPES = ((64, 32), (192, 160), (128, 576), (7, 96), (33, 64))
KINDS = ("dense-bf16", "dense-f32", "int8-rows", "int8-columns", "int8-shared", "int4", "nested")
TOLERANCE = {torch.bfloat16: 8e-3, torch.float32: 1e-6}


def make_weight(kind, num_outputs, num_inputs, layout=Int4Layout.ROWS, seed=0):
    generator = torch.Generator().manual_seed(seed)
    shape = (num_outputs, num_inputs)

    def scales(*dims):
        return (torch.rand(*dims, generator=generator) * 0.01 + 0.001).to(torch.bfloat16)

    def codes(low, high):
        return torch.randint(low, high + 1, shape, generator=generator, dtype=torch.int16)

    if kind.startswith("dense"):
        data = torch.randn(shape, generator=generator)
        return DenseWeight(data.to(torch.bfloat16) if kind == "dense-bf16" else data)
    if kind == "int8-rows":
        return Int8Weight(codes(-127, 127).to(torch.int8), scales(num_outputs), 0)
    if kind == "int8-columns":
        return Int8Weight(codes(-127, 127).to(torch.int8), scales(num_inputs), 1)
    if kind == "int8-shared":
        units = num_outputs // 2
        shared = scales(units)[None, :].expand(2, -1)
        return Int8Weight(codes(-127, 127)[: 2 * units].to(torch.int8), shared, 0)
    stored = packing.arrange_scales(scales(num_outputs, num_inputs // 32), layout)
    lowest = -7 if kind == "nested" else -8
    hi = Int4Weight(packing.pack_codes(codes(lowest, 7), layout), stored, 32, shape, layout)
    if kind == "int4":
        return hi
    return NestedWeight(hi, packing.pack_codes(codes(-8, 7), layout))


def random_rows(num_rows, num_inputs, dtype, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(num_rows, num_inputs, generator=generator).to(dtype)


def layouts_of(kind, num_outputs):
    if kind not in ("int4", "nested"):
        return [Int4Layout.ROWS]
    return [layout for layout in Int4Layout if num_outputs % layout.block_rows == 0]


def assert_close(y, truth, dtype):
    assert y.dtype == dtype
    assert y.shape == truth.shape
    assert (y.double() - truth).norm() <= TOLERANCE[dtype] * truth.norm()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("num_outputs", "num_inputs"), SHAPES)
def test_linear_agrees_with_reference(kind, num_outputs, num_inputs, dtype):
    for layout in layouts_of(kind, num_outputs):
        weight = make_weight(kind, num_outputs, num_inputs, layout)
        bias = torch.randn(weight.shape[0], generator=torch.Generator().manual_seed(2))
        for num_rows in ROWS:
            x = random_rows(num_rows, num_inputs, dtype)
            assert_close(dispatch.linear(x, weight), reference.linear(x, weight), dtype)
            truth = reference.linear(x, weight, bias)
            assert_close(dispatch.linear(x, weight, bias), truth, dtype)


@pytest.mark.parametrize("num_rows", ROWS)
def test_packed_kernels_agree_with_reference_at_any_number_of_rows(num_rows):
    layout = dispatch.preferred_int4_layout(128, 576, 64)
    x = random_rows(num_rows, 576, torch.bfloat16)
    for kind in ("int8-rows", "int8-columns", "int8-shared"):
        weight = make_weight(kind, 128, 576)
        assert_close(cpu.int8_linear(x, weight), reference.linear(x, weight), x.dtype)
    if not layout.is_packed:
        pytest.skip("no packed INT4 kernel on this processor")
    int4, nested = (make_weight(kind, 128, 576, layout) for kind in ("int4", "nested"))
    assert_close(cpu.int4_linear(x, int4), reference.linear(x, int4), x.dtype)
    assert_close(cpu.nested_linear(x, nested), reference.linear(x, nested), x.dtype)


@pytest.mark.parametrize("kind", ["int4", "nested"])
@pytest.mark.parametrize("layout", list(Int4Layout))
def test_unpack_float32_is_exact(kind, layout):
    weight = make_weight(kind, 128, 96, layout)
    assert torch.equal(cpu.unpack(weight, torch.float32), reference.dequantise(weight))


@pytest.mark.parametrize("kind", ["int4", "nested"])
@pytest.mark.parametrize("layout", list(Int4Layout))
def test_unpack_bfloat16_rounds_each_entry_once(kind, layout):
    weight = make_weight(kind, 128, 96, layout)
    expected = reference.dequantise(weight).to(torch.bfloat16)
    assert torch.equal(cpu.unpack(weight, torch.bfloat16), expected)


def test_unpack_reaches_every_pair_of_nibbles():
    hi_codes = torch.arange(-8, 8).repeat_interleave(16).view(2, 128)
    lo_codes = torch.arange(-8, 8).repeat(16).view(2, 128)
    scales = torch.full((2, 4), 16.0, dtype=torch.bfloat16)
    hi = Int4Weight(
        packing.pack_codes(hi_codes, Int4Layout.ROWS), scales, 32, (2, 128), Int4Layout.ROWS
    )
    weight = NestedWeight(hi, packing.pack_codes(lo_codes, Int4Layout.ROWS))
    # hi = -8 does not occur in a store; its codes below -128 wrap in one signed byte.
    fits = (16 * hi_codes + lo_codes).abs() <= 127
    expected = (16 * hi_codes + lo_codes).float()
    assert torch.equal(cpu.unpack(weight, torch.float32)[fits], expected[fits])
    assert int(fits.sum()) == 2 * 128 - 9


def test_reference_int4_equals_arithmetic_written_out():
    codes = torch.tensor([[-8, 7, 3, 0] * 8, [1, -1, 2, -2] * 8])
    scales = torch.tensor([[0.5], [0.25]], dtype=torch.bfloat16)
    weight = Int4Weight(
        packing.pack_codes(codes, Int4Layout.ROWS), scales, 32, (2, 32), Int4Layout.ROWS
    )
    x = torch.arange(32.0)[None, :]
    expected = [
        sum(k * [-8, 7, 3, 0][k % 4] * 0.5 for k in range(32)),
        sum(k * [1, -1, 2, -2][k % 4] * 0.25 for k in range(32)),
    ]
    assert reference.linear(x, weight).tolist() == [expected]
    lo = packing.pack_codes(codes.flip(0), Int4Layout.ROWS)
    nested = reference.dequantise(NestedWeight(weight, lo))
    assert nested[0, :4].tolist() == [(-128 + 1) / 32, (112 - 1) / 32, (48 + 2) / 32, -2 / 32]


def test_reference_int8_scales_rows_or_columns():
    codes = torch.tensor([[1, 2], [3, -4]], dtype=torch.int8)
    scale = torch.tensor([0.5, 2.0], dtype=torch.bfloat16)
    rows = reference.dequantise(Int8Weight(codes, scale, 0))
    columns = reference.dequantise(Int8Weight(codes, scale, 1))
    assert rows.tolist() == [[0.5, 1.0], [6.0, -8.0]]
    assert columns.tolist() == [[0.5, 4.0], [1.5, -8.0]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@pytest.mark.parametrize("kind", KINDS)
def test_linear_is_bitwise_repeatable(kind, dtype):
    """The workspace, other weights in between and the thread leave no trace."""
    layout = dispatch.preferred_int4_layout(128, 96, 32)
    weight, other = (make_weight(kind, 128, 96, layout, seed) for seed in (0, 9))
    for num_rows in ROWS:
        x = random_rows(num_rows, 96, dtype)
        first = dispatch.linear(x, weight)
        kept = first.clone()
        dispatch.linear(random_rows(40, 96, dtype, seed=5), other)
        assert torch.equal(first, kept)
        assert torch.equal(dispatch.linear(x, weight), first)
        results = []
        thread = threading.Thread(target=lambda: results.append(dispatch.linear(x, weight)))  # noqa: B023
        thread.start()
        thread.join()
        assert torch.equal(results[0], first)


@pytest.mark.parametrize("kind", KINDS)
def test_linear_leaves_its_arguments_alone(kind):
    weight = make_weight(kind, 128, 96)
    bias = torch.ones(weight.shape[0])
    for dtype in (torch.bfloat16, torch.float32):
        x = random_rows(3, 96, dtype)
        before, truth = x.clone(), reference.dequantise(weight)
        dispatch.linear(x, weight, bias)
        assert torch.equal(x, before)
        assert torch.equal(reference.dequantise(weight), truth)
        assert torch.equal(bias, torch.ones_like(bias))


@pytest.mark.parametrize("kind", KINDS)
def test_linear_takes_strided_and_empty_rows(kind):
    weight = make_weight(kind, 128, 96, dispatch.preferred_int4_layout(128, 96, 32))
    for dtype in (torch.bfloat16, torch.float32):
        wide = random_rows(4, 192, dtype)
        strided = wide[:, ::2]
        assert_close(dispatch.linear(strided, weight), reference.linear(strided, weight), dtype)
        assert dispatch.linear(strided[:0], weight).shape == (0, weight.shape[0])


def test_linear_other_dtype_raises():
    with pytest.raises(TypeError, match="float16"):
        dispatch.linear(torch.zeros(1, 32, dtype=torch.float16), make_weight("int4", 64, 32))


def test_linear_picks_the_packed_kernel_up_to_its_crossover(monkeypatch):
    layout = dispatch.preferred_int4_layout(64, 32, 32)
    if not layout.is_packed:
        pytest.skip("no packed INT4 kernel on this processor")
    used = []
    for name in ("int4_linear", "nested_linear", "int8_linear", "unpacked_linear"):
        monkeypatch.setattr(cpu, name, lambda x, weight, name=name: used.append(name) or x)
    for kind, limit in (
        ("int4", dispatch.MAX_ROWS_INT4),
        ("nested", dispatch.MAX_ROWS_NESTED),
        ("int8-rows", dispatch.MAX_ROWS_INT8),
    ):
        weight = make_weight(kind, 64, 32, layout)
        for num_rows in (1, limit, limit + 1):
            dispatch.linear(random_rows(num_rows, 32, torch.bfloat16), weight)
        dispatch.linear(random_rows(1, 32, torch.float32), weight)
        packed = f"{kind.split('-')[0]}_linear"
        assert used == [packed, packed, "unpacked_linear", "unpacked_linear"]
        used.clear()


def test_linear_foreign_layout_is_unpacked(monkeypatch):
    foreign = next(
        layout for layout in Int4Layout if layout.is_packed and not dispatch.is_native(layout)
    )
    weight, x = make_weight("int4", 64, 32, foreign), random_rows(1, 32, torch.bfloat16)
    assert_close(dispatch.linear(x, weight), reference.linear(x, weight), x.dtype)


def test_workspace_bytes_covers_what_is_held():
    held = {}

    def use():
        for kind in ("int4", "nested", "int8-rows"):
            weight = make_weight(kind, 128, 96)
            cpu.unpacked_linear(random_rows(2, 96, torch.bfloat16), weight)
        held["bytes"] = sum(buffer.nbytes for buffer in cpu._workspace._buffers.values())

    thread = threading.Thread(target=use)
    thread.start()
    thread.join()
    assert held["bytes"] == cpu.workspace_bytes([(128, 96), (64, 32)], torch.bfloat16)


def test_describe_names_every_kind():
    lines = dispatch.describe()
    kinds = ["dense", "int8", "int4", "nested", "float32 arithmetic"]
    assert [line.split(":")[0] for line in lines] == kinds


@pytest.mark.parametrize("kind", KINDS)
def test_workspace_made_in_inference_mode_serves_outside_of_it(kind):
    weight, x = make_weight(kind, 128, 64), torch.randn(40, 64)
    results = []

    def run():
        for dtype in (torch.float32, torch.bfloat16):
            with torch.inference_mode():
                inside = dispatch.linear(x.to(dtype), weight)
            outside = dispatch.linear(x.to(dtype), weight)
            results.append(torch.equal(inside.clone(), outside))

    thread = threading.Thread(target=run)  # a thread of its own has a fresh workspace
    thread.start()
    thread.join()
    assert results == [True, True]
