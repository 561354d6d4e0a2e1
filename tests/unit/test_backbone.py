"""The backbone's file, written shard by shard in any order."""

import shutil

import pytest
from mira_engine.checkpoint import backbone
from mira_engine.checkpoint.backbone import BackboneWriter, write_backbone
from mira_engine.checkpoint.experts import CheckpointExperts
from mira_engine.checkpoint.progress import Progress
from mira_engine.errors import CancelledError

NONE = Progress()


@pytest.fixture
def checkpoint(tiny_checkpoint):
    return CheckpointExperts(tiny_checkpoint("qwen3_moe", max_shard_size="100KB"))


def whole(checkpoint, folder, revision="r"):
    write_backbone(BackboneWriter(checkpoint, folder, revision=revision), NONE)
    return contents(folder)


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_write_in_another_order_gives_the_same_files(checkpoint, tmp_path):
    writer = BackboneWriter(checkpoint, tmp_path / "b", revision="r")
    assert len(writer.shards) > 3
    for shard in reversed(writer.shards):
        writer.write(shard, NONE)
    writer.finish()
    assert contents(tmp_path / "b") == whole(checkpoint, tmp_path / "other")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["b", "other"]


def test_write_with_shards_gone_goes_on_with_what_they_gave(checkpoint, tmp_path):
    folder = tmp_path / "checkpoint"
    shutil.copytree(checkpoint.folder, folder)
    first = BackboneWriter(CheckpointExperts(folder), tmp_path / "b", revision="r")
    for shard in first.shards[:2]:
        first.write(shard, NONE)
    known = CheckpointExperts(folder)
    again = BackboneWriter(known, tmp_path / "b", revision="r")
    assert again.done_shards == set(first.shards[:2])
    for shard in first.shards[:2]:
        assert again.missing_bytes(shard) == 0
        (folder / shard).unlink()
    write_backbone(again, NONE)
    assert contents(tmp_path / "b") == whole(checkpoint, tmp_path / "other")


def test_write_of_other_tensors_begins_anew(checkpoint, tmp_path, monkeypatch):
    """Which copies are left out differs where shards come one after another."""
    keys = checkpoint.backbone_keys
    monkeypatch.setattr(backbone, "kept_keys", lambda _: keys[1:])
    first = BackboneWriter(checkpoint, tmp_path / "b", revision="r")
    first.write(first.shards[-1], NONE)
    monkeypatch.undo()
    again = BackboneWriter(checkpoint, tmp_path / "b", revision="r")
    assert again.done_shards == frozenset()
    write_backbone(again, NONE)
    assert contents(tmp_path / "b") == whole(checkpoint, tmp_path / "other")


def test_write_of_another_revision_begins_anew(checkpoint, tmp_path):
    first = BackboneWriter(checkpoint, tmp_path / "b", revision="old")
    first.write(first.shards[0], NONE)
    again = BackboneWriter(checkpoint, tmp_path / "b", revision="new")
    assert again.done_shards == frozenset()
    write_backbone(again, NONE)
    assert contents(tmp_path / "b") == whole(checkpoint, tmp_path / "other", "new")


def test_write_cancelled_within_a_shard_keeps_the_shards_before(checkpoint, tmp_path):
    writer = BackboneWriter(checkpoint, tmp_path / "b", revision="r")
    first, second, *_ = [name for name in writer.shards if writer.missing_bytes(name)]
    writer.write(first, NONE)
    with pytest.raises(CancelledError):
        writer.write(second, Progress(is_cancelled=lambda: True))
    again = BackboneWriter(checkpoint, tmp_path / "b", revision="r")
    assert again.done_shards == {first}
    write_backbone(again, NONE)
    assert contents(tmp_path / "b") == whole(checkpoint, tmp_path / "other")


def test_missing_bytes_of_all_shards_is_the_backbone(checkpoint, tmp_path):
    writer = BackboneWriter(checkpoint, tmp_path / "b", revision="r")
    expected = sum(checkpoint.shards[key].num_bytes for key in checkpoint.backbone_keys)
    assert sum(map(writer.missing_bytes, writer.shards)) == expected
    write_backbone(writer, NONE)
    assert sum(map(writer.missing_bytes, writer.shards)) + writer.small_bytes == 0
