"""Memory that runs out in a reply: it goes on after what was told, with less, once, and says so."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.errors import MemoryShortageError
from mira_engine.events import Cancel, GenerationDone, Notice
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.memory_retry import SHRUNK
from mira_engine.prepare import prepare
from mira_engine.runtime.requests import BatchToken, RequestResult
from mira_engine.types import ComputeDtype, DraftExperts, FinishReason, Phase, Precision
from shortages import SHORTAGES, Holdings, Session, failing_passes, new_objects_only

CONFIG = EngineConfig(
    precision=Precision.NESTED,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=1.2),
    num_draft_tokens=3,
    draft_experts=DraftExperts.ALL,
    context_length=256,
    num_threads=1,
    prefill_chunk_tokens=32,
)
QUESTION = "Two and two, and then two more of those that were there before: how many?"
BRIEF = SamplingConfig(max_new_tokens=14)
SEEDED = SamplingConfig(max_new_tokens=14, temperature=0.9, seed=5)
PROMPTS = [[7, 99, 23, 180, 41], [5, 66, 12], [200, 3, 17, 90, 33, 21, 60, 8]]


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> ModelHome:
    """A tiny chat model, prepared."""
    library = ModelLibrary(tmp_path_factory.mktemp("replies"))
    made = library.resolve(str(tiny_checkpoint("olmoe", tokenizer=True)))
    prepare(made, Precision.NESTED, on_progress=lambda *_: None, is_cancelled=lambda: False)
    return made


@pytest.fixture(autouse=True, scope="module")
def _fast_collections() -> Iterator[None]:
    with new_objects_only():
        yield


@pytest.fixture
def start(home: ModelHome) -> Iterator[Callable[..., Session]]:
    sessions: list[Session] = []

    def make(**changes: object) -> Session:
        sessions.append(Session(home, replace(CONFIG, **changes)))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


@pytest.fixture
def load(home: ModelHome) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(notices: list[Notice] | None = None, **changes: object) -> Engine:
        told = [] if notices is None else notices
        engine = Engine.load(home, replace(CONFIG, **changes), on_notice=told.append)
        engine._end_ids = frozenset()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def _nth(phase: Phase, number: int, num_times: int = 1) -> Callable[[Phase, int], bool]:
    """Fails calls of the executor in a phase, from the one with this number."""
    return lambda now, calls: now is phase and number <= calls < number + num_times


@pytest.mark.parametrize(
    ("phase", "number"),
    [
        (Phase.PREFILL, 1),
        (Phase.PREFILL, 5),
        (Phase.DRAFT, 0),
        (Phase.DRAFT, 9),
        (Phase.VERIFY, 1),
        (Phase.VERIFY, 6),
    ],
)
def test_reply_goes_on_with_the_same_text(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch, phase: Phase, number: int
) -> None:
    session = start()
    expected = session.answer(QUESTION, BRIEF)
    before, first = session.engine.plan.budget_bytes, session.engine
    session.engine.state.reset()

    with failing_passes(monkeypatch, _nth(phase, number)):
        found = session.answer(QUESTION, BRIEF)

    assert found.text == expected.text
    assert found.stats.num_prompt_tokens == expected.stats.num_prompt_tokens
    assert len(session.notices(SHRUNK)) == 1
    if phase is Phase.PREFILL:
        assert session.engine is first, "smaller passes take no reload"
        assert session.engine.config.prefill_chunk_tokens == 16
    else:
        assert session.engine.plan.budget_bytes <= 0.9 * before
    assert session.answer(QUESTION, BRIEF).text == expected.text


def test_reply_goes_on_wherever_it_was_broken_off(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start(budget=MemoryAmount(share=4.0))
    expected = session.answer(QUESTION, BRIEF)
    session.engine.state.reset()
    with failing_passes(monkeypatch, lambda phase, number: False) as seen:
        session.answer(QUESTION, BRIEF)
    places, kinds = random.Random(3), list(SHORTAGES.values())
    for place in sorted(places.sample(range(len(seen)), 5)):
        session.engine.state.reset()
        phase = seen[place]
        number = seen[:place].count(phase)
        with failing_passes(monkeypatch, _nth(phase, number), places.choice(kinds)):
            assert session.answer(QUESTION, BRIEF).text == expected.text, (phase, number)


def test_plain_decoding_goes_on_with_the_same_text(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start(num_draft_tokens=0)
    expected = session.answer(QUESTION, BRIEF)

    with failing_passes(monkeypatch, _nth(Phase.DECODE, 7)):
        found = session.answer(QUESTION, BRIEF)

    assert found.text == expected.text
    assert session.notices(SHRUNK)


@pytest.mark.parametrize(("phase", "number"), [(Phase.DRAFT, 5), (Phase.VERIFY, 3)])
def test_seeded_reply_draws_the_same_random_numbers_again(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch, phase: Phase, number: int
) -> None:
    session = start(budget=MemoryAmount(share=4.0))
    expected = session.answer(QUESTION, SEEDED)

    with failing_passes(monkeypatch, _nth(phase, number)):
        found = session.answer(QUESTION, SEEDED)

    assert found.stats.num_drafted > 0
    assert found.text == expected.text


def test_reload_in_a_reply_holds_no_former_engine(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    holdings = Holdings()
    session = start()
    load, held = Engine.load, []

    def watching(*args: object, **kwargs: object) -> Engine:
        held.append(holdings.now())
        return load(*args, **kwargs)

    monkeypatch.setattr(Engine, "load", watching)
    with failing_passes(monkeypatch, _nth(Phase.VERIFY, 2)):
        session.answer(QUESTION, BRIEF)

    assert held == [[]]


@pytest.mark.parametrize("phase", [Phase.PREFILL, Phase.VERIFY])
def test_second_shortage_in_a_reply_is_told_and_the_worker_goes_on(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch, phase: Phase
) -> None:
    session = start()
    expected = session.answer(QUESTION, BRIEF)
    session.engine.state.reset()

    with failing_passes(monkeypatch, _nth(phase, 2, num_times=999)) as seen:
        failed = session.failure(QUESTION, BRIEF)

    assert failed.code == "MemoryShortageError"
    assert "once more with less" in failed.message
    assert "Close other programs" in failed.hint
    assert seen.count(phase) < 20, "tried again and again"
    assert session.answer(QUESTION, BRIEF).text == expected.text


def test_shrinking_below_the_minimum_is_told_and_the_former_engine_comes_back(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start()
    expected, plan = session.answer(QUESTION, BRIEF), session.engine.plan
    monkeypatch.setattr("mira_engine.memory_retry.free_bytes", lambda config: 0)

    with failing_passes(monkeypatch, _nth(Phase.VERIFY, 0)):
        failed = session.failure(QUESTION, BRIEF)

    assert "did not help" in failed.message
    assert "former settings" in failed.message
    assert session.engine.plan == plan
    assert session.answer(QUESTION, BRIEF).text == expected.text


def test_cancel_while_the_model_is_loaded_anew_keeps_what_was_told(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start()
    expected = session.answer(QUESTION, BRIEF)

    def cancel(event: object) -> None:
        if isinstance(event, Notice) and event.code == SHRUNK:
            session.worker._accept(Cancel(request_id="g"))

    session.writer.on_event = cancel
    with failing_passes(monkeypatch, _nth(Phase.VERIFY, 5)):
        stopped = session.ask(QUESTION, BRIEF)
    session.writer.on_event = lambda event: None

    assert isinstance(stopped, GenerationDone)
    assert stopped.reason is FinishReason.CANCELLED
    assert stopped.text
    assert expected.text.startswith(stopped.text)
    assert stopped.stats.num_new_tokens > 0
    assert session.answer(QUESTION, BRIEF).text == expected.text


@pytest.mark.parametrize("kind", SHORTAGES)
def test_engine_gives_the_state_back_and_can_be_used_on(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    engine = load()
    expected = _reply(engine, PROMPTS[0])
    reply = engine.reply(PROMPTS[0], BRIEF)

    with (
        failing_passes(monkeypatch, _nth(Phase.VERIFY, 3), SHORTAGES[kind]),
        pytest.raises(MemoryShortageError) as caught,
    ):
        list(reply)

    assert caught.value.planned_bytes == engine.plan.total_bytes
    assert engine.state.num_cached == 0
    residency = engine.executor.driver.residency
    assert not any(map(residency.is_pinned, range(residency.num_slots)))
    assert _reply(engine, PROMPTS[0]) == expected


def _reply(engine: Engine, prompt: list[int]) -> list[int]:
    return [step for step in engine.reply(prompt, BRIEF) if isinstance(step, int)]


# -- several at once -----------------------------------------------------------------------


def _batch(engine: Engine, sampling: SamplingConfig) -> dict[int, tuple[int, ...]]:
    events = list(engine.generate(PROMPTS, sampling))
    results = {e.request: e for e in events if isinstance(e, RequestResult)}
    for number, result in results.items():
        told = [e.token for e in events if isinstance(e, BatchToken) and e.request == number]
        assert tuple(told) == result.tokens, "each token is told once"
        assert result.ttft_s > 0
    return {number: results[number].tokens for number in sorted(results)}


@pytest.mark.parametrize(
    ("phase", "number"), [(Phase.PREFILL, 0), (Phase.DRAFT, 4), (Phase.VERIFY, 3)]
)
def test_batch_goes_on_one_after_another(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch, phase: Phase, number: int
) -> None:
    notices: list[Notice] = []
    engine = load(notices)
    expected = _batch(engine, BRIEF)
    assert len(expected) == len(PROMPTS)

    with failing_passes(monkeypatch, _nth(phase, number)):
        found = _batch(engine, BRIEF)

    assert found == expected
    assert [notice.code for notice in notices].count("batch-in-turn") == 1


def test_batch_that_fails_alone_too_is_told(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()

    with (
        failing_passes(monkeypatch, _nth(Phase.VERIFY, 3, num_times=999)),
        pytest.raises(MemoryShortageError),
    ):
        list(engine.generate(PROMPTS, BRIEF))


def test_beams_are_searched_again_with_less(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    notices: list[Notice] = []
    engine = load(notices)
    expected = engine.beam_search(PROMPTS[0], num_beams=2, max_new_tokens=6).tokens

    with failing_passes(monkeypatch, _nth(Phase.DECODE, 3)):
        found = engine.beam_search(PROMPTS[0], num_beams=2, max_new_tokens=6).tokens

    assert found == expected
    assert "beams-again" in {notice.code for notice in notices}


def test_beams_that_fail_twice_are_told_and_the_engine_goes_on(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()
    expected = _reply(engine, PROMPTS[1])

    with (
        failing_passes(monkeypatch, _nth(Phase.DECODE, 1, num_times=999)) as seen,
        pytest.raises(MemoryShortageError) as caught,
    ):
        engine.beam_search(PROMPTS[0], num_beams=2, max_new_tokens=6)

    assert "fewer beams" in caught.value.hint
    assert seen.count(Phase.DECODE) < 8
    assert _reply(engine, PROMPTS[1]) == expected


def test_passes_keep_nothing_after_a_shortage(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()
    with (
        failing_passes(monkeypatch, _nth(Phase.DRAFT, 2)),
        pytest.raises(MemoryShortageError),
    ):
        _reply(engine, PROMPTS[0])

    kept = [layer.keys for layer in engine.state.cache.layers if layer.is_initialized]
    assert kept == []
