"""How a batch's requests end, which batches are refused, and which are answered in turn."""

from __future__ import annotations

import pytest
from batch_scenes import (
    IN_TURN_FAMILIES,
    PROMPTS,
    Load,
    collect,
    make_samplings,
    replies_alone,
    some_tokens,
)
from mira_engine.config import SamplingConfig
from mira_engine.errors import BudgetError, ConfigError, ContextLengthError, NonFiniteError
from mira_engine.events import Notice
from mira_engine.model.batch_state import can_pad
from mira_engine.runtime.batch import BatchDecoder
from mira_engine.runtime.requests import RequestResult
from mira_engine.types import FinishReason
from tiny_models import tiny_config

# -- ends -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
def test_request_ending_early_leaves_the_others_as_they_are(
    load: Load, num_draft_tokens: int
) -> None:
    engine = load(num_draft_tokens=num_draft_tokens)
    free = replies_alone(engine, PROMPTS, make_samplings())
    engine._end_ids = frozenset({free[1][6], free[3][11]})
    expected = replies_alone(engine, PROMPTS, make_samplings())
    assert [len(e) for e in expected] != [len(f) for f in free]
    actual, results = collect(engine.generate(PROMPTS, make_samplings()))
    assert actual == expected
    assert results[1].reason is FinishReason.STOP
    for tokens, result in zip(actual, results, strict=True):
        assert (result.reason is FinishReason.STOP) == (tokens[-1] in engine._end_ids)
        assert result.ttft_s > 0
        assert result.tpot_s == pytest.approx(result.decode_s / max(1, len(tokens) - 1))


def test_full_context_ends_a_request(load: Load) -> None:
    engine = load(context_length=32)
    _, results = collect(engine.generate([some_tokens(21, 1)], SamplingConfig()))
    assert results[0].reason is FinishReason.CONTEXT
    assert len(results[0].tokens) == 11


@pytest.mark.parametrize("cancel_at", [1, 9, 14, 40])
def test_cancelled_batch_ends_all_requests_and_the_engine_goes_on(
    load: Load, cancel_at: int
) -> None:
    engine = load(num_draft_tokens=3)
    expected = replies_alone(engine, PROMPTS, make_samplings())
    num_calls = 0

    def is_cancelled() -> bool:
        nonlocal num_calls
        num_calls += 1
        return num_calls >= cancel_at

    engine.executor.is_cancelled = is_cancelled
    tokens, results = collect(engine.generate(PROMPTS, make_samplings()))
    assert FinishReason.CANCELLED in {result.reason for result in results}
    for cut, whole, result in zip(tokens, expected, results, strict=True):
        assert cut == whole[: len(cut)]
        assert (cut != whole) == (result.reason is FinishReason.CANCELLED)
    engine.executor.is_cancelled = lambda: False
    assert not any(map(engine.executor.driver.residency.is_pinned, range(engine.plan.num_slots)))
    assert collect(engine.generate(PROMPTS, make_samplings()))[0] == expected
    assert replies_alone(engine, PROMPTS, make_samplings()) == expected


def test_batch_left_unfinished_does_not_disturb_a_reply(load: Load) -> None:
    engine = load(num_draft_tokens=3)
    expected = replies_alone(engine, PROMPTS, make_samplings())
    running = engine.generate(PROMPTS, make_samplings())
    for _ in range(7):
        next(running)
    assert replies_alone(engine, PROMPTS, make_samplings()) == expected
    running.close()


def test_nan_in_a_batch_is_an_error(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = load()
    head = engine.model.get_output_embeddings().weight
    monkeypatch.setattr(head, "data", head.data * float("nan"))
    with pytest.raises(NonFiniteError):
        collect(engine.generate(PROMPTS, make_samplings()))


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
    replies_alone(engine, PROMPTS[:1], make_samplings()[:1])
    list(engine.generate(PROMPTS, make_samplings()))
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
    expected = replies_alone(engine, PROMPTS, make_samplings())
    actual, results = collect(engine.generate(PROMPTS, make_samplings()))
    assert actual == expected
    assert {result.reason for result in results} == {FinishReason.LENGTH}
    assert "batch-in-turn" in [notice.code for notice in notices]


def test_cancel_of_requests_in_turn_ends_all_of_them(load: Load) -> None:
    engine = load("gpt_oss")
    events = engine.generate(PROMPTS, make_samplings())
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
