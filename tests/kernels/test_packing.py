"""Orders of INT4 codes in memory, against the definition and against torch's own packing."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from mira_kernels import cpu, packing
from mira_kernels.weights import Int4Layout

PACKED = [layout for layout in Int4Layout if layout.is_packed]


def random_codes(num_outputs: int, num_inputs: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(-8, 8, (num_outputs, num_inputs), generator=generator, dtype=torch.int16)


def test_pack_codes_rows_puts_even_column_low():
    codes = torch.tensor([[-8, 7, 0, 1], [3, -1, -2, 5]])
    packed = packing.pack_codes(codes, Int4Layout.ROWS)
    assert packed.tolist() == [[0xF0, 0x98], [0x7B, 0xD6]]


@pytest.mark.parametrize("layout", PACKED)
def test_pack_codes_packed_pairs_rows_half_a_block_apart(layout):
    rows, columns = 2 * layout.block_rows, 6
    half = layout.block_rows // 2
    codes = random_codes(rows, columns)
    flat = packing.pack_codes(codes, layout).reshape(-1).tolist()
    expected = []
    for block in range(2):
        for column in range(columns):
            for j in range(half):
                low = int(codes[block * layout.block_rows + j, column]) + 8
                high = int(codes[block * layout.block_rows + j + half, column]) + 8
                expected.append(low | high << 4)
    assert flat == expected


@settings(max_examples=40, deadline=None)
@given(
    layout=st.sampled_from(list(Int4Layout)),
    blocks=st.integers(1, 3),
    half_columns=st.integers(1, 40),
    seed=st.integers(0, 2**31),
)
def test_unpack_codes_undoes_pack_codes(layout, blocks, half_columns, seed):
    codes = random_codes(blocks * layout.block_rows, 2 * half_columns, seed)
    packed = packing.pack_codes(codes, layout)
    assert packed.shape == (codes.shape[0], half_columns)
    restored = packing.unpack_codes(packed, layout, tuple(codes.shape))
    assert restored.dtype == torch.int8
    assert torch.equal(restored.to(torch.int16), codes)


@pytest.mark.parametrize("layout", list(Int4Layout))
def test_plain_scales_undoes_arrange_scales(layout):
    scales = torch.rand(64, 3).to(torch.bfloat16)
    stored = packing.arrange_scales(scales, layout)
    assert stored.shape == packing.scales_shape(layout, 64, 96, 32)
    assert stored.is_contiguous()
    assert torch.equal(packing.plain_scales(stored, layout), scales)
    if layout.is_packed:
        assert not stored[..., 1].any()


@pytest.mark.parametrize(("code", "is_allowed"), [(-9, False), (-8, True), (7, True), (8, False)])
def test_pack_codes_out_of_range_raises(code, is_allowed):
    codes = torch.full((1, 2), code)
    if is_allowed:
        packing.pack_codes(codes, Int4Layout.ROWS)
        return
    with pytest.raises(ValueError, match="outside"):
        packing.pack_codes(codes, Int4Layout.ROWS)


@pytest.mark.parametrize("layout", list(Int4Layout))
def test_pack_codes_unfitting_shape_raises(layout):
    with pytest.raises(ValueError, match="do not fit"):
        packing.pack_codes(torch.zeros(64, 3, dtype=torch.int8), layout)
    if layout.is_packed:
        with pytest.raises(ValueError, match="do not fit"):
            packing.pack_codes(torch.zeros(48, 4, dtype=torch.int8), layout)


@pytest.mark.parametrize(
    ("layout", "num_outputs", "num_inputs", "group_size", "fits"),
    [
        (Int4Layout.ROWS, 7, 64, 32, True),
        (Int4Layout.ROWS, 7, 48, 32, False),
        (Int4Layout.CPU_PACKED_AVX2, 96, 64, 32, True),
        (Int4Layout.CPU_PACKED_AVX512, 96, 64, 32, False),
        (Int4Layout.CPU_PACKED_AVX512, 128, 64, 16, False),
        (Int4Layout.CPU_PACKED_AVX512, 128, 64, 64, True),
    ],
)
def test_fits_layout(layout, num_outputs, num_inputs, group_size, fits):
    assert packing.fits_layout(layout, num_outputs, num_inputs, group_size) is fits


def test_native_layout_equals_torch_packing():
    layout = cpu.native_int4_layout()
    if layout is None:
        pytest.skip("no packed kernel on this processor")
    codes = random_codes(192, 160)
    theirs = torch.ops.aten._convert_weight_to_int4pack_for_cpu((codes + 8).to(torch.int32), 1)
    assert torch.equal(packing.pack_codes(codes, layout), theirs)


def test_probe_refuses_the_wrong_layout():
    layout = cpu.native_int4_layout()
    for other in PACKED:
        assert cpu._reads_layout(other) is (other is layout)


@pytest.mark.parametrize(
    ("capability", "expected"), [("avx2", "cpu-packed-avx2"), ("default", "None")]
)
def test_native_layout_follows_the_processor(capability, expected):
    """A processor without AVX512 is imitated through torch's own switch."""
    if torch.backends.cpu.get_cpu_capability() not in ("AVX2", "AVX512"):
        pytest.skip("not an x86 processor with AVX2")
    code = """
import torch
from mira_kernels import cpu, dispatch, packing, reference
from mira_kernels.weights import Int4Layout, Int4Weight
print(cpu.native_int4_layout())
codes = torch.randint(-8, 8, (64, 64))
scales = torch.rand(64, 2).to(torch.bfloat16)
x = torch.randn(3, 64).to(torch.bfloat16)
for layout in Int4Layout:
    weight = Int4Weight(packing.pack_codes(codes, layout), packing.arrange_scales(scales, layout),
                        32, (64, 64), layout)
    y, truth = dispatch.linear(x, weight), reference.linear(x, weight)
    assert (y - truth).norm() < 0.01 * truth.norm(), layout
print(*dispatch.describe(), sep="\\n")
"""
    environment = os.environ | {
        "ATEN_CPU_CAPABILITY": capability,
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=environment, capture_output=True, text=True, timeout=120, check=True,
    )  # fmt: skip
    lines = done.stdout.splitlines()
    assert lines[0] == expected
    is_packed = expected != "None"
    assert any(f"packed kernel ({expected})" in line for line in lines[1:]) is is_packed
    assert any("no packed kernel" in line for line in lines[1:]) is not is_packed
