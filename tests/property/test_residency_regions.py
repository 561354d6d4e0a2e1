"""The residency table with regions under random use: HOT keeps its own, misses their slots."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mira_engine.policy.base import Decline, DeclineReason, Evict, Fetch, FetchReason, Promote
from mira_engine.policy.eviction import LruEviction
from mira_engine.policy.regions import MIN_TRANSIENT_SLOTS, Regions
from mira_engine.policy.residency import ResidencyTable
from mira_engine.policy.slot_table import ResidencyError, SlotState
from mira_engine.types import CacheMode, ExpertId, Region
from random_residency import EXPERTS, SETTINGS, run_until_it_fails


class RegionMachine(RuleBasedStateMachine):
    """Drives a table with regions as executor, planner and rebalancer may."""

    table_class = ResidencyTable
    mode = CacheMode.LARGE
    num_slots, num_hot_slots, num_stage_slots = 7, 3, 2

    def __init__(self) -> None:
        super().__init__()
        self.order = LruEviction()
        self.table = self.table_class(
            self.num_slots,
            self.order,
            num_hot_slots=self.num_hot_slots,
            num_stage_slots=self.num_stage_slots,
            mode=self.mode,
        )
        self.pins: dict[ExpertId, int] = {}
        self.loading: dict[ExpertId, int] = {}
        self.unused: set[ExpertId] = set()
        self.kept: set[ExpertId] = set()
        """HOT when the prompt that is read began."""

    def members(self, region: Region) -> set[ExpertId]:
        return {e for e, slot in self.table.residents() if self.table.region(slot) is region}

    def can_go(self) -> set[ExpertId]:
        """STAGE entries that are loaded and not pinned."""
        return self.members(Region.STAGE) - set(self.loading) - set(self.pins)

    def note(self, expert: ExpertId, fetch: Fetch, protected: set[ExpertId]) -> None:
        """Checks what was given up for the expert, which was in STAGE until then."""
        if fetch.evicted is not None:
            assert fetch.evicted in self.before, "only STAGE entries that can go go"
            assert fetch.evicted not in protected
            assert fetch.evicted not in self.unused, "a claim holds for its window"
        self.loading[expert] = fetch.slot

    @rule(expert=st.sampled_from(EXPERTS))
    def miss(self, expert: ExpertId) -> None:
        if self.table.slot_of(expert) is not None:
            return
        self.before = self.can_go()
        fetch = self.table.admit(expert, FetchReason.MISS)
        if fetch is None:
            assert self.loading or self.pins, "a miss that nothing will make room for"
            return
        self.note(expert, fetch, set())

    @rule(
        expert=st.sampled_from(EXPERTS),
        protected=st.sets(st.sampled_from(EXPERTS), max_size=3),
    )
    def predict(self, expert: ExpertId, protected: set[ExpertId]) -> None:
        if self.table.slot_of(expert) is not None:
            with pytest.raises(ResidencyError):
                self.table.stage(expert)
            return
        self.before = self.can_go()
        fetch = self.table.stage(expert, protected=protected)
        if isinstance(fetch, Decline):
            assert fetch == Decline(expert, DeclineReason.STAGE_FULL)
            return
        self.note(expert, fetch, protected)
        self.unused.add(expert)

    @rule(expert=st.sampled_from(EXPERTS))
    def rebalance(self, expert: ExpertId) -> None:
        if self.table.slot_of(expert) is None:
            self.before = self.can_go()
            fetch = self.table.admit(expert, FetchReason.REBALANCE)
            if fetch is not None:
                self.note(expert, fetch, set())
                assert self.table.region(fetch.slot) is Region.HOT
        elif expert in self.members(Region.STAGE):
            slot = self.table.slot_of(expert)
            if self.table.promote(expert) is not None:
                self.unused.discard(expert)
                assert expert in self.members(Region.HOT)
            assert self.table.slot_of(expert) == slot
        else:
            with contextlib.suppress(ResidencyError):
                self.table.demote(expert)
            is_kept = expert in self.members(Region.HOT)
            assert is_kept is self.table.is_prefilling

    @rule(layer=st.integers(0, 1))
    def leave_layer(self, layer: int) -> None:
        hot = self.members(Region.HOT)
        reclaimable = {e for e in self.can_go() if e.layer == layer}
        actions = self.table.leave_layer(layer)
        self.unused -= {e for e in self.unused if e.layer == layer}
        assert self.members(Region.HOT) >= hot
        if self.mode is CacheMode.LARGE:
            assert actions == []
            return
        assert {a.expert for a in actions} == reclaimable
        for action in actions:
            assert isinstance(action, Evict | Promote)
            is_kept = self.table.slot_of(action.expert) is not None
            assert is_kept is isinstance(action, Promote)
        assert not {e for e in self.can_go() if e.layer == layer}

    @rule()
    def end_window(self) -> None:
        self.table.end_window()
        self.unused.clear()

    @rule(is_start=st.booleans())
    def prefill(self, is_start: bool) -> None:
        if is_start:
            self.table.begin_prefill()
            self.kept = self.members(Region.HOT)
        else:
            self.table.end_prefill()
            self.kept = set()

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), failed=st.booleans())
    def finish_load(self, data: st.DataObject, failed: bool) -> None:
        expert = data.draw(st.sampled_from(sorted(self.loading)))
        if failed and expert not in self.pins:
            self.table.abandon(self.loading[expert])
            self.unused.discard(expert)
        else:
            self.table.complete(self.loading[expert])
        del self.loading[expert]

    @rule(expert=st.sampled_from(EXPERTS), is_pinned=st.booleans())
    def use(self, expert: ExpertId, is_pinned: bool) -> None:
        if self.table.slot_of(expert) is None:
            return
        if is_pinned:
            self.table.pin(expert)
            self.pins[expert] = self.pins.get(expert, 0) + 1
        self.table.use(expert)
        self.unused.discard(expert)

    @precondition(lambda self: self.pins)
    @rule(data=st.data())
    def unpin(self, data: st.DataObject) -> None:
        expert = data.draw(st.sampled_from(sorted(self.pins)))
        self.table.unpin(expert)
        self.pins[expert] -= 1
        if not self.pins[expert]:
            del self.pins[expert]

    @rule(expert=st.sampled_from(EXPERTS))
    def evict(self, expert: ExpertId) -> None:
        is_kept = self.table.is_prefilling and expert in self.members(Region.HOT)
        if self.table.is_ready(expert) and expert not in self.pins and not is_kept:
            self.table.evict(expert)
            self.unused.discard(expert)
        else:
            with contextlib.suppress(ResidencyError):
                self.table.evict(expert)
                raise AssertionError("evicted what must stay")

    @invariant()
    def every_slot_is_accounted_for(self) -> None:
        regions = self.table.regions
        assert regions is not None
        slots = [slot for _, slot in self.table.residents()]
        assert len(slots) == len(set(slots)) == self.table.num_used <= self.num_slots
        hot, stage = self.members(Region.HOT), self.members(Region.STAGE)
        assert len(hot) == regions.num_hot <= self.num_hot_slots
        assert hot == set(regions.hot())
        assert len(stage) == regions.num_stage == self.table.num_used - len(hot)
        for slot in range(self.num_slots):
            is_free = self.table.state(slot) is SlotState.FREE
            assert is_free is (self.table.expert_in(slot) is None)
            assert is_free is (self.table.region(slot) is None)

    @invariant()
    def predictions_leave_slots_for_misses(self) -> None:
        limit = self.num_slots - MIN_TRANSIENT_SLOTS - len(self.members(Region.HOT))
        if self.mode is CacheMode.SMALL:
            limit = self.num_stage_slots
        assert len(self.unused) <= limit

    @invariant()
    def hot_loses_nobody_while_a_prompt_is_read(self) -> None:
        loaded = {expert for expert in self.kept if self.table.is_ready(expert)}
        assert loaded <= self.members(Region.HOT)

    @invariant()
    def the_order_offers_only_what_can_go(self) -> None:
        offered = list(self.order.victims())
        assert len(offered) == len(set(offered))
        assert set(offered) <= self.can_go() - self.unused

    @invariant()
    def nothing_pinned_or_loading_is_lost(self) -> None:
        assert all(self.table.slot_of(expert) is not None for expert in self.pins)
        for expert, slot in self.loading.items():
            assert self.table.slot_of(expert) == slot
            assert self.table.state(slot) is SlotState.LOADING


class SmallRegionMachine(RegionMachine):
    """The same where entries are reclaimed when their layer is done."""

    mode = CacheMode.SMALL


TestRegions = RegionMachine.TestCase
TestRegions.settings = SETTINGS

TestSmallRegions = SmallRegionMachine.TestCase
TestSmallRegions.settings = SETTINGS


class _OverfillsHot(ResidencyTable):
    """A planted fault: promotion does not look at HOT's room."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        self._regions.has_hot_room = lambda *, is_busy: True


class _OffersPinned(ResidencyTable):
    """A planted fault: a pin does not take an entry out of the order."""

    def pin(self, expert: ExpertId) -> int:
        slot = super().pin(expert)
        if self.state(slot) is SlotState.READY:
            self._regions.set_idle(expert, True)
        return slot


class _LosesHotInPrefill(ResidencyTable):
    """A planted fault: reading a prompt protects nobody."""

    def begin_prefill(self) -> None:
        pass


class _NeverReclaims(ResidencyTable):
    """A planted fault: entries outlive their layer in small mode."""

    def leave_layer(self, layer: int) -> list[object]:
        return []


class _StagesWithoutBound(ResidencyTable):
    """A planted fault: predictions take the slots kept for misses."""

    def __init__(self, *args: object, **options: object) -> None:
        super().__init__(*args, **options)
        regions = self._regions
        regions.may_enter = lambda reason: Regions.may_enter(
            regions, FetchReason.MISS if reason is FetchReason.LOOKAHEAD else reason
        )


class _ForgetsClaims(ResidencyTable):
    """A planted fault: what was predicted for this window goes like anything else."""

    def complete(self, slot: int) -> None:
        super().complete(slot)
        self._regions.end_claims()


@pytest.mark.parametrize(
    ("machine", "fault"),
    [
        (RegionMachine, _OverfillsHot),
        (RegionMachine, _OffersPinned),
        (RegionMachine, _LosesHotInPrefill),
        (SmallRegionMachine, _NeverReclaims),
        (RegionMachine, _StagesWithoutBound),
        (SmallRegionMachine, _StagesWithoutBound),
        (RegionMachine, _ForgetsClaims),
    ],
)
def test_machine_catches_faulty_regions(
    machine: type[RegionMachine], fault: type[ResidencyTable]
) -> None:
    class Broken(machine):
        table_class = fault

    run_until_it_fails(Broken)
