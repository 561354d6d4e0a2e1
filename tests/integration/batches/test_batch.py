"""Several requests at once answer as each would alone.

Oracle: the engine's own reply to each prompt (which `test_exactness` holds to
transformers). float32, unquantised store.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from batch_scenes import (
    FAMILIES,
    LENGTHS,
    NEW_TOKENS,
    PROMPTS,
    Load,
    collect,
    make_samplings,
    minimum,
    replies_alone,
    some_tokens,
)
from mira_engine.config import SamplingConfig
from mira_engine.errors import BudgetError
from mira_engine.events import Notice
from mira_engine.model.batch_state import BatchState
from mira_engine.runtime.batch import BatchDecoder
from mira_engine.types import FinishReason

# -- the same tokens as alone -----------------------------------------------------------------


@pytest.mark.parametrize("num_draft_tokens", [0, 3])
@pytest.mark.parametrize("family", FAMILIES)
def test_each_request_of_a_batch_equals_its_reply_alone(
    load: Load, notices: list[Notice], family: str, num_draft_tokens: int
) -> None:
    engine = load(family, num_draft_tokens=num_draft_tokens)
    for samplings in (make_samplings(), make_samplings(0.9, repetition_penalty=1.2)):
        expected = replies_alone(engine, PROMPTS, samplings)
        actual, results = collect(engine.generate(PROMPTS, samplings))
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
    tight = load(num_draft_tokens=num_draft_tokens, budget=minimum(roomy))
    assert tight.plan.num_slots == tight._top_k
    expected, _ = collect(roomy.generate(PROMPTS, make_samplings()))
    actual, _ = collect(tight.generate(PROMPTS, make_samplings()))
    assert actual == expected
    assert tight.stats().num_misses > roomy.stats().num_misses


def test_prompts_in_chunks_equal_prompts_at_once(load: Load) -> None:
    expected, _ = collect(load().generate(PROMPTS, make_samplings()))
    # Four rows: two columns a pass, for prompts and for candidates.
    narrow = load(prefill_chunk_tokens=8, num_draft_tokens=3)
    assert collect(narrow.generate(PROMPTS, make_samplings()))[0] == expected


def test_batch_of_32_equals_replies_alone(load: Load) -> None:
    engine = load(num_draft_tokens=2)
    prompts = [some_tokens(1 + 5 * number % 8, 100 + number) for number in range(32)]
    sampling = SamplingConfig(max_new_tokens=6)
    expected = replies_alone(engine, prompts, [sampling] * 32)
    assert collect(engine.generate(prompts, sampling))[0] == expected


def test_batch_of_one_equals_its_reply(load: Load) -> None:
    engine = load(num_draft_tokens=3)
    sampling = SamplingConfig(max_new_tokens=20, temperature=0.9, seed=3)
    expected = replies_alone(engine, PROMPTS[:1], [sampling])
    assert collect(engine.generate(PROMPTS[:1], sampling))[0] == expected


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
    expected = replies_alone(engine, PROMPTS, make_samplings())
    set_threshold(threshold)
    assert collect(engine.generate(PROMPTS, make_samplings()))[0] == expected
    assert fewest <= decoders[0].state.num_compactions <= most


def test_compaction_makes_room_where_the_plan_has_none_for_holes(
    load: Load, decoders: list[BatchDecoder], set_threshold: Callable[[float], None]
) -> None:
    set_threshold(0.9)
    # Four rows of 45 + 3 columns: what the requests need without a hole.
    engine = load(num_draft_tokens=3, context_length=4 * 48)
    assert collect(engine.generate(PROMPTS, make_samplings()))[0] == replies_alone(
        engine, PROMPTS, make_samplings()
    )
    assert decoders[0]._num_columns == 48
    assert decoders[0].state.num_compactions >= 1
    with pytest.raises(BudgetError, match="short"):
        load(num_draft_tokens=3, context_length=4 * 48 - 1).generate(PROMPTS, make_samplings())


def test_ended_requests_leave_the_batch(load: Load, decoders: list[BatchDecoder]) -> None:
    engine = load()
    samplings = [SamplingConfig(max_new_tokens=limit) for limit in (3, 3, 20, 3)]
    assert collect(engine.generate(PROMPTS, samplings))[0] == replies_alone(
        engine, PROMPTS, samplings
    )
    assert len(decoders[0].state.lengths) == 1
    assert [request.number for request in decoders[0]._rows] == [2]


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
    expected = replies_alone(engine, PROMPTS, make_samplings())
    monkeypatch.setattr(BatchState, "extend", fault)
    assert collect(engine.generate(PROMPTS, make_samplings()))[0] != expected
