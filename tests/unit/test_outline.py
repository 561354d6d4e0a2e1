"""What is known of shards that are not here."""

import pytest
from mira_engine.checkpoint.experts import CheckpointExperts
from mira_engine.checkpoint.outline import (
    OUTLINE_FILE,
    check_shard,
    forget_outline,
    read_outline,
    take_outline,
)
from mira_engine.checkpoint.progress import Progress
from mira_engine.checkpoint.shards import CheckpointShards
from mira_engine.errors import CheckpointError
from mira_engine.types import Precision


@pytest.fixture
def folder(tiny_checkpoint):
    return tiny_checkpoint("qwen3_moe", max_shard_size="100KB")


@pytest.fixture
def sizes(folder):
    shards = CheckpointShards(folder)
    return {shards.shard_of(key): shards[key].path.stat().st_size for key in shards}


@pytest.fixture
def take(folder, sizes, tmp_path):
    """Takes the outline by range, as of shards that are not here."""

    def taken(commit="c", precision=Precision.NESTED, read=None):
        asked = []

        def read_range(name, start, num_bytes):
            asked.append(name)
            return (folder / name).read_bytes()[start : start + num_bytes]

        made = take_outline(
            tmp_path, tmp_path / "absent", commit, precision,
            shard_bytes=sizes, read_range=read or read_range, progress=Progress(),
        )  # fmt: skip
        return made, asked

    return taken


def test_take_outline_places_every_tensor_and_keeps_the_fingerprint(folder, take):
    made, _ = take()
    known = CheckpointShards(folder, headers=made.headers(folder), fingerprint=made.fingerprint)
    whole = CheckpointShards(folder)
    assert list(known.items()) == list(whole.items())
    assert known.fingerprint() == whole.fingerprint()
    experts, expected = CheckpointExperts(folder, known), CheckpointExperts(folder)
    assert experts.backbone_keys == expected.backbone_keys
    assert experts.load(1, 2).up.equal(expected.load(1, 2).up)


def test_take_outline_again_asks_nothing(take, tmp_path):
    made, asked = take()
    assert asked
    again, asked = take()
    assert (again, asked) == (made, [])
    other, asked = take(precision=Precision.INT8)
    assert (other.shards, asked) == (made.shards, [])
    assert read_outline(tmp_path).precision is Precision.INT8


def test_take_outline_of_another_commit_asks_again(take):
    take()
    _, asked = take(commit="d")
    assert asked


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"version": 0}'])
def test_read_outline_of_a_damaged_file_is_none(text, tmp_path):
    (tmp_path / OUTLINE_FILE).write_text(text)
    assert read_outline(tmp_path) is None
    forget_outline(tmp_path)
    forget_outline(tmp_path)


def test_take_outline_of_no_weights_says_which(take):
    with pytest.raises(CheckpointError, match="model-0"):
        take(read=lambda name, start, num_bytes: b"\xff" * num_bytes)


def test_check_shard_tells_another_file_apart(folder, take, tmp_path, sizes):
    made, _ = take()
    name = next(iter(sizes))
    check_shard(made, folder, name)
    with pytest.raises(CheckpointError, match="missing"):
        check_shard(made, tmp_path, name)
    data = bytearray((folder / name).read_bytes())
    data[-1] ^= 1
    (tmp_path / name).write_bytes(bytes(data))
    with pytest.raises(CheckpointError, match=f"{name} is not the file"):
        check_shard(made, tmp_path, name)
