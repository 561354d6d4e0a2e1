"""Another configuration for a loaded model: what stays, what comes back, what fails."""

from __future__ import annotations

import io
import threading
import weakref
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mira_engine import wire
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.errors import GenerationError
from mira_engine.events import (
    Cancel,
    ChatMessage,
    Event,
    Generate,
    GenerationDone,
    LoadModel,
    ModelLoaded,
    Notice,
    Reconfigure,
    RequestFailed,
)
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.policy.base import FetchReason
from mira_engine.policy.eviction import LfuEviction, LruEviction
from mira_engine.policy.payoff import PrefetchPayoff
from mira_engine.policy.residency import ResidencyTable
from mira_engine.prepare import prepare
from mira_engine.reconfiguring import refill
from mira_engine.types import CachePolicy, ComputeDtype, DraftExperts, ExpertId, Precision, Region
from mira_engine.worker import Worker

CONFIG = EngineConfig(
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=0.6),
    num_draft_tokens=3,
    draft_experts=DraftExperts.CACHED,
    context_length=256,
    num_threads=1,
)
QUESTION = ChatMessage(role="user", content="Two and two?")
BRIEF = SamplingConfig(max_new_tokens=12)


class FakeWriter:
    """Keeps what the worker says, and may answer it."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.on_event: Callable[[Event], None] = lambda event: None

    def send(self, event: Event) -> None:
        self.events.append(event)
        self.on_event(event)


class Session:
    """A worker driven by hand, one job after the other, in the test's thread."""

    def __init__(self, home: ModelHome, config: EngineConfig) -> None:
        self.writer = FakeWriter()
        self.worker = Worker(ModelLibrary(home.root.parent.parent), self.writer)
        self.do(LoadModel(request_id="l", model=home.name, config=config))

    def do(self, job: LoadModel | Reconfigure | Generate) -> Event:
        """Runs a job. Returns its last event."""
        self.worker._run_job(job)
        return self.writer.events[-1]

    def change(self, **changes: object) -> ModelLoaded:
        loaded = self.do(Reconfigure(request_id="c", config=replace(self.config, **changes)))
        assert isinstance(loaded, ModelLoaded), loaded
        return loaded

    def fail(self, **changes: object) -> RequestFailed:
        failed = self.do(Reconfigure(request_id="c", config=replace(self.config, **changes)))
        assert isinstance(failed, RequestFailed), failed
        return failed

    def ask(self, *messages: ChatMessage) -> GenerationDone:
        chat = messages or (QUESTION,)
        done = self.do(Generate(request_id="g", messages=chat, sampling=BRIEF))
        assert isinstance(done, GenerationDone), done
        return done

    @property
    def engine(self) -> Engine:
        assert self.worker.engine is not None
        return self.worker.engine

    @property
    def config(self) -> EngineConfig:
        return self.engine.config

    @property
    def residents(self) -> list[ExpertId]:
        return self.engine.executor.driver.residency.by_worth()


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> ModelHome:
    """A tiny chat model with full attention, prepared in two precisions."""
    library = ModelLibrary(tmp_path_factory.mktemp("reconfigure"))
    made = library.resolve(str(tiny_checkpoint("olmoe", tokenizer=True)))
    for precision in (Precision.NESTED, Precision.INT8):
        prepare(made, precision, on_progress=lambda *_: None, is_cancelled=lambda: False)
    return made


@pytest.fixture
def start(home: ModelHome) -> Iterator[Callable[..., Session]]:
    sessions: list[Session] = []

    def make(**changes: object) -> Session:
        session = Session(home, replace(CONFIG, **changes))
        sessions.append(session)
        return session

    yield make
    for session in sessions:
        if session.worker.engine is not None:
            session.engine.close()


# -- in place ------------------------------------------------------------------------------


@pytest.mark.parametrize("k", [1, 5, 0])
def test_other_k_keeps_experts_conversation_and_text(start: Callable[..., Session], k: int) -> None:
    session = start()
    before, engine, residents = session.ask(), session.engine, session.residents
    loaded = session.change(num_draft_tokens=k)
    assert loaded.is_cache_kept
    assert loaded.plan.num_draft_tokens == k
    assert loaded.plan.num_slots == engine.plan.num_slots
    assert session.engine is engine
    assert session.residents == residents

    after = session.ask()
    assert after.text == before.text
    assert after.stats.num_cached_tokens == after.stats.num_prompt_tokens - 1
    assert after.stats.num_draft_tokens == k
    assert (after.stats.num_rounds > 0) == (k > 0)
    assert "as asked for" in after.stats.governor_reason or not k


def test_k_becomes_auto_and_fixed_again(start: Callable[..., Session]) -> None:
    session = start()
    assert session.change(num_draft_tokens=0).plan.num_draft_tokens == 0
    auto = session.change(num_draft_tokens=None)
    assert auto.is_cache_kept
    assert auto.plan.num_draft_tokens > 0
    assert session.engine.governor is not None
    text = session.ask().text
    assert session.change(num_draft_tokens=2).is_cache_kept
    assert session.engine.governor is None
    assert session.ask().text == text


def test_draft_of_another_kind_stays_and_is_told(start: Callable[..., Session]) -> None:
    """A long draft would be loaded with all experts; the one that is there is taken."""
    session = start(budget=MemoryAmount(share=2.0), draft_experts=DraftExperts.AUTO)
    kind = session.engine.plan.draft_experts
    text = session.ask().text
    others = [k for k in (1, 2, 8) if _planned_kind(session, k) is not kind]
    assert others
    loaded = session.change(num_draft_tokens=others[0])
    assert loaded.is_cache_kept
    assert loaded.plan.draft_experts is kind
    told = [e.code for e in session.writer.events if isinstance(e, Notice)]
    assert "draft-kept" in told
    assert session.ask().text == text


def _planned_kind(session: Session, k: int) -> DraftExperts:
    config = replace(session.config, num_draft_tokens=k)
    return session.engine.plan_for(config).memory.draft_experts


def test_prefetch_is_switched_off_and_on(start: Callable[..., Session]) -> None:
    session = start(budget=MemoryAmount(share=0.3))
    assert session.ask().stats.num_records_prefetched > 0
    assert session.change(is_prefetch_enabled=False).is_cache_kept
    other = ChatMessage(role="user", content="Something else altogether.")
    off = session.ask(other)
    assert off.stats.num_records_prefetched == 0
    assert off.stats.num_rounds > 0
    assert session.change(is_prefetch_enabled=True).is_cache_kept
    moved = session.engine.executor.driver._moved
    moved.payoffs[FetchReason.LOOKAHEAD] = PrefetchPayoff()  # whatever it found before
    on = session.ask(QUESTION)
    assert on.stats.num_records_prefetched > 0


def test_request_comes_over_the_wire(home: ModelHome) -> None:
    writer = FakeWriter()
    worker = Worker(ModelLibrary(home.root.parent.parent), writer)
    requests = (
        LoadModel(request_id="l", model=home.name, config=CONFIG),
        Reconfigure(request_id="c", config=replace(CONFIG, num_draft_tokens=1)),
    )
    worker.read_requests(io.StringIO("".join(wire.encode(r) + "\n" for r in requests)))
    worker.run()
    loaded = [e for e in writer.events if isinstance(e, ModelLoaded)]
    assert [(e.request_id, e.is_cache_kept) for e in loaded] == [("l", False), ("c", True)]


def test_same_configuration_changes_nothing(start: Callable[..., Session]) -> None:
    session = start()
    engine = session.engine
    assert session.change().is_cache_kept
    assert session.engine is engine


# -- by a reload ---------------------------------------------------------------------------


@pytest.mark.parametrize("policy", [CachePolicy.POOL, CachePolicy.REGIONS])
def test_other_budget_reloads_and_brings_the_best_back(
    start: Callable[..., Session], policy: CachePolicy
) -> None:
    session = start(cache_policy=policy)
    before, ranked, engine = session.ask(), session.residents, session.engine
    assert ranked
    loaded = session.change(budget=MemoryAmount(share=0.3))
    assert not loaded.is_cache_kept
    assert loaded.plan.num_slots < engine.plan.num_slots
    assert session.engine is not engine
    there = session.residents
    assert there
    assert set(there) == set(ranked[: len(there)])
    if policy is CachePolicy.POOL:
        assert len(there) == loaded.plan.num_slots - 2
    told = [e for e in session.writer.events if isinstance(e, Notice) and e.code == "reloaded"]
    assert f"{len(there)} of the {len(ranked)}" in told[-1].text
    after = session.ask()
    assert after.text == before.text
    assert after.stats.num_cached_tokens == 0, "the conversation is read again"

    grown = session.change(budget=MemoryAmount(share=1.0))
    assert grown.plan.num_slots > engine.plan.num_slots
    assert session.ask().text == before.text


def test_precision_reloads(start: Callable[..., Session]) -> None:
    session = start()
    loaded = session.change(precision=Precision.INT8)
    assert not loaded.is_cache_kept
    assert session.config.precision is Precision.INT8
    assert session.ask().stats.num_new_tokens == 12


def test_draft_that_is_not_there_takes_a_reload(start: Callable[..., Session]) -> None:
    session = start(num_draft_tokens=0)
    text = session.ask().text
    loaded = session.change(num_draft_tokens=2)
    assert not loaded.is_cache_kept
    assert loaded.plan.num_draft_tokens == 2
    after = session.ask()
    assert after.text == text
    assert after.stats.num_rounds > 0


def test_reload_holds_no_former_engine(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two at once were never planned: the arena of the first is free before the second's."""
    session = start()
    former = weakref.ref(session.engine)
    seen: list[bool] = []
    load = Engine.load

    def watched(*args: object, **kwargs: object) -> Engine:
        seen.append(former() is None)
        return load(*args, **kwargs)

    monkeypatch.setattr(Engine, "load", watched)
    session.change(budget=MemoryAmount(share=0.4))
    assert seen == [True]


# -- failing -------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "code"),
    [
        ({"budget": MemoryAmount(num_bytes=4096)}, "BudgetError"),
        ({"precision": Precision.FLOAT32}, "StoreError"),
        ({"context_length": 10**7}, "ConfigError"),
    ],
)
def test_change_that_cannot_be_leaves_the_engine_alone(
    start: Callable[..., Session], changes: dict[str, object], code: str
) -> None:
    session = start()
    before, engine = session.ask(), session.engine
    failed = session.fail(**changes)
    assert failed.code == code
    assert failed.message.endswith("goes on with its former settings.")
    assert session.engine is engine
    again = session.ask()
    assert again.text == before.text
    assert again.stats.num_cached_tokens > 0


def _failing_once(monkeypatch: pytest.MonkeyPatch, error: Exception, num_times: int = 1) -> None:
    load, left = Engine.load, [num_times]

    def failing(*args: object, **kwargs: object) -> Engine:
        if left[0]:
            left[0] -= 1
            raise error
        return load(*args, **kwargs)

    monkeypatch.setattr(Engine, "load", failing)


@pytest.mark.parametrize("error", [GenerationError("The disk is gone."), MemoryError()])
def test_reload_that_fails_brings_the_former_settings_back(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    session = start()
    before, config, ranked = session.ask(), session.config, session.residents
    _failing_once(monkeypatch, error)
    failed = session.fail(budget=MemoryAmount(share=0.3))
    assert failed.message.endswith("goes on with its former settings.")
    assert session.config == config
    assert set(session.residents) <= set(ranked)
    assert session.residents
    assert session.ask().text == before.text


def test_reload_that_fails_twice_says_that_nothing_is_loaded(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start()
    config = session.config
    _failing_once(monkeypatch, GenerationError("The disk is gone."), num_times=2)
    failed = session.fail(budget=MemoryAmount(share=0.3))
    assert failed.message == "The disk is gone. No model is loaded any more: The disk is gone."
    answer = session.do(Generate(request_id="g", messages=(QUESTION,), sampling=BRIEF))
    assert isinstance(answer, RequestFailed)
    assert answer.hint == "Pick a model first."
    again = session.do(Reconfigure(request_id="c", config=config))
    assert isinstance(again, RequestFailed)


def test_reload_that_is_cancelled_brings_the_former_settings_back(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start()
    before, config = session.ask(), session.config
    load = Engine.load

    def stopped(*args: object, **kwargs: object) -> Engine:
        session.worker._accept(Cancel(request_id="c"))
        return load(*args, **kwargs)

    monkeypatch.setattr(Engine, "load", stopped)
    failed = session.fail(budget=MemoryAmount(share=0.3))
    assert failed.code == "CancelledError"
    assert failed.message.endswith("goes on with its former settings.")
    monkeypatch.undo()
    assert session.config == config
    assert session.ask().text == before.text


def test_end_while_going_back_does_not_load_again(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start()
    load, asked = Engine.load, []

    def ending(*args: object, **kwargs: object) -> Engine:
        session.worker.read_requests(io.StringIO())
        session.worker._accept(Cancel(request_id="c"))
        asked.append(kwargs["is_cancelled"]())
        return load(*args, **kwargs)

    monkeypatch.setattr(Engine, "load", ending)
    session.fail(budget=MemoryAmount(share=0.3))
    assert asked == [True, True]
    assert session.worker.engine is None


def test_cancelled_refill_leaves_a_loaded_engine(start: Callable[..., Session]) -> None:
    session = start()
    session.ask()
    ranked = session.residents
    assert len(ranked) > 4
    session.change(budget=MemoryAmount(share=0.7))
    fresh = start(budget=MemoryAmount(share=0.7)).engine
    assert refill(fresh, ranked, lambda: True) == 0
    stop = threading.Event()
    assert refill(fresh, ranked, stop.is_set) == len(ranked)


def test_changed_fields_are_named() -> None:
    other = replace(CONFIG, num_draft_tokens=1, budget=None)
    assert CONFIG.changed_fields(other) == {"num_draft_tokens", "budget"}
    assert CONFIG.changed_fields(CONFIG) == frozenset()


def test_experts_are_ranked_by_worth_and_those_on_their_way_left_out() -> None:
    table = ResidencyTable(4, LfuEviction())
    experts = [ExpertId(0, number) for number in range(4)]
    for expert in experts[:3]:
        fetch = table.admit(expert, FetchReason.MISS)
        assert fetch is not None
        table.complete(fetch.slot)
    table.admit(experts[3], FetchReason.MISS)
    for expert in (experts[1], experts[1], experts[2]):
        table.use(expert)
    assert table.by_worth() == [experts[1], experts[2], experts[0]]


def test_hot_experts_are_worth_most() -> None:
    table = ResidencyTable(6, LruEviction(), num_hot_slots=2, num_stage_slots=2)
    for number, reason in enumerate((FetchReason.MISS, FetchReason.REBALANCE)):
        fetch = table.admit(ExpertId(0, number), reason)
        assert fetch is not None
        table.complete(fetch.slot)
    table.use(ExpertId(0, 0))
    assert table.region(0) is Region.STAGE
    assert table.by_worth() == [ExpertId(0, 1), ExpertId(0, 0)]
