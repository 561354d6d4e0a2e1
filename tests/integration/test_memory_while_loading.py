"""Memory that runs out while a model is loaded: freed, less asked for, once, and said."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mira_engine import loaded, memory_retry
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.errors import MemoryShortageError
from mira_engine.events import (
    DescribeMachine,
    MachineDescribed,
    ModelLoaded,
    Notice,
    Reconfigure,
    RequestFailed,
)
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.memory_retry import SHRUNK, load_with_retry
from mira_engine.prepare import prepare
from mira_engine.runtime import device, gpu_device, host_memory, host_records, slots
from mira_engine.types import ComputeDtype, DraftExperts, Precision
from shortages import SHORTAGES, FakeCard, Holdings, Session, failing, new_objects_only
from transformers import PreTrainedModel

CONFIG = EngineConfig(
    precision=Precision.NESTED,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=2.0),
    num_draft_tokens=3,
    draft_experts=DraftExperts.ALL,
    context_length=64,
    num_threads=1,
)
PROMPT = [7, 99, 23, 180, 41, 5, 66]
BRIEF = SamplingConfig(max_new_tokens=6)

ON_THE_PROCESSOR = {
    "backbone": (loaded, "load_backbone", 0),
    "draft": (slots, "huge_bytes", 0),
    "arena": (slots, "huge_bytes", 1),
    "views": (device, "SlotBinder", 0),
    "driver": (loaded, "ExpertCacheDriver", 0),
    "cache": (loaded, "StateManager", 0),
    "passes": (loaded, "ModelPasses", 0),
}
"""What fails: where it is looked up, and which call. From `driver` on the readers run."""

ON_A_CARD = {
    "to": (PreTrainedModel, "to", 0),
    "draft": (gpu_device, "GpuDraft", 0),
    "arena": (gpu_device, "GpuArena", 0),
    "records": (host_records, "read_exactly", 28),
    "link": (gpu_device, "CudaTransfer", 0),
    "tables": (gpu_device, "GpuExperts", 0),
    "cache": (loaded, "StateManager", 0),
}


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> ModelHome:
    """A tiny chat model, prepared."""
    library = ModelLibrary(tmp_path_factory.mktemp("shortage"))
    made = library.resolve(str(tiny_checkpoint("qwen2_moe", tokenizer=True)))
    prepare(made, Precision.NESTED, on_progress=lambda *_: None, is_cancelled=lambda: False)
    return made


@pytest.fixture(scope="module")
def usual(home: ModelHome) -> tuple[list[int], int]:
    """Text and bytes for experts where nothing fails."""
    engine = Engine.load(home, CONFIG)
    try:
        return _text(engine), engine.plan.budget_bytes
    finally:
        engine.close()


@pytest.fixture(autouse=True, scope="module")
def _fast_collections() -> Iterator[None]:
    with new_objects_only():
        yield


@pytest.fixture
def holdings(monkeypatch: pytest.MonkeyPatch) -> Holdings:
    """What is held, written down before every load that is tried."""
    watched = Holdings()
    load = Engine.load

    def watching(*args: object, **kwargs: object) -> Engine:
        watched.at_loads.append(watched.now())
        return load(*args, **kwargs)

    monkeypatch.setattr(Engine, "load", watching)
    return watched


def _text(engine: Engine) -> list[int]:
    return [step for step in engine.reply(PROMPT, BRIEF) if isinstance(step, int)]


def _load_twice(
    home: ModelHome, holdings: Holdings, notices: list[Notice], **changes: object
) -> Engine:
    engine = load_with_retry(home, replace(CONFIG, **changes), on_notice=notices.append)
    assert holdings.at_loads[-2:] == [[], []], "the first load has left something"
    return engine


@pytest.mark.parametrize(
    ("place", "kind"), zip(ON_THE_PROCESSOR, itertools.cycle(("host", "python")), strict=False)
)
def test_load_that_fails_anywhere_leaves_nothing_and_is_tried_with_less(
    home: ModelHome,
    monkeypatch: pytest.MonkeyPatch,
    usual: tuple[list[int], int],
    holdings: Holdings,
    place: str,
    kind: str,
) -> None:
    text, budget = usual
    notices: list[Notice] = []
    owner, name, at = ON_THE_PROCESSOR[place]

    with failing(monkeypatch, owner, name, SHORTAGES[kind], at=at):
        engine = _load_twice(home, holdings, notices)

    try:
        assert engine.plan.budget_bytes <= 0.9 * budget
        assert [notice.code for notice in notices].count(SHRUNK) == 1
        assert _text(engine) == text
    finally:
        engine.close()


@pytest.mark.parametrize("place", ON_A_CARD)
def test_load_on_a_card_that_fails_anywhere_leaves_nothing_and_is_tried_with_less(
    home: ModelHome,
    monkeypatch: pytest.MonkeyPatch,
    usual: tuple[list[int], int],
    holdings: Holdings,
    place: str,
) -> None:
    pytest.importorskip("triton", reason="triton has no wheel for this system")
    FakeCard(monkeypatch)
    # Half of the records stay on the disk, so that there is a ring with threads to be ended.
    monkeypatch.setattr(host_records, "allocate_chunks", _half_of_the_chunks)
    _, budget = usual
    notices: list[Notice] = []
    owner, name, at = ON_A_CARD[place]

    with failing(monkeypatch, owner, name, SHORTAGES["card"], at=at):
        engine = _load_twice(home, holdings, notices, gpu=0)

    engine.close()
    assert engine.plan.budget_bytes <= 0.9 * budget
    assert [notice.code for notice in notices].count(SHRUNK) == 1


def _half_of_the_chunks(wanted: int, record: int, allocate: object) -> list[object]:
    if wanted < 2 * record:
        return []
    return host_memory.allocate_chunks(min(wanted // 2, 8 * record), record, allocate)


def test_memory_that_cannot_be_pinned_takes_no_second_load(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch, holdings: Holdings
) -> None:
    pytest.importorskip("triton", reason="triton has no wheel for this system")
    card = FakeCard(monkeypatch)
    notices: list[Notice] = []

    def refuse(num_bytes: int) -> object:
        del num_bytes
        raise SHORTAGES["card"]()

    card.allocate = refuse
    engine = load_with_retry(home, replace(CONFIG, gpu=0), on_notice=notices.append)
    engine.close()

    assert len(holdings.at_loads) == 1
    codes = [notice.code for notice in notices]
    assert "pinned-memory" in codes
    assert SHRUNK not in codes


def test_budget_shrinks_by_what_is_missing_once_all_was_given_back(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[Notice] = []
    engine = Engine.load(home, CONFIG)
    engine.close()
    plan = engine.plan
    missing = plan.budget_bytes // 4
    monkeypatch.setattr(memory_retry, "free_bytes", lambda config: plan.total_bytes - missing)

    with failing(monkeypatch, slots, "huge_bytes", SHORTAGES["python"]):
        smaller = load_with_retry(home, CONFIG, on_notice=notices.append)
    smaller.close()

    assert smaller.config.budget == MemoryAmount(num_bytes=plan.budget_bytes - missing)
    told = next(notice.text for notice in notices if notice.code == SHRUNK)
    assert "instead of" in told


def test_second_shortage_is_told_with_what_to_do(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch, holdings: Holdings
) -> None:
    with (
        failing(monkeypatch, slots, "huge_bytes", SHORTAGES["host"], num_times=99) as calls,
        pytest.raises(MemoryShortageError) as caught,
    ):
        load_with_retry(home, CONFIG)

    assert calls[0] == 2, "one load, and one more"
    assert "did not help" in caught.value.message
    assert "--context" in caught.value.hint
    assert holdings.now() == []


def test_too_little_for_any_experts_is_told_with_what_to_do(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory_retry, "free_bytes", lambda config: 0)

    with (
        failing(monkeypatch, slots, "huge_bytes", SHORTAGES["host"]),
        pytest.raises(MemoryShortageError) as caught,
    ):
        load_with_retry(home, CONFIG)

    assert "below the minimum" in caught.value.message
    assert "Close other programs" in caught.value.hint


def test_other_failures_are_not_tried_again(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch, holdings: Holdings
) -> None:
    with (
        failing(monkeypatch, loaded, "StateManager", lambda: KeyError("layer")),
        pytest.raises(KeyError),
    ):
        load_with_retry(home, CONFIG)

    assert len(holdings.at_loads) == 1


# -- in the worker -------------------------------------------------------------------------


@pytest.fixture
def session(home: ModelHome, monkeypatch: pytest.MonkeyPatch):
    """A worker whose first load had to be tried twice."""
    with failing(monkeypatch, slots, "huge_bytes", SHORTAGES["host"]):
        made = Session(home, CONFIG)
    yield made
    made.close()


def test_worker_loads_with_less_and_says_so(session: Session) -> None:
    assert isinstance(session.last, ModelLoaded)
    assert len(session.notices(SHRUNK)) == 1
    assert session.loaded.plan.budget_bytes == session.engine.plan.budget_bytes


def test_other_k_keeps_the_smaller_budget_and_the_engine(session: Session) -> None:
    engine = session.engine
    config = replace(session.asked, num_draft_tokens=1)

    loaded = session.do(Reconfigure(request_id="c", config=config))

    assert isinstance(loaded, ModelLoaded)
    assert loaded.is_cache_kept
    assert session.engine is engine
    assert loaded.plan.budget_bytes == engine.plan.budget_bytes


def test_budget_that_is_asked_for_later_counts(session: Session) -> None:
    smaller = session.engine.plan.budget_bytes
    config = replace(session.asked, budget=MemoryAmount(share=3.0))

    loaded = session.do(Reconfigure(request_id="c", config=config))

    assert isinstance(loaded, ModelLoaded)
    assert loaded.plan.budget_bytes > smaller


@pytest.mark.parametrize("kind", ["card", "python"])
def test_worker_survives_a_shortage_in_any_other_job(
    session: Session, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    from mira_engine import machine_report

    job = DescribeMachine(request_id="d", model="builtin", config=CONFIG)
    with failing(monkeypatch, machine_report, "describe_machine", SHORTAGES[kind]):
        failed = session.do(job)

    assert isinstance(failed, RequestFailed)
    assert failed.code == "MemoryShortageError"
    assert failed.hint
    assert isinstance(session.do(job), MachineDescribed)


def test_worker_that_can_load_nothing_says_so_and_loads_later(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    with failing(monkeypatch, slots, "huge_bytes", SHORTAGES["host"], num_times=99):
        session = Session(home, CONFIG)
    failed = session.last
    assert isinstance(failed, RequestFailed)
    assert failed.code == "MemoryShortageError"

    assert isinstance(session.load(), ModelLoaded)
    session.close()
