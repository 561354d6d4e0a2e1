"""The way back of a reload that failed: the former settings, or what of them is possible."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mira_engine import memory_retry
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.errors import ConfigError, GenerationError, MemoryShortageError, MiraError
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.memory_retry import LEAST_SHRINKAGE, SHRUNK
from mira_engine.prepare import prepare
from mira_engine.types import ComputeDtype, DraftExperts, Phase, Precision
from shortages import Session, failing_passes, new_objects_only

CONFIG = EngineConfig(
    precision=Precision.NESTED,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=1.2),
    num_draft_tokens=3,
    draft_experts=DraftExperts.ALL,
    context_length=256,
    num_threads=1,
)
QUESTION = "Two and two?"
BRIEF = SamplingConfig(max_new_tokens=8)


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> ModelHome:
    """A tiny chat model, prepared."""
    library = ModelLibrary(tmp_path_factory.mktemp("way-back"))
    made = library.resolve(str(tiny_checkpoint("olmoe", tokenizer=True)))
    prepare(made, Precision.NESTED, on_progress=lambda *_: None, is_cancelled=lambda: False)
    return made


@pytest.fixture(autouse=True, scope="module")
def _fast_collections() -> Iterator[None]:
    with new_objects_only():
        yield


@pytest.fixture
def session(home: ModelHome) -> Iterator[Session]:
    made = Session(home, CONFIG)
    yield made
    made.close()


def _failing_loads(
    monkeypatch: pytest.MonkeyPatch, makers: list[Callable[[], MiraError]]
) -> list[int | None]:
    """Lets the next loads fail, one error each. Returns the budgets that all loads ask for."""
    load, asked, left = Engine.load, [], list(makers)

    def loading(home: ModelHome, config: EngineConfig, **kwargs: object) -> Engine:
        asked.append(config.budget.num_bytes if config.budget is not None else None)
        if left:
            raise left.pop(0)()
        return load(home, config, **kwargs)

    monkeypatch.setattr(Engine, "load", loading)
    return asked


def _in_a_check(monkeypatch: pytest.MonkeyPatch):
    """Lets one verification run out of memory."""
    return failing_passes(monkeypatch, lambda phase, calls: (phase, calls) == (Phase.VERIFY, 1))


def test_way_back_without_memory_for_the_former_budget_takes_what_there_is(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected, plan = session.answer(QUESTION, BRIEF), session.engine.plan

    def short() -> MemoryShortageError:
        error = MemoryShortageError("Memory ran out while the model was loaded.")
        error.planned_bytes, error.budget_bytes = plan.total_bytes, plan.budget_bytes
        return error

    asked = _failing_loads(monkeypatch, [lambda: GenerationError("The disk is gone."), short])
    with _in_a_check(monkeypatch):
        failed = session.failure(QUESTION, BRIEF)

    assert "The disk is gone." in failed.message
    assert failed.message.endswith("its former settings, but with less memory.")
    assert len(asked) == 3, "with less, as before, and with what is possible"
    assert asked[1] is None, "the former settings name a share"
    assert session.engine.plan.budget_bytes == asked[2] < plan.budget_bytes
    told = session.notices(SHRUNK)
    assert len(told) == 2
    assert "while the model was loaded" in told[1]
    assert session.answer(QUESTION, BRIEF).text == expected.text


def test_budget_is_chosen_once_no_engine_holds_memory_any_more(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    plan, seen = session.engine.plan, []
    free_bytes = plan.total_bytes - plan.budget_bytes // 4

    def look(config: EngineConfig) -> int:
        seen.append(session.worker.engine)
        return free_bytes

    monkeypatch.setattr(memory_retry, "free_bytes", look)
    with _in_a_check(monkeypatch):
        session.answer(QUESTION, BRIEF)

    assert seen == [None]
    assert session.engine.plan.budget_bytes == plan.budget_bytes - plan.budget_bytes // 4


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (ConfigError("There is no card 0 that torch can use here.", hint=""), "no card 0"),
        (MemoryError(), "machine's memory does not suffice"),
    ],
)
def test_budget_that_cannot_be_chosen_brings_the_former_settings_back(
    session: Session, monkeypatch: pytest.MonkeyPatch, error: Exception, said: str
) -> None:
    expected, plan = session.answer(QUESTION, BRIEF), session.engine.plan

    def refuse(config: EngineConfig) -> int:
        raise error

    monkeypatch.setattr(memory_retry, "free_bytes", refuse)
    with _in_a_check(monkeypatch):
        failed = session.failure(QUESTION, BRIEF)

    assert said in failed.message
    assert "former settings" in failed.message
    assert session.engine.plan == plan
    assert not session.notices(SHRUNK), "nothing was shrunk"
    monkeypatch.undo()
    assert session.answer(QUESTION, BRIEF).text == expected.text


def test_settings_of_the_way_back_are_those_before_the_shortage_not_the_smaller_ones(
    session: Session, monkeypatch: pytest.MonkeyPatch
) -> None:
    config, plan = session.engine.config, session.engine.plan
    asked = _failing_loads(monkeypatch, [lambda: GenerationError("The disk is gone.")])

    with _in_a_check(monkeypatch):
        session.failure(QUESTION, BRIEF)

    assert asked[0] is not None
    assert asked[0] <= (1 - LEAST_SHRINKAGE) * plan.budget_bytes
    assert session.engine.config == config
    assert session.engine.plan == plan
    session.answer(QUESTION, replace(BRIEF, max_new_tokens=2))
