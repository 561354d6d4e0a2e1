"""Several requests at once answer as each would alone; beams are transformers' own.

Oracle of a batch: the engine's own reply to each prompt (which `test_exactness` holds to
transformers). Oracle of beam search: transformers on the same tiny checkpoint with its
eager experts. float32, unquantised store.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.errors import (
    BudgetError,
    CancelledError,
    ConfigError,
    ContextLengthError,
    NonFiniteError,
)
from mira_engine.events import Notice
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.model import operators
from mira_engine.model.batch_state import (
    PADDED_ATTENTION_IMPLEMENTATION,
    BatchState,
    attending_padded,
    can_pad,
)
from mira_engine.model.experts import only_rows
from mira_engine.model.linear import DenseSwitch
from mira_engine.prepare import prepare
from mira_engine.runtime import passes as runtime_passes
from mira_engine.runtime.batch import BatchDecoder
from mira_engine.runtime.draft import DraftWindow
from mira_engine.runtime.passes import ModelPasses
from mira_engine.runtime.requests import BatchEvent, BatchToken, RequestResult
from mira_engine.types import ComputeDtype, FinishReason, Phase, Precision
from tiny_models import tiny_config
from transformers import AutoModelForCausalLM

FAMILIES = ("mixtral", "qwen2_moe", "deepseek_v3", "olmoe", "ernie4_5_moe")
"""With full attention: grouped, biased and latent; shared experts, dense layers first."""

IN_TURN_FAMILIES = ("gpt_oss", "jamba")
"""Sliding windows, and recurrent state."""

BASE = EngineConfig(
    precision=Precision.FLOAT32,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=8.0),
    num_draft_tokens=0,
    context_length=512,
    num_threads=1,
)

LENGTHS = (5, 21, 13, 1)
NEW_TOKENS = (17, 24, 9, 30)
"""Of the four requests: the third ends long before the others, in the middle of the batch."""


def _tokens(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 250, (num_tokens,), generator=generator).tolist()


PROMPTS = [_tokens(length, seed) for seed, length in enumerate(LENGTHS)]


def _samplings(temperature: float = 0.0, **fields: object) -> list[SamplingConfig]:
    return [
        SamplingConfig(max_new_tokens=limit, temperature=temperature, seed=seed, **fields)
        for seed, limit in enumerate(NEW_TOKENS)
    ]


@pytest.fixture(scope="module")
def prepared(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> Callable[[str], ModelHome]:
    """Prepares a family's tiny checkpoint once, without windows where it can be without."""
    library = ModelLibrary(tmp_path_factory.mktemp("batch"))
    homes: dict[str, ModelHome] = {}

    def make(family: str) -> ModelHome:
        if family not in homes:
            folder = tiny_checkpoint(family, has_windows=family in IN_TURN_FAMILIES)
            homes[family] = library.resolve(str(folder))
            prepare(
                homes[family],
                Precision.FLOAT32,
                on_progress=lambda *_: None,
                is_cancelled=lambda: False,
            )
        return homes[family]

    return make


Load = Callable[..., Engine]


@pytest.fixture
def notices() -> list[Notice]:
    return []


@pytest.fixture
def load(prepared: Callable[[str], ModelHome], notices: list[Notice]) -> Iterator[Load]:
    """Loads engines whose replies have no end but their length."""
    engines: list[Engine] = []

    def make(family: str = "olmoe", **changes: object) -> Engine:
        engine = Engine.load(prepared(family), replace(BASE, **changes), on_notice=notices.append)
        engine._end_ids = frozenset()
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def _alone(
    engine: Engine, prompts: Sequence[list[int]], samplings: Sequence[SamplingConfig]
) -> list[list[int]]:
    """Each prompt's reply by itself, from an empty cache."""
    replies = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        engine.state.reset()
        replies.append([t for t in engine.reply(prompt, sampling) if isinstance(t, int)])
    return replies


def _answers(events: Iterator[BatchEvent]) -> tuple[list[list[int]], list[RequestResult]]:
    """Tokens as they came and results, both by request; every request ends once."""
    tokens: dict[int, list[int]] = {}
    results: dict[int, RequestResult] = {}
    for event in events:
        if isinstance(event, BatchToken):
            assert event.request not in results, "a token after the end"
            tokens.setdefault(event.request, []).append(event.token)
        else:
            assert event.request not in results
            results[event.request] = event
    ordered = [results[number] for number in range(len(results))]
    streamed = [tokens.get(number, []) for number in range(len(results))]
    assert streamed == [list(result.tokens) for result in ordered]
    return streamed, ordered


def _minimum(engine: Engine) -> MemoryAmount:
    """A budget of exactly top-k slots, with the draft where the engine has one."""
    plan = engine.plan
    return MemoryAmount(num_bytes=plan.draft_bytes + engine._top_k * plan.slot_bytes)


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


@pytest.fixture
def set_threshold(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Sets the share of removable entries above which batches are compacted from now on."""
    make = BatchDecoder.__init__

    def set_to(threshold: float) -> None:
        def with_threshold(self: BatchDecoder, *args: object, **kwargs: object) -> None:
            make(self, *args, **kwargs, compact_above=threshold)

        monkeypatch.setattr(BatchDecoder, "__init__", with_threshold)

    return set_to


# -- the same tokens as alone -----------------------------------------------------------------


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_request_of_a_batch_equals_its_reply_alone(
    load: Load, notices: list[Notice], family: str, num_draft_tokens: int
) -> None:
    engine = load(family, num_draft_tokens=num_draft_tokens)
    for samplings in (_samplings(), _samplings(0.9, repetition_penalty=1.2)):
        expected = _alone(engine, PROMPTS, samplings)
        actual, results = _answers(engine.generate(PROMPTS, samplings))
        assert actual == expected
        assert [len(tokens) for tokens in actual] == list(NEW_TOKENS)
        assert {result.reason for result in results} == {FinishReason.LENGTH}
    stats = engine.stats()
    assert stats.num_new_tokens == sum(NEW_TOKENS)
    assert stats.num_prompt_tokens == sum(LENGTHS)
    assert (stats.num_drafted > stats.num_accepted) == (num_draft_tokens > 0)
    assert not notices


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_batch_with_fewest_slots_equals_batch_with_all(load: Load, num_draft_tokens: int) -> None:
    roomy = load(num_draft_tokens=num_draft_tokens)
    tight = load(num_draft_tokens=num_draft_tokens, budget=_minimum(roomy))
    assert tight.plan.num_slots == tight._top_k
    expected, _ = _answers(roomy.generate(PROMPTS, _samplings()))
    actual, _ = _answers(tight.generate(PROMPTS, _samplings()))
    assert actual == expected
    assert tight.stats().num_misses > roomy.stats().num_misses


def test_prompts_in_chunks_equal_prompts_at_once(load: Load) -> None:
    expected, _ = _answers(load().generate(PROMPTS, _samplings()))
    # Four rows: two columns a pass, for prompts and for candidates.
    narrow = load(prefill_chunk_tokens=8, num_draft_tokens=3)
    assert _answers(narrow.generate(PROMPTS, _samplings()))[0] == expected


def test_batch_of_32_equals_replies_alone(load: Load) -> None:
    engine = load(num_draft_tokens=2)
    prompts = [_tokens(1 + 5 * number % 8, 100 + number) for number in range(32)]
    sampling = SamplingConfig(max_new_tokens=6)
    expected = _alone(engine, prompts, [sampling] * 32)
    assert _answers(engine.generate(prompts, sampling))[0] == expected


def test_batch_of_one_equals_its_reply(load: Load) -> None:
    engine = load(num_draft_tokens=3)
    sampling = SamplingConfig(max_new_tokens=20, temperature=0.9, seed=3)
    expected = _alone(engine, PROMPTS[:1], [sampling])
    assert _answers(engine.generate(PROMPTS[:1], sampling))[0] == expected


# -- holes and compaction -----------------------------------------------------------------------


@pytest.mark.parametrize(
    ("threshold", "fewest", "most"), [(0.01, 5, 99), (0.25, 1, 4), (0.9, 0, 0)]
)
def test_compaction_changes_nothing(
    load: Load,
    decoders: list[BatchDecoder],
    set_threshold: Callable[[float], None],
    threshold: float,
    fewest: int,
    most: int,
) -> None:
    engine = load(num_draft_tokens=3)
    expected = _alone(engine, PROMPTS, _samplings())
    set_threshold(threshold)
    assert _answers(engine.generate(PROMPTS, _samplings()))[0] == expected
    assert fewest <= decoders[0].state.num_compactions <= most


def test_compaction_makes_room_where_the_plan_has_none_for_holes(
    load: Load, decoders: list[BatchDecoder], set_threshold: Callable[[float], None]
) -> None:
    set_threshold(0.9)
    # Four rows of 45 + 3 columns: what the requests need without a hole.
    engine = load(num_draft_tokens=3, context_length=4 * 48)
    assert _answers(engine.generate(PROMPTS, _samplings()))[0] == _alone(
        engine, PROMPTS, _samplings()
    )
    assert decoders[0]._num_columns == 48
    assert decoders[0].state.num_compactions >= 1
    with pytest.raises(BudgetError, match="short"):
        load(num_draft_tokens=3, context_length=4 * 48 - 1).generate(PROMPTS, _samplings())


def test_ended_requests_leave_the_batch(load: Load, decoders: list[BatchDecoder]) -> None:
    engine = load()
    samplings = [SamplingConfig(max_new_tokens=limit) for limit in (3, 3, 20, 3)]
    assert _answers(engine.generate(PROMPTS, samplings))[0] == _alone(engine, PROMPTS, samplings)
    assert len(decoders[0].state.lengths) == 1
    assert [request.number for request in decoders[0]._rows] == [2]


# -- where it computes ---------------------------------------------------------------------------

ELSEWHERE = torch.device("meta")
"""A device that is not the host and needs no hardware; it holds no values."""


class FakeLogits:
    """Logits that are on another device until they are fetched."""

    def cpu(self) -> torch.Tensor:
        return torch.zeros(2, 1, 264)


def test_batch_pass_gives_all_inputs_to_the_models_device_and_logits_to_the_host(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine, given = load(), []
    state = BatchState(engine.model.config, num_rows=2, num_columns=12)
    passes = ModelPasses(
        engine.model, engine.executor, engine.state, DenseSwitch(), device=ELSEWHERE
    )

    def forward(self: object, **inputs: object) -> SimpleNamespace:
        given.extend(value for value in inputs.values() if isinstance(value, torch.Tensor))
        return SimpleNamespace(logits=FakeLogits())

    @contextmanager
    def noting_rows(modules: object, rows: torch.Tensor) -> Iterator[None]:
        given.append(rows)
        yield

    monkeypatch.setattr(type(engine.model), "forward", forward)
    monkeypatch.setattr(runtime_passes, "only_rows", noting_rows)
    logits = passes.forward_batch(state, [[5, 6], [7]], Phase.PREFILL, logits_at=[1])

    assert [tensor.device for tensor in given] == [ELSEWHERE] * 5
    assert logits.shape == (2, 1, 264)
    assert logits.device.type == "cpu"


def test_beams_begin_on_the_models_device(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, given = load(), []

    def generate(ids: torch.Tensor, *, attention_mask: torch.Tensor, **_: object) -> torch.Tensor:
        given.extend((ids.device, attention_mask.device))
        return torch.zeros(1, 9, dtype=torch.int64)

    monkeypatch.setattr(type(engine.model), "device", ELSEWHERE)
    monkeypatch.setattr(engine.model, "generate", generate)
    engine.beam_search(PROMPTS[0], num_beams=2, max_new_tokens=4)

    assert given == [ELSEWHERE] * 2


# -- planted faults: what the equalities above rest on ------------------------------------------


def _mask_off_by_one(state: BatchState, tokens: Sequence[Sequence[int]]) -> object:
    inputs = _EXTEND(state, tokens)
    mask = torch.roll(inputs.mask, 1, dims=1)
    mask[:, 0] = True
    return replace(inputs, mask=mask)


def _holes_seen(state: BatchState, tokens: Sequence[Sequence[int]]) -> object:
    inputs = _EXTEND(state, tokens)
    return replace(inputs, mask=torch.ones_like(inputs.mask))


def _positions_by_column(state: BatchState, tokens: Sequence[Sequence[int]]) -> object:
    start = state.num_columns
    inputs = _EXTEND(state, tokens)
    width = inputs.ids.shape[1]
    return replace(inputs, positions=(start + torch.arange(width)).expand_as(inputs.ids))


_EXTEND = BatchState.extend


@pytest.mark.parametrize("fault", [_mask_off_by_one, _holes_seen, _positions_by_column])
def test_planted_fault_in_the_padded_cache_is_seen(
    load: Load, monkeypatch: pytest.MonkeyPatch, fault: Callable[..., object]
) -> None:
    engine = load(num_draft_tokens=3)
    expected = _alone(engine, PROMPTS, _samplings())
    monkeypatch.setattr(BatchState, "extend", fault)
    assert _answers(engine.generate(PROMPTS, _samplings()))[0] != expected


def test_padding_is_routed_to_no_expert(load: Load) -> None:
    engine = load()
    requests = [_tokens(1, 0), _tokens(40, 1)]
    sampling = SamplingConfig(max_new_tokens=1)
    _answers(engine.generate(requests, sampling))
    traffic = engine.executor.meter.prefill
    num_layers = engine.executor.driver.lookahead.num_layers
    assert traffic.num_hits + traffic.num_misses == 41 * engine._top_k * num_layers


def test_lookahead_counts_all_running_requests(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load(num_draft_tokens=3)
    counts = []
    advance = DraftWindow.advance

    def counting(self: DraftWindow, num_passes: int) -> None:
        lookahead = engine.executor.driver.lookahead
        counts.append(sum(n for _, n in lookahead.ranking(0)))
        advance(self, num_passes)

    monkeypatch.setattr(DraftWindow, "advance", counting)
    _answers(engine.generate(PROMPTS[:3], SamplingConfig(max_new_tokens=5)))
    # After the first and the second draft token of three requests.
    assert counts[:2] == [3 * engine._top_k, 6 * engine._top_k]
    assert engine.executor.driver.lookahead.is_empty


# -- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_request_ending_early_leaves_the_others_as_they_are(
    load: Load, num_draft_tokens: int
) -> None:
    engine = load(num_draft_tokens=num_draft_tokens)
    free = _alone(engine, PROMPTS, _samplings())
    engine._end_ids = frozenset({free[1][6], free[3][11]})
    expected = _alone(engine, PROMPTS, _samplings())
    assert [len(e) for e in expected] != [len(f) for f in free]
    actual, results = _answers(engine.generate(PROMPTS, _samplings()))
    assert actual == expected
    assert results[1].reason is FinishReason.STOP
    for tokens, result in zip(actual, results, strict=True):
        assert (result.reason is FinishReason.STOP) == (tokens[-1] in engine._end_ids)
        assert result.ttft_s > 0
        assert result.tpot_s == pytest.approx(result.decode_s / max(1, len(tokens) - 1))


def test_full_context_ends_a_request(load: Load) -> None:
    engine = load(context_length=32)
    _, results = _answers(engine.generate([_tokens(21, 1)], SamplingConfig()))
    assert results[0].reason is FinishReason.CONTEXT
    assert len(results[0].tokens) == 11


@pytest.mark.parametrize("cancel_at", [1, 9, 14, 40])
def test_cancelled_batch_ends_all_requests_and_the_engine_goes_on(
    load: Load, cancel_at: int
) -> None:
    engine = load(num_draft_tokens=3)
    expected = _alone(engine, PROMPTS, _samplings())
    num_calls = 0

    def is_cancelled() -> bool:
        nonlocal num_calls
        num_calls += 1
        return num_calls >= cancel_at

    engine.executor.is_cancelled = is_cancelled
    tokens, results = _answers(engine.generate(PROMPTS, _samplings()))
    assert FinishReason.CANCELLED in {result.reason for result in results}
    for cut, whole, result in zip(tokens, expected, results, strict=True):
        assert cut == whole[: len(cut)]
        assert (cut != whole) == (result.reason is FinishReason.CANCELLED)
    engine.executor.is_cancelled = lambda: False
    assert not any(map(engine.executor.driver.residency.is_pinned, range(engine.plan.num_slots)))
    assert _answers(engine.generate(PROMPTS, _samplings()))[0] == expected
    assert _alone(engine, PROMPTS, _samplings()) == expected


def test_batch_left_unfinished_does_not_disturb_a_reply(load: Load) -> None:
    engine = load(num_draft_tokens=3)
    expected = _alone(engine, PROMPTS, _samplings())
    running = engine.generate(PROMPTS, _samplings())
    for _ in range(7):
        next(running)
    assert _alone(engine, PROMPTS, _samplings()) == expected
    running.close()


def test_nan_in_a_batch_is_an_error(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load()
    head = engine.model.get_output_embeddings().weight
    monkeypatch.setattr(head, "data", head.data * float("nan"))
    with pytest.raises(NonFiniteError):
        _answers(engine.generate(PROMPTS, _samplings()))


# -- what is refused ------------------------------------------------------------------------------


def test_no_prompt_too_many_or_unfitting_samplings_are_refused(load: Load) -> None:
    engine = load()
    greedy = SamplingConfig(max_new_tokens=2)
    for prompts, samplings, text in (
        ([], greedy, "number of prompts cannot be 0"),
        ([[5]] * 33, greedy, "number of prompts cannot be 33"),
        ([[5], []], greedy, "prompt 1 cannot be"),
        ([[5], [6]], [greedy], "number of samplings cannot be 1"),
    ):
        with pytest.raises(ConfigError, match=text):
            engine.generate(prompts, samplings)
    with pytest.raises(ContextLengthError, match="Prompt 1 has 512 tokens"):
        engine.generate([[5], [6] * 512], greedy)


def test_batch_larger_than_planned_is_refused_with_the_missing_bytes(load: Load) -> None:
    engine = load(context_length=64)
    engine.generate([[5]] * 2, SamplingConfig(max_new_tokens=20))
    with pytest.raises(BudgetError, match=r"the plan has .*: .* short"):
        engine.generate([[5]] * 8, SamplingConfig(max_new_tokens=20))
    assert engine.state.num_cached == 0


def test_cache_of_a_batch_is_no_larger_than_planned(
    load: Load, decoders: list[BatchDecoder]
) -> None:
    engine = load(num_draft_tokens=3)
    _alone(engine, PROMPTS[:1], _samplings()[:1])
    list(engine.generate(PROMPTS, _samplings()))
    assert engine.state.num_cached == 0, "the conversation's cache is held beside the batch's"
    layers = decoders[-1].state.cache.layers
    reserved = sum(
        t.untyped_storage().nbytes() for layer in layers for t in (layer.keys, layer.values)
    )
    assert 0 < reserved <= engine.plan.kv_bytes


@pytest.mark.parametrize("family", IN_TURN_FAMILIES)
def test_family_with_bounded_state_answers_in_turn_and_says_so(
    load: Load, notices: list[Notice], family: str
) -> None:
    engine = load(family)
    expected = _alone(engine, PROMPTS, _samplings())
    actual, results = _answers(engine.generate(PROMPTS, _samplings()))
    assert actual == expected
    assert {result.reason for result in results} == {FinishReason.LENGTH}
    assert "batch-in-turn" in [notice.code for notice in notices]


def test_cancel_of_requests_in_turn_ends_all_of_them(load: Load) -> None:
    engine = load("gpt_oss")
    events = engine.generate(PROMPTS, _samplings())
    next(events)
    engine.cancel()
    results = [event for event in events if isinstance(event, RequestResult)]
    assert [result.reason for result in results] == [FinishReason.CANCELLED] * 4
    assert not results[-1].tokens


def test_can_pad_length_dependent_positions_only_below_their_length() -> None:
    config = tiny_config("mixtral", has_windows=False)
    assert can_pad(config, 512)
    config.rope_parameters = {
        "rope_type": "longrope",
        "original_max_position_embeddings": 64,
    }
    assert can_pad(config, 64)
    assert not can_pad(config, 65)
    assert not can_pad(tiny_config("mixtral"), 8)


# -- beams ----------------------------------------------------------------------------------------

BEAM_FAMILIES = ("qwen2_moe", "deepseek_v2", "olmoe", "gpt_oss", "jamba")


@pytest.mark.parametrize("family", BEAM_FAMILIES)
def test_beam_search_equals_transformers(
    load: Load, prepared: Callable[[str], ModelHome], family: str
) -> None:
    prompt = _tokens(21, 7)
    model = AutoModelForCausalLM.from_pretrained(
        prepared(family).checkpoint_dir, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    engine = load(family)
    texts = []
    for width in (1, 4):
        expected = model.generate(
            torch.tensor([prompt]), num_beams=width, max_new_tokens=16, do_sample=False
        )
        found = engine.beam_search(prompt, num_beams=width, max_new_tokens=16)
        assert list(found.tokens) == expected[0, len(prompt) :].tolist()
        assert found.num_passes == 16
        texts.append(found.tokens)
    assert texts[0] != texts[1], "beams that find the greedy text prove little"


def test_beam_search_counts_its_prompt_as_prefill_and_keeps_the_conversation(load: Load) -> None:
    engine = load(num_draft_tokens=3, prefill_chunk_tokens=8)
    prompt = _tokens(21, 7)
    reply = _alone(engine, [prompt], [SamplingConfig(max_new_tokens=9)])[0]
    longer = [*prompt, *reply, 17, 30, 4]
    cached = list(engine.state.tokens)
    engine.executor.phase = Phase.DRAFT
    # Four beams of 21 tokens in chunks of 8 tokens: two columns a pass.
    engine.beam_search(prompt, num_beams=4, max_new_tokens=3)
    meter = engine.executor.meter
    per_token = engine._top_k * engine.executor.driver.lookahead.num_layers
    assert meter.prefill.num_hits + meter.prefill.num_misses == 4 * 21 * per_token
    assert meter.decode.num_hits + meter.decode.num_misses == 4 * 2 * per_token
    assert engine.state.tokens == cached
    continued = [
        t for t in engine.reply(longer, SamplingConfig(max_new_tokens=9)) if isinstance(t, int)
    ]
    assert engine.stats().num_cached_tokens == len(cached)
    assert continued == _alone(engine, [longer], [SamplingConfig(max_new_tokens=9)])[0]


def test_beam_search_ends_at_the_engines_ends_only(load: Load) -> None:
    engine = load()
    free = engine.beam_search(PROMPTS[1], num_beams=1, max_new_tokens=12).tokens
    end, place = free[5], free.index(free[5])
    engine._end_ids = frozenset({end})
    ended = engine.beam_search(PROMPTS[1], num_beams=1, max_new_tokens=12)
    assert ended.tokens == free[: place + 1]
    engine.model.generation_config.eos_token_id = end
    engine._end_ids = frozenset()
    assert engine.beam_search(PROMPTS[1], num_beams=1, max_new_tokens=12).tokens == free


def test_cancelled_beam_search_leaves_a_working_engine(load: Load) -> None:
    engine = load()
    expected = engine.beam_search(PROMPTS[1], num_beams=3, max_new_tokens=8).tokens
    engine.cancel()
    with pytest.raises(CancelledError):
        engine.beam_search(PROMPTS[1], num_beams=3, max_new_tokens=8)
    engine.clear_cancel()
    assert engine.beam_search(PROMPTS[1], num_beams=3, max_new_tokens=8).tokens == expected
    assert not engine.model._forward_pre_hooks


def test_beams_beyond_context_or_plan_are_refused(load: Load) -> None:
    engine = load(context_length=64)
    with pytest.raises(ConfigError, match="beams cannot be 0"):
        engine.beam_search(PROMPTS[0], num_beams=0, max_new_tokens=4)
    with pytest.raises(ConfigError, match="needs a prompt"):
        engine.beam_search([], num_beams=2, max_new_tokens=4)
    with pytest.raises(ContextLengthError):
        engine.beam_search(PROMPTS[0], num_beams=1, max_new_tokens=60)
    with pytest.raises(BudgetError, match="short"):
        engine.beam_search(PROMPTS[0], num_beams=8, max_new_tokens=50)


# -- the native kernel knows one row without holes ----------------------------------------------


def test_batches_and_beams_never_use_the_native_attention(
    load: Load, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(num_draft_tokens=3)

    def refuse(*_: object) -> None:
        raise AssertionError("native attention")

    monkeypatch.setattr(operators, "has_native_attention", lambda: True)
    monkeypatch.setattr(operators, "native_attention", refuse)
    with pytest.raises(AssertionError, match="native attention"):
        _alone(engine, PROMPTS[:1], _samplings()[:1])
    _answers(engine.generate(PROMPTS, _samplings()))
    engine.beam_search(PROMPTS[1], num_beams=2, max_new_tokens=3)


# -- what is changed during a pass is changed back ------------------------------------------------


def test_padded_attention_and_row_filter_end_with_their_blocks(load: Load) -> None:
    engine = load()
    modules = engine.passes._modules
    before = [module.__dict__["_mira"] for module in modules]
    implementation = engine.model.config._attn_implementation

    def fail_inside() -> None:
        with attending_padded(engine.model), only_rows(modules, torch.tensor([0])):
            assert engine.model.config._attn_implementation == PADDED_ATTENTION_IMPLEMENTATION
            assert [module.__dict__["_mira"] for module in modules] != before
            raise CancelledError("Stopped.")

    with pytest.raises(CancelledError):
        fail_inside()
    assert [module.__dict__["_mira"] for module in modules] == before
    assert engine.model.config._attn_implementation == implementation
