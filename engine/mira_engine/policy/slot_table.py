"""The slots of the device: what is in each, and how far it is.

Owns the life of every slot, FREE -> LOADING -> READY -> FREE, its pins and its generations;
an illegal transition raises. Does not know who should be let in or who should go:
`mira_engine.policy.residency` says so. No bytes, no threads; one thread calls it.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator

from ..types import ExpertId


class SlotState(enum.Enum):
    """Life of a slot."""

    FREE = "free"
    LOADING = "loading"
    READY = "ready"


class ResidencyError(RuntimeError):
    """A transition that must not happen: a fault in the engine, not in its input."""


class SlotTable:
    """Slots and their experts.

    Args:
        num_slots: Slots of the device arena, at least 1.
        on_leave: Told an expert that loses its slot.
        on_idle: Told whether an expert's slot can be given up from now on (loaded, no pin),
            each time that changes while the expert has it; `None` for nobody.

    Raises:
        ResidencyError: No slot.
    """

    def __init__(
        self,
        num_slots: int,
        *,
        on_leave: Callable[[ExpertId], None],
        on_idle: Callable[[ExpertId, bool], None] | None,
    ) -> None:
        if num_slots < 1:
            raise ResidencyError(f"an arena needs at least one slot, got {num_slots}")
        self.num_slots = num_slots
        self._on_leave = on_leave
        self._on_idle = on_idle
        self._slot_of: dict[ExpertId, int] = {}
        self._expert_in: list[ExpertId | None] = [None] * num_slots
        self._state = [SlotState.FREE] * num_slots
        self._pins = [0] * num_slots
        self._generation = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))

    # -- looking ---------------------------------------------------------------------

    def slot_of(self, expert: ExpertId) -> int | None:
        """Returns the slot that holds or is loading the expert, `None` when it has none."""
        return self._slot_of.get(expert)

    def state(self, slot: int) -> SlotState:
        """Returns the slot's state."""
        return self._state[slot]

    def expert_in(self, slot: int) -> ExpertId | None:
        """Returns the expert a slot holds or is loading."""
        return self._expert_in[slot]

    def generation(self, slot: int) -> int:
        """Returns how many times the slot has been given to an expert."""
        return self._generation[slot]

    def is_ready(self, expert: ExpertId) -> bool:
        """Whether the expert can be computed now."""
        slot = self._slot_of.get(expert)
        return slot is not None and self._state[slot] is SlotState.READY

    def is_pinned(self, slot: int) -> bool:
        """Whether the slot is protected from eviction by a pin."""
        return self._pins[slot] > 0

    def residents(self) -> Iterator[tuple[ExpertId, int]]:
        """Yields every expert that has a slot, with it."""
        return iter(self._slot_of.items())

    @property
    def num_loading(self) -> int:
        """Slots that a record is on its way to."""
        return self._state.count(SlotState.LOADING)

    @property
    def num_used(self) -> int:
        """Slots that are not free."""
        return self.num_slots - len(self._free)

    # -- life of a slot ----------------------------------------------------------------

    def _give(self, expert: ExpertId, evicted: ExpertId | None) -> int:
        """Gives the expert the slot of the evicted one, or a free one: -> LOADING."""
        if evicted is None:
            slot = self._free.pop()
        else:
            slot = self._slot_of[evicted]
            self._clear(slot)
        self._slot_of[expert] = slot
        self._expert_in[slot] = expert
        self._state[slot] = SlotState.LOADING
        self._generation[slot] += 1
        return slot

    def complete(self, slot: int) -> None:
        """A load into the slot has ended: LOADING -> READY.

        Raises:
            ResidencyError: The slot was not loading.
        """
        if self._state[slot] is not SlotState.LOADING:
            raise ResidencyError(f"slot {slot} completed while {self._state[slot].value}")
        self._state[slot] = SlotState.READY
        if self._on_idle is not None and not self._pins[slot]:
            expert = self._expert_in[slot]
            assert expert is not None
            self._on_idle(expert, True)

    def abandon(self, slot: int) -> None:
        """A load into the slot failed or was withdrawn: LOADING -> FREE.

        Raises:
            ResidencyError: The slot was not loading, or is pinned.
        """
        if self._state[slot] is not SlotState.LOADING or self._pins[slot]:
            raise ResidencyError(f"slot {slot} abandoned while {self._state[slot].value}")
        self._clear(slot)
        self._free.append(slot)

    def evict(self, expert: ExpertId) -> int:
        """Frees the expert's slot: READY -> FREE. Returns the slot.

        Raises:
            ResidencyError: The expert has no slot, or it is loading or pinned.
        """
        slot = self._slot_of.get(expert)
        if slot is None or self._state[slot] is not SlotState.READY or self._pins[slot]:
            raise ResidencyError(f"{expert} cannot be evicted (slot {slot})")
        self._clear(slot)
        self._free.append(slot)
        return slot

    def _clear(self, slot: int) -> None:
        expert = self._expert_in[slot]
        assert expert is not None
        self._on_leave(expert)
        del self._slot_of[expert]
        self._expert_in[slot] = None
        self._state[slot] = SlotState.FREE

    def pin(self, expert: ExpertId) -> int:
        """Protects the expert's slot until `unpin`. Returns the slot.

        Raises:
            ResidencyError: The expert has no slot.
        """
        slot = self._slot_of.get(expert)
        if slot is None:
            raise ResidencyError(f"{expert} has no slot to pin")
        self._pins[slot] += 1
        if self._on_idle is not None and self._pins[slot] == 1:
            self._on_idle(expert, False)
        return slot

    def unpin(self, expert: ExpertId) -> None:
        """Takes back one pin.

        Raises:
            ResidencyError: The expert has no slot or no pin.
        """
        slot = self._slot_of.get(expert)
        if slot is None or not self._pins[slot]:
            raise ResidencyError(f"{expert} is not pinned")
        self._pins[slot] -= 1
        if self._on_idle is not None and not self._pins[slot]:
            self._on_idle(expert, self._state[slot] is SlotState.READY)
