"""Records in host memory: as much as the system pins, the rest through a ring from disk."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import torch
from mira_engine.errors import StoreError
from mira_engine.runtime.host_memory import (
    CHUNK_BYTES,
    PinnedSource,
    RingSource,
    allocate_chunks,
    pageable,
)
from mira_engine.types import ExpertId, Plane
from torch import Tensor

PLANE_BYTES = {Plane.HI: 4096, Plane.LO: 8192}
RECORD_BYTES = sum(PLANE_BYTES.values())
WAIT_S = 60.0


class FakeQuota:
    """Memory of which the system gives only so much."""

    def __init__(self, num_bytes: int) -> None:
        self.left = num_bytes
        self.sizes: list[int] = []

    def __call__(self, num_bytes: int) -> Tensor:
        if num_bytes > self.left:
            raise RuntimeError("out of pinned memory")
        self.left -= num_bytes
        self.sizes.append(num_bytes)
        return torch.empty(0, dtype=torch.uint8)


def test_chunks_hold_whole_records_and_end_where_the_system_gives_no_more() -> None:
    quota = FakeQuota(5 * CHUNK_BYTES // 2)

    chunks = allocate_chunks(4 * CHUNK_BYTES, 1000, quota)

    assert len(chunks) == 2
    assert all(size % 1000 == 0 and size <= CHUNK_BYTES for size in quota.sizes)


def test_chunks_of_less_than_a_record_are_none() -> None:
    assert allocate_chunks(RECORD_BYTES - 1, RECORD_BYTES, pageable) == []


def _number(expert: ExpertId, plane: Plane) -> int:
    return 10 * expert.expert + (plane is Plane.LO)


@pytest.fixture
def store(tmp_path: Path):
    """A file for each record. Returns where they are."""

    def locate(expert: ExpertId, plane: Plane) -> tuple[Path, int, int]:
        path = tmp_path / f"{expert.expert}-{plane.value}"
        if not path.exists() and expert.expert < 8:
            path.write_bytes(bytes([_number(expert, plane)]) * PLANE_BYTES[plane])
        return path, 0, PLANE_BYTES[plane]

    return locate


def _take(source: RingSource | PinnedSource, expert: ExpertId):
    deadline = time.monotonic() + WAIT_S
    while (found := source.take(expert)) is None:
        assert time.monotonic() < deadline
    return found


def _check(parts, expert: ExpertId) -> None:
    for plane, num_bytes in PLANE_BYTES.items():
        assert parts[plane].numel() == num_bytes
        assert set(parts[plane].tolist()) == {_number(expert, plane)}


def _ring(locate, num_buffers: int, num_threads: int = 2) -> RingSource:
    buffers = [pageable(RECORD_BYTES) for _ in range(num_buffers)]
    return RingSource(locate, PLANE_BYTES, buffers, num_threads=num_threads, is_direct=False)


def test_ring_gives_every_record_through_few_buffers(store) -> None:
    ring = _ring(store, num_buffers=2)
    experts = [ExpertId(0, index) for index in range(6)]
    for expert in experts:
        ring.begin(expert, is_demand=False)

    for expert in experts:
        _check(_take(ring, expert), expert)
        ring.give_back(expert)
    ring.close()


def test_ring_reads_a_demand_before_what_has_not_begun(store) -> None:
    ring = _ring(store, num_buffers=1)
    first, later, urgent = (ExpertId(0, index) for index in range(3))
    for expert in (first, later):
        ring.begin(expert, is_demand=False)
    ring.begin(urgent, is_demand=True)

    _check(_take(ring, first), first)
    ring.give_back(first)

    _check(_take(ring, urgent), urgent)
    assert ring.take(later) is None
    ring.close()


def test_ring_says_what_cannot_be_read_and_goes_on(store) -> None:
    ring = _ring(store, num_buffers=1)
    absent, there = ExpertId(0, 9), ExpertId(0, 1)
    ring.begin(absent, is_demand=True)
    ring.begin(there, is_demand=False)

    with pytest.raises(StoreError, match="9-hi"):
        _take(ring, absent)

    _check(_take(ring, there), there)
    ring.close()


def test_pinned_records_are_there_at_once_and_others_come_from_the_ring(store) -> None:
    ring = _ring(store, num_buffers=1)
    experts = [ExpertId(0, index) for index in range(4)]

    def load(expert: ExpertId, plane: Plane, part: Tensor) -> None:
        part.fill_(_number(expert, plane))

    source = PinnedSource([pageable(2 * RECORD_BYTES)], experts, PLANE_BYTES, load, ring)

    assert source.num_held == 2
    source.begin(experts[0], is_demand=True)
    _check(source.take(experts[0]), experts[0])
    source.give_back(experts[0])
    source.begin(experts[3], is_demand=True)
    source.hurry(experts[3])
    _check(_take(source, experts[3]), experts[3])
    source.give_back(experts[3])
    source.close()


def test_pinned_source_without_a_ring_does_not_know_what_it_has_no_room_for(store) -> None:
    source = PinnedSource([], [ExpertId(0, 0)], PLANE_BYTES, lambda *_: None)

    with pytest.raises(KeyError):
        source.take(ExpertId(0, 0))
