"""Expert formats: round trips against arithmetic written out, and golden bytes."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mira_engine.checkpoint import quantise
from mira_engine.checkpoint.formats import ExpertTensors, Int4Format, make_format
from mira_engine.checkpoint.quantised_expert import QuantisedExpert
from mira_engine.errors import FormatError
from mira_engine.types import ExpertShape, Plane, Precision
from mira_kernels import dispatch, reference
from mira_kernels.weights import DenseWeight, Int4Layout, Int8Weight, NestedWeight

GATED = ExpertShape(hidden_size=64, intermediate_size=96)
SHAPES = {
    "gated": GATED,
    "biased": ExpertShape(hidden_size=64, intermediate_size=96, has_bias=True),
    "interleaved": ExpertShape(
        hidden_size=64, intermediate_size=32, has_bias=True, is_interleaved=True
    ),
    "ungated": ExpertShape(hidden_size=128, intermediate_size=64, has_gate=False),
    "ungated-biased": ExpertShape(
        hidden_size=32, intermediate_size=64, has_gate=False, has_bias=True
    ),
}
LAYOUTS = [layout.value for layout in Int4Layout]
all_shapes = pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)


def random_expert(shape: ExpertShape, seed: int = 0, dtype=torch.bfloat16) -> ExpertTensors:
    generator = torch.Generator().manual_seed(seed)

    def random(*dims):
        return (torch.randn(*dims, generator=generator) * 0.05).to(dtype)

    hidden, inner = shape.hidden_size, shape.intermediate_size
    return ExpertTensors(
        up=random(shape.up_rows, hidden),
        down=random(hidden, inner),
        up_bias=random(shape.up_rows) if shape.has_bias else None,
        down_bias=random(hidden) if shape.has_bias else None,
    )


def bf16(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32).to(torch.bfloat16))


def f32(value: float) -> float:
    return float(torch.tensor(value, dtype=torch.float32))


def group_codes_written_out(row, group, max_code, min_code):
    """Codes and scales of one row, one number at a time."""
    codes, scales = [], []
    for start in range(0, len(row), group):
        entries = row[start : start + group]
        scale = bf16(f32(max(max(abs(w) for w in entries), 1e-8) / max_code))
        scales.append(scale)
        for w in entries:
            codes.append(min(max(round(f32(w / scale)), min_code), max_code))
    return codes, scales


def layouts_for(precision: Precision, shape: ExpertShape) -> list[str]:
    found = []
    for layout in LAYOUTS:
        try:
            make_format(precision, shape, layout=layout)
        except FormatError:
            continue
        found.append(layout)
    assert "rows" in found
    return found


def assert_biases_equal(decoded: ExpertTensors, tensors: ExpertTensors) -> None:
    for name in ("up_bias", "down_bias"):
        stored, given_bias = getattr(decoded, name), getattr(tensors, name)
        assert (stored is None) is (given_bias is None)
        if stored is not None:
            assert torch.equal(stored, given_bias.float())


@all_shapes
@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FLOAT32])
def test_dense_round_trip_is_lossless(precision, shape):
    dtype = torch.bfloat16 if precision is Precision.BF16 else torch.float32
    tensors = random_expert(shape, dtype=dtype)
    form = make_format(precision, shape)
    bound = form.bind(form.encode(tensors))
    assert isinstance(bound.up, DenseWeight)
    assert bound.up.data.dtype == dtype
    decoded = form.decode(bound)
    assert torch.equal(decoded.up, tensors.up.float())
    assert torch.equal(decoded.down, tensors.down.float())
    assert_biases_equal(decoded, tensors)
    if shape.has_bias:
        assert bound.up_bias.dtype == dtype


@all_shapes
def test_int8_round_trip_equals_arithmetic_written_out(shape):
    tensors = random_expert(shape)
    form = make_format(Precision.INT8, shape)
    bound = form.bind(form.encode(tensors))
    decoded = form.decode(bound)
    up, down = tensors.up.tolist(), tensors.down.tolist()
    size = shape.intermediate_size
    for r in range(size):
        if not shape.has_gate:
            rows = [r]
        elif shape.is_interleaved:
            rows = [2 * r, 2 * r + 1]
        else:
            rows = [r, size + r]
        column = [row[r] for row in down]
        largest = max(abs(w) for entries in [column, *(up[row] for row in rows)] for w in entries)
        scale = bf16(f32(largest / 127))

        def stored(w, scale=scale):
            return f32(min(max(round(f32(w / scale)), -127), 127) * scale)

        for row in rows:
            assert decoded.up[row].tolist() == [stored(w) for w in up[row]]
        assert decoded.down[:, r].tolist() == [stored(w) for w in column]
    assert_biases_equal(decoded, tensors)


@all_shapes
def test_int4_round_trip_equals_arithmetic_written_out(shape):
    tensors = random_expert(shape)
    for layout in layouts_for(Precision.INT4, shape):
        form = make_format(Precision.INT4, shape, layout=layout)
        group = shape.int4_group_size
        bound = form.bind(form.encode(tensors))
        decoded = form.decode(bound)
        for name in ("up", "down"):
            for row, found in zip(
                getattr(tensors, name).tolist(), getattr(decoded, name), strict=True
            ):
                codes, scales = group_codes_written_out(row, group, 7, -8)
                expected = [f32(code * scales[k // group]) for k, code in enumerate(codes)]
                assert found.tolist() == expected
        assert_biases_equal(decoded, tensors)


@all_shapes
def test_nested_round_trip_equals_arithmetic_written_out(shape):
    tensors = random_expert(shape)
    for layout in layouts_for(Precision.NESTED, shape):
        form = make_format(Precision.NESTED, shape, layout=layout)
        group = shape.int4_group_size
        records = form.encode(tensors)
        whole, draft = form.bind(records), form.bind_draft(records[Plane.HI])
        decoded, coarse = form.decode(whole), form.decode(draft)
        for name in ("up", "down"):
            for i, row in enumerate(getattr(tensors, name).tolist()):
                codes, scales = group_codes_written_out(row, group, 119, -119)
                expected = [f32(code * scales[k // group]) for k, code in enumerate(codes)]
                assert getattr(decoded, name)[i].tolist() == expected
                hi = [math.floor((code + 8) / 16) for code in codes]
                expected = [f32(high * (16 * scales[k // group])) for k, high in enumerate(hi)]
                assert getattr(coarse, name)[i].tolist() == expected
        assert_biases_equal(decoded, tensors)
        assert_biases_equal(coarse, tensors)


def test_nested_planes_stay_inside_int4():
    tensors = random_expert(GATED)
    form = make_format(Precision.NESTED, GATED)
    weight = form.bind(form.encode(tensors)).up
    assert isinstance(weight, NestedWeight)
    joined, hi = reference.codes(weight), reference.codes(weight.hi)
    lo = joined - 16 * hi
    assert (int(hi.min()), int(hi.max())) == (-7, 7)
    assert (int(lo.min()), int(lo.max())) == (-8, 7)
    assert int(joined.abs().max()) == 119


@given(st.integers(-119, 119))
def test_split_planes_rejoins(code):
    hi, lo = quantise.split_planes(torch.tensor(code))
    assert -7 <= int(hi) <= 7
    assert -8 <= int(lo) <= 7
    assert 16 * int(hi) + int(lo) == code
    assert int(hi) == math.floor((code + 8) / 16)


@settings(max_examples=50, deadline=None)
@given(
    values=st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=64, max_size=64),
    max_code=st.sampled_from([7, 119]),
)
def test_quantise_groups_errs_by_at_most_half_a_step(values, max_code):
    weight = torch.tensor(values).view(2, 32)
    found = quantise.quantise_groups(weight, 32, max_code, -max_code)
    scales = found.scales.double()
    assert bool((found.codes.abs() <= max_code).all())
    error = (found.codes * scales - weight.double()).abs()
    # Rounding the scale to bfloat16 can push the largest entry out by max_code / 256 steps.
    assert bool((error <= scales * (0.5 + max_code / 256)).all())


@pytest.mark.parametrize("precision", list(Precision))
def test_zero_expert_decodes_to_zero(precision):
    shape = SHAPES["biased"]
    tensors = ExpertTensors(
        up=torch.zeros(shape.up_rows, shape.hidden_size),
        down=torch.zeros(shape.hidden_size, shape.intermediate_size),
        up_bias=torch.zeros(shape.up_rows),
        down_bias=torch.zeros(shape.hidden_size),
    )
    form = make_format(precision, shape)
    bound = form.bind(form.encode(tensors))
    decoded = form.decode(bound)
    assert not decoded.up.any()
    assert not decoded.down.any()
    x = torch.ones(2, shape.hidden_size, dtype=torch.bfloat16)
    assert not dispatch.linear(x, bound.up).any()


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4, Precision.NESTED])
def test_zero_rows_beside_others_stay_zero(precision):
    tensors = random_expert(GATED)
    tensors.up[3] = 0
    tensors.down[5] = 0
    form = make_format(precision, GATED)
    decoded = form.decode(form.bind(form.encode(tensors)))
    assert not decoded.up[3].any()
    assert not decoded.down[5].any()
    assert (decoded.up - tensors.up).norm() < 0.2 * tensors.up.norm()


def test_int8_unit_of_zeros_uses_eps():
    scales = quantise.shared_unit_scales(torch.zeros(2, 3, 4), torch.zeros(4, 3))
    assert scales.tolist() == [bf16(1e-8 / 127)] * 3


@pytest.mark.parametrize("precision", list(Precision))
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
@all_shapes
def test_bound_expert_multiplies_like_its_decoded_matrices(precision, shape, dtype):
    form = make_format(precision, shape)
    bound = form.bind(form.encode(random_expert(shape)))
    decoded = form.decode(bound)
    generator = torch.Generator().manual_seed(4)
    for weight, bias, matrix in (
        (bound.up, bound.up_bias, decoded.up),
        (bound.down, bound.down_bias, decoded.down),
    ):
        x = torch.randn(3, matrix.shape[1], generator=generator).to(dtype)
        truth = x.double() @ matrix.double().t()
        if bias is not None:
            truth += bias.double()
        error = (dispatch.linear(x, weight, bias).double() - truth).norm()
        assert error <= (8e-3 if dtype == torch.bfloat16 else 1e-6) * truth.norm()


@pytest.mark.parametrize("precision", list(Precision))
def test_bind_returns_views_into_a_slot(precision):
    """A later record in the same slot shows through weights that were bound before."""
    shape = SHAPES["biased"]
    form = make_format(precision, shape)
    total = sum(form.record_bytes(plane) for plane in form.planes)
    arena, slots, start = torch.zeros(total + 4096, dtype=torch.uint8), {}, 4096
    for plane in form.planes:
        slots[plane] = arena[start : start + form.record_bytes(plane)]
        start += form.record_bytes(plane)
    bound = form.bind(slots)
    tensors = random_expert(shape, seed=7)
    records = form.encode(tensors)
    for plane in form.planes:
        slots[plane].copy_(records[plane])
    seen, expected = form.decode(bound), form.decode(form.bind(records))
    assert torch.equal(seen.up, expected.up)
    assert torch.equal(seen.down, expected.down)
    assert torch.equal(seen.up_bias, expected.up_bias)
    assert seen.up.any()


def test_combine_equals_bind():
    form = make_format(Precision.NESTED, SHAPES["biased"])
    records = form.encode(random_expert(form.shape))
    high, low = form.bind_draft(records[Plane.HI]), form.bind_low(records[Plane.LO])
    combined, bound = form.combine(high, low), form.bind(records)
    assert torch.equal(form.decode(combined).up, form.decode(bound).up)
    assert torch.equal(form.decode(combined).down, form.decode(bound).down)
    assert combined.up.hi is high.up
    assert combined.down_bias is high.down_bias


def test_int4_draft_is_the_expert_itself():
    form = make_format(Precision.INT4, GATED)
    records = form.encode(random_expert(GATED))
    draft = form.decode(form.bind_draft(records[Plane.WHOLE]))
    assert torch.equal(draft.up, form.decode(form.bind(records)).up)


@pytest.mark.parametrize(
    ("precision", "planes", "draft_plane"),
    [
        (Precision.BF16, (Plane.WHOLE,), None),
        (Precision.FLOAT32, (Plane.WHOLE,), None),
        (Precision.INT8, (Plane.WHOLE,), None),
        (Precision.INT4, (Plane.WHOLE,), Plane.WHOLE),
        (Precision.NESTED, (Plane.HI, Plane.LO), Plane.HI),
    ],
)
def test_planes_of_each_format(precision, planes, draft_plane):
    form = make_format(precision, GATED)
    assert form.precision is precision
    assert form.planes == planes
    assert form.draft_plane is draft_plane
    records = form.encode(random_expert(GATED))
    for plane in planes:
        assert form.record_bytes(plane) % 4096 == 0
        assert 0 <= form.record_bytes(plane) - form.payload_bytes(plane) < 4096
        assert records[plane].shape == (form.record_bytes(plane),)
        assert not records[plane][form.payload_bytes(plane) :].any()


def test_int8_scale_is_stored_once():
    for name in ("gated", "interleaved"):
        form = make_format(Precision.INT8, SHAPES[name])
        bound = form.bind(form.encode(random_expert(SHAPES[name])))
        assert isinstance(bound.up, Int8Weight)
        assert bound.up.scale.data_ptr() == bound.down.scale.data_ptr()
        assert bound.up.scale.untyped_storage().data_ptr() == bound.up.codes.data_ptr()


def random_quantised(shape: ExpertShape, group_size: int, seed: int = 0) -> QuantisedExpert:
    generator = torch.Generator().manual_seed(seed)
    parts: dict[str, torch.Tensor] = {}
    for name, rows, columns in (
        ("up", shape.up_rows, shape.hidden_size),
        ("down", shape.hidden_size, shape.intermediate_size),
    ):
        codes = torch.randint(-8, 8, (rows, columns), generator=generator)
        parts[f"{name}_codes"] = codes.to(torch.int8)
        parts[f"{name}_scales"] = torch.rand(rows, columns // group_size, generator=generator)
        if shape.has_bias:
            parts[f"{name}_bias"] = torch.randn(rows, generator=generator)
    return QuantisedExpert(group_size=group_size, **parts)


@all_shapes
def test_encode_quantised_keeps_every_code_and_rounds_scales_only(shape):
    for layout in layouts_for(Precision.INT4, shape):
        form = make_format(Precision.INT4, shape, layout=layout)
        given_expert = random_quantised(shape, form.group_size)
        bound = form.bind(form.encode_quantised(given_expert))
        decoded = form.decode(bound)
        for name in ("up", "down"):
            codes = getattr(given_expert, f"{name}_codes")
            assert torch.equal(reference.codes(getattr(bound, name)), codes.to(torch.int16))
            scales = getattr(given_expert, f"{name}_scales").bfloat16().float()
            spread = scales.repeat_interleave(form.group_size, dim=1)
            assert torch.equal(getattr(decoded, name), codes * spread)
        assert_biases_equal(decoded, given_expert)


def test_encode_quantised_of_what_int4_chooses_equals_encode():
    tensors = random_expert(GATED)
    form = make_format(Precision.INT4, GATED)
    up, down = (
        quantise.quantise_int4(each, form.group_size) for each in (tensors.up, tensors.down)
    )
    given_expert = QuantisedExpert(
        up_codes=up.codes.to(torch.int8),
        up_scales=up.scales.float(),
        down_codes=down.codes.to(torch.int8),
        down_scales=down.scales.float(),
        group_size=form.group_size,
    )
    assert torch.equal(
        form.encode_quantised(given_expert)[Plane.WHOLE], form.encode(tensors)[Plane.WHOLE]
    )


def test_encode_quantised_repeats_the_scale_of_a_larger_group():
    shape = ExpertShape(hidden_size=256, intermediate_size=256)
    form = Int4Format(shape, Int4Layout.ROWS, 64)
    given_expert = random_quantised(shape, 128)
    decoded = form.decode(form.bind(form.encode_quantised(given_expert)))
    scales = given_expert.up_scales.bfloat16().float().repeat_interleave(128, dim=1)
    assert torch.equal(decoded.up, given_expert.up_codes * scales)


def test_encode_quantised_by_groups_that_do_not_divide_is_refused():
    form = make_format(Precision.INT4, ExpertShape(hidden_size=256, intermediate_size=192))
    given_expert = random_quantised(ExpertShape(hidden_size=256, intermediate_size=256), 128)
    with pytest.raises(FormatError, match="Groups of 128 do not divide"):
        form.encode_quantised(given_expert)


def test_encode_quantised_by_smaller_groups_is_refused():
    form = make_format(Precision.INT4, GATED)
    with pytest.raises(FormatError, match="groups of 16 have no form in groups of 32"):
        form.encode_quantised(random_quantised(GATED, 16))


@pytest.mark.parametrize("precision", [p for p in Precision if p != "int4"])
def test_encode_quantised_by_another_format_is_refused(precision):
    form = make_format(precision, GATED)
    with pytest.raises(FormatError, match=f"The {precision} format holds no INT4 codes"):
        form.encode_quantised(random_quantised(GATED, 32))


@pytest.mark.parametrize(
    ("name", "wrong", "words"),
    [
        ("up_codes", torch.full((192, 64), 8, dtype=torch.int8), "up_codes are no INT4 codes"),
        ("down_codes", torch.full((64, 96), -9, dtype=torch.int8), "down_codes are no INT4"),
        ("up_codes", torch.zeros(192, 64), "up_codes are no INT4 codes"),
        ("up_codes", torch.zeros(192, 32, dtype=torch.int8), r"up_codes should have shape"),
        ("down_scales", torch.ones(64, 2), r"down_scales should have shape \(64, 3\)"),
        ("up_scales", torch.full((192, 2), float("nan")), "up_scales hold nan or infinity"),
        ("down_scales", torch.full((64, 3), 3.4e38), "down_scales hold nan or infinity"),
        ("up_bias", torch.ones(192), "up_bias should have shape None"),
    ],
)
def test_encode_quantised_of_a_wrong_tensor_names_it(name, wrong, words):
    given_expert = replace(random_quantised(GATED, 32), **{name: wrong})
    with pytest.raises(FormatError, match=words):
        make_format(Precision.INT4, GATED).encode_quantised(given_expert)
