"""A card that is host memory: what tests of the engine on a card are made of.

Kernels run in triton's interpreter, copies on queues that check their order. Whatever reads a
slot, a target's launch or a draft's, is checked against the copies into it. A card that records
its work (`fake_graphs`) tells of its launches itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import pytest
import torch
from fake_queues import FakeQueues
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import Notice
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.runtime import gpu_device
from mira_engine.runtime.cuda_transfer import CudaTransfer
from mira_engine.runtime.gpu_device import GpuHandle
from mira_engine.runtime.gpu_experts import GpuExperts
from mira_engine.runtime.host_memory import pageable
from mira_engine.types import ComputeDtype, Precision
from torch import Tensor

if TYPE_CHECKING:
    from fake_graphs import FakeGraphs

CARD_BYTES = 8 << 30

BASE = EngineConfig(
    precision=Precision.BF16,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=8.0),
    num_draft_tokens=0,
    context_length=64,
    num_threads=1,
)
"""All experts on the device, no draft, arithmetic in float32."""

PROMPT = (7, 99, 23, 180, 41, 5, 66)

Load = Callable[..., Engine]
"""`(home, notices=None, **changes of BASE) -> Engine`."""

Prepared = Callable[[str, Precision], ModelHome]


@dataclass(frozen=True, slots=True)
class FakeCard:
    """What stands for a card."""

    queues: FakeQueues
    graphs: FakeGraphs


def plug_in_recording_card(monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    """Makes every card one with 8 GiB that is host memory and records its work."""
    from fake_graphs import FakeGraphs

    queues = FakeQueues()
    graphs = FakeGraphs(queues)
    graphs.install(monkeypatch)
    _plug_in(monkeypatch, queues, graphs)
    return FakeCard(queues, graphs)


def plug_in_card(monkeypatch: pytest.MonkeyPatch) -> FakeQueues:
    """Makes every card one with 8 GiB that is host memory. Returns its queues."""
    queues = FakeQueues()
    _plug_in(monkeypatch, queues)
    _check_launches(monkeypatch, queues)
    return queues


def _plug_in(
    monkeypatch: pytest.MonkeyPatch, queues: FakeQueues, graphs: FakeGraphs | None = None
) -> None:
    handle = GpuHandle(device=torch.device("cpu"), queues=queues, allocate=pageable, graphs=graphs)
    monkeypatch.setattr(gpu_device, "open_card", lambda index: handle)
    monkeypatch.setattr(gpu_device, "free_device_bytes", lambda index: CARD_BYTES)
    monkeypatch.setattr(gpu_device, "peak_device_bytes", lambda index: 0)


def _check_launches(monkeypatch: pytest.MonkeyPatch, queues: FakeQueues) -> None:
    """Has each launch read its slots before the queues' eyes."""
    acquire, draft = CudaTransfer.acquire, GpuExperts.draft

    def read(transfer: CudaTransfer, slots: Iterable[int]) -> None:
        for slot in slots:
            for part in transfer._slots[slot].values():
                queues.read(part)

    def acquire_and_read(self: CudaTransfer, slots: Iterable[int]) -> None:
        acquire(self, slots)
        read(self, slots)

    def read_and_draft(self: GpuExperts, layer: int, *args: Tensor) -> Tensor:
        if self._draft is None:  # It computes with the slots that the table on the device names.
            read(self.transfer, [slot for slot in self._in_slots[layer].tolist() if slot >= 0])
        return draft(self, layer, *args)

    monkeypatch.setattr(CudaTransfer, "acquire", acquire_and_read)
    monkeypatch.setattr(GpuExperts, "draft", read_and_draft)


def preparing(folder: Path, tiny_checkpoint: Callable[..., Path]) -> Prepared:
    """Returns what prepares a family's tiny checkpoint in a precision, once."""
    library = ModelLibrary(folder)

    def prepared(family: str, precision: Precision, **form: object) -> ModelHome:
        home = library.resolve(str(tiny_checkpoint(family, **form)))
        if not home.is_ready(precision):
            prepare(home, precision, on_progress=lambda *_: None, is_cancelled=lambda: False)
        return home

    return prepared


@contextmanager
def loading() -> Iterator[Load]:
    """Loads engines whose replies have no end but their length, and closes them."""
    engines: list[Engine] = []

    def load(home: ModelHome, notices: list[Notice] | None = None, **changes: object) -> Engine:
        told = [] if notices is None else notices
        engine = Engine.load(home, replace(BASE, **changes), on_notice=told.append)
        engine._end_ids = frozenset()
        engines.append(engine)
        return engine

    try:
        yield load
    finally:
        for engine in engines:
            engine.close()


def reply_of(engine: Engine, num_tokens: int, prompt: Iterable[int] = PROMPT) -> list[int]:
    """Returns the greedy reply's tokens."""
    steps = engine.reply(list(prompt), SamplingConfig(max_new_tokens=num_tokens))
    return [step for step in steps if isinstance(step, int)]
