"""Memory that runs out in a sweep over K: it goes on with less, once, in figures of one budget."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mira_engine import loaded, profiling
from mira_engine.config import EngineConfig, MemoryAmount
from mira_engine.engine import Engine
from mira_engine.errors import MemoryShortageError
from mira_engine.events import KProfile, Notice
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.memory_retry import SHRUNK
from mira_engine.prepare import prepare
from mira_engine.profiles import load_profile
from mira_engine.profiling import Sweep, profile_model
from mira_engine.types import CompileMode, ComputeDtype, Phase, Precision
from shortages import SHORTAGES, Holdings, failing, failing_passes, new_objects_only

CONFIG = EngineConfig(
    precision=Precision.NESTED,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=3.0),
    context_length=256,
    num_threads=1,
    compile_mode=CompileMode.OFF,
    prefill_chunk_tokens=32,
)
SWEEP = Sweep(depths=(0, 2), num_prompts_per_kind=1, num_repeats=1, num_tokens=4)
TWICE = replace(SWEEP, num_repeats=2)
CALLS_OF_A_K = 6
"""Replies of one K in one round: five, and one that fills the slots."""


@pytest.fixture(scope="module")
def prepared(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> ModelHome:
    library = ModelLibrary(tmp_path_factory.mktemp("profiling"))
    home = library.resolve(str(tiny_checkpoint("olmoe", tokenizer=True)))
    prepare(home, Precision.NESTED, on_progress=lambda *_: None, is_cancelled=lambda: False)
    return home


@pytest.fixture
def home(prepared: ModelHome) -> Iterator[ModelHome]:
    """A prepared model without profiles."""
    yield prepared
    for path in prepared.root.glob("profiles/*"):
        path.unlink()


@pytest.fixture(autouse=True, scope="module")
def _fast_collections() -> Iterator[None]:
    with new_objects_only():
        yield


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, list[str]]]:
    """What was asked for at each load, and what was held before."""
    holdings, load, made = Holdings(), Engine.load, []

    def watching(home: ModelHome, config: EngineConfig, **options: object) -> Engine:
        made.append((config, holdings.now()))
        return load(home, config, **options)

    monkeypatch.setattr(Engine, "load", watching)
    return made


def measure(
    home: ModelHome, notices: list[Notice], sweep: Sweep = SWEEP, **changes: object
) -> KProfile:
    return profile_model(
        home, replace(CONFIG, **changes), sweep, cache_dir=None, on_notice=notices.append,
        on_progress=lambda *_: None,
    )  # fmt: skip


def shrunk(notices: list[Notice]) -> str:
    (notice,) = [notice for notice in notices if notice.code == SHRUNK]
    return notice.text


def kept_profile(home: ModelHome, budget: MemoryAmount | None) -> KProfile | None:
    """Returns the profile of a load with this budget."""
    engine = Engine.load(home, replace(CONFIG, budget=budget))
    engine.close()
    return load_profile(home.root, engine.profile_key, lambda code, text: None)


@pytest.mark.parametrize(
    ("phase", "number", "kind"),
    [
        (Phase.DECODE, 0, "python"),
        (Phase.DECODE, 9, "card"),
        (Phase.DRAFT, 1, "host"),
        (Phase.VERIFY, 5, "system"),
    ],
)
def test_shortage_in_a_reply_measures_every_k_anew_with_a_smaller_budget(
    home: ModelHome,
    monkeypatch: pytest.MonkeyPatch,
    loads: list,
    phase: Phase,
    number: int,
    kind: str,
) -> None:
    notices: list[Notice] = []

    def is_that(now: Phase, calls: int) -> bool:
        return now is phase and calls == number

    with failing_passes(monkeypatch, is_that, SHORTAGES[kind]):
        found = measure(home, notices)

    assert [(r.num_draft_tokens, r.num_replies) for r in found.results] == [(0, 5), (2, 5)]
    assert "every K is measured anew" in shrunk(notices)
    budgets = [config.budget for config, _ in loads]
    assert budgets[-2:] == [budgets[-1]] * 2, "both K's with one budget"
    assert budgets[-1] != budgets[0] == CONFIG.budget
    assert [config.num_draft_tokens for config, _ in loads][-2:] == [0, 2]
    assert loads[-2][1] == [], "the engine that failed is held"
    assert kept_profile(home, budgets[-1]) == found
    assert kept_profile(home, CONFIG.budget) is None


def test_shortage_while_loading_is_none_of_too_small_a_budget(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[Notice] = []

    with failing(monkeypatch, loaded, "StateManager", SHORTAGES["host"], at=1):  # That of K 2.
        found = measure(home, notices)

    assert [r.num_draft_tokens for r in found.results] == [0, 2]
    assert {n.code for n in notices} >= {SHRUNK}
    assert "profile-k0" not in {n.code for n in notices}


def test_long_prompt_that_takes_too_much_is_read_in_shorter_passes_and_nothing_is_lost(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch, loads: list
) -> None:
    notices: list[Notice] = []
    chunks: list[int] = []
    original = Engine.limit_chunks
    monkeypatch.setattr(
        Engine, "limit_chunks", lambda engine, n: (chunks.append(n), original(engine, n))[1]
    )

    class FailsInTheSecondK:
        is_done = False

        def __call__(self, phase: Phase, calls: int) -> bool:
            if phase is not Phase.PREFILL or len(loads) < 2 or self.is_done:
                return False
            self.is_done = True
            return True

    with failing_passes(monkeypatch, FailsInTheSecondK()):
        found = measure(home, notices)

    assert [(r.num_draft_tokens, r.num_replies) for r in found.results] == [(0, 5), (2, 5)]
    assert [config.num_draft_tokens for config, _ in loads] == [0, 2, 2], "K 0 is not run again"
    assert {config.budget for config, _ in loads} == {CONFIG.budget}
    assert chunks == [32, 32, 16]
    assert "What was measured stays" in shrunk(notices)
    assert kept_profile(home, CONFIG.budget) == found


def test_usual_budget_is_that_of_the_first_load_whatever_is_free_later(
    home: ModelHome, loads: list
) -> None:
    found = measure(home, [], budget=None)
    budgets = [config.budget for config, _ in loads]
    assert budgets[0] is None
    assert len(set(budgets[1:])) == 1
    assert budgets[1] is not None
    assert kept_profile(home, budgets[1]) == found


def test_profile_of_more_rounds_is_not_given_for_one_of_fewer(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch, loads: list
) -> None:
    former = measure(home, [], TWICE)
    notices: list[Notice] = []
    with failing(monkeypatch, Engine, "reply", SHORTAGES["python"], at=3 * CALLS_OF_A_K + 2):
        measure(home, notices, TWICE)
    assert shrunk(notices).endswith("The former budget's profile stays as it was.")
    assert kept_profile(home, CONFIG.budget) == former


def test_whole_rounds_are_kept_for_the_former_budget_and_never_mixed(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch, loads: list
) -> None:
    notices: list[Notice] = []
    at = 3 * CALLS_OF_A_K + 2  # In K 2 of the second round.

    with failing(monkeypatch, Engine, "reply", SHORTAGES["python"], at=at):
        found = measure(home, notices, TWICE)

    assert [(r.num_draft_tokens, r.num_replies) for r in found.results] == [(0, 10), (2, 10)]
    assert "kept for the former budget" in shrunk(notices)
    former = kept_profile(home, CONFIG.budget)
    assert former is not None
    assert [(r.num_draft_tokens, r.num_replies) for r in former.results] == [(0, 5), (2, 5)]
    assert kept_profile(home, loads[7][0].budget) == found


def test_shortage_that_a_reader_told_knows_its_plan(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch, loads: list
) -> None:
    def tell() -> MemoryShortageError:
        return MemoryShortageError("Memory ran out while a record was read.")

    notices: list[Notice] = []
    with failing(monkeypatch, Engine, "reply", tell, at=2):
        found = measure(home, notices)

    assert [r.num_replies for r in found.results] == [5, 5]
    assert loads[-1][0].budget != CONFIG.budget
    assert shrunk(notices).startswith("Memory ran out while a record was read: experts get ")


def test_second_shortage_is_an_error_with_a_hint_and_nothing_is_saved(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch, loads: list
) -> None:
    notices: list[Notice] = []
    holdings = Holdings()

    with (
        failing(monkeypatch, Engine, "reply", SHORTAGES["card"], at=2, num_times=99) as calls,
        pytest.raises(MemoryShortageError) as caught,
    ):
        measure(home, notices)

    assert calls[0] == 4, "tried again and again"
    assert len(loads) == 2
    assert "while a K was measured" in caught.value.message
    assert "for experts did not help" in caught.value.message
    assert "--budget" in caught.value.hint
    assert not list(home.root.glob("profiles/*"))
    assert holdings.now() == []


def test_too_little_for_a_smaller_budget_is_told_with_the_reason(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mira_engine.memory_retry.free_bytes", lambda config: 0)

    with (
        failing(monkeypatch, Engine, "reply", SHORTAGES["card"], at=2),
        pytest.raises(MemoryShortageError) as caught,
    ):
        measure(home, [])

    assert "below the minimum" in caught.value.message
    assert not list(home.root.glob("profiles/*"))


def test_other_failures_of_a_sweep_are_not_tried_again(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch, loads: list
) -> None:
    with (
        failing(monkeypatch, Engine, "reply", lambda: KeyError("layer"), at=1),
        pytest.raises(KeyError),
    ):
        measure(home, [])

    assert len(loads) == 1


def test_smaller_budget_is_one_that_an_option_can_name(monkeypatch: pytest.MonkeyPatch) -> None:
    mib = 2**20
    monkeypatch.setattr(profiling, "less_for_experts", lambda *_: (7 * mib + 12345, "less"))
    notices: list[Notice] = []
    run = profiling._SweepRun(
        home=None, config=CONFIG, sweep=SWEEP, cache_dir=None, on_progress=lambda *_: None,
        tell=notices.append, is_cancelled=lambda: False,
    )  # fmt: skip

    run.take_less(MemoryShortageError("Memory ran out."))

    assert run._config.budget == MemoryAmount.parse("7MiB")
    assert "--budget 7MiB" in shrunk(notices)
