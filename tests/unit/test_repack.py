"""A record in one layout becomes the same values in another."""

from __future__ import annotations

import pytest
import torch
from mira_engine.checkpoint.expert import ExpertTensors
from mira_engine.checkpoint.formats import make_format
from mira_engine.types import ExpertShape, Precision


@pytest.mark.parametrize("precision", [Precision.INT4, Precision.NESTED])
@pytest.mark.parametrize("has_bias", [False, True])
def test_repacked_record_is_the_same_expert(precision: Precision, has_bias: bool) -> None:
    shape = ExpertShape(
        hidden_size=128,
        intermediate_size=64,
        has_gate=True,
        has_bias=has_bias,
        is_interleaved=False,
    )
    torch.manual_seed(0)
    expert = ExpertTensors(
        up=torch.randn(128, 128),
        down=torch.randn(128, 64),
        up_bias=torch.randn(128) if has_bias else None,
        down_bias=torch.randn(128) if has_bias else None,
    )
    packed = make_format(precision, shape, layout="cpu-packed-avx512")
    rows = make_format(precision, shape, layout="rows")
    assert packed.layout != rows.layout

    records = packed.encode(expert)
    again = {plane: rows.repack(plane, record, packed) for plane, record in records.items()}

    expected = rows.encode(expert)
    for plane, record in again.items():
        assert torch.equal(record, expected[plane])
