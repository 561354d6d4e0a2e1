"""Room in huge pages: aligned, zero, bounded, and given back when no tensor uses it."""

from __future__ import annotations

import gc
import mmap
from pathlib import Path

import psutil
import pytest
import torch
from mira_kernels import pages
from mira_kernels.pages import HUGE_PAGE_BYTES, Arena, huge_bytes

MIB = 2**20


@pytest.fixture(params=["huge", "without"])
def kind(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """As the system has it, and as on systems that have no huge pages to ask for."""
    if request.param == "without":
        monkeypatch.delattr(mmap, "MADV_HUGEPAGE", raising=False)
    return request.param


@pytest.mark.parametrize("num_bytes", [0, 1, 4096, HUGE_PAGE_BYTES, 5 * MIB + 7])
def test_room_is_aligned_zero_and_of_its_size(kind: str, num_bytes: int) -> None:
    del kind
    room = huge_bytes(num_bytes)
    assert (room.dtype, tuple(room.shape)) == (torch.uint8, (num_bytes,))
    assert not num_bytes or room.data_ptr() % HUGE_PAGE_BYTES == 0
    assert not room.any()
    room.fill_(255)
    assert int(room.sum(dtype=torch.int64)) == 255 * num_bytes


def test_rooms_do_not_overlap(kind: str) -> None:
    del kind
    rooms = [huge_bytes(3 * MIB) for _ in range(4)]
    for value, room in enumerate(rooms, start=1):
        room.fill_(value)
    for value, room in enumerate(rooms, start=1):
        assert bool((room == value).all())


def test_room_that_cannot_be_in_huge_pages_is_ordinary(monkeypatch: pytest.MonkeyPatch) -> None:
    if not hasattr(mmap, "MADV_HUGEPAGE"):
        pytest.skip("no huge pages to ask for")
    monkeypatch.setattr(pages.mmap, "MADV_HUGEPAGE", -1)  # EINVAL, as of a kernel without.
    assert not huge_bytes(MIB).any()


def _is_mapped(address: int) -> bool:
    for line in Path("/proc/self/maps").read_text(encoding="ascii").splitlines():
        start, _, stop = line.split(maxsplit=1)[0].partition("-")
        if int(start, 16) <= address < int(stop, 16):
            return True
    return False


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="no /proc")
def test_memory_goes_with_the_last_tensor() -> None:
    size = 96 * MIB
    process = psutil.Process()
    gc.collect()
    before = process.memory_info().rss
    room = huge_bytes(size).fill_(1)
    address = room.data_ptr() + size - 1
    part = room[-10:].view(torch.int8)
    del room
    gc.collect()
    assert _is_mapped(address), "a view still needs it"
    assert bool((part == 1).all())
    assert process.memory_info().rss - before > 0.9 * size
    del part
    gc.collect()
    assert process.memory_info().rss - before < 0.1 * size


def test_arena_hands_out_aligned_pieces_that_do_not_overlap() -> None:
    wanted = [
        ((3, 5), torch.bfloat16),
        ((7,), torch.uint8),
        ((), torch.float32),
        ((9, 9), torch.int16),
    ]
    arena = Arena(sum(Arena.padded(torch.Size(s).numel() * d.itemsize) for s, d in wanted))
    pieces = [arena.take(shape, dtype) for shape, dtype in wanted]
    for value, (piece, (shape, dtype)) in enumerate(zip(pieces, wanted, strict=True)):
        assert (tuple(piece.shape), piece.dtype) == (shape, dtype)
        assert piece.is_contiguous()
        assert piece.data_ptr() % 64 == 0
        piece.fill_(value + 1)
    for value, piece in enumerate(pieces):
        assert bool((piece == value + 1).all())
    ends = [piece.data_ptr() + piece.nbytes for piece in pieces]
    for end, after in zip(ends, pieces[1:], strict=False):
        assert end <= after.data_ptr() < end + 64, "no room is lost between"


@pytest.mark.parametrize(("num_bytes", "padded"), [(0, 0), (1, 64), (64, 64), (65, 128)])
def test_padded_is_the_next_multiple_of_64(num_bytes: int, padded: int) -> None:
    assert Arena.padded(num_bytes) == padded


def test_arena_refuses_what_it_has_no_room_for_and_goes_on() -> None:
    arena = Arena(256)
    first = arena.take((100,), torch.uint8)
    with pytest.raises(ValueError, match="used up"):
        arena.take((129,), torch.uint8)
    second = arena.take((64,), torch.bfloat16)
    assert second.data_ptr() - first.data_ptr() == 128
    with pytest.raises(ValueError, match="used up"):
        arena.take((1,), torch.uint8)
    assert arena.take((0, 5), torch.float32).numel() == 0


def test_arena_lives_as_long_as_a_piece_of_it() -> None:
    piece = Arena(32 * MIB).take((16 * MIB,), torch.uint8).fill_(3)
    gc.collect()
    others = [huge_bytes(32 * MIB).fill_(9) for _ in range(2)]
    assert bool((piece == 3).all())
    del others
