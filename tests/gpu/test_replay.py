"""The replayed engine: the trace's experts are computed, acceptance is as set, races are found."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

pytest.importorskip("triton", reason="triton has no wheel for this system")

from fake_graphs import FakeGraphs
from fake_queues import FakeQueues, RaceError
from gpu.decoding import BUDGETS, NUM_PROMPT_TOKENS, Case, Decoding
from gpu.replay import ACCEPTANCE, ReplayedEngine, SetAcceptance
from gpu.shapes import SMALL
from mira_engine.model.sampling import DraftToken
from mira_engine.policy.budget import MAX_CACHED_DRAFT_TOKENS
from mira_engine.runtime.cuda_transfer import CudaTransfer

LINK = "link as it is"


@pytest.fixture(scope="module")
def decoding() -> Decoding:
    return Decoding(SMALL, num_tokens=4)


@pytest.fixture
def start(decoding: Decoding) -> Iterator:
    """Begins a conversation, and closes it."""
    begun: list[ReplayedEngine] = []

    def make(row: str, budget: int = 0) -> ReplayedEngine:
        case = Case(budget=BUDGETS[budget], link=LINK, row=row)
        engine = ReplayedEngine(decoding.setting(case))
        begun.append(engine)
        engine.read_prompt(NUM_PROMPT_TOKENS)
        return engine

    yield make
    for engine in begun:
        engine.close()


def demands(engine: ReplayedEngine) -> list[tuple[int, list[tuple[int, int]]]]:
    """What the driver is asked for from now on, layer by layer."""
    asked: list[tuple[int, list[tuple[int, int]]]] = []

    def note(name: str, arguments, actions) -> None:
        if name == "enter_layer":
            asked.append((arguments[0], list(arguments[1])))

    engine.executor.driver.on_decision = note
    return asked


def test_decoding_computes_the_traces_experts(start, decoding: Decoding) -> None:
    engine = start("lru")
    asked = demands(engine)

    engine.round()

    ids = decoding._routing.target[NUM_PROMPT_TOKENS]
    assert asked == [
        (layer, [(expert, 1) for expert in sorted(row)]) for layer, row in enumerate(ids.tolist())
    ]


@pytest.mark.parametrize("row", ["lru", "everything"])
def test_recorded_steps_compute_what_launched_ones_do(
    row: str, start, decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    def graphs_of(queues: FakeQueues) -> FakeGraphs:
        graphs = FakeGraphs(queues)
        graphs.install(monkeypatch)
        return graphs

    # Which experts a cached draft lacks is counted at another moment where steps are recorded.
    monkeypatch.setattr(ReplayedEngine, "_chance", lambda self: 0.7)
    launched = start(row)
    asked = demands(launched)
    launched.run(4, num_warm_tokens=0)
    case = Case(budget=BUDGETS[0], link=LINK, row=row)

    recorded = ReplayedEngine(decoding.setting(case), graphs_of=graphs_of)
    try:
        recorded.read_prompt(NUM_PROMPT_TOKENS)
        asked_again = demands(recorded)
        figures = recorded.run(4, num_warm_tokens=0)
    finally:
        recorded.close()

    assert recorded.history == launched.history
    assert asked_again == asked
    assert figures["num_recorded_passes"] > 0
    assert figures["num_launched_passes"] == 0
    assert figures["notices"] == []


def test_round_after_a_rejection_goes_on_at_the_position_it_left(
    start, decoding: Decoding, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start("everything")
    monkeypatch.setattr(engine.sampler._random, "random", lambda: 1.0)  # Nothing stands.
    assert engine.round() == 1
    asked = demands(engine)

    engine.round()

    position = NUM_PROMPT_TOKENS + 1
    window = decoding._routing.target[position : position + MAX_CACHED_DRAFT_TOKENS + 1, 0]
    experts = [expert for expert, _ in asked[0][1]]
    assert experts == sorted(set(window.reshape(-1).tolist()))
    assert engine.state.num_cached == position + 1


def test_acceptance_falls_with_what_a_cached_draft_lacks(start) -> None:
    engine = start("everything")
    engine.routing.num_drafted, engine.routing.num_present = 8, 2

    assert engine._chance() == pytest.approx(ACCEPTANCE / 4)
    assert engine._chance() == ACCEPTANCE  # Counted anew: nothing is known to be missing.


@pytest.mark.parametrize(("chance", "expected"), [(1.0, 3), (0.0, 0)])
def test_set_acceptance_accepts_as_told(chance: float, expected: int) -> None:
    import torch

    sampler = SetAcceptance(lambda: chance)
    drafted = [DraftToken(token, None) for token in (1, 2, 3)]

    count, following = sampler.accept([0], drafted, torch.eye(4))

    assert (count, following) == (expected, expected)  # The row behind the last that stood.


def test_slot_written_before_its_reader_is_done_is_found(
    start, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start("lru")
    monkeypatch.setattr(CudaTransfer, "release", lambda self, slots: None)

    with pytest.raises(RaceError):
        engine.run(4, num_warm_tokens=0)


def test_memory_is_planned_as_the_engine_plans_it(decoding: Decoding) -> None:
    case = Case(budget=BUDGETS[0], link=LINK, row="everything")
    cached = decoding.setting(case).plan
    whole = decoding.setting(replace(case, budget=BUDGETS[1])).plan
    plain = decoding.setting(replace(case, row="lru")).plan

    assert (cached.num_draft_tokens, str(cached.draft_experts)) == (2, "cached")
    assert (whole.num_draft_tokens, str(whole.draft_experts)) == (3, "all")
    assert plain.num_draft_tokens == 0
    assert SMALL.top_k <= plain.num_slots < SMALL.num_layers * SMALL.num_experts
