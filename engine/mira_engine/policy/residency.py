"""Verification Expert Cache Residency Manager: which expert is in which slot, and who may go.

Owns the state of every slot: FREE -> LOADING -> READY -> FREE, pins, region labels and
generations. Pure bookkeeping: no bytes, no threads; one thread calls it. A pinned or
loading slot is never a victim, an illegal transition raises.

Without regions all slots are one pool, in which the eviction policy decides alone. With
them HOT is given up by the rebalancer only, and everything else comes and goes in STAGE
(`mira_engine.policy.regions`).

Source: Specter, Verification Expert Cache Residency Manager (hits first, protection
until an expert's tokens are done); Mira IV-C for the regions.
"""

from __future__ import annotations

import enum
from collections.abc import Collection, Iterator

from ..types import CacheMode, ExpertId, Region, ServedBy
from .base import (
    AHEAD,
    Action,
    Decline,
    DeclineReason,
    Demote,
    DemoteReason,
    Evict,
    EvictReason,
    Fetch,
    FetchReason,
    Promote,
    PromoteReason,
)
from .eviction import EvictionPolicy
from .regions import MIN_TRANSIENT_SLOTS, Regions


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
        eviction: Order in which READY experts are offered as victims; with regions, those
            of STAGE.
        num_hot_slots: Most slots labelled HOT; `None` for one pool without regions.
        num_stage_slots: Slots for STAGE; `None` for all but HOT's and two. What is left,
            two at least, are the transient slots, kept for misses.
        mode: With regions: whether STAGE entries stay until their slot is wanted, or go
            when their layer is done (`SMALL`).

    Raises:
        ResidencyError: No slot, or regions that leave too few for misses.
    """

    def __init__(
        self,
        num_slots: int,
        eviction: EvictionPolicy,
        *,
        num_hot_slots: int | None = None,
        num_stage_slots: int | None = None,
        mode: CacheMode = CacheMode.LARGE,
    ) -> None:
        if num_slots < 1:
            raise ResidencyError(f"an arena needs at least one slot, got {num_slots}")
        self.num_slots = num_slots
        self._regions: Regions | None = None
        if num_hot_slots is not None:
            if num_stage_slots is None:
                num_stage_slots = num_slots - num_hot_slots - MIN_TRANSIENT_SLOTS
            num_left = num_slots - num_hot_slots - num_stage_slots
            if min(num_hot_slots, num_stage_slots) < 0 or num_left < MIN_TRANSIENT_SLOTS:
                raise ResidencyError(
                    f"{num_hot_slots} HOT and {num_stage_slots} STAGE of {num_slots} slots do "
                    f"not leave {MIN_TRANSIENT_SLOTS} for misses"
                )
            self._regions = Regions(
                num_slots=num_slots,
                num_hot_slots=num_hot_slots,
                num_stage_slots=num_stage_slots,
                mode=mode,
                order=eviction,
            )
        self._eviction = eviction
        self._slot_of: dict[ExpertId, int] = {}
        self._expert_in: list[ExpertId | None] = [None] * num_slots
        self._state = [SlotState.FREE] * num_slots
        self._pins = [0] * num_slots
        self._region: list[Region | None] = [None] * num_slots
        self._generation = [0] * num_slots
        self._free = list(range(num_slots - 1, -1, -1))
        self._is_prefetched = [False] * num_slots
        self._is_prefilling = False

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

    def by_worth(self) -> list[ExpertId]:
        """Returns the experts that can be computed now, those to keep longest first."""
        hot = [e for e, slot in self._slot_of.items() if self._region[slot] is Region.HOT]
        others = reversed(list(self._eviction.victims()))
        if self._regions is None:
            hot = []  # One pool: its order alone says what an expert is worth.
        ranked = dict.fromkeys([*sorted(hot), *others, *self._slot_of])
        return [expert for expert in ranked if self.is_ready(expert)]

    def served_by(self, expert: ExpertId) -> ServedBy:
        """Returns what serves the expert if it is routed to now."""
        slot = self._slot_of.get(expert)
        if slot is None:
            return ServedBy.MISS
        return ServedBy.HOT if self._region[slot] is Region.HOT else ServedBy.STAGE

    @property
    def regions(self) -> Regions | None:
        """Room and members of HOT and STAGE, to look at; `None` for one pool."""
        return self._regions

    @property
    def is_prefilling(self) -> bool:
        """Whether HOT must not lose an expert now."""
        return self._is_prefilling

    @property
    def num_loading(self) -> int:
        """Slots that a record is on its way to."""
        return self._state.count(SlotState.LOADING)

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
            reason: Carried into the action; decides the region label. A miss counts as a
                use of the expert.
            protected: Experts that must not be evicted for it.

        Returns:
            The fetch to carry out, or `None` when every slot is pinned, loading or
            protected; with regions, when neither the expert's region nor, for a miss, the
            transient slots have one to give. A miss then waits for a load or a pin to end,
            as one of them does: what predictions claim is never more than STAGE's room.

        Raises:
            ResidencyError: The expert already has a slot.
        """
        if expert in self._slot_of:
            raise ResidencyError(f"{expert} already has slot {self._slot_of[expert]}")
        if self._regions is not None:
            return self._admit_to_region(self._regions, expert, reason, protected)
        evicted = None
        if not self._free:
            evicted = self._find_victim(protected)
            if evicted is None:
                return None
        slot = self._give_slot(expert, evicted)
        self._region[slot] = Region.STAGE if reason in AHEAD else Region.HOT
        self._is_prefetched[slot] = reason in AHEAD
        if reason is FetchReason.MISS:
            self._eviction.on_miss(expert)
        self._eviction.on_admit(expert)
        return Fetch(expert, slot, reason, evicted)

    def _admit_to_region(
        self,
        regions: Regions,
        expert: ExpertId,
        reason: FetchReason,
        protected: Collection[ExpertId],
    ) -> Fetch | None:
        if not regions.may_enter(reason):
            return None
        evicted = None
        if not (self._free and regions.prefers_free_slot(reason)):
            evicted = regions.find_victim(reason, protected)
            if evicted is None and not (self._free and reason is FetchReason.MISS):
                return None
        slot = self._give_slot(expert, evicted)
        self._region[slot] = regions.enter(expert, reason)
        self._is_prefetched[slot] = reason in AHEAD
        return Fetch(expert, slot, reason, evicted)

    def _give_slot(self, expert: ExpertId, evicted: ExpertId | None) -> int:
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
        if self._regions is not None:
            self._regions.end_claims()

    def complete(self, slot: int) -> None:
        """A load into the slot has ended: LOADING -> READY.

        Raises:
            ResidencyError: The slot was not loading.
        """
        if self._state[slot] is not SlotState.LOADING:
            raise ResidencyError(f"slot {slot} completed while {self._state[slot].value}")
        self._state[slot] = SlotState.READY
        if self._regions is not None and not self._pins[slot]:
            expert = self._expert_in[slot]
            assert expert is not None
            self._regions.set_idle(expert, True)

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
            ResidencyError: The expert has no slot, or it is loading or pinned; or it is HOT
                while a prompt is read.
        """
        slot = self._slot_of.get(expert)
        if slot is None or self._state[slot] is not SlotState.READY or self._pins[slot]:
            raise ResidencyError(f"{expert} cannot be evicted (slot {slot})")
        if self._regions is not None and self._is_prefilling and self._region[slot] is Region.HOT:
            raise ResidencyError(f"{expert} is HOT and a prompt is read")
        self._clear(slot)
        self._free.append(slot)
        return slot

    def _clear(self, slot: int) -> None:
        expert = self._expert_in[slot]
        if expert is not None:
            if self._regions is None:
                self._eviction.on_remove(expert)
            else:
                self._regions.leave(expert)
            del self._slot_of[expert]
        self._expert_in[slot] = None
        self._state[slot] = SlotState.FREE
        self._region[slot] = None
        self._is_prefetched[slot] = False

    # -- regions -------------------------------------------------------------------------

    def begin_prefill(self) -> None:
        """A prompt is read from now on: HOT keeps its experts."""
        self._is_prefilling = True

    def end_prefill(self) -> None:
        """The prompt is read."""
        self._is_prefilling = False

    def stage(
        self, expert: ExpertId, *, protected: Collection[ExpertId] = _NOBODY
    ) -> Fetch | Decline:
        """Gives a predicted expert a place in STAGE, or declines where STAGE is full.

        Raises:
            ResidencyError: The expert already has a slot.
        """
        fetch = self.admit(expert, FetchReason.LOOKAHEAD, protected=protected)
        return fetch or Decline(expert, DeclineReason.STAGE_FULL)

    def leave_layer(self, layer: int) -> list[Action]:
        """A layer is done: what was staged for it has had its turn.

        In large mode its entries stay until their slots are wanted. In small mode they are
        reclaimed, except that those that were used fill up a HOT region with room left:
        its slots would stand empty otherwise.

        Returns:
            What was done; nothing of it moves bytes.
        """
        regions = self._regions
        if regions is None:
            return []
        regions.end_claims(layer)
        if regions.mode is not CacheMode.SMALL:
            return []
        actions: list[Action] = []
        for expert in regions.stage_of(layer):
            if not regions.is_idle(expert):
                continue
            slot = self._slot_of[expert]
            promote = (
                None if self._is_prefetched[slot] else self.promote(expert, PromoteReason.ROOM)
            )
            if promote is None:
                self.evict(expert)
            actions.append(promote or Evict(expert, slot, EvictReason.LAYER_BEHIND))
        return actions

    def promote(
        self, expert: ExpertId, reason: PromoteReason = PromoteReason.DEMAND
    ) -> Promote | None:
        """Labels a STAGE entry HOT. Moves no bytes.

        Returns:
            What was done; `None` where HOT is full, or would take a slot kept for misses.

        Raises:
            ResidencyError: The expert is not in STAGE, or there are no regions.
        """
        regions, slot = self._in_region(expert, Region.STAGE)
        if not regions.has_hot_room(is_busy=not regions.is_open(expert)):
            return None
        regions.relabel(expert, Region.HOT)
        self._region[slot] = Region.HOT
        return Promote(expert, slot, reason)

    def demote(self, expert: ExpertId) -> Demote:
        """Labels a HOT expert STAGE, where it stays until its slot is wanted.

        Raises:
            ResidencyError: The expert is not HOT, a prompt is read, or no regions.
        """
        regions, slot = self._in_region(expert, Region.HOT)
        if self._is_prefilling:
            raise ResidencyError(f"{expert} is HOT and a prompt is read")
        regions.relabel(expert, Region.STAGE)
        self._region[slot] = Region.STAGE
        return Demote(expert, slot, DemoteReason.LOW_DEMAND)

    def _in_region(self, expert: ExpertId, region: Region) -> tuple[Regions, int]:
        slot = self._slot_of.get(expert)
        if self._regions is None or slot is None or self._region[slot] is not region:
            raise ResidencyError(f"{expert} is not in {region.value} (slot {slot})")
        return self._regions, slot

    # -- use -----------------------------------------------------------------------------

    def use(self, expert: ExpertId) -> bool:
        """Records that a resident or loading expert is routed to.

        Returns:
            Whether this is the first use of an expert that a prefetch brought.
        """
        slot = self._slot_of[expert]
        if self._regions is None:
            self._eviction.on_use(expert)
        else:
            self._regions.use(expert)
        is_first = self._is_prefetched[slot]
        self._is_prefetched[slot] = False
        return is_first

    def note_miss(self, expert: ExpertId) -> None:
        """Records that an expert without a slot is routed to, and served without one."""
        if self._regions is None:
            self._eviction.on_miss(expert)
        else:
            self._regions.note_miss(expert)

    def pin(self, expert: ExpertId) -> int:
        """Protects the expert's slot until `unpin`. Returns the slot.

        Raises:
            ResidencyError: The expert has no slot.
        """
        slot = self._slot_of.get(expert)
        if slot is None:
            raise ResidencyError(f"{expert} has no slot to pin")
        self._pins[slot] += 1
        if self._regions is not None and self._pins[slot] == 1:
            self._regions.set_idle(expert, False)
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
        if self._regions is not None and not self._pins[slot]:
            self._regions.set_idle(expert, self._state[slot] is SlotState.READY)
