"""The residency table under random use: never two experts in a slot, nothing needed lost."""

from __future__ import annotations

import pytest
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from mira_engine.policy.base import AHEAD, FetchReason
from mira_engine.policy.eviction import EvictionPolicy, LfruEviction, LfuEviction, LruEviction
from mira_engine.policy.residency import ResidencyTable
from mira_engine.policy.slot_table import ResidencyError, SlotState
from mira_engine.types import ExpertId
from random_residency import EXPERTS, SETTINGS, run_until_it_fails


class ResidencyMachine(RuleBasedStateMachine):
    """Drives the table as the executor may, beside a plain model of what must hold."""

    table_class = ResidencyTable
    num_slots = 4

    @staticmethod
    def make_eviction() -> EvictionPolicy:
        return LruEviction()

    def __init__(self) -> None:
        super().__init__()
        self.eviction = self.make_eviction()
        self.table = self.table_class(self.num_slots, self.eviction)
        self.pins: dict[ExpertId, int] = {}
        self.loading: dict[ExpertId, int] = {}
        self.unused: set[ExpertId] = set()
        """Brought by a prefetch for this window and not used yet."""

    @rule(
        expert=st.sampled_from(EXPERTS),
        reason=st.sampled_from(list(FetchReason)),
        protected=st.sets(st.sampled_from(EXPERTS), max_size=3),
    )
    def admit(self, expert: ExpertId, reason: FetchReason, protected: set[ExpertId]) -> None:
        if self.table.slot_of(expert) is not None:
            with pytest.raises(ResidencyError):
                self.table.admit(expert, reason)
            return
        could_go = {
            held
            for held, _ in self.table.residents()
            if not (held in self.loading or held in self.pins or held in protected)
        }
        fetch = self.table.admit(expert, reason, protected=protected)
        if fetch is None:
            assert not could_go
            for slot in range(self.num_slots):
                held = self.table.expert_in(slot)
                assert held in self.loading or held in self.pins or held in protected
            return
        assert fetch.evicted not in self.pins
        assert fetch.evicted not in self.loading
        assert fetch.evicted not in protected
        if fetch.evicted in self.unused:
            assert could_go <= self.unused, "somebody else could have gone"
        self.unused.discard(fetch.evicted)
        self.loading[expert] = fetch.slot
        if reason in AHEAD:
            self.unused.add(expert)

    @rule()
    def end_window(self) -> None:
        self.table.end_window()
        self.unused.clear()

    @precondition(lambda self: self.loading)
    @rule(data=st.data(), failed=st.booleans())
    def finish_load(self, data: st.DataObject, failed: bool) -> None:
        expert = data.draw(st.sampled_from(sorted(self.loading)))
        slot = self.loading[expert]
        if failed and expert not in self.pins:
            self.table.abandon(slot)
            self.unused.discard(expert)
            assert self.table.slot_of(expert) is None
        else:
            self.table.complete(slot)
        del self.loading[expert]

    @rule(expert=st.sampled_from(EXPERTS))
    def pin_and_use(self, expert: ExpertId) -> None:
        if self.table.slot_of(expert) is None:
            with pytest.raises(ResidencyError):
                self.table.pin(expert)
            return
        self.table.pin(expert)
        assert self.table.use(expert) == (expert in self.unused)
        self.unused.discard(expert)
        self.pins[expert] = self.pins.get(expert, 0) + 1

    @rule(expert=st.sampled_from(EXPERTS))
    def unpin(self, expert: ExpertId) -> None:
        if expert not in self.pins:
            with pytest.raises(ResidencyError):
                self.table.unpin(expert)
            return
        self.table.unpin(expert)
        self.pins[expert] -= 1
        if not self.pins[expert]:
            del self.pins[expert]

    @rule(expert=st.sampled_from(EXPERTS))
    def evict(self, expert: ExpertId) -> None:
        is_free_to_go = (
            self.table.is_ready(expert) and expert not in self.pins and expert not in self.loading
        )
        if is_free_to_go:
            self.table.evict(expert)
            self.unused.discard(expert)
        else:
            with pytest.raises(ResidencyError):
                self.table.evict(expert)

    @invariant()
    def every_expert_has_its_own_slot(self) -> None:
        slots = [slot for _, slot in self.table.residents()]
        assert len(slots) == len(set(slots)) == self.table.num_used <= self.num_slots
        for expert, slot in self.table.residents():
            assert self.table.expert_in(slot) == expert
            assert self.table.state(slot) is not SlotState.FREE

    @invariant()
    def the_policy_offers_every_resident_once(self) -> None:
        offered = list(self.eviction.victims())
        assert len(offered) == len(set(offered))
        assert set(offered) == {expert for expert, _ in self.table.residents()}

    @invariant()
    def nothing_pinned_or_loading_is_lost(self) -> None:
        for expert in self.pins:
            assert self.table.slot_of(expert) is not None
        for expert, slot in self.loading.items():
            assert self.table.slot_of(expert) == slot
            assert self.table.state(slot) is SlotState.LOADING


class LfuMachine(ResidencyMachine):
    """The same where counts decide, which fade every other use."""

    @staticmethod
    def make_eviction() -> EvictionPolicy:
        return LfuEviction(fade_after=2)


class LfruMachine(ResidencyMachine):
    """The same where frequency and recency decide together."""

    @staticmethod
    def make_eviction() -> EvictionPolicy:
        return LfruEviction(half_life=3)


TestResidencyByRecency = ResidencyMachine.TestCase
TestResidencyByRecency.settings = SETTINGS

TestResidencyByCounts = LfuMachine.TestCase
TestResidencyByCounts.settings = SETTINGS

TestResidencyByBoth = LfruMachine.TestCase
TestResidencyByBoth.settings = SETTINGS


class _ForgetsPins(ResidencyTable):
    """A planted fault: pinned slots are taken as victims."""

    def _find_victim(self, protected: object) -> ExpertId | None:
        for expert in self._eviction.victims():
            if self.state(self._slot_of[expert]) is SlotState.READY:
                return expert
        return None


class _ForgetsPrefetches(ResidencyTable):
    """A planted fault: what a prefetch brought goes like anything else."""

    def _find_victim(self, protected: object) -> ExpertId | None:
        self._is_prefetched = [False] * self.num_slots
        return super()._find_victim(protected)


class _KeepsClaims(ResidencyTable):
    """A planted fault: a prefetch's claim outlives the pass it was made for."""

    def end_window(self) -> None:
        pass


class _LosesResidents(LfuEviction):
    """A planted fault: fading forgets who is there."""

    def _fade(self) -> None:
        super()._fade()
        self._by_count.pop(0, None)


@pytest.mark.parametrize("machine", [ResidencyMachine, LfuMachine])
@pytest.mark.parametrize("fault", [_ForgetsPins, _ForgetsPrefetches, _KeepsClaims])
def test_machine_catches_a_table_that_forgets(
    machine: type[ResidencyMachine], fault: type[ResidencyTable]
) -> None:
    class Broken(machine):
        table_class = fault
        num_slots = 2

    run_until_it_fails(Broken)


def test_machine_catches_a_policy_that_loses_residents() -> None:
    class Broken(ResidencyMachine):
        num_slots = 2

        @staticmethod
        def make_eviction() -> EvictionPolicy:
            return _LosesResidents(fade_after=2)

    run_until_it_fails(Broken)


def test_completing_a_slot_twice_raises() -> None:
    table = ResidencyTable(1, LruEviction())
    fetch = table.admit(EXPERTS[0], FetchReason.MISS)
    assert fetch is not None
    table.complete(fetch.slot)
    with pytest.raises(ResidencyError):
        table.complete(fetch.slot)


def test_lru_gives_up_the_least_recently_used() -> None:
    table = ResidencyTable(2, LruEviction())
    for expert in EXPERTS[:2]:
        fetch = table.admit(expert, FetchReason.MISS)
        assert fetch is not None
        table.complete(fetch.slot)
    table.use(EXPERTS[0])
    fetch = table.admit(EXPERTS[2], FetchReason.MISS)
    assert fetch is not None
    assert fetch.evicted == EXPERTS[1]


def test_generation_counts_each_tenant() -> None:
    table = ResidencyTable(1, LruEviction())
    for count, expert in enumerate(EXPERTS[:3], start=1):
        fetch = table.admit(expert, FetchReason.MISS)
        assert fetch is not None
        table.complete(fetch.slot)
        assert table.generation(fetch.slot) == count
