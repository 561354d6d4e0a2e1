"""A name means a whole file; a full disk is called one and gets its room back."""

import errno
import io
from pathlib import Path

import pytest
import torch
from mira_engine.checkpoint import writing
from mira_engine.checkpoint.writing import TensorFileWriter, require_space, write_json
from mira_engine.errors import DiskSpaceError, PrepareError
from safetensors.torch import load_file

SPECS = {"a": (torch.float32, (2, 3)), "b": (torch.bfloat16, (4,))}


class FakeFullFile(io.RawIOBase):
    """Takes some bytes and then has no room."""

    def __init__(self, room, code):
        self.room, self.code = room, code

    def writable(self):
        return True

    def write(self, data):
        if len(data) > self.room:
            raise OSError(self.code, "no room")
        self.room -= len(data)
        return len(data)

    def fileno(self):
        return 0


def test_tensor_file_writer_gives_what_safetensors_reads(tmp_path):
    tensors = {"a": torch.arange(6.0).reshape(2, 3), "b": torch.ones(4, dtype=torch.bfloat16)}
    path = tmp_path / "x.safetensors"
    with TensorFileWriter(path, SPECS, alignment=4096) as writer:
        writer.append(tensors["a"][:1])
        writer.append(tensors["a"][1:])
        writer.append(tensors["b"])
    loaded = load_file(path)
    assert all(torch.equal(loaded[name], tensors[name]) for name in tensors)
    assert writer.sha256 == writing.file_sha256(path)
    assert path.stat().st_size == writer.num_bytes == 4096 + 24 + 8


def test_tensor_file_writer_with_too_few_bytes_never_gets_its_name(tmp_path):
    path = tmp_path / "x.safetensors"
    with pytest.raises(AssertionError), TensorFileWriter(path, SPECS) as writer:
        writer.append(torch.zeros(2, 3))
    assert not path.exists()


def test_tensor_file_writer_left_with_an_error_removes_its_part(tmp_path):
    def write_and_fail():
        with TensorFileWriter(tmp_path / "x.safetensors", SPECS) as writer:
            writer.append(torch.zeros(2, 3))
            raise KeyError("stop")

    with pytest.raises(KeyError):
        write_and_fail()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT])
@pytest.mark.parametrize("room", [0, 1000])
def test_tensor_file_writer_on_a_full_disk_says_so(tmp_path, monkeypatch, code, room):
    monkeypatch.setattr(Path, "open", lambda *args, **options: FakeFullFile(room, code))

    def write_all():
        path = tmp_path / "x.safetensors"
        with TensorFileWriter(path, {"a": (torch.float32, (2, 300))}) as writer:
            writer.append(torch.zeros(2, 300))

    with pytest.raises(DiskSpaceError, match=r"x\.safetensors") as caught:
        write_all()
    assert "kept" in caught.value.hint


def test_write_json_into_a_file_in_a_folders_place_is_a_prepare_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(PrepareError, match="could not be written"):
        write_json(tmp_path / "file" / "x.json", {})


def test_require_space_names_needed_free_and_missing_bytes(tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "free_bytes", lambda path: 1000)
    require_space(tmp_path, 1000, "A thing")
    with pytest.raises(DiskSpaceError, match=r"3000 bytes.*1000 bytes") as caught:
        require_space(tmp_path, 3000, "A thing")
    assert "Free 2.0 KiB more" in caught.value.hint


def test_free_bytes_of_a_folder_that_is_not_there_yet(tmp_path):
    assert writing.free_bytes(tmp_path / "a" / "b") > 0
