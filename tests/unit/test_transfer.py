"""The disk link: right bytes in right slots, demand first, failures that name the file."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
from mira_engine.errors import StoreError
from mira_engine.runtime import disk
from mira_engine.runtime.disk import DiskTransfer, open_for_records
from mira_engine.runtime.transfer import Completion, LinkThrottle
from mira_engine.types import RECORD_ALIGNMENT, ExpertId, Plane
from mira_kernels.pages import huge_bytes

RECORD = RECORD_ALIGNMENT
NUM_EXPERTS = 6
WAIT_S = 60.0
"""Only a failure takes so long."""


@pytest.fixture
def records(tmp_path: Path) -> Path:
    path = tmp_path / "layer-0000.whole.safetensors"
    path.write_bytes(b"".join(bytes([e + 1]) * RECORD for e in range(NUM_EXPERTS)))
    return path


class Link:
    """A transfer over one file, with its slots."""

    def __init__(self, path: Path, *, num_slots: int = NUM_EXPERTS, num_threads: int = 1) -> None:
        self.memory = huge_bytes(num_slots * RECORD)
        parts = [self.memory[i * RECORD : (i + 1) * RECORD] for i in range(num_slots)]
        self.slots = parts
        self.gate = threading.Event()
        self.gate.set()
        self.order: list[ExpertId] = []
        self.transfer = DiskTransfer(
            locate=self._locate,
            planes=(Plane.WHOLE,),
            slot_buffers=[{Plane.WHOLE: memoryview(p.numpy())} for p in parts],
            num_threads=num_threads,
            is_direct=True,
        )
        self._path = path

    def _locate(self, expert: ExpertId, plane: Plane) -> tuple[Path, int, int]:
        assert self.gate.wait(timeout=WAIT_S)
        self.order.append(expert)
        return self._path, expert.expert * RECORD, RECORD

    def finish(self, count: int) -> list[Completion]:
        landed: list[Completion] = []
        while len(landed) < count:
            got = self.transfer.wait_any(WAIT_S)
            assert got, "nothing landed"
            landed += got
        return landed


@pytest.fixture
def link(records: Path) -> Iterator[Link]:
    made = Link(records)
    yield made
    made.gate.set()
    made.transfer.close()


def test_records_land_in_their_slots(link: Link) -> None:
    for expert in range(NUM_EXPERTS):
        link.transfer.submit(ExpertId(0, expert), NUM_EXPERTS - 1 - expert, is_demand=True)
    landed = link.finish(NUM_EXPERTS)
    assert {c.slot for c in landed} == set(range(NUM_EXPERTS))
    assert all(c.num_bytes == RECORD and c.error is None for c in landed)
    for expert in range(NUM_EXPERTS):
        assert (link.slots[NUM_EXPERTS - 1 - expert] == expert + 1).all()


def test_demand_overtakes_prefetch_and_promotion_works(link: Link) -> None:
    link.gate.clear()
    first, ahead, urgent, asked = (ExpertId(0, e) for e in range(4))
    link.transfer.submit(first, 0, is_demand=False)  # taken by the reader, held at the gate
    while link.transfer._ahead:
        pass
    link.transfer.submit(ahead, 1, is_demand=False)
    link.transfer.submit(urgent, 2, is_demand=False)
    link.transfer.submit(asked, 3, is_demand=True)
    link.transfer.promote(urgent)
    link.gate.set()
    link.finish(4)
    assert link.order == [first, asked, urgent, ahead]


class PieceGate:
    """In place of a throttle: stops each piece until it is let go."""

    def __init__(self) -> None:
        self.arrived, self.go = threading.Semaphore(0), threading.Semaphore(0)

    def hold(self, num_bytes: int, started_at: float, *, is_end: bool = True) -> None:
        self.arrived.release()
        assert self.go.acquire(timeout=WAIT_S)


@pytest.mark.parametrize("is_promoted", [False, True])
def test_prefetch_gives_way_to_a_demand_unless_it_is_waited_for(
    tmp_path: Path, is_promoted: bool
) -> None:
    size = 4 * (128 << 10)
    path = tmp_path / "layer.safetensors"
    path.write_bytes(os.urandom(2 * size))
    memory = huge_bytes(2 * size)
    gate = PieceGate()
    transfer = DiskTransfer(
        locate=lambda expert, plane: (path, expert.expert * size, size),
        planes=(Plane.WHOLE,),
        slot_buffers=[
            {Plane.WHOLE: memoryview(memory[i * size : (i + 1) * size].numpy())} for i in range(2)
        ],
        num_threads=1,
        is_direct=True,
        throttle=gate,
    )
    try:
        transfer.submit(ExpertId(0, 0), 0, is_demand=False)
        assert gate.arrived.acquire(timeout=WAIT_S)  # Its first piece is read.
        transfer.submit(ExpertId(0, 1), 1, is_demand=True)
        if is_promoted:
            transfer.promote(ExpertId(0, 0))
        gate.go.release(20)
        landed: list[Completion] = []
        while len(landed) < 2:
            landed += transfer.wait_any(WAIT_S)
        order = [item.expert.expert for item in landed]
        assert order == ([0, 1] if is_promoted else [1, 0])
        assert bytes(memory[: 2 * size].numpy()) == path.read_bytes()
        assert all(item.error is None and item.num_bytes == size for item in landed)
    finally:
        gate.go.release(20)
        transfer.close()


def test_truncated_file_is_named(link: Link, records: Path) -> None:
    os.truncate(records, 2 * RECORD)
    link.transfer.submit(ExpertId(0, 4), 0, is_demand=True)
    (landed,) = link.finish(1)
    assert isinstance(landed.error, StoreError)
    assert records.name in landed.error.message
    assert "prepare it again" in landed.error.hint


def test_missing_file_is_named(link: Link, records: Path) -> None:
    records.unlink()
    link.transfer.submit(ExpertId(0, 0), 0, is_demand=True)
    (landed,) = link.finish(1)
    assert landed.error is not None
    assert records.name in landed.error.message


@pytest.mark.skipif(not hasattr(os, "O_DIRECT"), reason="this system has no O_DIRECT")
def test_refused_direct_io_falls_back_and_says_so(
    records: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    real = os.open

    def refuse(path: Path, flags: int, *rest: object) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "Invalid argument")
        return real(path, flags)

    monkeypatch.setattr(disk.os, "open", refuse)
    link = Link(records)
    try:
        link.transfer.submit(ExpertId(0, 3), 0, is_demand=True)
        link.finish(1)
        assert (link.slots[0] == 4).all()
        assert not link.transfer.is_direct
    finally:
        link.transfer.close()


def test_close_drops_what_is_queued(link: Link) -> None:
    link.gate.clear()
    for expert in range(4):
        link.transfer.submit(ExpertId(0, expert), expert, is_demand=True)
    link.gate.set()
    link.transfer.close()
    assert all(not thread.is_alive() for thread in link.transfer._threads)


def test_open_reports_direct_io(records: Path) -> None:
    fd, is_direct = open_for_records(records, is_direct=False)
    os.close(fd)
    assert not is_direct


class FakeTime:
    """A clock that only sleeping moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def clock(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


def test_throttle_serves_records_one_after_another() -> None:
    time = FakeTime()
    throttle = LinkThrottle(bytes_per_s=1000, latency_s=0.5, clock=time.clock, sleep=time.sleep)
    throttle.hold(1000, started_at=0.0)
    assert time.now == pytest.approx(1.5)
    throttle.hold(2000, started_at=0.0)  # begun at once, but the link was busy until 1.0
    assert time.now == pytest.approx(3.5)
    throttle.hold(1000, started_at=10.0)
    assert time.now == pytest.approx(11.5)


def test_throttle_without_rate_adds_latency_only() -> None:
    time = FakeTime()
    throttle = LinkThrottle(bytes_per_s=None, latency_s=0.25, clock=time.clock, sleep=time.sleep)
    throttle.hold(10**9, started_at=0.0)
    assert time.now == pytest.approx(0.25)
