"""Damaged and hostile checkpoints are named before anything is read from them."""

import json

import pytest
import torch
from mira_engine.checkpoint import shards as shards_module
from mira_engine.checkpoint.shards import INDEX_FILE, SINGLE_FILE, CheckpointShards
from mira_engine.errors import CheckpointError
from safetensors.torch import save_file

SHARDS = ("model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors")


@pytest.fixture
def folder(tmp_path):
    tensors = {
        "a.weight": torch.arange(24, dtype=torch.float32).reshape(4, 3, 2),
        "b.weight": torch.arange(6, dtype=torch.bfloat16).reshape(2, 3),
    }
    for name, key in zip(SHARDS, tensors, strict=True):
        save_file({key: tensors[key]}, tmp_path / name)
    write_index(tmp_path, dict(zip(tensors, SHARDS, strict=True)))
    return tmp_path


def write_index(folder, weight_map):
    (folder / INDEX_FILE).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def test_read_whole_and_row_give_the_stored_values(folder):
    shards = CheckpointShards(folder)
    assert list(shards) == ["a.weight", "b.weight"]
    whole = torch.arange(24, dtype=torch.float32).reshape(4, 3, 2)
    assert torch.equal(shards.read("a.weight"), whole)
    assert torch.equal(shards.read("a.weight", row=2), whole[2:3])
    assert shards.read("b.weight").dtype == torch.bfloat16


def test_pieces_put_together_are_the_tensors_bytes(folder):
    shards = CheckpointShards(folder)
    pieces = list(shards.pieces("a.weight", piece_bytes=40))
    assert [len(piece) for piece in pieces] == [40, 40, 16]
    assert torch.equal(torch.cat(pieces).view(torch.float32), torch.arange(24.0))


def test_single_file_needs_no_index(tmp_path):
    save_file({"x": torch.ones(2)}, tmp_path / SINGLE_FILE)
    assert list(CheckpointShards(tmp_path)) == ["x"]


def test_shard_missing_is_named(folder):
    (folder / SHARDS[1]).unlink()
    with pytest.raises(CheckpointError, match=f"{SHARDS[1]} is missing") as caught:
        CheckpointShards(folder)
    assert "Download" in caught.value.hint


@pytest.mark.parametrize("num_bytes", [0, 3, 8, 40, -1])
def test_shard_truncated_is_named(folder, num_bytes):
    path = folder / SHARDS[0]
    path.write_bytes(path.read_bytes()[:num_bytes])
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]} is truncated"):
        CheckpointShards(folder)


def test_shard_too_long_is_named(folder):
    path = folder / SHARDS[0]
    path.write_bytes(path.read_bytes() + b"\0")
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]} is longer"):
        CheckpointShards(folder)


def test_shard_that_is_a_git_lfs_pointer_is_named(folder):
    oid = "0" * 64
    (folder / SHARDS[0]).write_text(
        f"version https://git-lfs.example/spec/v1\noid sha256:{oid}\nsize 12345\n"
    )
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]} is a Git LFS pointer") as caught:
        CheckpointShards(folder)
    assert "git lfs pull" in caught.value.hint


@pytest.mark.parametrize(
    "header",
    [
        b"not json at all",
        b'["a list"]',
        b'{"a.weight": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
        b'{"a.weight": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}',
        b'{"a.weight": {"dtype": "WHAT", "shape": [2], "data_offsets": [0, 8]}}',
        b'{"a.weight": 3}',
    ],
)
def test_shard_with_an_unreadable_header_is_named(folder, header):
    (folder / SHARDS[0]).write_bytes(len(header).to_bytes(8, "little") + header + b"\0" * 8)
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]} has an unreadable safetensors header"):
        CheckpointShards(folder)


@pytest.mark.parametrize(
    "name",
    ["../outside.safetensors", "/etc/outside.safetensors", "a/../../b.safetensors",
     "..\\outside.safetensors", "C:\\outside.safetensors", ""],
)  # fmt: skip
def test_shard_named_outside_the_folder_is_refused_unread(folder, name):
    save_file({"a.weight": torch.ones(1)}, folder.parent / "outside.safetensors")
    write_index(folder, {"a.weight": name})
    with pytest.raises(CheckpointError, match="names a shard outside the folder"):
        CheckpointShards(folder)


def test_index_that_names_a_tensor_its_shard_lacks_is_refused(folder):
    write_index(folder, {"a.weight": SHARDS[1]})
    with pytest.raises(CheckpointError, match=rf"{SHARDS[1]} lacks the tensor a\.weight"):
        CheckpointShards(folder)


def test_index_that_names_a_file_that_is_absent_names_it(folder):
    write_index(folder, {"a.weight": SHARDS[0], "b.weight": "model-00009-of-00009.safetensors"})
    with pytest.raises(CheckpointError, match="model-00009-of-00009.safetensors is missing"):
        CheckpointShards(folder)


def test_index_older_than_its_files_gives_way_to_their_headers(folder):
    save_file({"a.weight": torch.zeros(1), "late.weight": torch.ones(3)}, folder / SHARDS[0])
    write_index(folder, {"b.weight": SHARDS[0], "a.weight": SHARDS[0], "c.weight": SHARDS[1]})
    save_file({"b.weight": torch.ones(2), "c.weight": torch.ones(5)}, folder / SHARDS[1])
    shards = CheckpointShards(folder)
    assert list(shards) == ["b.weight", "a.weight", "c.weight", "late.weight"]
    assert shards["b.weight"].path == folder / SHARDS[1]
    assert torch.equal(shards.read("late.weight"), torch.ones(3))


def test_index_decides_between_two_files_that_hold_a_tensor(folder):
    for value, name in enumerate(SHARDS):
        save_file({"a.weight": torch.full((2,), float(value))}, folder / name)
    write_index(folder, {"a.weight": SHARDS[1], "x": SHARDS[0]})
    with pytest.raises(CheckpointError, match=rf"{SHARDS[0]} lacks the tensor x"):
        CheckpointShards(folder)
    save_file({"a.weight": torch.zeros(2), "x": torch.ones(1)}, folder / SHARDS[0])
    assert torch.equal(CheckpointShards(folder).read("a.weight"), torch.ones(2))


def test_tensor_in_two_files_that_the_index_does_not_know_is_refused(folder):
    for name, key in zip(SHARDS, ("a.weight", "b.weight"), strict=True):
        save_file({key: torch.ones(1), "twice.weight": torch.ones(1)}, folder / name)
    with pytest.raises(CheckpointError, match=r"both hold the tensor twice\.weight") as caught:
        CheckpointShards(folder)
    assert all(name in caught.value.message for name in SHARDS)


@pytest.mark.parametrize(
    "names",
    [
        ("pytorch_model-00001-of-00002.safetensors", "pytorch_model-00002-of-00002.safetensors"),
        ("part-00000-of-00002.safetensors", "part-00001-of-00002.safetensors"),
        ("experts.safetensors", "rest.safetensors"),
        ("consolidated.safetensors", "consolidated2.safetensors"),
    ],
)
def test_files_of_any_name_without_an_index_are_read_together(folder, names):
    before = {key: CheckpointShards(folder).read(key) for key in ("a.weight", "b.weight")}
    (folder / INDEX_FILE).unlink()
    for old, new in zip(SHARDS, names, strict=True):
        (folder / old).rename(folder / new)
    shards = CheckpointShards(folder)
    assert sorted(shards) == ["a.weight", "b.weight"]
    assert all(torch.equal(shards.read(key), before[key]) for key in shards)


@pytest.mark.parametrize("stem", ["model", "pytorch_model", "x-1"])
def test_file_missing_of_a_numbered_set_without_an_index_is_named(tmp_path, stem):
    for number in (1, 3):
        path = tmp_path / f"{stem}-0000{number}-of-00003.safetensors"
        save_file({f"{number}.weight": torch.ones(1)}, path)
    with pytest.raises(CheckpointError, match=f"{stem}-00002-of-00003.safetensors is missing"):
        CheckpointShards(tmp_path)


def test_same_tensor_in_two_loose_files_is_refused(folder):
    (folder / INDEX_FILE).unlink()
    save_file({"a.weight": torch.ones(1)}, folder / "other.safetensors")
    with pytest.raises(CheckpointError, match=r"both hold the tensor a\.weight"):
        CheckpointShards(folder)


def test_read_rows_takes_no_more_than_the_rows(folder, monkeypatch):
    lengths, original = [], shards_module.read_bytes

    def counted(path, offset, num_bytes):
        lengths.append(num_bytes)
        return original(path, offset, num_bytes)

    monkeypatch.setattr(shards_module, "read_bytes", counted)
    rows = CheckpointShards(folder).read_rows("a.weight", 1, 3)
    assert torch.equal(rows, torch.arange(24, dtype=torch.float32).reshape(4, 3, 2)[1:3])
    assert lengths == [2 * 3 * 2 * 4]


@pytest.mark.parametrize("text", ["", "[]", '{"weight_map": 3}', '{"metadata": {}}'])
def test_index_unreadable_is_named(folder, text):
    (folder / INDEX_FILE).write_text(text)
    with pytest.raises(CheckpointError, match=f"{INDEX_FILE} is no weight index"):
        CheckpointShards(folder)


def test_folder_with_pickled_weights_only_is_refused(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    with pytest.raises(CheckpointError, match="neither model.safetensors") as caught:
        CheckpointShards(tmp_path)
    assert "safetensors" in caught.value.hint


def test_read_of_a_file_that_shrank_says_so(folder):
    shards = CheckpointShards(folder)
    path = folder / SHARDS[0]
    path.write_bytes(path.read_bytes()[:-4])
    with pytest.raises(CheckpointError, match=f"{SHARDS[0]} ends early"):
        shards.read("a.weight")


def test_fingerprint_follows_content_and_not_the_clock(folder):
    before = CheckpointShards(folder).fingerprint()
    path = folder / SHARDS[0]
    data = bytearray(path.read_bytes())
    path.write_bytes(data)
    assert CheckpointShards(folder).fingerprint() == before
    data[-1] ^= 1
    path.write_bytes(data)
    assert CheckpointShards(folder).fingerprint() != before
