"""What the machines that use the residency table at random have in common."""

from __future__ import annotations

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import RuleBasedStateMachine
from mira_engine.policy.slot_table import ResidencyError
from mira_engine.types import ExpertId

EXPERTS = [ExpertId(layer, expert) for layer in range(2) for expert in range(5)]

SETTINGS = settings(max_examples=60, stateful_step_count=40, deadline=None)


def run_until_it_fails(machine: type[RuleBasedStateMachine]) -> None:
    """Checks that a machine with a planted fault is caught."""
    machine.TestCase.settings = settings(
        max_examples=12_000,  # As many as the rarest fault takes from an unlucky start.
        stateful_step_count=40,
        deadline=None,
        database=None,
        derandomize=True,
        phases=[Phase.generate],
        report_multiple_bugs=False,
    )
    with pytest.raises((AssertionError, ResidencyError)):
        machine.TestCase("runTest").runTest()
