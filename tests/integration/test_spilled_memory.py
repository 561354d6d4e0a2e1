"""A card's memory that Windows moves is told when a model is loaded, and while it replies.

On a card that is host memory; how fast it is read is scripted.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fake_queues import FakeQueues
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.errors import ConfigError
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.runtime import gpu_device, host_records, spill
from mira_engine.runtime.gpu_device import GpuHandle
from mira_engine.runtime.host_memory import pageable
from mira_engine.runtime.host_system import HostKind, HostSystem
from mira_engine.system_memory import SystemMemory
from mira_engine.types import ComputeDtype, Precision

pytest.importorskip("triton", reason="triton has no wheel for this system")

VRAM, BUS = 300e9, 15e9
CONFIG = EngineConfig(
    precision=Precision.NESTED,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=4.0),
    num_draft_tokens=0,
    context_length=64,
    num_threads=1,
    gpu=0,
)


class FakeCard:
    """What reads a card's memory; its first piece may lie elsewhere."""

    def __init__(self) -> None:
        self.first_bytes_per_s = VRAM
        self.num_reads = 0

    def make_reads(self, pieces: list[torch.Tensor], device: torch.device) -> spill.Reads:
        """Stands for `CudaReads`."""

        def read(number: int) -> float:
            self.num_reads += 1
            return pieces[number].numel() / (VRAM if number else self.first_bytes_per_s)

        return read


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    """A card of Windows with 8 GiB that is host memory, and that is looked at every time."""
    made, queues = FakeCard(), FakeQueues()
    handle = GpuHandle(device=torch.device("cpu"), queues=queues, allocate=pageable)
    monkeypatch.setattr(gpu_device, "open_card", lambda index: handle)
    monkeypatch.setattr(gpu_device, "free_device_bytes", lambda index: 8 << 30)
    monkeypatch.setattr(gpu_device, "peak_device_bytes", lambda index: 0)
    monkeypatch.setattr(gpu_device, "look_at_host", lambda: HostSystem(kind=HostKind.WINDOWS))
    monkeypatch.setattr(spill, "CudaReads", made.make_reads)
    monkeypatch.setattr(spill, "MIN_PIECE_BYTES", 1)
    monkeypatch.setattr(spill, "_INTERVAL_S", 0.0)
    monkeypatch.setattr(spill, "_WAKE_S", 0.0)
    return made


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]):
    """A tiny model that is prepared."""
    made = ModelLibrary(tmp_path_factory.mktemp("spill")).resolve(str(tiny_checkpoint("qwen2_moe")))
    prepare(made, Precision.NESTED, on_progress=lambda *_: None, is_cancelled=lambda: False)
    return made


@pytest.fixture
def load(home: ModelHome) -> Iterator[Callable[[], tuple[Engine, list[str]]]]:
    """Loads it on the card; returns the engine, and the codes of what that tells."""
    engines: list[Engine] = []

    def make() -> tuple[Engine, list[str]]:
        told: list[str] = []
        engine = Engine.load(home, CONFIG, on_notice=lambda notice: told.append(notice.code))
        engine._end_ids = frozenset()
        engines.append(engine)
        return engine, told

    yield make
    for engine in engines:
        engine.close()


def _reply(engine: Engine) -> None:
    for _ in engine.reply([7], SamplingConfig(max_new_tokens=2)):
        pass


def test_memory_that_is_not_on_the_card_is_told_at_loading(card: FakeCard, load) -> None:
    card.first_bytes_per_s = BUS
    engine, told = load()

    assert told.count("spilled-memory") == 1
    engine._tell_fallbacks()
    assert told.count("spilled-memory") == 1


def test_memory_that_leaves_the_card_later_is_told_once(card: FakeCard, load) -> None:
    engine, told = load()
    engine._tell_fallbacks()
    assert "spilled-memory" not in told
    assert card.num_reads
    card.first_bytes_per_s = BUS

    _reply(engine)
    engine._tell_fallbacks()

    assert told.count("spilled-memory") == 1


def test_memory_is_never_read_for_it_on_linux(
    card: FakeCard, load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_device, "look_at_host", lambda: HostSystem(kind=HostKind.LINUX))
    card.first_bytes_per_s = BUS
    engine, told = load()
    engine._tell_fallbacks()

    assert "spilled-memory" not in told
    assert card.num_reads == 0


def test_pinned_memory_stays_within_the_container(
    card: FakeCard, load, monkeypatch: pytest.MonkeyPatch
) -> None:
    little = SystemMemory(total_bytes=1 << 20, available_bytes=100_000, container_bytes=1 << 20)
    monkeypatch.setattr(host_records, "system_memory", lambda: little)
    chunks = host_records.allocate_chunks
    room: list[int] = []

    def allocate(wanted: int, record_bytes: int, take) -> list[torch.Tensor]:
        room.append(wanted)
        return chunks(wanted, record_bytes, take)

    monkeypatch.setattr(host_records, "allocate_chunks", allocate)
    _, told = load()

    assert 0 < sum(room) <= host_records.HOST_SHARE * 100_000
    assert "host-memory" in told


def test_refused_pinning_names_the_limit_that_explains_it(monkeypatch: pytest.MonkeyPatch) -> None:
    limits = host_records.look_at_limits().__class__(locked_bytes=8 << 20)
    monkeypatch.setattr(host_records, "look_at_limits", lambda: limits)
    monkeypatch.setattr(host_records, "look_at_host", lambda: HostSystem(kind=HostKind.LINUX))
    assert "ulimit -l" in host_records._pin_limit(1 << 30)
    assert host_records._pin_limit(1 << 20) == ""
    monkeypatch.setattr(host_records, "look_at_host", lambda: HostSystem(kind=HostKind.WSL))
    assert "half" in host_records._pin_limit(1 << 30)


def test_card_without_triton_is_refused_before_anything_is_loaded(
    load, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_device, "has_triton", lambda: False)

    with pytest.raises(ConfigError, match="triton") as caught:
        load()

    assert "--gpu" in caught.value.hint
