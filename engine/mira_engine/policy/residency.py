"""Verification Expert Cache Residency Manager: which expert is in which slot, and who may go.

Owns the state of every slot: FREE -> LOADING -> READY -> FREE, pins, region labels and
generations. Pure bookkeeping: no bytes, no threads; one thread calls it. A pinned or
loading slot is never a victim, an illegal transition raises.

Source: Specter, Verification Expert Cache Residency Manager (hits first, protection
until an expert's tokens are done); Mira IV-C for the region labels.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator

from ..types import ExpertId, Region
from .base import Fetch, FetchReason
from .eviction import EvictionPolicy


class SlotState(enum.Enum):
    """Life of a slot."""

    FREE = "free"
    LOADING = "loading"
    READY = "ready"


class ResidencyError(RuntimeError):
    """A transition that must not happen: a fault in the engine, not in its input."""


_NOBODY: frozenset[ExpertId] = frozenset()


class ResidencyTable:
    """Slots and their experts.

    Args:
        num_slots: Slots of the device arena, at least 1.
        eviction: Order in which READY experts are offered as victims.
    """

    def __init__(self, num_slots: int, eviction: EvictionPolicy) -> None:
        if num_slots < 1:
            raise ResidencyError(f"an arena needs at least one slot, got {num_slots}")
        self.num_slots = num_slots
        self._eviction = eviction
        self._slot_of: dict[ExpertId, int] = {}
        self._expert_in: list[ExpertId | None] = [None] * num_slots
        self._state = [SlotState.FREE] * num_slots
        self._pins = [0] * num_slots
        self._region: list[Region | None] = [None] * num_slots
        self._generation = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._is_prefetched = [False] * num_slots

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

    def region(self, slot: int) -> Region | None:
        """Returns the slot's label, `None` for a free slot."""
        return self._region[slot]

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
    def num_used(self) -> int:
        """Slots that are not free."""
        return self.num_slots - len(self._free)

    # -- admission and eviction ---------------------------------------------------------

    def admit(
        self,
        expert: ExpertId,
        reason: FetchReason,
        *,
        protected: Collection[ExpertId] = _NOBODY,
    ) -> Fetch | None:
        """Gives the expert a slot in state LOADING, evicting where none is free.

        Args:
            expert: Must not have a slot.
            reason: Carried into the action; decides the region label.
            protected: Experts that must not be evicted for it.

        Returns:
            The fetch to carry out, or `None` when every slot is pinned, loading or
            protected.

        Raises:
            ResidencyError: The expert already has a slot.
        """
        if expert in self._slot_of:
            raise ResidencyError(f"{expert} already has slot {self._slot_of[expert]}")
        evicted = None
        if self._free:
            slot = self._free.pop()
        else:
            evicted = self._find_victim(protected)
            if evicted is None:
                return None
            slot = self._slot_of[evicted]
            self._clear(slot)
        self._slot_of[expert] = slot
        self._expert_in[slot] = expert
        self._state[slot] = SlotState.LOADING
        self._generation[slot] += 1
        self._region[slot] = Region.STAGE if reason is FetchReason.LOOKAHEAD else Region.HOT
        self._is_prefetched[slot] = reason is FetchReason.LOOKAHEAD
        self._eviction.on_admit(expert)
        return Fetch(expert, slot, reason, evicted)

    def _find_victim(self, protected: Collection[ExpertId]) -> ExpertId | None:
        """Finds who may go; what a prefetch brought and nobody has used yet goes last."""
        unused = None
        for expert in self._eviction.victims():
            slot = self._slot_of[expert]
            is_idle = self._state[slot] is SlotState.READY and not self._pins[slot]
            if not is_idle or expert in protected:
                continue
            if not self._is_prefetched[slot]:
                return expert
            unused = unused or expert
        return unused

    def end_window(self) -> None:
        """The pass that prefetches were made for is over: what it did not use has no claim."""
        self._is_prefetched = [False] * self.num_slots

    def complete(self, slot: int) -> None:
        """A load into the slot has ended: LOADING -> READY.

        Raises:
            ResidencyError: The slot was not loading.
        """
        if self._state[slot] is not SlotState.LOADING:
            raise ResidencyError(f"slot {slot} completed while {self._state[slot].value}")
        self._state[slot] = SlotState.READY

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
        if expert is not None:
            self._eviction.on_remove(expert)
            del self._slot_of[expert]
        self._expert_in[slot] = None
        self._state[slot] = SlotState.FREE
        self._region[slot] = None
        self._is_prefetched[slot] = False

    # -- use -----------------------------------------------------------------------------

    def use(self, expert: ExpertId) -> bool:
        """Records that a resident or loading expert is routed to.

        Returns:
            Whether this is the first use of an expert that a prefetch brought.
        """
        slot = self._slot_of[expert]
        self._eviction.on_use(expert)
        is_first = self._is_prefetched[slot]
        self._is_prefetched[slot] = False
        return is_first

    def pin(self, expert: ExpertId) -> int:
        """Protects the expert's slot until `unpin`. Returns the slot.

        Raises:
            ResidencyError: The expert has no slot.
        """
        slot = self._slot_of.get(expert)
        if slot is None:
            raise ResidencyError(f"{expert} has no slot to pin")
        self._pins[slot] += 1
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
