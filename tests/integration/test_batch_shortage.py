"""A batch that a shortage breaks off goes on with the same random numbers, and with its K.

Oracle: the same seeded batch, unbroken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from fake_card import Load, loading
from mira_engine.config import MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import Notice
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.model.batch_state import BatchState
from mira_engine.prepare import prepare
from mira_engine.runtime.requests import BatchToken, RequestResult
from mira_engine.types import DraftExperts, Phase, Precision
from shortages import SHORTAGES, failing, failing_passes, new_objects_only

PROMPTS = [[7, 99, 23, 180, 41], [5, 66, 12], [200, 3, 17, 90, 33, 21, 60, 8]]
SAMPLINGS = [
    SamplingConfig(max_new_tokens=limit, temperature=0.9, seed=seed)
    for seed, limit in enumerate((12, 9, 14))
]
CHUNK = 32


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> ModelHome:
    """A family whose requests share a cache, prepared."""
    made = ModelLibrary(tmp_path_factory.mktemp("batch")).resolve(str(tiny_checkpoint("olmoe")))
    prepare(made, Precision.NESTED, on_progress=lambda *_: None, is_cancelled=lambda: False)
    return made


@pytest.fixture(autouse=True, scope="module")
def _fast_collections() -> Iterator[None]:
    with new_objects_only():
        yield


@pytest.fixture
def load(home: ModelHome) -> Iterator[Load]:
    with loading() as load_any:

        def drafting(notices: list[Notice], **changes: object) -> Engine:
            fields = {
                "precision": Precision.NESTED,
                "budget": MemoryAmount(share=1.2),
                "num_draft_tokens": 3,
                "draft_experts": DraftExperts.ALL,
                "context_length": 256,
                "prefill_chunk_tokens": CHUNK,
            }
            return load_any(home, notices, **(fields | changes))

        yield drafting


def _batch(engine: Engine) -> list[tuple[int, ...]]:
    events = list(engine.generate(PROMPTS, SAMPLINGS))
    results = {event.request: event.tokens for event in events if isinstance(event, RequestResult)}
    for number, tokens in results.items():
        told = [e.token for e in events if isinstance(e, BatchToken) and e.request == number]
        assert tuple(told) == tokens, "each token is told once"
    return [results[number] for number in range(len(PROMPTS))]


Breaking = Callable[[pytest.MonkeyPatch], AbstractContextManager[object]]


def _in(phase: Phase, number: int) -> Breaking:
    """Breaks the call of the executor with this number in a phase."""
    return lambda patch: failing_passes(patch, lambda now, calls: (now, calls) == (phase, number))


def _between_rounds(number: int) -> Breaking:
    """Breaks the compaction with this number, before anything of a round is drawn."""
    return lambda patch: failing(patch, BatchState, "compact", SHORTAGES["host"], at=number)


def _after_accepting(number: int) -> Breaking:
    """Breaks a round whose tokens are drawn, and told to nobody."""
    return lambda patch: failing(patch, BatchState, "keep", SHORTAGES["host"], at=number)


@pytest.mark.parametrize(
    "breaking",
    [
        _in(Phase.DRAFT, 3),
        _in(Phase.VERIFY, 1),
        _in(Phase.DRAFT, 21),
        _in(Phase.VERIFY, 7),
        _between_rounds(0),
        _after_accepting(5),
    ],
    ids=["first draft", "first check", "draft", "check", "between rounds", "after accepting"],
)
def test_seeded_batch_that_is_broken_off_draws_the_same_random_numbers(
    load: Load, monkeypatch: pytest.MonkeyPatch, breaking: Breaking
) -> None:
    notices: list[Notice] = []
    engine = load(notices)
    expected = _batch(engine)
    assert len(set(expected)) == len(PROMPTS)
    assert engine.stats().num_accepted < engine.stats().num_drafted

    with breaking(monkeypatch):
        found = _batch(engine)

    assert found == expected
    assert [notice.code for notice in notices].count("batch-in-turn") == 1, "it was not broken off"


def test_shortage_in_a_batch_leaves_the_prompts_passes_as_they_are(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load([])

    with _in(Phase.VERIFY, 3)(monkeypatch):
        _batch(engine)

    assert engine.config.prefill_chunk_tokens == CHUNK


def test_shortage_in_a_search_makes_that_search_s_passes_smaller_and_no_others(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load([], num_draft_tokens=0)
    prompt = [(7 * place) % 240 + 3 for place in range(2 * CHUNK)]
    expected = engine.beam_search(prompt, num_beams=2, max_new_tokens=3).tokens
    with failing_passes(monkeypatch, lambda phase, calls: False) as before:
        engine.beam_search(prompt, num_beams=2, max_new_tokens=3)

    with _in(Phase.DECODE, 1)(monkeypatch) as seen:
        found = engine.beam_search(prompt, num_beams=2, max_new_tokens=3).tokens

    assert found == expected
    num_prefills = before.count(Phase.PREFILL)
    assert seen.count(Phase.PREFILL) > 2 * num_prefills, "the second time in smaller passes"
    with failing_passes(monkeypatch, lambda phase, calls: False) as after:
        engine.beam_search(prompt, num_beams=2, max_new_tokens=3)
    assert after == before
