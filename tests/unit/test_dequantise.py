"""Values of stored forms: against transformers' own, and against arithmetic written out."""

import pytest
import stored_forms
import torch
from mira_engine.checkpoint.dequantise import (
    dequantise_fp8,
    dequantise_mxfp4,
    grid_of,
    scales_to_float,
    unpack_gptq_codes,
    unpack_gptq_zeros,
)
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

BLOCK = (128, 128)


def random(*dims, seed=0):
    return torch.randn(*dims, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(128, 128), (256, 384), (384, 128)])
def test_dequantise_fp8_whole_blocks_equals_transformers(shape):
    values, scales = stored_forms.fp8_of(random(*shape), BLOCK)
    expected = Fp8Dequantize(None)._dequantize_one(values, scales, output_dtype=torch.bfloat16)
    assert torch.equal(dequantise_fp8(values, scales, BLOCK), expected)


@pytest.mark.parametrize("shape", [(320, 256), (192, 256), (256, 320), (1, 7), (130, 257)])
def test_dequantise_fp8_blocks_cut_at_the_edge_equals_blocks_written_out(shape):
    values, scales = stored_forms.fp8_of(random(*shape), BLOCK)
    assert scales.shape == grid_of(*shape, BLOCK)
    expected = stored_forms.fp8_values(values, scales, BLOCK)
    assert torch.equal(dequantise_fp8(values, scales, BLOCK), expected)


def test_transformers_own_dequantisation_does_not_know_blocks_that_are_cut():
    """The reason for arithmetic of our own; when this fails, theirs may do."""
    values, scales = stored_forms.fp8_of(random(320, 256), BLOCK)
    with pytest.raises(ValueError, match="not divisible"):
        Fp8Dequantize(None)._dequantize_one(values, scales)
    values, scales = stored_forms.fp8_of(random(192, 256), BLOCK)
    theirs = Fp8Dequantize(None)._dequantize_one(values, scales, output_dtype=torch.bfloat16)
    assert not torch.equal(theirs, stored_forms.fp8_values(values, scales, BLOCK))


def test_dequantise_fp8_stack_equals_its_matrices():
    pairs = [stored_forms.fp8_of(random(200, 150, seed=seed), BLOCK) for seed in range(3)]
    values = torch.stack([each for each, _ in pairs])
    scales = torch.stack([each for _, each in pairs])
    made = dequantise_fp8(values, scales, BLOCK)
    for number, (matrix, grid) in enumerate(pairs):
        assert torch.equal(made[number], dequantise_fp8(matrix, grid, BLOCK))


def test_dequantise_mxfp4_equals_transformers_and_arithmetic_written_out():
    generator = torch.Generator().manual_seed(1)
    blocks = torch.randint(0, 256, (2, 6, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (2, 6, 3), generator=generator, dtype=torch.uint8)
    made = dequantise_mxfp4(blocks, scales_to_float(scales))
    assert made.shape == (2, 6, 96)
    assert torch.equal(made, stored_forms.mxfp4_values(blocks, scales))
    theirs = convert_moe_packed_tensors(blocks, scales, dtype=torch.bfloat16)
    assert torch.equal(made.transpose(1, 2), theirs)


def test_dequantise_mxfp4_gives_every_code_its_value():
    blocks = torch.arange(256, dtype=torch.uint8).view(1, 16, 16)
    made = dequantise_mxfp4(blocks, torch.ones(1, 16)).flatten().tolist()
    values = [*stored_forms.FP4, *(-value for value in stored_forms.FP4)]
    assert made[0::2] == [values[byte & 15] for byte in range(256)]
    assert made[1::2] == [values[byte >> 4] for byte in range(256)]


@pytest.mark.parametrize("dtype", [torch.uint8, torch.float8_e8m0fnu])
def test_scales_to_float_takes_bytes_as_powers_of_two(dtype):
    codes = torch.arange(256, dtype=torch.uint8).view(16, 16)
    made = scales_to_float(codes.view(dtype)).flatten()
    assert made[:255].tolist() == [2.0 ** (code - 127) for code in range(255)]
    assert made[255].isnan()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_scales_to_float_keeps_numbers(dtype):
    scales = random(3, 2).to(dtype)
    assert torch.equal(scales_to_float(scales), scales.float())


def test_unpack_gptq_codes_and_zeros_undo_the_packing():
    codes = torch.randint(-8, 8, (24, 64), generator=torch.Generator().manual_seed(2))
    scales = torch.ones(24, 2, dtype=torch.float16)
    packed = stored_forms.gptq_tensors("x", codes.to(torch.int8), scales, 32, 9)
    assert torch.equal(unpack_gptq_codes(packed["x.qweight"]).long() - 8, codes)
    zeros = unpack_gptq_zeros(packed["x.qzeros"])
    assert zeros.shape == (2, 24)
    assert bool((zeros == 9).all())
