"""When a piece is launched before its layer's choice is known."""

from __future__ import annotations

from collections.abc import Collection

import pytest
from mira_engine.policy.launching import MAX_AHEAD, Launch, LaunchAhead
from mira_engine.types import ExpertId


def _choose(
    ahead: LaunchAhead,
    *,
    num_ahead: int = 0,
    resident: Collection[int] = (),
    expected: Collection[int] = (),
) -> Launch:
    return ahead.choose(
        3,
        num_ahead=num_ahead,
        num_resident=len(resident),
        num_experts=8,
        expected=expected,
        is_ready=lambda expert: expert.layer == 3 and expert.expert in resident,
    )


@pytest.mark.parametrize(
    ("resident", "expected", "launch"),
    [
        (range(8), (), Launch.CERTAIN),
        (range(8), (1, 2), Launch.CERTAIN),
        (range(7), (), Launch.WAIT),
        (range(7), (0, 6), Launch.EXPECTED),
        (range(7), (0, 7), Launch.WAIT),
        ((), (0,), Launch.WAIT),
    ],
)
def test_launch_needs_all_experts_or_all_that_a_draft_chose(
    resident: Collection[int], expected: Collection[int], launch: Launch
) -> None:
    assert _choose(LaunchAhead(), resident=resident, expected=expected) is launch


def test_launch_waits_where_enough_is_ahead() -> None:
    ahead = LaunchAhead()

    assert _choose(ahead, num_ahead=MAX_AHEAD - 1, resident=range(8)) is Launch.CERTAIN
    assert _choose(ahead, num_ahead=MAX_AHEAD, resident=range(8)) is Launch.WAIT


def test_guesses_that_were_wrong_are_made_now_and_then_only() -> None:
    ahead = LaunchAhead()
    for _ in range(4):
        ahead.observe(Launch.EXPECTED, is_right=False)

    made = [_choose(ahead, resident=range(7), expected=(1,)) for _ in range(64)]

    assert made.count(Launch.EXPECTED) == 2
    assert _choose(ahead, resident=range(8)) is Launch.CERTAIN


def test_guesses_that_are_right_again_are_made_again() -> None:
    ahead = LaunchAhead()
    ahead.observe(Launch.EXPECTED, is_right=False)
    for _ in range(12):
        ahead.observe(Launch.EXPECTED, is_right=True)

    assert _choose(ahead, resident=range(7), expected=(1,)) is Launch.EXPECTED


def test_certain_launches_say_nothing_of_guesses() -> None:
    ahead = LaunchAhead()
    ahead.observe(Launch.EXPECTED, is_right=False)
    for _ in range(20):
        ahead.observe(Launch.CERTAIN, is_right=True)

    assert _choose(ahead, resident=range(7), expected=(1,)) is Launch.WAIT


def test_readiness_is_asked_of_the_layer_in_question() -> None:
    asked: list[ExpertId] = []

    def is_ready(expert: ExpertId) -> bool:
        asked.append(expert)
        return True

    LaunchAhead().choose(
        5, num_ahead=0, num_resident=1, num_experts=8, expected=(2, 4), is_ready=is_ready
    )

    assert asked == [ExpertId(5, 2), ExpertId(5, 4)]
