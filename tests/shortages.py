"""Memory that runs out where a test says so, and a worker whose jobs a test runs by hand."""

from __future__ import annotations

import gc
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import pytest
import torch
from fake_queues import FakeQueues
from mira_engine.config import EngineConfig, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import (
    ChatMessage,
    Event,
    Generate,
    GenerationDone,
    LoadModel,
    ModelLoaded,
    Notice,
    Reconfigure,
    RequestFailed,
    TokenDelta,
)
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.runtime import gpu_device
from mira_engine.runtime.cuda_transfer import CudaTransfer
from mira_engine.runtime.disk import DiskTransfer
from mira_engine.runtime.executor import ExpertExecutor
from mira_engine.runtime.gpu_device import GpuHandle
from mira_engine.runtime.gpu_experts import GpuExperts, GpuPlan
from mira_engine.runtime.gpu_records import GpuArena, GpuDraft
from mira_engine.runtime.host_memory import PinnedSource, RingSource, pageable
from mira_engine.runtime.slots import DraftArena, SlotArena
from mira_engine.types import Phase
from mira_engine.worker import Worker
from transformers import PreTrainedModel

GIB = 1 << 30

SHORTAGES: dict[str, Callable[[], Exception]] = {
    "card": lambda: torch.OutOfMemoryError(
        "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 8 GiB."
    ),
    "host": lambda: RuntimeError(
        "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate "
        "memory: you tried to allocate 4294967296 bytes. Error code 12 (Cannot allocate memory)"
    ),
    "python": MemoryError,
    "system": lambda: OSError(12, "Cannot allocate memory"),
}
"""Makers of every kind of shortage: each raise takes a new one, as a traceback holds much."""

_HELD = (
    Engine, PreTrainedModel, SlotArena, DraftArena, DiskTransfer, GpuArena, GpuDraft, GpuExperts,
    CudaTransfer, PinnedSource, RingSource,
)  # fmt: skip
_THREADS = ("mira-reader", "mira-ring")


class Holdings:
    """What holds a model's memory, and the threads that serve it, since it was made."""

    def __init__(self) -> None:
        gc.collect()
        self._before = {id(each) for each in self._all()}
        self._threads = set(threading.enumerate())
        self.at_loads: list[list[str]] = []
        """What was held before each load."""

    @staticmethod
    def _all() -> Iterator[object]:
        return (each for each in gc.get_objects() if issubclass(type(each), _HELD))

    def now(self) -> list[str]:
        """Names what is there; nothing is collected first."""
        held = [type(each).__name__ for each in self._all() if id(each) not in self._before]
        threads = [
            thread.name
            for thread in threading.enumerate()
            if thread not in self._threads and thread.name.startswith(_THREADS)
        ]
        return held + threads


@contextmanager
def new_objects_only() -> Iterator[None]:
    """Looks at no object from before: going through all that pytest and torch have made takes
    half a second, which each shortage would."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@contextmanager
def failing(
    monkeypatch: pytest.MonkeyPatch,
    owner: object,
    name: str,
    make_error: Callable[[], Exception],
    *,
    at: int = 0,
    num_times: int = 1,
) -> Iterator[list[int]]:
    """Lets calls of a function or class fail: the one numbered `at`, and as many as said.

    Yields:
        A list with the number of calls so far.
    """
    original, calls = getattr(owner, name), [0]

    def call(*args: object, **kwargs: object) -> object:
        calls[0] += 1
        if at < calls[0] <= at + num_times:
            raise make_error()
        return original(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, call)
        yield calls


@contextmanager
def failing_passes(
    monkeypatch: pytest.MonkeyPatch,
    should_fail: Callable[[Phase, int], bool],
    make_error: Callable[[], Exception] = SHORTAGES["card"],
) -> Iterator[list[Phase]]:
    """Lets passes fail in the middle: asked at each layer, with the phase and its calls before.

    Yields:
        The phases of all calls so far.
    """
    original, seen = ExpertExecutor.__call__, []

    def compute(self: ExpertExecutor, *args: object) -> torch.Tensor:
        number = seen.count(self.phase)
        seen.append(self.phase)
        if should_fail(self.phase, number):
            raise make_error()
        return original(self, *args)

    with monkeypatch.context() as patch:
        patch.setattr(ExpertExecutor, "__call__", compute)
        yield seen


class FakeCard:
    """A card of 8 GiB that is host memory.

    Attributes:
        queues: Its lanes.
        capability: Its compute capability.
        allocate: Takes pinned memory.
        free_bytes: What nobody uses.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch
        self.queues = FakeQueues()
        self.capability = (8, 9)
        self.allocate = pageable
        self.free_bytes = 8 * GIB
        monkeypatch.setattr(gpu_device, "open_card", self._open)
        monkeypatch.setattr(gpu_device, "free_device_bytes", lambda index: self.free_bytes)
        monkeypatch.setattr(gpu_device, "peak_device_bytes", lambda index: 0)
        monkeypatch.setattr(gpu_device, "device_capability", lambda index: self.capability)

    def leave_experts_out(self) -> None:
        """Lets experts add nothing: in the interpreter their kernels take seconds a pass."""
        self._monkeypatch.setattr(GpuPlan, "compute", lambda plan, experts: None)
        self._monkeypatch.setattr(
            GpuPlan, "combine", lambda plan, weights: torch.zeros_like(plan._hidden)
        )

    def _open(self, index: int) -> GpuHandle:
        del index
        return GpuHandle(
            device=torch.device("cpu"), queues=self.queues, allocate=lambda n: self.allocate(n)
        )


class FakeWriter:
    """Keeps what the worker says, and may answer it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.on_event: Callable[[Event], None] = lambda event: None

    def send(self, event: Event) -> None:
        self.events.append(event)
        self.on_event(event)


class Session:
    """A worker whose jobs run one after the other in the test's thread."""

    def __init__(self, home: ModelHome, config: EngineConfig) -> None:
        self.asked = config
        self.writer = FakeWriter()
        self.worker = Worker(ModelLibrary(home.root.parent.parent), self.writer)
        self._model = home.name
        self.last = self.load()

    def load(self) -> Event:
        """Loads the model with what is asked for. Returns the last event."""
        return self.do(LoadModel(request_id="l", model=self._model, config=self.asked))

    def do(self, job: LoadModel | Reconfigure | Generate) -> Event:
        """Runs a job. Returns its last event."""
        self.worker._run_job(job)
        return self.writer.events[-1]

    def ask(self, text: str, sampling: SamplingConfig) -> Event:
        """Asks a question. Returns the last event."""
        chat = (ChatMessage(role="user", content=text),)
        return self.do(Generate(request_id="g", messages=chat, sampling=sampling))

    def answer(self, text: str, sampling: SamplingConfig) -> GenerationDone:
        """Asks a question that is answered; what was told is the whole answer, said once."""
        start = len(self.writer.events)
        done = self.ask(text, sampling)
        assert isinstance(done, GenerationDone), done
        deltas = [e for e in self.writer.events[start:] if isinstance(e, TokenDelta)]
        assert "".join(delta.text for delta in deltas) == done.text
        assert sum(delta.num_tokens for delta in deltas) == done.stats.num_new_tokens
        return done

    def failure(self, text: str, sampling: SamplingConfig) -> RequestFailed:
        """Asks a question that is refused."""
        failed = self.ask(text, sampling)
        assert isinstance(failed, RequestFailed), failed
        return failed

    def notices(self, code: str) -> list[str]:
        """Returns what was said under a code."""
        return [e.text for e in self.writer.events if isinstance(e, Notice) and e.code == code]

    @property
    def loaded(self) -> ModelLoaded:
        """The answer to the last load."""
        return [e for e in self.writer.events if isinstance(e, ModelLoaded)][-1]

    @property
    def engine(self) -> Engine:
        """The one in use."""
        assert self.worker.engine is not None
        return self.worker.engine

    def close(self) -> None:
        """Gives the engine up."""
        self.worker.close()
