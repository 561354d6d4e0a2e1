"""Verification Expert Cache Residency Manager: which expert is in which slot, and who may go.

A table of slots that also decides whom to let in and who goes for it: region labels, what
prefetches brought, the eviction policy's order. A pinned or loading slot is never a victim.
Pure bookkeeping: no bytes, no threads; one thread calls it.

Without regions all slots are one pool, in which the eviction policy decides alone. With
them HOT is given up by the rebalancer only, and everything else comes and goes in STAGE
(`mira_engine.policy.regions`).

Source: Specter, Verification Expert Cache Residency Manager (hits first, protection
until an expert's tokens are done); Mira IV-C for the regions.
"""

from __future__ import annotations

from collections.abc import Collection

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
from .slot_table import ResidencyError, SlotState, SlotTable

_NOBODY: frozenset[ExpertId] = frozenset()


class ResidencyTable(SlotTable):
    """Slots, their experts, and who comes and goes.

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
        super().__init__(
            num_slots,
            on_leave=eviction.on_remove if self._regions is None else self._regions.leave,
            on_idle=None if self._regions is None else self._regions.set_idle,
        )
        self._eviction = eviction
        self._region: list[Region | None] = [None] * num_slots
        """Labels; a free slot's is the last that it had."""
        self._is_prefetched = [False] * num_slots
        """Whether a prefetch brought the slot's expert, which nobody has used yet."""
        self._is_prefilling = False

    # -- looking ---------------------------------------------------------------------

    def region(self, slot: int) -> Region | None:
        """Returns the slot's label, `None` for a free slot."""
        return None if self._expert_in[slot] is None else self._region[slot]

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
        slot = self._give(expert, evicted)
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
        slot = self._give(expert, evicted)
        self._region[slot] = regions.enter(expert, reason)
        self._is_prefetched[slot] = reason in AHEAD
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
        if self._regions is not None:
            self._regions.end_claims()

    def evict(self, expert: ExpertId) -> int:
        """Frees the expert's slot: READY -> FREE. Returns the slot.

        Raises:
            ResidencyError: The expert has no slot, or it is loading or pinned; or it is HOT
                while a prompt is read.
        """
        if self._regions is not None and self._is_prefilling:
            slot = self._slot_of.get(expert)
            if slot is not None and self._region[slot] is Region.HOT:
                raise ResidencyError(f"{expert} is HOT and a prompt is read")
        return super().evict(expert)

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
