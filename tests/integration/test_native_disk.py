"""An engine with native readers: taken up at loading, the same tokens and the same traffic."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.library import ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.runtime import device
from mira_engine.runtime.capture import StepCapture
from mira_engine.runtime.disk import DiskTransfer
from mira_engine.runtime.native_disk import NativeDiskTransfer
from mira_engine.types import ComputeDtype, Precision

CONFIG = EngineConfig(
    precision=Precision.NESTED,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=0.6),
    context_length=96,
    num_threads=1,
    num_draft_tokens=2,
)


@pytest.fixture
def load(
    tmp_path: Path,
    tiny_checkpoint: Callable[..., Path],
    native_cache: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Path | None], Engine]:
    """Loads engines of one tiny model, nothing compiled for it."""
    monkeypatch.setattr(StepCapture, "start", lambda self, *_: self._done.set())
    home = ModelLibrary(tmp_path).resolve(str(tiny_checkpoint("olmoe", has_windows=False)))
    prepare(home, Precision.NESTED, on_progress=lambda *_: None, is_cancelled=lambda: False)

    def make(cache_dir: Path | None) -> Engine:
        engine = Engine.load(home, CONFIG, cache_dir=cache_dir)
        engine._end_ids = frozenset()
        return engine

    return make


def _reply(engine: Engine) -> tuple[list[int], int, int]:
    generator = torch.Generator().manual_seed(3)
    prompt = torch.randint(3, 250, (19,), generator=generator).tolist()
    try:
        steps = engine.reply(prompt, SamplingConfig(max_new_tokens=24))
        tokens = [step for step in steps if isinstance(step, int)]
        stats = engine.stats()
    finally:
        engine.close()
    return tokens, stats.num_records_loaded, stats.bytes_moved


def test_engine_without_built_kernels_reads_in_python(
    load: Callable[[Path | None], Engine], tmp_path: Path
) -> None:
    for cache_dir in (None, tmp_path / "empty"):
        engine = load(cache_dir)
        engine.close()
        assert isinstance(engine.transfer, DiskTransfer)


def test_engine_reads_natively_with_the_same_tokens(
    load: Callable[[Path | None], Engine], native_cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(native_cache)
    assert isinstance(engine.transfer, NativeDiskTransfer)
    tokens, num_records, num_bytes = _reply(engine)
    assert num_records > 0
    assert num_bytes == num_records * engine.transfer.record_bytes
    monkeypatch.setattr(device, "find_library", lambda cache_dir: None)
    engine = load(native_cache)
    assert isinstance(engine.transfer, DiskTransfer)
    assert _reply(engine)[0] == tokens
