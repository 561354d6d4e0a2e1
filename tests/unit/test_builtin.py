"""Making the built-in checkpoint on a stand-in for its source: resuming, same bytes."""

import hashlib

import pytest
import torch
from mira_engine.checkpoint import builtin
from mira_engine.checkpoint.experts import CheckpointExperts
from mira_engine.checkpoint.progress import Progress
from mira_engine.errors import CancelledError, CheckpointError

SHAPES = {
    "attn_norm": (576,), "ffn_norm": (576,), "output_norm": (576,), "token_embd": (49152, 576),
    "attn_q": (576, 576), "attn_k": (192, 576), "attn_v": (192, 576), "attn_output": (576, 576),
    "ffn_gate": (1536, 576), "ffn_up": (1536, 576), "ffn_down": (576, 1536),
}  # fmt: skip


class FakeDenseSource(builtin.DenseSource):
    """Random matrices in the place of the GGUF's."""

    def __init__(self, reader):
        self.reader = reader

    def matrix(self, name):
        generator = torch.Generator().manual_seed(sum(name.encode()))
        return torch.randn(SHAPES[name.rpartition(".")[2]], generator=generator)


@pytest.fixture
def small_builtin(monkeypatch):
    monkeypatch.setattr(builtin, "NUM_LAYERS", 2)
    monkeypatch.setattr(builtin, "_LAYERS_PER_SHARD", 1)
    monkeypatch.setattr(builtin, "_NUM_SHARDS", 3)
    monkeypatch.setattr(builtin, "DenseSource", FakeDenseSource)
    monkeypatch.setattr(builtin, "check_gguf", lambda source, progress: None)
    monkeypatch.setattr(builtin.gguf, "GGUFReader", lambda source: None)
    monkeypatch.setattr(
        builtin,
        "_write_small_files",
        lambda source, folder: builtin.builtin_config().save_pretrained(folder),
    )


def hashes(folder):
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


def test_make_checkpoint_stopped_goes_on_with_the_same_bytes(small_builtin, tmp_path):
    builtin.make_checkpoint(tmp_path / "x", tmp_path / "whole", Progress())
    seen = []

    def is_cancelled():
        return len(seen) == 2

    with pytest.raises(CancelledError):
        builtin.make_checkpoint(
            tmp_path / "x",
            tmp_path / "cut",
            Progress(on_progress=lambda *args: seen.append(args), is_cancelled=is_cancelled),
        )
    assert not builtin.is_checkpoint_complete(tmp_path / "cut")
    (first,) = (tmp_path / "cut").iterdir()
    before = first.stat()
    builtin.make_checkpoint(tmp_path / "x", tmp_path / "cut", Progress())
    assert (first.stat().st_ino, first.stat().st_mtime_ns) == (before.st_ino, before.st_mtime_ns)
    assert hashes(tmp_path / "cut") == hashes(tmp_path / "whole")


def test_every_routed_expert_is_the_same_function_with_other_bytes(small_builtin, tmp_path):
    builtin.make_checkpoint(tmp_path / "x", tmp_path / "m", Progress())
    checkpoint = CheckpointExperts(tmp_path / "m")
    x = torch.randn(3, 576, generator=torch.Generator().manual_seed(0)) / 24

    def run(expert):
        tensors = checkpoint.load(1, expert)
        gate, up = (x @ tensors.up.float().T).chunk(2, dim=-1)
        return (torch.nn.functional.silu(gate) * up) @ tensors.down.float().T

    first = run(0)
    for expert in range(1, 16):
        assert not torch.equal(checkpoint.load(1, expert).up, checkpoint.load(1, 0).up)
        torch.testing.assert_close(run(expert), first, rtol=1e-4, atol=1e-4)


def test_make_checkpoint_of_another_file_is_refused(tmp_path):
    source = tmp_path / builtin.GGUF_NAME
    source.write_bytes(b"another")
    with pytest.raises(CheckpointError, match="not the file"):
        builtin.make_checkpoint(source, tmp_path / "m", Progress())
    assert not (tmp_path / "m").exists()
