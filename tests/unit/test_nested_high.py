"""Nested experts around a high plane that is given."""

from __future__ import annotations

import pytest
import torch
from mira_engine.checkpoint import quantise
from mira_engine.checkpoint.formats import ExpertTensors, make_format
from mira_engine.checkpoint.quantised_expert import QuantisedExpert
from mira_engine.errors import FormatError
from mira_engine.types import ExpertShape, Plane, Precision
from mira_kernels import reference
from mira_kernels.weights import Int4Layout

SHAPE = ExpertShape(hidden_size=64, intermediate_size=96, has_bias=True)
GROUP = 32


def expert(seed=0):
    generator = torch.Generator().manual_seed(seed)

    def random(*dims):
        return torch.randn(*dims, generator=generator) * 0.05

    return ExpertTensors(
        up=random(SHAPE.up_rows, 64),
        down=random(64, 96),
        up_bias=random(SHAPE.up_rows),
        down_bias=random(64),
    )


def given(tensors, shift=0, group=GROUP):
    """INT4 codes of the expert's matrices to nearest, moved by `shift`."""
    parts = {}
    for name in ("up", "down"):
        codes = quantise.quantise_int4(getattr(tensors, name), group)
        parts[f"{name}_codes"] = (codes.codes + shift).clamp(-8, 7).to(torch.int8)
        parts[f"{name}_scales"] = codes.scales.float()
    return QuantisedExpert(
        group_size=group, up_bias=tensors.up_bias, down_bias=tensors.down_bias, **parts
    )


def layouts():
    found = []
    for layout in Int4Layout:
        try:
            found.append(make_format(Precision.NESTED, SHAPE, layout=layout.value))
        except FormatError:
            continue
    return found


@pytest.mark.parametrize("shift", [-2, 0, 1])
def test_high_plane_is_what_was_given(shift):
    tensors = expert()
    high = given(tensors, shift)
    for form in layouts():
        records = form.encode_with_high(tensors, high)
        draft = form.bind_draft(records[Plane.HI])
        assert torch.equal(reference.codes(draft.up), high.up_codes.clamp(-7, 7).to(torch.int16))
        decoded = form.decode(draft)
        spread = high.down_scales.repeat_interleave(GROUP, dim=1)
        assert torch.equal(decoded.down, high.down_codes.clamp(-7, 7) * spread)
        assert torch.equal(decoded.up_bias, tensors.up_bias)
        assert torch.equal(decoded.down_bias, tensors.down_bias)


@pytest.mark.parametrize("shift", [-2, 0, 1])
def test_low_plane_is_the_best_completion_there_is(shift):
    tensors = expert()
    high = given(tensors, shift)
    form = make_format(Precision.NESTED, SHAPE)
    bound = form.bind(form.encode_with_high(tensors, high))
    decoded, hi = form.decode(bound), reference.codes(bound.up.hi)
    step = high.up_scales.repeat_interleave(GROUP, dim=1) / 16
    reachable = torch.stack([(16 * hi + low) * step for low in range(-8, 8)])
    best = (reachable - tensors.up).abs().amin(dim=0)
    torch.testing.assert_close((decoded.up - tensors.up).abs(), best, rtol=1e-4, atol=1e-7)


def test_nearest_high_codes_make_an_int8_target():
    """Half a step, and a step where the largest weight lies just beyond the low plane's end."""
    tensors = expert()
    form = make_format(Precision.NESTED, SHAPE)
    high = given(tensors)
    decoded = form.decode(form.bind(form.encode_with_high(tensors, high)))
    step = high.up_scales.repeat_interleave(GROUP, dim=1) / 16
    errors = (decoded.up - tensors.up).abs() / step
    assert float(errors.max()) <= 1.01
    assert float(errors.mean()) < 0.3


def test_joined_codes_fit_a_signed_byte_whatever_is_given():
    tensors = expert()
    high = given(tensors, shift=-12)
    assert int(high.up_codes.min()) == -8
    form = make_format(Precision.NESTED, SHAPE)
    joined = reference.codes(form.bind(form.encode_with_high(tensors, high)).up)
    assert int(joined.min()) >= -128
    assert int(joined.max()) <= 127


def test_scale_of_a_larger_group_is_repeated_and_a_smaller_one_refused():
    form = make_format(
        Precision.NESTED, ExpertShape(hidden_size=256, intermediate_size=256, has_gate=False)
    )
    generator = torch.Generator().manual_seed(0)
    tensors = ExpertTensors(
        up=torch.randn(256, 256, generator=generator),
        down=torch.randn(256, 256, generator=generator),
    )
    assert form.group_size == 128
    high = given(tensors, group=256)
    draft = form.decode(form.bind_draft(form.encode_with_high(tensors, high)[Plane.HI]))
    assert torch.equal(draft.up, high.up_codes.clamp(-7, 7) * high.up_scales)
    with pytest.raises(FormatError, match="groups of 64"):
        form.encode_with_high(tensors, given(tensors, group=64))


def test_expert_that_is_not_finite_is_refused():
    tensors = expert()
    high = given(tensors)
    tensors.up[0, 0] = torch.nan
    with pytest.raises(FormatError, match="nan"):
        make_format(Precision.NESTED, SHAPE).encode_with_high(tensors, high)


def test_expert_of_another_shape_is_refused():
    tensors = expert()
    form = make_format(Precision.NESTED, SHAPE)
    short = ExpertTensors(tensors.up[:-1], tensors.down, tensors.up_bias, tensors.down_bias)
    with pytest.raises(FormatError, match="up should have shape"):
        form.encode_with_high(short, given(tensors))
