"""Both disk links: right bytes in right slots, demand first, failures that name the file."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from disk_links import (
    NUM_EXPERTS,
    PIECE,
    RECORD,
    AnyTransfer,
    Churn,
    FakeThrottle,
    Link,
    MakeTransfer,
    OnPiece,
    PieceGate,
    num_native_threads,
    write_records,
)
from mira_engine.errors import StoreError
from mira_engine.runtime import disk
from mira_engine.runtime.disk import DiskTransfer, open_for_records
from mira_engine.runtime.native_disk import NativeDiskTransfer
from mira_engine.runtime.transfer import LinkThrottle
from mira_engine.types import ExpertId
from mira_kernels import reader


@pytest.fixture(params=["python", "native"])
def make_transfer(request: pytest.FixtureRequest) -> Iterator[MakeTransfer]:
    """Makes transfers of one kind, and closes them."""
    made: list[AnyTransfer] = []

    def make(*, on_piece: OnPiece | None = None, **arguments: object) -> AnyTransfer:
        if request.param == "native":
            library = reader.find_library(request.getfixturevalue("native_cache"))
            assert library is not None
            made.append(NativeDiskTransfer(library, on_piece=on_piece, **arguments))
        else:
            if on_piece is not None:
                arguments["throttle"] = FakeThrottle(on_piece)
            made.append(DiskTransfer(**arguments))
        return made[-1]

    yield make
    for transfer in made:
        transfer.close()


@pytest.fixture
def gate() -> Iterator[PieceGate]:
    made = PieceGate()
    yield made
    made.open()


@pytest.fixture
def records(tmp_path: Path) -> Path:
    return write_records(tmp_path)


@pytest.fixture
def link(make_transfer: MakeTransfer, records: Path) -> Link:
    return Link(make_transfer, records)


def test_records_land_in_their_slots(link: Link) -> None:
    for expert in range(NUM_EXPERTS):
        link.transfer.submit(ExpertId(0, expert), NUM_EXPERTS - 1 - expert, is_demand=True)
    landed = link.finish(NUM_EXPERTS)
    assert {c.slot for c in landed} == set(range(NUM_EXPERTS))
    assert all(c.num_bytes == RECORD and c.error is None for c in landed)
    for expert in range(NUM_EXPERTS):
        assert (link.slots[NUM_EXPERTS - 1 - expert] == expert + 1).all()


def test_wait_without_work_ends_with_nothing(link: Link) -> None:
    assert link.transfer.poll() == []
    assert link.transfer.wait_any(0.001) == []


def test_demand_overtakes_prefetch_and_promotion_works(
    make_transfer: MakeTransfer, records: Path, gate: PieceGate
) -> None:
    link = Link(make_transfer, records, on_piece=gate)
    first, ahead, urgent, asked = (ExpertId(0, e) for e in range(4))
    link.transfer.submit(first, 0, is_demand=False)
    assert gate.arrived.acquire(timeout=10)  # The reader has it, and is held.
    link.transfer.submit(ahead, 1, is_demand=False)
    link.transfer.submit(urgent, 2, is_demand=False)
    link.transfer.submit(asked, 3, is_demand=True)
    link.transfer.promote(urgent)
    link.transfer.promote(ExpertId(7, 7))  # Nobody knows it.
    gate.open()
    assert [c.expert for c in link.finish(4)] == [first, asked, urgent, ahead]


def test_promotion_wakes_a_reader_that_stood_back(
    make_transfer: MakeTransfer, records: Path, gate: PieceGate
) -> None:
    link = Link(make_transfer, records, num_threads=2, on_piece=gate)
    link.transfer.submit(ExpertId(0, 0), 0, is_demand=True)
    assert gate.arrived.acquire(timeout=10)
    link.transfer.submit(ExpertId(0, 1), 1, is_demand=False)
    link.transfer.promote(ExpertId(0, 1))
    assert gate.arrived.acquire(timeout=10)  # Both are under way at once.
    gate.open()
    link.finish(2)


@pytest.fixture
def two_large(tmp_path: Path) -> Path:
    path = tmp_path / "layer.safetensors"
    path.write_bytes(os.urandom(2 * 4 * PIECE))
    return path


@pytest.mark.parametrize("is_promoted", [False, True])
def test_prefetch_gives_way_to_a_demand_unless_it_is_waited_for(
    make_transfer: MakeTransfer, two_large: Path, gate: PieceGate, is_promoted: bool
) -> None:
    link = Link(make_transfer, two_large, num_slots=3, record_bytes=4 * PIECE, on_piece=gate)
    first, asked, other = ExpertId(0, 0), ExpertId(0, 1), ExpertId(1, 0)
    link.transfer.submit(first, 0, is_demand=False)
    assert gate.arrived.acquire(timeout=10)  # Its first piece is read.
    link.transfer.submit(other, 2, is_demand=False)
    link.transfer.submit(asked, 1, is_demand=True)
    if is_promoted:
        link.transfer.promote(first)
    gate.open()
    landed = link.finish(3)
    order = [item.expert for item in landed]
    assert order == ([first, asked, other] if is_promoted else [asked, first, other])
    assert sum(gate.pieces) == 3 * 4 * PIECE  # It went on where it was.
    assert bytes(link.memory[: 8 * PIECE].numpy()) == two_large.read_bytes()
    assert all(item.error is None and item.num_bytes == 4 * PIECE for item in landed)


def test_prefetch_that_was_set_aside_can_be_promoted(
    make_transfer: MakeTransfer, two_large: Path, gate: PieceGate
) -> None:
    link = Link(make_transfer, two_large, num_slots=3, record_bytes=4 * PIECE, on_piece=gate)
    aside, asked, later = ExpertId(0, 0), ExpertId(0, 1), ExpertId(1, 0)
    link.transfer.submit(aside, 0, is_demand=False)
    assert gate.arrived.acquire(timeout=10)
    link.transfer.submit(asked, 1, is_demand=True)
    gate.go.release()
    assert gate.arrived.acquire(timeout=10)  # The demand is held: the other was set aside.
    assert gate.pieces[1] == 4 * PIECE
    link.transfer.promote(aside)
    link.transfer.submit(later, 2, is_demand=True)
    gate.open()
    assert [c.expert for c in link.finish(3)] == [asked, aside, later]
    assert (link.slots[0] == link.slots[2]).all()


def test_prefetch_is_read_in_whole_pages_and_a_demand_at_once(
    make_transfer: MakeTransfer, two_large: Path, gate: PieceGate
) -> None:
    gate.open()
    link = Link(make_transfer, two_large, num_slots=2, record_bytes=4 * PIECE, on_piece=gate)
    link.transfer.submit(ExpertId(0, 0), 0, is_demand=False)
    link.finish(1)
    assert gate.pieces[0] == PIECE  # Before a rate is known.
    assert sum(gate.pieces) == 4 * PIECE
    assert all(size >= PIECE and size % 4096 == 0 for size in gate.pieces)
    del gate.pieces[:]
    link.transfer.submit(ExpertId(0, 1), 1, is_demand=True)
    link.finish(1)
    assert gate.pieces == [4 * PIECE]


def test_seconds_leave_out_pauses(
    make_transfer: MakeTransfer, two_large: Path, gate: PieceGate
) -> None:
    """One thread's records take turns, so that together they take no more than has passed."""
    link = Link(make_transfer, two_large, num_slots=2, record_bytes=4 * PIECE, on_piece=gate)
    started = time.perf_counter()
    link.transfer.submit(ExpertId(0, 0), 0, is_demand=False)
    assert gate.arrived.acquire(timeout=10)
    link.transfer.submit(ExpertId(0, 1), 1, is_demand=True)
    gate.go.release()
    assert gate.arrived.acquire(timeout=10)
    held_at = time.perf_counter()
    while time.perf_counter() < held_at + 0.03:
        pass
    gate.open()
    seconds = [item.seconds for item in link.finish(2)]
    assert seconds[0] >= 0.03
    assert sum(seconds) <= time.perf_counter() - started


def test_emulated_link_serves_records_one_after_another(
    make_transfer: MakeTransfer, records: Path
) -> None:
    throttle = LinkThrottle(bytes_per_s=RECORD / 0.01, latency_s=0.02)
    link = Link(make_transfer, records, num_threads=3, throttle=throttle)
    started = time.perf_counter()
    for expert in range(3):
        link.transfer.submit(ExpertId(0, expert), expert, is_demand=True)
    landed = link.finish(3)
    assert time.perf_counter() - started >= 3 * 0.01 + 0.02
    assert all(item.seconds >= 0.01 + 0.02 for item in landed)
    link.transfer.limit_rate(RECORD / 0.05)
    link.transfer.submit(ExpertId(0, 3), 3, is_demand=True)
    assert link.finish(1)[0].seconds >= 0.05 + 0.02


def test_truncated_file_is_named(link: Link, records: Path) -> None:
    os.truncate(records, 2 * RECORD)
    link.transfer.submit(ExpertId(0, 4), 0, is_demand=True)
    (landed,) = link.finish(1)
    assert isinstance(landed.error, StoreError)
    assert landed.error.message == f"{records.name} ends before byte {5 * RECORD}."
    assert "prepare it again" in landed.error.hint
    link.transfer.submit(ExpertId(0, 1), 1, is_demand=True)
    assert link.finish(1)[0].error is None


def test_missing_file_is_named_and_tried_again(link: Link, records: Path) -> None:
    records.rename(records.with_suffix(".away"))
    link.transfer.submit(ExpertId(0, 0), 0, is_demand=True)
    (landed,) = link.finish(1)
    assert landed.error is not None
    assert landed.error.message == (
        f"{records.name} cannot be opened: {os.strerror(errno.ENOENT)}."
    )
    records.with_suffix(".away").rename(records)
    link.transfer.submit(ExpertId(0, 0), 0, is_demand=True)
    assert link.finish(1)[0].error is None


def test_file_that_cannot_be_read_is_named(make_transfer: MakeTransfer, tmp_path: Path) -> None:
    link = Link(make_transfer, tmp_path)  # A folder opens, but does not read.
    link.transfer.submit(ExpertId(0, 0), 0, is_demand=False)
    (landed,) = link.finish(1)
    assert landed.error is not None
    assert landed.error.message == (f"Reading {tmp_path.name} failed: {os.strerror(errno.EISDIR)}.")
    assert "Check the disk" in landed.error.hint


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
    link = Link(DiskTransfer, records)
    try:
        link.transfer.submit(ExpertId(0, 3), 0, is_demand=True)
        link.finish(1)
        assert (link.slots[0] == 4).all()
        assert not link.transfer.is_direct
    finally:
        link.transfer.close()


def test_file_system_without_direct_io_is_told_of(make_transfer: MakeTransfer) -> None:
    path = Path("/proc/version")
    try:
        fd, is_direct = open_for_records(path, is_direct=True)
    except OSError:
        pytest.skip("no such file here")
    text = os.read(fd, RECORD)
    os.close(fd)
    if is_direct or not hasattr(os, "O_DIRECT"):
        pytest.skip("it takes O_DIRECT here")
    link = Link(make_transfer, path, record_bytes=len(text))
    assert link.transfer.is_direct
    link.transfer.submit(ExpertId(0, 0), 0, is_demand=True)
    assert link.finish(1)[0].error is None
    assert bytes(link.slots[0].numpy()) == text
    assert not link.transfer.is_direct


def test_direct_io_that_is_not_wanted_is_not_told_of(
    make_transfer: MakeTransfer, records: Path
) -> None:
    link = Link(make_transfer, records, is_direct=False)
    link.transfer.submit(ExpertId(0, 0), 0, is_demand=True)
    assert link.finish(1)[0].error is None
    assert not link.transfer.is_direct


def test_close_drops_what_is_queued(
    make_transfer: MakeTransfer, records: Path, gate: PieceGate
) -> None:
    num_threads, count = num_native_threads(), 200
    link = Link(make_transfer, records, on_piece=gate)
    for expert in range(count):
        link.transfer.submit(ExpertId(expert, 0), expert % NUM_EXPERTS, is_demand=expert % 2 == 0)
    assert gate.arrived.acquire(timeout=10)  # One is under way.
    closing = threading.Thread(target=link.transfer.close)
    closing.start()
    while closing.is_alive():
        gate.go.release()
        gate.arrived.acquire(timeout=0.05)
    num_read = len(gate.pieces)
    assert 1 <= num_read < count
    assert len(link.transfer.poll()) == num_read  # What was under way is whole.
    assert num_native_threads() == num_threads
    python_threads = getattr(link.transfer, "_threads", ())
    assert not any(thread.is_alive() for thread in python_threads)
    link.transfer.submit(ExpertId(0, 0), 0, is_demand=True)
    link.transfer.promote(ExpertId(0, 0))
    assert link.transfer.wait_any(0.001) == []
    link.transfer.close()


def test_close_closes_the_files(link: Link, records: Path) -> None:
    def num_open() -> int:
        links = Path("/proc/self/fd")
        if not links.is_dir():
            pytest.skip("no /proc here")
        return sum(os.path.realpath(fd) == str(records) for fd in links.iterdir())

    link.transfer.submit(ExpertId(0, 0), 0, is_demand=True)
    link.finish(1)
    assert num_open() == 1
    link.transfer.close()
    assert num_open() == 0


@pytest.mark.parametrize(
    ("count", "planes"),
    [(10_000, (RECORD, 2 * RECORD)), (400, (3 * PIECE, RECORD))],
    ids=["small", "in pieces"],
)
def test_churn_keeps_every_byte(
    make_transfer: MakeTransfer, tmp_path: Path, count: int, planes: tuple[int, int]
) -> None:
    churn = Churn(make_transfer, tmp_path, planes)
    churn.run(count)
    assert churn.counts["landed"] == churn.counts["submitted"] == count
    assert churn.counts["promoted"] > count / 20
    assert not churn.under_way


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
