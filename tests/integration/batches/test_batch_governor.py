"""Batches that choose their own K: the same texts, and what is drafted for them.

Seconds are virtual where K is to change, so that no machine decides what is tested.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from types import SimpleNamespace

import pytest
from batch_scenes import PROMPTS, Load, collect, make_samplings, replies_alone, some_tokens
from mira_engine.config import MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import Notice
from mira_engine.policy import speculation
from mira_engine.policy.batch_speculation import BatchGovernor
from mira_engine.policy.speculation import RoundObservation
from mira_engine.runtime.batch import BatchDecoder
from mira_engine.runtime.draft import DraftWindow
from mira_engine.runtime.executor import ExpertExecutor
from mira_engine.runtime.passes import ModelPasses
from mira_engine.types import DraftExperts, Phase, Precision

GREEDY = SamplingConfig(max_new_tokens=24)


@pytest.fixture
def load_governed(load: Load) -> Load:
    """Loads engines whose plan has a draft of up to four tokens and a governor."""

    def make(**changes: object) -> Engine:
        engine = load(num_draft_tokens=None, **changes)
        assert engine.governor is not None
        assert engine.governor.candidates == (0, 1, 2, 3, 4)
        return engine

    return make


@pytest.fixture
def set_seconds(monkeypatch: pytest.MonkeyPatch) -> Callable[[float, float], None]:
    """Has every round cost so many virtual seconds: for a drafted token, for a verified one."""
    observe = BatchGovernor.observe

    def set_to(draft_s: float, token_s: float) -> None:
        def observe_virtual(self: BatchGovernor, each: RoundObservation) -> None:
            verify_s = 1 + token_s * each.num_requests * (each.num_draft + 1)
            draft = each.num_draft * draft_s
            observe(self, replace(each, draft_s=draft, verify_s=verify_s, stall_s=0.0))

        monkeypatch.setattr(BatchGovernor, "observe", observe_virtual)

    return set_to


@pytest.fixture
def is_restless(monkeypatch: pytest.MonkeyPatch) -> None:
    """Has governors try another K after every round."""
    for name in ("_EXPLORE_AFTER", "_EXPLORE_MAX", "_TRIAL_ROUNDS"):
        monkeypatch.setattr(speculation, name, 1)
    monkeypatch.setattr(speculation, "_EXPLORE_FLOOR", 0.0)


def rounds_of(engine: Engine) -> list[RoundObservation]:
    """What the engine's rounds do from now on."""
    rounds: list[RoundObservation] = []
    engine.on_round = rounds.append
    return rounds


class TakesTurns:
    """A governor that goes through all depths, one a round."""

    def __init__(self, depths: Sequence[int]) -> None:
        self.depths, self.num_rounds = depths, 0

    def choose(self, num_requests: int = 1) -> speculation.KChoice:
        k = self.depths[self.num_rounds % len(self.depths)]
        return speculation.KChoice(k, f"K {k}: its turn.")

    def observe(self, observation: RoundObservation) -> None:
        self.num_rounds += 1


# -- the text ------------------------------------------------------------------------------------


def test_greedy_texts_do_not_depend_on_what_the_governor_does(
    load_governed: Load,
    set_seconds: Callable[[float, float], None],
    is_restless: None,
) -> None:
    engine = load_governed()
    expected = replies_alone(engine, PROMPTS, make_samplings())
    set_seconds(0.1, 0.01)
    rounds = rounds_of(engine)
    for _ in range(3):
        assert collect(engine.generate(PROMPTS, make_samplings()))[0] == expected
    assert {each.num_draft for each in rounds} >= {0, 1, 2}, "it did try other depths"
    assert {each.num_requests for each in rounds} == {1, 2, 3, 4}


@pytest.mark.parametrize("depths", [(0, 1, 2, 3, 4), (4, 0), (3, 1)])
def test_greedy_texts_are_the_same_through_all_depths(
    load_governed: Load, monkeypatch: pytest.MonkeyPatch, depths: tuple[int, ...]
) -> None:
    engine = load_governed()
    expected = replies_alone(engine, PROMPTS, make_samplings())
    monkeypatch.setattr(engine._several, "_governor_in_force", lambda: TakesTurns(depths))
    rounds = rounds_of(engine)
    assert collect(engine.generate(PROMPTS, make_samplings()))[0] == expected
    assert {each.num_draft for each in rounds} >= set(depths)
    stats = engine.stats()
    assert sum(each.num_accepted for each in rounds) == stats.num_accepted
    assert sum(each.num_records for each in rounds) == stats.num_records_loaded
    assert sum(each.draft_s for each in rounds) == pytest.approx(stats.draft_s)
    assert sum(each.verify_s for each in rounds) == pytest.approx(stats.verify_s)


def test_tokens_of_a_rejected_draft_in_the_text_are_seen(
    load_governed: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The equalities above rest on the verification: without it they would not hold."""
    engine = load_governed()
    expected = replies_alone(engine, PROMPTS, make_samplings())
    monkeypatch.setattr(engine._several, "_governor_in_force", lambda: TakesTurns((0, 4)))
    accept = lambda sampler, history, drafts, logits: (len(drafts), int(logits[-1].argmax()))
    monkeypatch.setattr("mira_engine.model.sampling.Sampler.accept", accept)
    assert collect(engine.generate(PROMPTS, make_samplings()))[0] != expected


def test_sampled_texts_are_those_of_replies_alone_with_the_same_depths(
    load_governed: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The sampler's rule is the conversation's, whatever K's a batch takes."""
    engine = load_governed(draft_experts=DraftExperts.ALL)
    monkeypatch.setattr(engine, "_kept_depth", lambda samplings: None)
    expected = []
    for prompt, sampling in zip(PROMPTS, make_samplings(0.9), strict=True):
        monkeypatch.setattr(engine, "governor", TakesTurns((2, 0, 4, 1)))
        expected += replies_alone(engine, [prompt], [sampling])
    monkeypatch.setattr(engine._several, "_governor_in_force", lambda: TakesTurns((2, 0, 4, 1)))
    assert collect(engine.generate(PROMPTS, make_samplings(0.9)))[0] == expected
    assert expected != replies_alone(engine, PROMPTS, make_samplings())


# -- what is drafted -----------------------------------------------------------------------------


def test_rounds_without_a_draft_touch_nothing_of_the_draft(
    load_governed: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, phases = load_governed(), []
    monkeypatch.setattr(engine._several, "_governor_in_force", lambda: TakesTurns((0,)))
    forward = ModelPasses.forward_batch

    def noting(self: ModelPasses, state: object, rows: object, phase: Phase, **at: object):
        phases.append(phase)
        return forward(self, state, rows, phase, **at)

    def refuse(*_: object) -> None:
        raise AssertionError("the draft's")

    monkeypatch.setattr(ModelPasses, "forward_batch", noting)
    monkeypatch.setattr(ExpertExecutor, "_run_draft", refuse)
    monkeypatch.setattr(DraftWindow, "begin", refuse)
    monkeypatch.setattr(DraftWindow, "end", refuse)
    collect(engine.generate(PROMPTS, make_samplings()))
    assert set(phases) == {Phase.PREFILL, Phase.DECODE}
    assert engine.stats().num_drafted == 0


def test_draft_of_a_request_with_few_tokens_left_is_cut_to_them(
    load_governed: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, lengths = load_governed(), []
    monkeypatch.setattr(engine._several, "_governor_in_force", lambda: TakesTurns((4,)))
    draft = BatchDecoder._draft

    def noting(self: BatchDecoder, k: int) -> list[list[object]]:
        drafted = draft(self, k)
        lengths.append([len(tokens) for tokens in drafted])
        return drafted

    monkeypatch.setattr(BatchDecoder, "_draft", noting)
    limits = [SamplingConfig(max_new_tokens=limit) for limit in (2, 4, 20)]
    collect(engine.generate(PROMPTS[:3], limits))
    assert lengths[0] == [0, 2, 4]


def test_batch_drafts_where_that_pays_and_not_where_it_does_not(
    load_governed: Load, set_seconds: Callable[[float, float], None]
) -> None:
    engine = load_governed()
    prompts = [some_tokens(5, seed) for seed in range(4)]
    rounds = rounds_of(engine)
    for draft_s, is_worth_it in ((0.0, True), (200.0, False)):
        set_seconds(draft_s, 0.0)
        for _ in range(2):
            collect(engine.generate(prompts, SamplingConfig(max_new_tokens=40)))
        k = engine._several._governor_in_force().choose(4).num_draft_tokens
        assert (k > 0) == is_worth_it
    assert rounds[0].num_draft == 0


# -- who chooses ---------------------------------------------------------------------------------


def test_stats_give_each_rounds_k_and_why(
    load_governed: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load_governed()
    monkeypatch.setattr(engine._several, "_governor_in_force", lambda: TakesTurns((3, 0, 1)))
    told: list[tuple[int, str]] = []
    engine.on_round = lambda each: told.append(
        (engine.stats().num_draft_tokens, engine.stats().governor_reason)
    )
    collect(engine.generate(PROMPTS[:1], GREEDY))
    assert told[:3] == [(3, "K 3: its turn."), (0, "K 0: its turn."), (1, "K 1: its turn.")]
    assert engine.stats().governor_reason == told[-1][1]


def test_governor_stays_from_batch_to_batch(load_governed: Load) -> None:
    engine = load_governed()
    collect(engine.generate(PROMPTS, make_samplings()))
    assert engine.stats().governor_reason
    events = engine.generate(PROMPTS, make_samplings())
    for _ in range(5):
        next(events)
    assert "tok/s expected" in engine.stats().governor_reason, "measured before"


def test_other_conversation_governor_means_another_one_for_batches(load_governed: Load) -> None:
    engine = load_governed()
    first = engine._several._governor_in_force()
    assert engine._several._governor_in_force() is first
    engine.governor = speculation.SpeculationGovernor((0, 2))
    assert engine._several._governor_in_force().candidates == (0, 2)


def test_costs_are_measured_anew_when_native_kernels_are_taken_up(load_governed: Load) -> None:
    engine = load_governed()
    collect(engine.generate(PROMPTS, make_samplings()))
    assert "expected" in engine._several._governor_in_force().choose(4).reason
    engine.native_path = SimpleNamespace(is_native=True, take=lambda: True)
    assert "not measured yet" in engine._several._governor_in_force().choose(4).reason
    engine.native_path = None


def test_given_k_is_kept(load: Load) -> None:
    engine = load(num_draft_tokens=3)
    rounds = rounds_of(engine)
    collect(engine.generate(PROMPTS, make_samplings()))
    assert engine.stats().governor_reason == "K 3: as asked for."
    assert {each.num_draft for each in rounds if each.num_requests == 4} == {3}


def test_one_seed_keeps_k_for_the_whole_batch(load_governed: Load) -> None:
    engine = load_governed(draft_experts=DraftExperts.ALL)
    rounds = rounds_of(engine)
    one = [GREEDY, replace(GREEDY, temperature=0.9, seed=3)]
    first, _ = collect(engine.generate(PROMPTS[:2], one))
    assert engine.stats().governor_reason == "K 4: fixed, since a seed was given."
    assert rounds[0].num_draft == rounds[1].num_draft == 4
    assert collect(engine.generate(PROMPTS[:2], one))[0] == first


@pytest.mark.parametrize("k", [None, 3])
def test_seed_does_not_draft_with_what_happens_to_be_cached(
    load: Load, notices: list[Notice], k: int | None
) -> None:
    engine = load(
        precision=Precision.NESTED,
        draft_experts=DraftExperts.CACHED,
        num_draft_tokens=k,
        budget=MemoryAmount(share=0.9),
    )
    sampled = make_samplings(0.9)
    texts = [collect(engine.generate(PROMPTS, sampled))[0] for _ in range(2)]
    assert texts[0] == texts[1]
    assert engine.stats().num_drafted == 0
    assert engine.stats().governor_reason.startswith("K 0: a seed was given")
    told = [notice for notice in notices if notice.code == "seed-without-draft"]
    assert len(told) == (1 if k else 0)
