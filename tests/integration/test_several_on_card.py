"""Batches and beams on a card give what one reply, or the processor, gives; without a card.

Oracle of a batch: the same engine's replies one by one. Oracle of beams: the processor's, which
`test_beams` holds to transformers. float32; every read of a slot is checked against the copies.
The kernels are `plain_kernels`, but for one test.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import pytest
import torch
from fake_card import Load, Prepared, loading, plug_in_card, preparing, reply_of
from fake_queues import FakeQueues, RaceError
from mira_engine.config import MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import Notice
from mira_engine.library import ModelHome
from mira_engine.runtime.batch import BatchDecoder
from mira_engine.runtime.cuda_transfer import CudaTransfer
from mira_engine.runtime.requests import BatchEvent, RequestResult
from mira_engine.types import DraftExperts, FinishReason, Precision

pytest.importorskip("triton", reason="triton has no wheel for this system")

from plain_kernels import use_plain_kernels

LENGTHS = (5, 9, 3, 1, 8, 2, 7, 4)
NEW_TOKENS = (6, 9, 4, 7, 3, 8, 5, 6)
"""Of the eight requests: they begin side by side and end one after another."""


def _tokens(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 250, (num_tokens,), generator=generator).tolist()


PROMPTS = [_tokens(length, seed) for seed, length in enumerate(LENGTHS)]


def _samplings(size: int, temperature: float = 0.0) -> list[SamplingConfig]:
    return [
        SamplingConfig(max_new_tokens=limit, temperature=temperature, seed=seed)
        for seed, limit in enumerate(NEW_TOKENS[:size])
    ]


@pytest.fixture(scope="module")
def prepared(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> Prepared:
    return preparing(tmp_path_factory.mktemp("several"), tiny_checkpoint)


@pytest.fixture(scope="module")
def home(prepared: Prepared) -> ModelHome:
    """A family whose requests can share a cache, in two INT4 planes."""
    return prepared("olmoe", Precision.NESTED)


@pytest.fixture
def real_kernels() -> None:
    """Leaves the kernels to triton's interpreter."""


@pytest.fixture
def queues(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest) -> FakeQueues:
    if "real_kernels" not in request.fixturenames:
        use_plain_kernels(monkeypatch)
    return plug_in_card(monkeypatch)


@pytest.fixture
def load(queues: FakeQueues, home: ModelHome) -> Iterator[Load]:
    """Loads engines on the card, with room for a batch."""
    with loading() as load_any:

        def load(notices: list[Notice] | None = None, **changes: object) -> Engine:
            fields = {"precision": Precision.NESTED, "gpu": 0, "context_length": 512} | changes
            return load_any(home, notices, **fields)

        yield load


@pytest.fixture(scope="module")
def alone(home: ModelHome) -> list[list[int]]:
    """Each prompt's greedy reply by itself on the card, without a draft."""
    with pytest.MonkeyPatch.context() as patch, loading() as load_any:
        use_plain_kernels(patch)
        plug_in_card(patch)
        engine = load_any(home, precision=Precision.NESTED, gpu=0, context_length=512)
        return [
            reply_of(engine, limit, prompt)
            for prompt, limit in zip(PROMPTS, NEW_TOKENS, strict=True)
        ]


@pytest.fixture
def decoders(monkeypatch: pytest.MonkeyPatch) -> list[BatchDecoder]:
    """The decoders that engines make in this test."""
    made: list[BatchDecoder] = []
    run = BatchDecoder.run

    def noting_run(self: BatchDecoder) -> Iterator[BatchEvent]:
        made.append(self)
        return run(self)

    monkeypatch.setattr(BatchDecoder, "run", noting_run)
    return made


def _results(events: Iterator[BatchEvent]) -> list[RequestResult]:
    found = [event for event in events if isinstance(event, RequestResult)]
    return sorted(found, key=lambda result: result.request)


def _batch(engine: Engine, size: int) -> list[list[int]]:
    results = _results(engine.generate(PROMPTS[:size], _samplings(size)))
    return [list(result.tokens) for result in results]


def _fewest_slots(engine: Engine) -> MemoryAmount:
    """A budget of exactly top-k slots, with the draft where the engine has one."""
    plan = engine.plan
    return MemoryAmount(num_bytes=plan.draft_bytes + engine._top_k * plan.slot_bytes)


# -- batches --------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("size", [1, 3, 8])
def test_each_request_of_a_batch_on_a_card_equals_its_reply_alone(
    load: Load,
    alone: list[list[int]],
    decoders: list[BatchDecoder],
    size: int,
    num_draft_tokens: int,
) -> None:
    notices: list[Notice] = []
    engine = load(notices, num_draft_tokens=num_draft_tokens)

    assert _batch(engine, size) == alone[:size]

    assert len(decoders) == 1, "answered in turn"
    assert "batch-in-turn" not in {notice.code for notice in notices}
    stats = engine.stats()
    assert stats.num_new_tokens == sum(NEW_TOKENS[:size])
    assert (stats.num_drafted > 0) == (num_draft_tokens > 0)
    assert (stats.num_accepted > 0) == (num_draft_tokens > 0)


@pytest.mark.usefixtures("real_kernels")
def test_batch_by_the_cards_own_kernels_is_the_same(load: Load, alone: list[list[int]]) -> None:
    engine = load(num_draft_tokens=2)

    results = _results(engine.generate(PROMPTS[:3], SamplingConfig(max_new_tokens=3)))

    assert [list(result.tokens) for result in results] == [tokens[:3] for tokens in alone[:3]]


@pytest.mark.parametrize(
    ("num_draft_tokens", "experts"), [(0, None), (3, DraftExperts.ALL), (3, DraftExperts.CACHED)]
)
def test_batch_on_a_card_with_fewest_slots_equals_replies_alone(
    load: Load,
    alone: list[list[int]],
    queues: FakeQueues,
    num_draft_tokens: int,
    experts: DraftExperts | None,
) -> None:
    form = {"num_draft_tokens": num_draft_tokens, "draft_experts": experts}
    tight = load(**form, budget=_fewest_slots(load(**form)))
    assert tight.plan.num_slots == tight._top_k
    queues.copies.clear()

    assert _batch(tight, 3) == alone[:3]

    meter = tight.executor.meter
    assert meter.decode.num_misses > 0
    assert len(queues.copies) >= meter.prefill.num_records + meter.decode.num_records > 0


def test_sampled_batch_on_a_card_draws_what_each_request_would_alone(load: Load) -> None:
    engine = load(num_draft_tokens=3)
    samplings = _samplings(3, temperature=0.9)
    expected = []
    for prompt, sampling in zip(PROMPTS, samplings, strict=False):
        engine.state.reset()
        expected.append(tuple(t for t in engine.reply(prompt, sampling) if isinstance(t, int)))

    results = _results(engine.generate(PROMPTS[:3], samplings))

    assert [result.tokens for result in results] == expected


def test_request_on_a_card_that_ends_early_leaves_the_others_as_they_are(
    load: Load, alone: list[list[int]], decoders: list[BatchDecoder]
) -> None:
    engine = load(num_draft_tokens=3)
    engine._end_ids = frozenset({alone[1][2], alone[5][4]})
    expected = [_until_end(tokens, engine.end_ids) for tokens in alone]
    assert expected[1] != alone[1]

    results = _results(engine.generate(PROMPTS, _samplings(8)))

    assert [list(result.tokens) for result in results] == expected
    assert results[1].reason is FinishReason.STOP
    assert decoders[0].state.num_compactions >= 1
    assert len(decoders[0].state.lengths) < 8, "ended requests stay in the batch"


def _until_end(tokens: Sequence[int], end_ids: frozenset[int]) -> list[int]:
    ends = [place for place, token in enumerate(tokens) if token in end_ids]
    return list(tokens[: ends[0] + 1] if ends else tokens)


@pytest.mark.parametrize("cancel_at", [1, 7, 16])
def test_cancelled_batch_on_a_card_ends_all_requests_and_the_engine_goes_on(
    load: Load, alone: list[list[int]], cancel_at: int
) -> None:
    engine = load(num_draft_tokens=3)
    num_calls = 0

    def is_cancelled() -> bool:
        nonlocal num_calls
        num_calls += 1
        return num_calls >= cancel_at

    engine.executor.is_cancelled = is_cancelled
    results = _results(engine.generate(PROMPTS[:3], _samplings(3)))
    assert FinishReason.CANCELLED in {result.reason for result in results}
    for result, whole in zip(results, alone, strict=False):
        assert list(result.tokens) == whole[: len(result.tokens)]
        assert (len(result.tokens) < len(whole)) == (result.reason is FinishReason.CANCELLED)

    engine.executor.is_cancelled = lambda: False

    assert not any(map(engine.executor.driver.residency.is_pinned, range(engine.plan.num_slots)))
    assert _batch(engine, 3) == alone[:3]
    assert reply_of(engine, NEW_TOKENS[0], PROMPTS[0]) == alone[0]


def test_family_with_windows_answers_in_turn_on_a_card_too(
    prepared: Prepared, queues: FakeQueues, decoders: list[BatchDecoder]
) -> None:
    notices: list[Notice] = []
    with loading() as load_any:
        engine = load_any(prepared("mixtral", Precision.BF16), notices, gpu=0)
        expected = [reply_of(engine, 3, prompt) for prompt in PROMPTS[:2]]
        results = _results(engine.generate(PROMPTS[:2], SamplingConfig(max_new_tokens=3)))
    assert [list(result.tokens) for result in results] == expected
    assert "batch-in-turn" in {notice.code for notice in notices}
    assert not decoders


# -- planted faults: what the order of copies and launches rests on -------------------------------


@pytest.mark.parametrize(
    ("left_out", "experts"), [("release", None), ("release_all", DraftExperts.CACHED)]
)
def test_slot_of_a_batch_that_is_not_given_back_is_a_race(
    load: Load, monkeypatch: pytest.MonkeyPatch, left_out: str, experts: DraftExperts | None
) -> None:
    form = {"num_draft_tokens": 3 if experts else 0, "draft_experts": experts}
    tight = load(**form, budget=_fewest_slots(load(**form)))
    monkeypatch.setattr(CudaTransfer, left_out, lambda self, *slots: None)

    with pytest.raises(RaceError):
        _batch(tight, 3)


# -- beams ----------------------------------------------------------------------------------------


def test_beams_on_a_card_are_the_processors(
    prepared: Prepared, load: Load, queues: FakeQueues
) -> None:
    home, prompt = prepared("olmoe", Precision.BF16), _tokens(9, 7)
    with loading() as load_any:
        processor, card = (load_any(home, gpu=gpu, context_length=128) for gpu in (None, 0))
        texts = []
        for width in (1, 2, 4):
            expected = processor.beam_search(prompt, num_beams=width, max_new_tokens=10)
            found = card.beam_search(prompt, num_beams=width, max_new_tokens=10)
            assert found.tokens == expected.tokens
            assert found.num_passes == expected.num_passes
            texts.append(found.tokens)
    assert len(set(texts)) > 1, "beams that find the greedy text prove little"
    assert queues.copies


def test_beams_on_a_card_take_the_room_of_the_conversation(
    load: Load, alone: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load()
    assert reply_of(engine, NEW_TOKENS[0], PROMPTS[0]) == alone[0]
    held: list[bool] = []
    generate = engine.model.generate

    def generate_and_look(*args: object, **kwargs: object) -> torch.Tensor:
        held.extend(layer.is_initialized for layer in engine.state.cache.layers)
        return generate(*args, **kwargs)

    monkeypatch.setattr(engine.model, "generate", generate_and_look)
    engine.beam_search(PROMPTS[1], num_beams=2, max_new_tokens=3)

    assert held == [False] * len(engine.state.cache.layers), "two caches are more than planned"
    assert reply_of(engine, NEW_TOKENS[0], PROMPTS[0]) == alone[0]
