"""Choosing K on a tiny model: the sweep, what loading makes of it, and the governor at work."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.errors import CancelledError
from mira_engine.events import ChatMessage, DepthResult, KProfile, Notice
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.policy import payoff, speculation
from mira_engine.policy.speculation import RoundObservation, SpeculationGovernor
from mira_engine.prepare import prepare
from mira_engine.profiles import save_profile
from mira_engine.profiling import Sweep, profile_model
from mira_engine.runtime import disk, draft, executor
from mira_engine.types import CompileMode, ComputeDtype, DraftExperts, Lookahead, Precision
from ticking_clock import TickingClock

CHAT = [ChatMessage(role="user", content="Hello, who are you?")]
CONFIG = EngineConfig(
    precision=Precision.NESTED,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=3.0),
    context_length=256,
    num_threads=1,
    compile_mode=CompileMode.OFF,
)
TIGHT = MemoryAmount(share=0.9)
"""The draft, and slots for 12 of the 16 experts."""

SMALL = Sweep(depths=(0, 2), num_prompts_per_kind=1, num_repeats=2, num_tokens=6)
PROFILE = KProfile(
    best=2,
    acceptance=0.5,
    results=(DepthResult(num_draft_tokens=2, tpot_s=0.1, num_replies=9),),
)


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
    for path in profiles(prepared):
        path.unlink()


@pytest.fixture
def load(home: ModelHome) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(
        *,
        notices: list[Notice] | None = None,
        depths: tuple[int, ...] | None = None,
        **changes: object,
    ) -> Engine:
        told = notices if notices is not None else []
        config = replace(CONFIG, **changes)
        engines.append(Engine.load(home, config, on_notice=told.append, draft_depths=depths))
        engines[-1]._end_ids = frozenset()
        return engines[-1]

    yield make
    for engine in engines:
        engine.close()


def profiles(home: ModelHome) -> list[Path]:
    return sorted(home.root.glob("profiles/*"))


def reply(engine: Engine, num_tokens: int, **sampling: object) -> list[int]:
    config = SamplingConfig(max_new_tokens=num_tokens, **sampling)
    return [t for t in engine.reply(engine.render(CHAT), config) if isinstance(t, int)]


# -- the sweep ---------------------------------------------------------------------------------


def test_sweep_measures_every_k_in_every_round(home: ModelHome) -> None:
    told: list[tuple[int, int, str]] = []
    found = profile_model(
        home, CONFIG, SMALL, cache_dir=None, on_notice=lambda notice: None,
        on_progress=lambda *report: told.append(report),
    )  # fmt: skip
    assert [(r.num_draft_tokens, r.num_replies) for r in found.results] == [(0, 10), (2, 10)]
    assert found.best == min(found.results, key=lambda r: r.tpot_s).num_draft_tokens
    details = dict.fromkeys(d.removesuffix(", loading") for _, _, d in told)
    assert list(details) == [
        "K 0, round 1 of 2", "K 2, round 1 of 2", "K 0, round 2 of 2", "K 2, round 2 of 2",
    ]  # fmt: skip
    assert told[-1] == (20, 20, "K 2, round 2 of 2")
    assert len(profiles(home)) == 1


def test_budget_without_room_for_a_draft_measures_k_0_alone(home: ModelHome) -> None:
    notices: list[Notice] = []
    config = replace(CONFIG, budget=MemoryAmount(share=0.5), draft_experts=DraftExperts.ALL)
    found = profile_model(
        home, config, SMALL, cache_dir=None, on_notice=notices.append,
        on_progress=lambda *_: None,
    )  # fmt: skip
    assert (found.best, [r.num_draft_tokens for r in found.results]) == (0, [0])
    assert [n.code for n in notices] == ["profile-k0"]


@pytest.mark.parametrize("at", ["K 0, round 1 of 2", "K 2, round 2 of 2"])
def test_stopped_sweep_saves_nothing(home: ModelHome, at: str) -> None:
    seen: list[str] = []
    with pytest.raises(CancelledError):
        profile_model(
            home, CONFIG, SMALL, cache_dir=None, on_notice=lambda notice: None,
            on_progress=lambda done, total, detail: seen.append(detail),
            is_cancelled=lambda: at in seen,
        )  # fmt: skip
    assert seen[-1] == at
    assert not profiles(home)


# -- what loading makes of it ------------------------------------------------------------------


def test_loading_takes_the_profiled_k_unless_one_is_given(load: Callable[..., Engine]) -> None:
    plain = load()
    assert plain.plan.num_draft_tokens == 4
    save_profile(plain.home.root, plain.profile_key, PROFILE)
    profiled, given = load(), load(num_draft_tokens=3)
    assert profiled.plan.num_draft_tokens == 2
    assert profiled.governor is not None
    assert profiled.governor.candidates == (0, 1, 2)
    assert "from the profile" in profiled.governor.choose().reason
    assert (given.plan.num_draft_tokens, given.governor) == (3, None)
    assert load(budget=MemoryAmount(share=2.9)).plan.num_draft_tokens == 4


def test_profiled_k_of_0_leaves_the_draft_out(load: Callable[..., Engine]) -> None:
    plain = load()
    none = replace(PROFILE, best=0, results=(replace(PROFILE.results[0], num_draft_tokens=0),))
    save_profile(plain.home.root, plain.profile_key, none)
    engine = load()
    assert (engine.plan.draft_bytes, engine.governor) == (0, None)
    reply(engine, 3)
    assert engine.stats().governor_reason == "K 0: from the profile."


def test_damaged_profile_is_said_and_left_aside(load: Callable[..., Engine]) -> None:
    plain = load()
    save_profile(plain.home.root, plain.profile_key, PROFILE).write_text("{", encoding="utf-8")
    notices: list[Notice] = []
    assert load(notices=notices).plan.num_draft_tokens == 4
    assert "profile-unusable" in [n.code for n in notices]


# -- the governor at work ----------------------------------------------------------------------


def test_text_does_not_depend_on_what_the_governor_does(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = reply(load(num_draft_tokens=0), 60)
    monkeypatch.setattr(speculation, "_EXPLORE_AFTER", 1)
    monkeypatch.setattr(speculation, "_EXPLORE_MAX", 1)
    monkeypatch.setattr(speculation, "_TRIAL_ROUNDS", 1)
    engine = load(depths=(1, 2, 3))
    governor = SpeculationGovernor((0, 1, 2, 3, 4), initial=3)

    def observe_virtual_seconds(each: RoundObservation) -> None:
        """The deeper the draft, the slower its tokens, however busy the machine is."""
        verify_s = (each.num_accepted + 1) * (1 + each.num_draft / 5)
        SpeculationGovernor.observe(
            governor, replace(each, draft_s=0.0, verify_s=verify_s, stall_s=0.0)
        )

    monkeypatch.setattr(governor, "observe", observe_virtual_seconds)
    monkeypatch.setattr(engine, "governor", governor)
    rounds: list[RoundObservation] = []
    engine.on_round = rounds.append
    assert reply(engine, 60) == expected
    assert len({each.num_draft for each in rounds}) >= 3, "it did try other depths"
    stats = engine.stats()
    assert sum(each.num_accepted for each in rounds) == stats.num_accepted
    assert sum(each.num_draft for each in rounds) == stats.num_drafted
    assert sum(each.num_records for each in rounds) == stats.num_records_loaded
    assert sum(each.verify_s for each in rounds) == pytest.approx(stats.verify_s)
    assert stats.governor_reason


def test_governor_is_given_all_depths_up_to_the_plans_unless_told(
    load: Callable[..., Engine],
) -> None:
    governors = [load().governor, load(depths=(1, 2, 9)).governor]
    assert [g.candidates for g in governors if g] == [(0, 1, 2, 3, 4), (0, 1, 2, 4)]


def test_seeded_sampling_keeps_k(load: Callable[..., Engine]) -> None:
    engine = load(draft_experts=DraftExperts.ALL)
    drafted: list[int] = []
    engine.on_round = lambda each: drafted.append(each.num_draft)
    first = reply(engine, 80, temperature=0.9, seed=3)
    assert engine.stats().governor_reason == "K 4: fixed, since a seed was given."
    assert set(drafted[:-2]) == {4}
    assert reply(engine, 80, temperature=0.9, seed=3) == first


@pytest.mark.parametrize("k", [None, 3])
def test_seeded_sampling_does_not_draft_with_what_happens_to_be_cached(
    load: Callable[..., Engine], k: int | None
) -> None:
    notices: list[Notice] = []
    engine = load(
        notices=notices, draft_experts=DraftExperts.CACHED, num_draft_tokens=k, budget=TIGHT
    )
    texts = [reply(engine, 60, temperature=0.9, seed=3) for _ in range(3)]
    assert texts[0] == texts[1] == texts[2]
    assert engine.stats().num_drafted == 0
    assert "a seed was given" in engine.stats().governor_reason
    told = [n.text for n in notices if n.code == "seed-without-draft"]
    assert len(told) == (1 if k else 0), "what was asked for and is not done is said once"
    reply(engine, 20)
    assert engine.stats().num_drafted > 0, "greedy replies draft"


def test_cache_that_cannot_be_rolled_back_is_the_reason_for_k_of_0(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()
    monkeypatch.setattr(type(engine.state), "can_roll_back", property(lambda self: False))
    reply(engine, 4)
    stats = engine.stats()
    assert (stats.num_drafted, stats.num_draft_tokens) == (0, 0)
    assert stats.governor_reason == "K 0: this model's cache cannot be rolled back."


# -- prefetching at work -----------------------------------------------------------------------


def test_window_of_k_has_a_batch_after_every_token(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(num_draft_tokens=6, lookahead=Lookahead.BATCHES)
    planner = engine.executor.driver.planner
    boundaries: list[int] = []
    plan = planner.plan

    def planned(snapshot, residency, *, num_drafted):
        boundaries.append(num_drafted)
        return plan(snapshot, residency, num_drafted=num_drafted)

    monkeypatch.setattr(planner, "plan", planned)
    monkeypatch.setattr(planner, "observe_transfer", lambda num_bytes, seconds: None)
    reply(engine, 20)
    full = boundaries[: boundaries.index(6) + 1]
    assert full == [1, 2, 3, 4, 5, 6], "a link of unknown speed is taken for a fast one"
    assert engine.executor.driver.lookahead.is_empty


def test_prefetches_are_used_and_their_link_time_is_measured(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    for module in (disk, draft, executor):
        monkeypatch.setattr(module, "time", TickingClock())
    engine = load(num_draft_tokens=4, budget=TIGHT)
    reply(engine, 40)
    traffic, planner = engine.executor.meter.decode, engine.executor.driver.planner
    assert 0 < traffic.num_prefetch_used <= traffic.num_prefetched
    assert planner.record_s is not None
    assert planner.draft_token_s is not None
    stats = engine.stats()
    assert planner.draft_token_s <= 2 * stats.draft_s / stats.num_drafted
    without = load(num_draft_tokens=4, budget=TIGHT, is_prefetch_enabled=False)
    reply(without, 40)
    assert without.stats().num_records_prefetched == 0
    assert stats.num_misses < without.stats().num_misses


def test_prefetching_that_does_not_pay_is_said_once(load: Callable[..., Engine]) -> None:
    notices: list[Notice] = []
    engine = load(notices=notices, num_draft_tokens=4, budget=TIGHT)
    useless = payoff.PrefetchRound(num_prefetched=10, num_used=0, saved_s=0.0, spent_s=1.0)
    for _ in range(20):
        engine.executor.driver.payoff.observe(useless)
        engine.executor.driver.prediction_payoff.observe(useless)
    reply(engine, 20)
    (notice,) = [n for n in notices if n.code == "predictions-off"]
    assert "0% of the records" in notice.text
    (notice,) = [n for n in notices if n.code == "prefetch-off"]
    assert "0% of the records" in notice.text
    assert engine.stats().num_records_prefetched == 0
