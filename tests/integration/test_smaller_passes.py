"""Prompts are read in smaller passes only where a long one ran out of memory, and then alone.

Where another pass did, the experts get less memory, and prompts are read as before.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.errors import MemoryShortageError
from mira_engine.events import ChatMessage
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.memory_retry import SHRUNK
from mira_engine.prepare import prepare
from mira_engine.runtime.shortage import LEAST_CHUNK, smaller_chunk
from mira_engine.types import ComputeDtype, DraftExperts, FinishReason, Phase, Precision
from shortages import SHORTAGES, Session, failing, failing_passes, new_objects_only

CONFIG = EngineConfig(
    precision=Precision.NESTED,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=1.2),
    num_draft_tokens=3,
    draft_experts=DraftExperts.ALL,
    context_length=256,
    num_threads=1,
)
QUESTION = "Two and two, and then two more of those that were there before: how many?"
BRIEF = SamplingConfig(max_new_tokens=8)
NUM_LAYERS = 2


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> ModelHome:
    """A tiny chat model, prepared."""
    library = ModelLibrary(tmp_path_factory.mktemp("passes"))
    made = library.resolve(str(tiny_checkpoint("olmoe", tokenizer=True)))
    prepare(made, Precision.NESTED, on_progress=lambda *_: None, is_cancelled=lambda: False)
    return made


@pytest.fixture(autouse=True, scope="module")
def _fast_collections() -> Iterator[None]:
    with new_objects_only():
        yield


@pytest.fixture
def start(home: ModelHome) -> Iterator[Callable[[int], Session]]:
    sessions: list[Session] = []

    def make(chunk: int) -> Session:
        sessions.append(Session(home, replace(CONFIG, prefill_chunk_tokens=chunk)))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


@pytest.fixture
def num_prompt(start: Callable[[int], Session]) -> int:
    """Tokens of the question."""
    chat = (ChatMessage(role="user", content=QUESTION),)
    found = len(start(256).engine.render(chat))
    assert 4 * LEAST_CHUNK < found < 200
    return found


def _nth(phase: Phase, number: int) -> Callable[[Phase, int], bool]:
    return lambda now, calls: (now, calls) == (phase, number)


def _is_shrunk(session: Session, before_bytes: int) -> bool:
    """Whether the experts got less; half measures fail."""
    less = session.engine.plan.budget_bytes <= 0.9 * before_bytes
    assert less or session.engine.plan.budget_bytes == before_bytes
    return less


@pytest.mark.parametrize("is_whole", [True, False], ids=["a whole chunk", "half a chunk"])
def test_long_pass_over_a_prompt_that_fails_makes_passes_smaller_and_leaves_the_experts(
    start: Callable[[int], Session],
    num_prompt: int,
    monkeypatch: pytest.MonkeyPatch,
    is_whole: bool,
) -> None:
    # Two passes, the second as long as the first or half as long.
    chunk = -(-num_prompt // 2) if is_whole else 2 * num_prompt // 3
    session = start(chunk)
    engine, budget = session.engine, session.engine.plan.budget_bytes

    with failing_passes(monkeypatch, _nth(Phase.PREFILL, 0 if is_whole else NUM_LAYERS)) as seen:
        session.answer(QUESTION, BRIEF)

    failed = chunk if is_whole else num_prompt - chunk
    assert session.engine is engine
    assert not _is_shrunk(session, budget)
    assert engine.config.prefill_chunk_tokens == smaller_chunk(failed)
    num_passes = -(-num_prompt // smaller_chunk(failed))
    assert seen.count(Phase.PREFILL) >= NUM_LAYERS * num_passes
    assert len(session.notices(SHRUNK)) == 1


def test_short_last_pass_over_a_prompt_that_fails_takes_memory_from_the_experts(
    start: Callable[[int], Session], num_prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk = num_prompt - LEAST_CHUNK - 4
    session = start(chunk)
    budget = session.engine.plan.budget_bytes

    with failing_passes(monkeypatch, _nth(Phase.PREFILL, NUM_LAYERS)):
        session.answer(QUESTION, BRIEF)

    assert _is_shrunk(session, budget)
    assert session.engine.config.prefill_chunk_tokens == chunk


def test_pass_that_cannot_be_smaller_takes_memory_from_the_experts(
    start: Callable[[int], Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start(LEAST_CHUNK)
    budget = session.engine.plan.budget_bytes

    with failing_passes(monkeypatch, _nth(Phase.PREFILL, 0)):
        session.answer(QUESTION, BRIEF)

    assert _is_shrunk(session, budget)
    assert session.engine.config.prefill_chunk_tokens == LEAST_CHUNK


@pytest.mark.parametrize(("phase", "number"), [(Phase.DRAFT, 0), (Phase.VERIFY, 3)])
def test_shortage_after_a_long_last_pass_takes_memory_from_the_experts(
    start: Callable[[int], Session],
    num_prompt: int,
    monkeypatch: pytest.MonkeyPatch,
    phase: Phase,
    number: int,
) -> None:
    session = start(num_prompt)  # All of it is read at once, by the pass before.
    budget = session.engine.plan.budget_bytes

    with failing_passes(monkeypatch, _nth(phase, number)):
        session.answer(QUESTION, BRIEF)

    assert _is_shrunk(session, budget)
    assert session.engine.config.prefill_chunk_tokens == num_prompt
    assert "prompt tokens" not in session.notices(SHRUNK)[0]


def test_shortage_outside_of_passes_says_nothing_of_a_prompt_that_was_broken_off_before(
    start: Callable[[int], Session], num_prompt: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = start(num_prompt).engine
    prompt = engine.render((ChatMessage(role="user", content=QUESTION),))
    engine.executor.is_cancelled = lambda: True
    steps = engine.reply(prompt, BRIEF)
    with pytest.raises(StopIteration) as stopped:
        next(steps)
    assert stopped.value.value is FinishReason.CANCELLED
    engine.executor.is_cancelled = lambda: False

    with (
        failing(monkeypatch, type(engine), "take_compiled", SHORTAGES["host"]),
        pytest.raises(MemoryShortageError) as caught,
    ):
        next(engine.reply(prompt, BRIEF))

    assert caught.value.num_prompt_tokens == 0
