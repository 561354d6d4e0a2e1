"""HOT and STAGE: what each label may hold, and which STAGE entry goes first.

Owns the labels of resident experts, the room of each region and the order of those that
can be given up. Knows no slots and no bytes; `mira_engine.policy.residency` asks it and
carries the answer out. Pure; one thread calls it.

Only experts that can go at once are in the order (STAGE, loaded, not pinned, not claimed),
so a victim is found without passing over those that cannot, however many there are.

Source: Mira IV-C. We differ in that labels are not places: a promotion moves no bytes, and
what HOT does not fill yet serves as STAGE in large mode.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator

from ..types import CacheMode, ExpertId, Region
from .base import AHEAD, FetchReason
from .eviction import EvictionPolicy

MIN_TRANSIENT_SLOTS = 2
"""Slots that neither HOT nor predictions may take: a miss is always served, and while one
is computed the next one loads."""


class Regions:
    """Labels, capacities and victims of the experts that have a slot.

    Args:
        num_slots: Slots of the arena; what the regions leave are the transient slots.
        num_hot_slots: Most slots labelled HOT.
        num_stage_slots: Slots for STAGE once HOT is full.
        mode: In `SMALL` mode STAGE never grows into what HOT does not fill.
        order: Order in which STAGE entries that can go are given up.
    """

    def __init__(
        self,
        *,
        num_slots: int,
        num_hot_slots: int,
        num_stage_slots: int,
        mode: CacheMode,
        order: EvictionPolicy,
    ) -> None:
        self.num_hot_slots = num_hot_slots
        self.num_stage_slots = num_stage_slots
        self.num_transient_slots = num_slots - num_hot_slots - num_stage_slots
        self.mode = mode
        self._order = order
        self._hot: dict[ExpertId, None] = {}
        self._stage: dict[int, dict[ExpertId, None]] = {}
        """STAGE entries by layer."""
        self._num_stage = 0
        self._idle: set[ExpertId] = set()
        """Loaded and not pinned."""
        self._open: set[ExpertId] = set()
        """Those in the order: idle, STAGE, not claimed."""
        self._claimed: dict[ExpertId, None] = {}
        """Brought or spared for the running window, and not used in it yet."""

    # -- looking ---------------------------------------------------------------------

    @property
    def num_hot(self) -> int:
        """Experts labelled HOT."""
        return len(self._hot)

    @property
    def num_stage(self) -> int:
        """Experts labelled STAGE, those in transient slots included."""
        return self._num_stage

    def hot(self) -> Iterator[ExpertId]:
        """Yields the HOT experts."""
        return iter(self._hot)

    def stage_of(self, layer: int) -> list[ExpertId]:
        """Returns a layer's STAGE entries by expert id."""
        return sorted(self._stage.get(layer, ()))

    def is_idle(self, expert: ExpertId) -> bool:
        """Whether the expert is loaded and not pinned."""
        return expert in self._idle

    def is_open(self, expert: ExpertId) -> bool:
        """Whether the expert is a STAGE entry that can go now."""
        return expert in self._open

    @property
    def _num_busy(self) -> int:
        """STAGE entries that cannot go now."""
        return self._num_stage - len(self._open)

    @property
    def _stage_limit(self) -> int:
        """STAGE's room now: in large mode with what HOT does not fill."""
        if self.mode is CacheMode.SMALL:
            return self.num_stage_slots
        return self.num_stage_slots + self.num_hot_slots - len(self._hot)

    def has_hot_room(self, *, is_busy: bool) -> bool:
        """Whether one more expert may be HOT and misses keep their transient slots.

        Args:
            is_busy: Whether the expert is a STAGE entry that cannot go now, which
                leaves as much for misses as there was.
        """
        if len(self._hot) >= self.num_hot_slots:
            return False
        return is_busy or self.mode is CacheMode.SMALL or self._num_busy < self._stage_limit

    # -- choosing --------------------------------------------------------------------

    def may_enter(self, reason: FetchReason) -> bool:
        """Whether there is a slot for one more expert, free or to be had from STAGE."""
        if reason is FetchReason.REBALANCE:
            return self.has_hot_room(is_busy=False)
        limit = self._stage_limit
        if reason is FetchReason.MISS:
            limit += self.num_transient_slots
        return self._num_busy < limit

    def prefers_free_slot(self, reason: FetchReason) -> bool:
        """Whether the expert takes a free slot before another's: within its region's room."""
        return (
            reason is FetchReason.REBALANCE
            or self.mode is not CacheMode.SMALL
            or self._num_stage < self.num_stage_slots
        )

    def find_victim(self, reason: FetchReason, protected: Collection[ExpertId]) -> ExpertId | None:
        """Finds the STAGE entry that goes.

        Predictions come in batches that protect the same experts. Those met on the way are
        claimed for the running window, so that each is passed over once a window.
        """
        if reason not in AHEAD:
            return next((e for e in self._order.victims() if e not in protected), None)
        while self.may_enter(reason):
            expert = next(self._order.victims(), None)
            if expert is None or expert not in protected:
                return expert
            self._claimed[expert] = None
            self._settle(expert)
        return None

    # -- life of an expert's stay ----------------------------------------------------

    def enter(self, expert: ExpertId, reason: FetchReason) -> Region:
        """Labels an expert that was given a slot and is loading. Returns the label."""
        if reason is FetchReason.REBALANCE:
            self._hot[expert] = None
            return Region.HOT
        self._stage.setdefault(expert.layer, {})[expert] = None
        self._num_stage += 1
        if reason is FetchReason.MISS:
            self._order.on_miss(expert)
        elif reason in AHEAD:
            self._claimed[expert] = None
        return Region.STAGE

    def leave(self, expert: ExpertId) -> None:
        """Forgets an expert that lost its slot."""
        self._idle.discard(expert)
        self._claimed.pop(expert, None)
        self._settle(expert)
        if expert in self._hot:
            del self._hot[expert]
        else:
            del self._stage[expert.layer][expert]
            self._num_stage -= 1

    def set_idle(self, expert: ExpertId, is_idle: bool) -> None:
        """The expert's slot can, or cannot, be given up from now on."""
        if is_idle:
            self._idle.add(expert)
        else:
            self._idle.discard(expert)
        self._settle(expert)

    def use(self, expert: ExpertId) -> None:
        """The expert is routed to: it counts, and has got what it was claimed for."""
        if expert in self._open:
            self._order.on_use(expert)
            return
        self._order.on_miss(expert)
        if expert in self._claimed:
            del self._claimed[expert]
            self._settle(expert)

    def note_miss(self, expert: ExpertId) -> None:
        """The expert is routed to, and served without a slot: it counts."""
        self._order.on_miss(expert)

    def relabel(self, expert: ExpertId, region: Region) -> None:
        """Moves the expert to the other region."""
        if region is Region.HOT:
            del self._stage[expert.layer][expert]
            self._num_stage -= 1
            self._hot[expert] = None
            self._claimed.pop(expert, None)
        else:
            del self._hot[expert]
            self._stage.setdefault(expert.layer, {})[expert] = None
            self._num_stage += 1
        self._settle(expert)

    def end_claims(self, layer: int | None = None) -> None:
        """Ends the claims of a layer that is done, or all of them."""
        if not self._claimed:
            return
        for expert in list(self._claimed if layer is None else self._stage.get(layer, ())):
            if self._claimed.pop(expert, self) is None:
                self._settle(expert)

    def _settle(self, expert: ExpertId) -> None:
        """Brings the expert's place in the order in line with its state."""
        belongs = expert in self._idle and expert not in self._hot and expert not in self._claimed
        if belongs is (expert in self._open):
            return
        if belongs:
            self._open.add(expert)
            self._order.on_admit(expert)
        else:
            self._open.discard(expert)
            self._order.on_remove(expert)
