"""Bytes of expert records: golden digests, sizes, the group rule and what is refused."""

from __future__ import annotations

import hashlib
import math

import pytest
import torch
from mira_engine.checkpoint import formats
from mira_engine.checkpoint.formats import ExpertTensors, make_format
from mira_engine.errors import FormatError, StoreError
from mira_engine.types import ExpertShape, Plane, Precision
from mira_kernels import dispatch
from mira_kernels.weights import Int4Layout

GATED = ExpertShape(hidden_size=64, intermediate_size=96)
BIASED = ExpertShape(hidden_size=64, intermediate_size=96, has_bias=True)
INTERLEAVED = ExpertShape(hidden_size=64, intermediate_size=32, has_bias=True, is_interleaved=True)
LAYOUTS = [layout.value for layout in Int4Layout]


def fixed_expert(shape: ExpertShape) -> ExpertTensors:
    """Values from integer arithmetic alone, so that golden bytes need no generator."""

    def fixed(*dims):
        numbers = torch.arange(math.prod(dims), dtype=torch.int64)
        return ((numbers * 7919 % 257 - 128).float() / 1024).view(*dims)

    hidden, inner = shape.hidden_size, shape.intermediate_size
    return ExpertTensors(
        up=fixed(shape.up_rows, hidden),
        down=fixed(hidden, inner),
        up_bias=fixed(shape.up_rows) if shape.has_bias else None,
        down_bias=fixed(hidden) if shape.has_bias else None,
    )


GOLDEN = {
    "bf16/gated/rows/whole": "f557a0006c33a20a4d17309f4a9cc488",
    "bf16/interleaved/rows/whole": "918da767e6cb23829fd4ca0ce595bf18",
    "float32/gated/rows/whole": "0c716d74158ce9d9b42ecb0f7b33912e",
    "float32/interleaved/rows/whole": "abfd6036da8d4239cdc3b1820db59a80",
    "int8/gated/rows/whole": "c7b0122fa4efdfdf45228ac2f5fc52d9",
    "int8/interleaved/rows/whole": "803c7d3d2d25183bbc92fa1d2a130a48",
    "int4/gated/rows/whole": "018e5623702d7286491f0b9265e59055",
    "int4/gated/cpu-packed-avx2/whole": "516e8d60cb4c0043420b1bd4e8e7e10b",
    "int4/gated/cpu-packed-avx512/whole": "0dda5ee9980891b38b3c6ea90adaff89",
    "int4/interleaved/rows/whole": "89847c31d1824a3b3c5d6ebc56e82bf6",
    "nested/gated/rows/hi": "04165f2bb1e25b982bc88eb17c098101",
    "nested/gated/rows/lo": "8778a5cdf8e6d030f98224b3b5fdaa44",
    "nested/gated/cpu-packed-avx2/hi": "80203574cf3671b03e9dd336a55057be",
    "nested/gated/cpu-packed-avx2/lo": "837d9aff980cf233298b24b27491207c",
    "nested/gated/cpu-packed-avx512/hi": "45f2cac0f9c1689aa5cca86086b913ba",
    "nested/gated/cpu-packed-avx512/lo": "4e2096b6e6c7d79cc425a3171cdc8a4b",
    "nested/interleaved/rows/hi": "09a8ce9aa3ab26d1fdc7e553b46ee1bb",
    "nested/interleaved/rows/lo": "e5889b29b3e4d3287ecee6858fdb5beb",
}


def golden_cases():
    for precision in Precision:
        grouped = precision in (Precision.INT4, Precision.NESTED)
        for name in ("gated", "interleaved"):
            for layout in LAYOUTS if grouped and name == "gated" else ["rows"]:
                yield precision, name, layout


def golden_shape(name: str) -> ExpertShape:
    if name == "gated":
        return ExpertShape(hidden_size=64, intermediate_size=64)
    return INTERLEAVED


@pytest.mark.parametrize(("precision", "name", "layout"), list(golden_cases()))
def test_golden_bytes(precision, name, layout):
    """A record's bytes are a file format: they change only with a new manifest version."""
    shape = golden_shape(name)
    form = make_format(precision, shape, layout=layout)
    for plane, record in form.encode(fixed_expert(shape)).items():
        digest = hashlib.sha256(record.numpy().tobytes()).hexdigest()
        assert digest[:32] == GOLDEN[f"{precision}/{name}/{layout}/{plane}"]


@pytest.mark.parametrize(
    ("precision", "plane", "expected"),
    [
        (Precision.BF16, Plane.WHOLE, "00bea23d043d70bc7cbddebdc43d483d"),
        (Precision.INT8, Plane.WHOLE, "815021f1c192613202d2a3724213e3b4"),
        (Precision.INT4, Plane.WHOLE, "c17a25bd58e39c46d17a25be68e39c47"),
        (Precision.NESTED, Plane.HI, "d17a24be58f39c46d17a25be68f39c47"),
        (Precision.NESTED, Plane.LO, "31a71e63da31a61d64d940960d54c930"),
    ],
)
def test_golden_first_bytes(precision, plane, expected):
    form = make_format(precision, golden_shape("gated"), layout="rows")
    record = form.encode(fixed_expert(form.shape))[plane]
    assert record[:16].numpy().tobytes().hex() == expected


def test_record_sizes_of_the_built_in_shape():
    shape = ExpertShape(hidden_size=576, intermediate_size=512)
    weights = 3 * 576 * 512
    assert shape.int4_group_size == 64
    assert formats.int8_reference_bytes(shape) == 888832  # weights + 1024, padded
    assert make_format(Precision.INT8, shape).payload_bytes(Plane.WHOLE) == weights + 2 * 512
    rows = make_format(Precision.NESTED, shape, layout="rows")
    assert rows.payload_bytes(Plane.HI) == weights // 2 + weights // 64 * 2
    assert rows.payload_bytes(Plane.LO) == weights // 2
    packed = make_format(Precision.NESTED, shape, layout="cpu-packed-avx512")
    assert packed.payload_bytes(Plane.HI) == weights // 2 + weights // 64 * 4
    assert packed.payload_bytes(Plane.LO) == weights // 2


@pytest.mark.parametrize(
    ("hidden", "inner", "group"),
    [(576, 512, 64), (2048, 1408, 128), (96, 64, 32), (64, 48, None), (100, 64, None)],
)
def test_group_rule(hidden, inner, group):
    shape = ExpertShape(hidden_size=hidden, intermediate_size=inner)
    for precision in (Precision.INT4, Precision.NESTED):
        if group is None:
            with pytest.raises(FormatError, match="32") as caught:
                make_format(precision, shape)
            assert str(hidden) in caught.value.message
            assert caught.value.hint
        else:
            assert make_format(precision, shape).group_size == group
    assert make_format(Precision.INT8, shape).group_size is None


def test_unknown_layout_raises():
    with pytest.raises(FormatError, match="mystery"):
        make_format(Precision.INT4, GATED, layout="mystery")
    with pytest.raises(FormatError, match="cpu-packed-avx512"):
        make_format(Precision.INT8, GATED, layout="cpu-packed-avx512")


def test_layout_that_does_not_fit_raises():
    shape = ExpertShape(hidden_size=96, intermediate_size=32)
    with pytest.raises(FormatError, match="does not fit"):
        make_format(Precision.NESTED, shape, layout="cpu-packed-avx512")
    assert make_format(Precision.NESTED, shape, layout="rows").layout == "rows"


def test_default_layout_is_native():
    for shape in (GATED, BIASED, INTERLEAVED):
        assert make_format(Precision.NESTED, shape).is_native
    foreign = [name for name in LAYOUTS if not dispatch.is_native(Int4Layout(name))]
    shape = ExpertShape(hidden_size=64, intermediate_size=64)
    for name in foreign:
        form = make_format(Precision.NESTED, shape, layout=name)
        assert form.is_native is (name == "rows")


@pytest.mark.parametrize(
    "change",
    [
        {"up": torch.zeros(64, 192)},
        {"down": torch.zeros(96, 64)},
        {"up_bias": torch.zeros(192)},
        {"down_bias": torch.zeros(64)},
    ],
)
def test_encode_wrong_shape_raises(change):
    tensors = fixed_expert(GATED)
    given_tensors = {"up": tensors.up, "down": tensors.down} | change
    with pytest.raises(FormatError, match=next(iter(change))):
        make_format(Precision.BF16, GATED).encode(ExpertTensors(**given_tensors))


def test_encode_missing_bias_raises():
    with pytest.raises(FormatError, match="up_bias"):
        make_format(Precision.INT8, BIASED).encode(fixed_expert(GATED))


@pytest.mark.parametrize("precision", [Precision.INT8, Precision.INT4, Precision.NESTED])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_encode_not_finite_raises(precision, value):
    tensors = fixed_expert(GATED)
    tensors.down[0, 0] = value
    with pytest.raises(FormatError, match="second matrix"):
        make_format(precision, GATED).encode(tensors)


def test_bind_damaged_records_raises():
    form = make_format(Precision.NESTED, GATED)
    records = form.encode(fixed_expert(GATED))
    with pytest.raises(FormatError, match="lo plane"):
        form.bind({Plane.HI: records[Plane.HI]})
    with pytest.raises(StoreError):
        form.bind({Plane.HI: records[Plane.HI][:-1], Plane.LO: records[Plane.LO]})
    with pytest.raises(StoreError):
        form.bind_draft(records[Plane.HI].view(torch.int8))
    with pytest.raises(StoreError):
        form.bind_low(records[Plane.LO].repeat_interleave(2)[::2])


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.FLOAT32, Precision.INT8])
def test_bind_draft_without_draft_raises(precision):
    form = make_format(precision, GATED)
    with pytest.raises(FormatError, match="no INT4 draft"):
        form.bind_draft(torch.zeros(form.record_bytes(Plane.WHOLE), dtype=torch.uint8))


def test_sections_start_on_cache_lines():
    shape = ExpertShape(hidden_size=32, intermediate_size=32, has_bias=True, has_gate=False)
    form = make_format(Precision.INT4, shape, layout="rows")
    bound = form.bind(form.encode(fixed_expert(shape)))
    tensors = (bound.up.packed, bound.up.scales, bound.down.packed, bound.down.scales,
               bound.up_bias, bound.down_bias)  # fmt: skip
    for tensor in tensors:
        assert tensor.storage_offset() * tensor.itemsize % 64 == 0
