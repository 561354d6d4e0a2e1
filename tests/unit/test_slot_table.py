"""The life of slots: who is told what, and which transitions must not happen."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from mira_engine.policy.slot_table import ResidencyError, SlotState, SlotTable
from mira_engine.types import ExpertId

A, B = ExpertId(0, 1), ExpertId(0, 2)


class FakeOwner:
    """Writes down what a table tells whoever decides more about its experts."""

    def __init__(self) -> None:
        self.told: list[tuple[ExpertId, str]] = []

    def leave(self, expert: ExpertId) -> None:
        self.told.append((expert, "left"))

    def set_idle(self, expert: ExpertId, is_idle: bool) -> None:
        self.told.append((expert, "idle" if is_idle else "busy"))


@pytest.fixture
def owner() -> FakeOwner:
    return FakeOwner()


@pytest.fixture
def table(owner: FakeOwner) -> SlotTable:
    """One slot, into which A is loading."""
    table = SlotTable(1, on_leave=owner.leave, on_idle=owner.set_idle)
    assert table._give(A, None) == 0
    return table


def test_expert_is_idle_while_it_is_loaded_and_has_no_pin(
    table: SlotTable, owner: FakeOwner
) -> None:
    table.complete(0)
    for _ in range(2):
        table.pin(A)
    for _ in range(2):
        table.unpin(A)
    table.evict(A)
    assert owner.told == [(A, "idle"), (A, "busy"), (A, "idle"), (A, "left")]
    assert table.state(0) is SlotState.FREE


def test_expert_that_is_pinned_while_it_loads_is_idle_after_its_last_pin(
    table: SlotTable, owner: FakeOwner
) -> None:
    table.pin(A)
    table.complete(0)
    assert owner.told == [(A, "busy")]
    table.unpin(A)
    assert owner.told[1:] == [(A, "idle")]


def test_slot_given_on_is_another_generation_and_the_one_who_left_has_none(
    table: SlotTable, owner: FakeOwner
) -> None:
    table.complete(0)
    assert table._give(B, A) == 0
    assert owner.told[-1] == (A, "left")
    assert (table.slot_of(A), table.slot_of(B), table.generation(0)) == (None, 0, 2)
    assert (table.num_loading, table.num_used) == (1, 1)


@pytest.mark.parametrize(
    "break_rule",
    [
        lambda table: table.evict(A),  # It is loading.
        lambda table: table.evict(B),
        lambda table: table.unpin(A),
        lambda table: table.pin(B),
        lambda table: (table.complete(0), table.complete(0)),
        lambda table: (table.complete(0), table.abandon(0)),
        lambda table: (table.pin(A), table.abandon(0)),
        lambda table: (table.complete(0), table.pin(A), table.evict(A)),
    ],
)
def test_transition_that_must_not_happen_raises(
    table: SlotTable, break_rule: Callable[[SlotTable], object]
) -> None:
    with pytest.raises(ResidencyError):
        break_rule(table)
    assert table.slot_of(A) == 0, "nothing was changed by it"


def test_table_without_a_slot_is_refused(owner: FakeOwner) -> None:
    with pytest.raises(ResidencyError, match="at least one slot"):
        SlotTable(0, on_leave=owner.leave, on_idle=None)
