"""A truth that does not hold ends the section, and is named."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton has no wheel for this system")

from gpu import truths
from gpu.sections import Deadline


@pytest.fixture
def told(monkeypatch: pytest.MonkeyPatch) -> None:
    """Puts answers in the place of the checks, which take long."""
    monkeypatch.setattr(truths._Models, "home", lambda self, family, precision: None)
    monkeypatch.setattr(truths, "Outcome", lambda home, config: None)
    monkeypatch.setattr(truths, "card_is_processor", lambda home: {"holds": True})
    monkeypatch.setattr(truths, "budget_changes_nothing", lambda home, expected: {"holds": False})
    monkeypatch.setattr(
        truths, "draft_changes_nothing", lambda home, expected, experts: {"holds": True}
    )


def test_truth_that_does_not_hold_fails_the_section_by_name(told: None) -> None:
    results: dict = {}

    with pytest.raises(AssertionError, match="not true: any budget = all slots"):
        truths.check_truths(results, Deadline(60.0))

    assert len(results) == 5
    lines = list(truths.describe_truths(results))
    assert sum("NOT TRUE" in line for line in lines) == 1
    assert sum("not checked" in line for line in lines) == 1
