"""What a card does not do of what was asked for is told, and nothing else is."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_queues import FakeQueues
from mira_engine.config import EngineConfig, LinkConfig, MemoryAmount
from mira_engine.engine import Engine
from mira_engine.events import Notice
from mira_engine.library import ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.runtime import gpu_device
from mira_engine.runtime.gpu_device import GpuHandle
from mira_engine.runtime.host_memory import pageable
from mira_engine.types import ComputeDtype, DraftDense, Precision

pytest.importorskip("triton", reason="triton has no wheel for this system")

WHOLE = EngineConfig(
    precision=Precision.NESTED,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=8.0),
    num_draft_tokens=2,
    context_length=64,
    num_threads=1,
    gpu=0,
)


@pytest.fixture
def told(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> Callable[..., dict[str, str]]:
    """Loads a model on a card that is host memory; returns texts by code."""
    handle = GpuHandle(device=torch.device("cpu"), queues=FakeQueues(), allocate=pageable)
    monkeypatch.setattr(gpu_device, "open_card", lambda index: handle)
    monkeypatch.setattr(gpu_device, "free_device_bytes", lambda index: 8 << 30)
    monkeypatch.setattr(gpu_device, "peak_device_bytes", lambda index: 0)
    home = ModelLibrary(tmp_path).resolve(str(tiny_checkpoint("qwen2_moe")))
    prepare(home, Precision.NESTED, on_progress=lambda *_: None, is_cancelled=lambda: False)

    def load(config: EngineConfig) -> dict[str, str]:
        notices: list[Notice] = []
        Engine.load(home, config, on_notice=notices.append).close()
        return {notice.code: notice.text for notice in notices}

    return load


def test_latency_that_a_card_leaves_out_is_told_where_it_was_asked_for(told) -> None:
    slow = replace(WHOLE, link=LinkConfig(bytes_per_s=2**30, latency_s=0.001))
    assert "latency is left out" in told(slow)["no-latency"]
    rate = replace(WHOLE, link=LinkConfig(bytes_per_s=2**30))
    assert "no-latency" not in told(rate)


def test_draft_of_half_weights_that_a_card_leaves_out_is_told(told) -> None:
    split = replace(WHOLE, draft_dense=DraftDense.SPLIT)
    assert "as the target does" in told(split)["draft-dense"]
    whole = replace(WHOLE, draft_dense=DraftDense.TARGET)
    assert "draft-dense" not in told(whole)
    assert "draft-dense" not in told(replace(split, num_draft_tokens=0))
