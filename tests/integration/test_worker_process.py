"""The engine's process on a tiny chat model: it answers, cancels, fails, ends and is killed."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mira_engine import wire
from mira_engine.config import EngineConfig, LinkConfig, MemoryAmount, SamplingConfig
from mira_engine.events import (
    Cancel,
    ChatMessage,
    EngineReady,
    Event,
    Generate,
    GenerationDone,
    LoadModel,
    ModelLoaded,
    PrepareDone,
    PrepareModel,
    Request,
    RequestFailed,
    Shutdown,
    TokenDelta,
)
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.types import (
    ComputeDtype,
    FinishReason,
    Precision,
)

CHAT = (ChatMessage(role="user", content="Hello, who are you?"),)
CONFIG = EngineConfig(
    precision=Precision.NESTED,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=2.0),
    num_draft_tokens=3,
    context_length=128,
    num_threads=1,
)
EXIT_TIMEOUT_S = 120
"""Only a failure takes so long."""


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> ModelHome:
    """A tiny chat model, prepared."""
    library = ModelLibrary(tmp_path_factory.mktemp("engine"))
    made = library.resolve(str(tiny_checkpoint("qwen3_moe", tokenizer=True)))
    prepare(made, Precision.NESTED, on_progress=lambda *_: None, is_cancelled=lambda: False)
    return made


SLOW = replace(
    CONFIG,
    budget=MemoryAmount(share=0.4),
    num_draft_tokens=0,
    is_prefetch_enabled=False,
    link=LinkConfig(latency_s=0.05),
)
"""A link so slow that a reply is still under way when it is cancelled, on any machine."""


class WorkerProcess:
    """The engine process, driven by hand."""

    def __init__(self, data_dir: Path) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "mira_engine.worker", "--data-dir", str(data_dir)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )

    def send(self, request: Request) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(wire.encode(request) + "\n")
        self.process.stdin.flush()

    def events(self) -> Iterator[Event]:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            event = wire.decode(line)
            yield event  # type: ignore[misc]

    def wait_for(self, kind: type) -> Event:
        for event in self.events():
            if isinstance(event, RequestFailed) and kind is not RequestFailed:
                raise AssertionError(event)
            if isinstance(event, kind):
                return event
        raise AssertionError(f"the process ended before {kind.__name__}")

    def close(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()
        for stream in (self.process.stdin, self.process.stdout):
            assert stream is not None
            stream.close()


@pytest.fixture
def worker(home: ModelHome) -> Iterator[WorkerProcess]:
    made = WorkerProcess(home.root.parent.parent)
    yield made
    made.close()


def _ask(model: ModelHome, config: EngineConfig = CONFIG) -> tuple[Request, ...]:
    return (
        PrepareModel(request_id="p", model=model.name),
        LoadModel(request_id="l", model=model.name, config=config),
    )


def test_worker_prepares_loads_answers_cancels_and_ends(
    worker: WorkerProcess, home: ModelHome
) -> None:
    assert isinstance(worker.wait_for(EngineReady), EngineReady)
    for request, kind in zip(_ask(home, SLOW), (PrepareDone, ModelLoaded), strict=True):
        worker.send(request)
        worker.wait_for(kind)
    endless = SamplingConfig(temperature=1.5, seed=1)
    worker.send(Generate(request_id="a", messages=CHAT, sampling=endless))
    worker.wait_for(TokenDelta)
    worker.send(Cancel(request_id="a"))
    first = worker.wait_for(GenerationDone)
    worker.send(Generate(request_id="b", messages=CHAT, sampling=SamplingConfig(max_new_tokens=6)))
    second = worker.wait_for(GenerationDone)
    assert isinstance(first, GenerationDone)
    assert isinstance(second, GenerationDone)
    assert first.reason is FinishReason.CANCELLED
    assert second.request_id == "b"
    worker.send(Shutdown())
    assert worker.process.wait(timeout=EXIT_TIMEOUT_S) == 0


def test_worker_reports_errors_and_goes_on(worker: WorkerProcess, home: ModelHome) -> None:
    worker.wait_for(EngineReady)
    worker.send(Generate(request_id="early", messages=CHAT))
    failed = worker.wait_for(RequestFailed)
    assert isinstance(failed, RequestFailed)
    assert failed.request_id == "early"
    worker.send(PrepareModel(request_id="no", model="/no/such/folder"))
    failed = worker.wait_for(RequestFailed)
    assert isinstance(failed, RequestFailed)
    assert failed.code == "UnknownModelError"
    worker.send(LoadModel(request_id="l", model=home.name, config=CONFIG))
    worker.wait_for(ModelLoaded)


def test_worker_ends_when_its_input_ends(worker: WorkerProcess, home: ModelHome) -> None:
    worker.wait_for(EngineReady)
    worker.send(_ask(home)[1])
    worker.wait_for(ModelLoaded)
    worker.send(
        Generate(request_id="a", messages=CHAT, sampling=SamplingConfig(temperature=2.0, seed=2))
    )
    worker.wait_for(TokenDelta)
    assert worker.process.stdin is not None
    worker.process.stdin.close()
    worker.wait_for(GenerationDone)
    assert worker.process.wait(timeout=EXIT_TIMEOUT_S) == 0


def test_worker_killed_in_a_reply_leaves_a_model_that_loads(
    worker: WorkerProcess, home: ModelHome
) -> None:
    worker.wait_for(EngineReady)
    worker.send(_ask(home)[1])
    worker.wait_for(ModelLoaded)
    worker.send(Generate(request_id="a", messages=CHAT))
    worker.wait_for(TokenDelta)
    worker.process.send_signal(signal.SIGKILL)
    worker.process.wait(timeout=EXIT_TIMEOUT_S)
    again = WorkerProcess(home.root.parent.parent)
    try:
        again.wait_for(EngineReady)
        again.send(_ask(home)[1])
        assert isinstance(again.wait_for(ModelLoaded), ModelLoaded)
    finally:
        again.close()


def test_protocol_lines_are_plain_json(worker: WorkerProcess) -> None:
    assert worker.process.stdout is not None
    fields = json.loads(worker.process.stdout.readline())
    assert fields["type"] == "EngineReady"
