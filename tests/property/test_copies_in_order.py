"""No slot is written while a kernel may read it, and none is read before its copy ends.

Random schedules of demands, prefetches, evictions, kernels and looks at the link, on queues
that check the order of every two accesses; planted faults show that they would be seen.
"""

from __future__ import annotations

import pytest
import torch
from fake_queues import FakeQueues, RaceError
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from mira_engine.runtime import cuda_transfer
from mira_engine.runtime.cuda_transfer import CudaTransfer
from mira_engine.types import ExpertId, Plane
from torch import Tensor

NUM_SLOTS = 3
PLANES = (Plane.HI, Plane.LO)

steps = st.lists(
    st.tuples(
        st.sampled_from(["demand", "ahead", "compute", "launch", "poll", "promote"]),
        st.integers(0, NUM_SLOTS - 1),
    ),
    max_size=60,
)


class FakeSource:
    """Records that are in host memory, after as many looks as the schedule says."""

    def __init__(self, decide) -> None:
        self._decide = decide
        self.held: set[ExpertId] = set()

    def begin(self, expert: ExpertId, *, is_demand: bool) -> None:
        pass

    def hurry(self, expert: ExpertId) -> None:
        pass

    def take(self, expert: ExpertId) -> dict[Plane, Tensor] | None:
        if not self._decide():
            return None
        self.held.add(expert)
        return {plane: torch.full((8,), expert.expert, dtype=torch.uint8) for plane in PLANES}

    def give_back(self, expert: ExpertId) -> None:
        self.held.remove(expert)

    def close(self) -> None:
        pass


class Machine:
    """A transfer, and what an executor does with it."""

    def __init__(self, make: type[CudaTransfer], decide) -> None:
        self.queues = FakeQueues(decide)
        self.source = FakeSource(decide)
        self.slots = [
            {plane: torch.zeros(8, dtype=torch.uint8) for plane in PLANES} for _ in range(NUM_SLOTS)
        ]
        self.transfer = make(
            self.queues, self.source, self.slots, clock=lambda: 0.0, sleep=lambda _: None
        )
        self.num_experts = 0
        self.loading: dict[int, ExpertId] = {}
        self.there: dict[int, ExpertId] = {}

    def do(self, step: str, slot: int) -> None:
        if step in ("demand", "ahead") and slot not in self.loading:
            expert = ExpertId(0, self.num_experts)
            self.num_experts += 1
            self.there.pop(slot, None)
            self.loading[slot] = expert
            self.transfer.submit(expert, slot, is_demand=step == "demand")
        elif step == "compute" and slot in self.there:
            self.run_kernel(slot, self.there[slot])
        elif step == "launch" and self.is_copy_begun(slot):
            # The host has not seen the copy end: the device waits, not the host.
            self.run_kernel(slot, self.loading[slot])
        elif step == "promote" and slot in self.loading:
            self.transfer.promote(self.loading[slot])
        elif step == "poll":
            self.collect(self.transfer.poll())

    def is_copy_begun(self, slot: int) -> bool:
        address = self.slots[slot][Plane.LO].data_ptr()
        expert = self.loading.get(slot)
        return expert in self.source.held and any(a == address for a, _ in self.queues.copies)

    def run_kernel(self, slot: int, expert: ExpertId) -> None:
        self.transfer.acquire([slot])
        for plane in PLANES:
            part = self.slots[slot][plane]
            self.queues.read(part)
            assert part.tolist() == [expert.expert % 256] * 8
        self.transfer.release([slot])

    def collect(self, landed) -> None:
        for item in landed:
            assert self.loading.pop(item.slot) == item.expert
            self.there[item.slot] = item.expert

    def finish(self) -> None:
        for _ in range(200):
            if not self.loading:
                return
            self.collect(self.transfer.wait_any(1e9))
        raise AssertionError("a record never landed")


def _run(make: type[CudaTransfer], schedule, seed: int) -> Machine:
    generator = torch.Generator().manual_seed(seed)
    machine = Machine(make, lambda: bool(torch.rand((), generator=generator) < 0.4))
    for step, slot in schedule:
        machine.do(step, slot)
    machine.finish()
    return machine


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(schedule=steps, seed=st.integers(0, 2**32 - 1))
def test_copies_and_kernels_are_ordered_in_every_schedule(schedule, seed: int) -> None:
    machine = _run(CudaTransfer, schedule, seed)

    assert not machine.source.held


class _NoReuseWait(CudaTransfer):
    """Planted: a slot is written again without waiting for the kernels that read it."""

    def _begin(self, copy, records) -> None:
        self._is_read[copy.slot] = False
        super()._begin(copy, records)


class _NoReadyWait(CudaTransfer):
    """Planted: kernels read slots whose copies may still run."""

    def acquire(self, slots) -> None:
        pass


class _NoReuseRecord(CudaTransfer):
    """Planted: nobody marks where the kernels that read a slot are."""

    def release(self, slots) -> None:
        pass


@pytest.mark.parametrize("faulty", [_NoReuseWait, _NoReadyWait, _NoReuseRecord])
def test_a_missing_wait_is_found(faulty: type[CudaTransfer]) -> None:
    @settings(max_examples=2000, deadline=None, database=None, phases=[Phase.generate])
    @given(schedule=steps, seed=st.integers(0, 2**32 - 1))
    def search(schedule, seed: int) -> None:
        _run(faulty, schedule, seed)

    with pytest.raises(RaceError):
        search()


def test_prefetch_waits_while_demands_fill_their_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_transfer, "MAX_UNDER_WAY", 1)
    machine = Machine(CudaTransfer, lambda: True)
    machine.queues.decide = lambda: False  # No copy ends.
    machine.do("demand", 0)
    machine.do("ahead", 1)
    assert len(machine.queues.copies) == 2

    machine.queues.decide = lambda: True
    machine.do("poll", 0)

    assert [lane.value for _, lane in machine.queues.copies] == ["demand"] * 2 + ["ahead"] * 2


def test_promoted_prefetch_takes_the_demands_lane(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cuda_transfer, "MAX_UNDER_WAY", 1)
    machine = Machine(CudaTransfer, lambda: True)
    machine.queues.decide = lambda: False
    machine.do("ahead", 0)
    machine.do("ahead", 1)

    machine.do("promote", 1)

    assert [lane.value for _, lane in machine.queues.copies] == ["ahead"] * 2 + ["demand"] * 2
