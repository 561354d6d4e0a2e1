"""What the heads of a layer are asked, phase by phase."""

from __future__ import annotations

import pytest
from mira_engine.policy.prediction import question_for
from mira_engine.types import Phase


@pytest.mark.parametrize("has_far_heads", [False, True])
def test_question_for_a_prompt_asks_near_heads_for_all_experts(has_far_heads: bool) -> None:
    question = question_for(Phase.PREFILL, has_far_heads=has_far_heads)

    assert not question.is_far
    assert question.is_unbounded
    assert not question.is_last_token_only


def test_question_for_a_verification_is_about_the_last_token() -> None:
    question = question_for(Phase.VERIFY, has_far_heads=True)

    assert question.is_far
    assert question.is_last_token_only


@pytest.mark.parametrize("has_far_heads", [False, True])
def test_question_for_decoding_asks_far_heads_where_there_are_any(has_far_heads: bool) -> None:
    question = question_for(Phase.DECODE, has_far_heads=has_far_heads)

    assert question.is_far is has_far_heads
    assert not question.is_last_token_only
