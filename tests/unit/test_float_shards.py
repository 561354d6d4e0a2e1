"""Quantised tensors under the keys and shapes of their float form, and what is refused."""

import pytest
import stored_forms
import torch
from mira_engine.checkpoint import shards as shards_module
from mira_engine.checkpoint.float_shards import FloatShards, as_float
from mira_engine.checkpoint.quantisation import quantisation_of
from mira_engine.checkpoint.shards import CheckpointShards
from mira_engine.errors import CheckpointError, UnsupportedModelError
from safetensors.torch import save_file

BLOCK = (128, 128)
FILE = "model.safetensors"


def random(*dims, seed=0):
    return torch.randn(*dims, generator=torch.Generator().manual_seed(seed))


def open_with(folder, tensors, fields):
    save_file(tensors, folder / FILE)
    return as_float(CheckpointShards(folder), quantisation_of({"quantization_config": fields}))


@pytest.fixture
def matrix():
    """An FP8 matrix whose last blocks are cut off, its scales, and what they stand for."""
    values, scales = stored_forms.fp8_of(random(320, 200), BLOCK)
    return values, scales, stored_forms.fp8_values(values, scales, BLOCK)


@pytest.mark.parametrize("suffix", ["_scale_inv", "_scale"])
def test_fp8_pair_is_shown_as_one_float_tensor(tmp_path, matrix, suffix):
    values, scales, expected = matrix
    shards = open_with(
        tmp_path,
        {"a.weight": values, f"a.weight{suffix}": scales, "b.weight": random(2, 2)},
        stored_forms.FP8_FIELDS,
    )
    assert set(shards) == {"a.weight", "b.weight"}
    where = shards["a.weight"]
    assert (where.dtype, where.shape, where.num_bytes) == (torch.bfloat16, (320, 200), 128_000)
    assert where.path == tmp_path / FILE
    assert torch.equal(shards.read("a.weight"), expected)
    assert torch.equal(shards.read("a.weight", row=300), expected[300:301])
    assert torch.equal(shards.read("b.weight"), random(2, 2))
    assert torch.equal(shards.read("b.weight", row=1), random(2, 2)[1:])


@pytest.mark.parametrize("piece_bytes", [1, 60_000, 1 << 20])
def test_pieces_of_an_fp8_tensor_are_its_float_bytes(tmp_path, matrix, piece_bytes):
    values, scales, expected = matrix
    shards = open_with(
        tmp_path, {"a.weight": values, "a.weight_scale_inv": scales}, stored_forms.FP8_FIELDS
    )
    pieces = list(shards.pieces("a.weight", piece_bytes=piece_bytes))
    assert max(len(piece) for piece in pieces) <= max(piece_bytes, 128 * 200 * 2)
    assert len(pieces) == (1 if piece_bytes == 1 << 20 else 3)
    assert torch.equal(torch.cat(pieces).view(torch.bfloat16).view(320, 200), expected)


@pytest.mark.parametrize(
    ("shape", "block"),
    [((), None), ((1,), None), ((1, 1), None), ((), [128, 128]), ((1,), [128, 128])],
)
def test_fp8_matrix_with_one_scale_is_multiplied_by_it(tmp_path, shape, block):
    values, scales = stored_forms.fp8_of(random(300, 96), (300, 96))
    shards = open_with(
        tmp_path,
        {"a.weight": values, "a.weight_scale_inv": scales.reshape(shape)},
        stored_forms.FP8_FIELDS | {"weight_block_size": block},
    )
    expected = stored_forms.fp8_values(values, scales, (300, 96))
    assert torch.equal(shards.read("a.weight"), expected)
    assert torch.equal(torch.cat(list(shards.pieces("a.weight", 1))).view(-1, 2 * 96).view(
        torch.bfloat16
    ), expected)  # fmt: skip


def test_fp8_configuration_without_a_block_size_means_128(tmp_path, matrix):
    values, scales, expected = matrix
    fields = {"quant_method": "fp8"}
    shards = open_with(tmp_path, {"a.weight": values, "a.weight_scale_inv": scales}, fields)
    assert torch.equal(shards.read("a.weight"), expected)


def test_fp8_stack_of_experts_is_read_one_expert_at_a_time(tmp_path, monkeypatch):
    pairs = [stored_forms.fp8_of(random(200, 130, seed=seed), BLOCK) for seed in range(4)]
    shards = open_with(
        tmp_path,
        {
            "experts.up": torch.stack([values for values, _ in pairs]),
            "experts.up_scale_inv": torch.stack([scales for _, scales in pairs]),
        },
        stored_forms.FP8_FIELDS,
    )
    read = count_bytes(monkeypatch)
    got = shards.read("experts.up", row=2)
    assert sum(read) == 200 * 130 + 2 * 2 * 4
    assert torch.equal(got[0], stored_forms.fp8_values(*pairs[2], BLOCK))


def test_mxfp4_pair_is_shown_transposed_and_read_one_expert_at_a_time(tmp_path, monkeypatch):
    generator = torch.Generator().manual_seed(3)
    blocks = torch.randint(0, 256, (4, 6, 3, 16), generator=generator, dtype=torch.uint8)
    scales = torch.randint(100, 140, (4, 6, 3), generator=generator, dtype=torch.uint8)
    shards = open_with(
        tmp_path,
        {"e.up_blocks": blocks, "e.up_scales": scales, "e.up_bias": random(4, 6)},
        stored_forms.MXFP4_FIELDS,
    )
    assert sorted(shards) == ["e.up", "e.up_bias"]
    assert shards["e.up"].shape == (4, 96, 6)
    read = count_bytes(monkeypatch)
    got = shards.read("e.up", row=1)
    assert sum(read) == 6 * 3 * 17
    expected = stored_forms.mxfp4_values(blocks, scales).transpose(1, 2)
    assert torch.equal(got[0], expected[1])
    pieces = torch.cat(list(shards.pieces("e.up", 1)))
    assert torch.equal(pieces.view(torch.bfloat16).view(4, 96, 6), expected)


def count_bytes(monkeypatch):
    """Returns the list that the length of every read from a file goes to."""
    read, original = [], shards_module.read_bytes

    def counted(path, offset, num_bytes):
        read.append(num_bytes)
        return original(path, offset, num_bytes)

    monkeypatch.setattr(shards_module, "read_bytes", counted)
    return read


@pytest.mark.parametrize("grid", [(2, 2), (3, 1), (3, 3), (3, 2, 1), (1, 1)])
def test_fp8_scales_of_another_shape_are_named(tmp_path, matrix, grid):
    values, _, _ = matrix
    with pytest.raises(
        CheckpointError, match=r"a\.weight_scale_inv of shape .* needs \(3, 2\)"
    ) as e:
        open_with(
            tmp_path,
            {"a.weight": values, "a.weight_scale_inv": torch.ones(grid)},
            stored_forms.FP8_FIELDS,
        )
    assert FILE in e.value.message
    assert e.value.hint


def test_fp8_values_without_scales_are_named(tmp_path, matrix):
    with pytest.raises(CheckpointError, match=rf"{FILE} holds the FP8 tensor a\.weight"):
        open_with(tmp_path, {"a.weight": matrix[0]}, stored_forms.FP8_FIELDS)


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_fp8_scale_that_is_no_number_is_named_when_it_is_read(tmp_path, matrix, wrong):
    values, scales, expected = matrix
    scales[2, 1] = wrong
    shards = open_with(
        tmp_path, {"a.weight": values, "a.weight_scale_inv": scales}, stored_forms.FP8_FIELDS
    )
    assert torch.equal(shards.read("a.weight", row=0), expected[:1])
    with pytest.raises(CheckpointError, match=rf"{FILE} holds nan .* a\.weight_scale_inv"):
        shards.read("a.weight")


def test_mxfp4_scale_that_is_no_number_is_named_when_it_is_read(tmp_path):
    scales = torch.full((2, 4, 1), 120, dtype=torch.uint8)
    scales[1, 0, 0] = 255
    shards = open_with(
        tmp_path,
        {"e.up_blocks": torch.zeros(2, 4, 1, 16, dtype=torch.uint8), "e.up_scales": scales},
        stored_forms.MXFP4_FIELDS,
    )
    assert not shards.read("e.up", row=0).any()
    with pytest.raises(CheckpointError, match=rf"{FILE} holds nan .* e\.up_scales"):
        shards.read("e.up", row=1)


@pytest.mark.parametrize(
    ("blocks", "scales"),
    [((2, 4, 3, 16), (2, 4, 4)), ((2, 4, 4, 8), (2, 4, 4)), ((2, 4, 64), (2, 4, 4))],
)
def test_mxfp4_blocks_that_are_cut_short_are_named(tmp_path, blocks, scales):
    with pytest.raises(CheckpointError, match="do not fit each other") as caught:
        open_with(
            tmp_path,
            {
                "e.up_blocks": torch.zeros(blocks, dtype=torch.uint8),
                "e.up_scales": torch.zeros(scales, dtype=torch.uint8),
            },
            stored_forms.MXFP4_FIELDS,
        )
    assert f"{FILE} holds e.up_blocks" in caught.value.message


def test_mxfp4_blocks_without_scales_are_named(tmp_path):
    blocks = torch.zeros(2, 4, 1, 16, dtype=torch.uint8)
    with pytest.raises(CheckpointError, match=rf"{FILE} holds the MXFP4 tensor e\.up_blocks"):
        open_with(tmp_path, {"e.up_blocks": blocks}, stored_forms.MXFP4_FIELDS)


@pytest.mark.parametrize("block", ["128", [128], [128, 0], [128.0, 128]])
def test_fp8_block_size_that_is_none_is_named(tmp_path, matrix, block):
    fields = stored_forms.FP8_FIELDS | {"weight_block_size": block}
    with pytest.raises(CheckpointError, match="weight_block_size"):
        open_with(tmp_path, {"a.weight": matrix[0]}, fields)


def test_form_that_is_not_read_is_refused(tmp_path):
    with pytest.raises(UnsupportedModelError, match="awq"):
        open_with(tmp_path, {"a.weight": random(2, 2)}, {"quant_method": "awq"})


def test_float_checkpoint_is_opened_as_it_is(tmp_path):
    save_file({"a.weight": random(2, 2)}, tmp_path / FILE)
    stored = CheckpointShards(tmp_path)
    assert as_float(stored, None) is stored


def test_fingerprint_is_that_of_the_stored_files(tmp_path, matrix):
    values, scales, _ = matrix
    shards = open_with(
        tmp_path, {"a.weight": values, "a.weight_scale_inv": scales}, stored_forms.FP8_FIELDS
    )
    assert isinstance(shards, FloatShards)
    assert shards.fingerprint() == CheckpointShards(tmp_path).fingerprint()


@pytest.mark.parametrize("is_split", [False, True])
def test_scales_in_another_file_than_their_values_are_found_and_told(tmp_path, matrix, is_split):
    values, scales, expected = matrix
    files = {"part-1.safetensors": {"a.weight": values}, "part-2.safetensors": {"b": random(2)}}
    files["part-2.safetensors" if is_split else "part-1.safetensors"]["a.weight_scale_inv"] = scales
    for name, tensors in files.items():
        save_file(tensors, tmp_path / name)
    fields = {"quantization_config": stored_forms.FP8_FIELDS}
    shards = as_float(CheckpointShards(tmp_path), quantisation_of(fields))
    assert torch.equal(shards.read("a.weight"), expected)
    assert shards.is_split is is_split
    assert [shards.shard_of(key) for key in ("a.weight", "b")] == list(files)
