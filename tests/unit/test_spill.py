"""Memory that has left the card is noticed by its rate; noise, sleep and slow cards are not."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable

import pytest
import torch
from mira_engine.runtime import spill
from mira_engine.runtime.cards import Card
from mira_engine.runtime.host_system import HostKind, HostSystem
from mira_engine.runtime.spill import (
    CardRates,
    CudaReads,
    SpillWatch,
    bus_rate,
    cut,
    judge,
    make_watch,
    rates_of,
)

MIB, GB = 1 << 20, 1e9
CARD = CardRates(memory_bytes_per_s=360 * GB, bus_bytes_per_s=31.5 * GB)
UNKNOWN = CardRates()
VRAM, BUS = 330 * GB, 22 * GB
PIECE = 128 * MIB


class FakeCard:
    """A card whose pieces are read at given rates, and a clock that runs while they are.

    Args:
        rates: Bytes per second of each piece.
        slowed: Returns by how much a read is slower, from its number.
    """

    def __init__(self, rates: list[float], slowed: Callable[[int], float] = lambda number: 1.0):
        self.rates = rates
        self.slowed = slowed
        self.reads: list[int] = []
        self.now = 1000.0

    def __call__(self, piece: int) -> float:
        seconds = PIECE / self.rates[piece] * self.slowed(len(self.reads))
        self.reads.append(piece)
        self.now += seconds
        return seconds

    def watch(self, card: CardRates = CARD) -> SpillWatch:
        """Makes the watch of this card."""
        return SpillWatch(self, [PIECE] * len(self.rates), card, clock=lambda: self.now)


@pytest.mark.parametrize(
    ("rates", "card", "slow"),
    [
        ([VRAM] * 4, CARD, ()),
        ([VRAM, VRAM, VRAM, BUS], CARD, (3,)),
        ([BUS, VRAM, BUS], CARD, (0, 2)),
        ([BUS] * 4, CARD, (0, 1, 2, 3)),
        ([VRAM, VRAM, BUS], UNKNOWN, (2,)),
        ([BUS] * 4, UNKNOWN, ()),
        ([VRAM, 0.3 * VRAM], UNKNOWN, ()),
        ([VRAM, 60 * GB], CARD, ()),
        ([VRAM], CARD, ()),
    ],
    ids=[
        "all-here", "last-moved", "first-and-last-moved", "all-moved", "moved-rate-unknown",
        "all-moved-rate-unknown", "shared-with-others", "faster-than-the-bus", "one-piece",
    ],
)  # fmt: skip
def test_pieces_far_below_the_card_and_no_faster_than_its_bus_are_slow(
    rates: list[float], card: CardRates, slow: tuple[int, ...]
) -> None:
    reads = {number: [rate, 0.9 * rate] for number, rate in enumerate(rates)}

    assert judge(reads, card).slow == slow


def test_fastest_read_of_a_piece_counts() -> None:
    assert judge({0: [BUS, BUS, VRAM], 1: [VRAM, BUS, BUS]}, CARD).slow == ()


def test_moved_memory_is_told_once_with_what_to_do() -> None:
    card = FakeCard([VRAM] * 6 + [BUS] * 2)
    watch = card.watch()

    found = watch.look_at_all()

    assert found is not None
    assert found.slow == (6, 7)
    assert "25%" in found.text
    assert "--memory" in found.text
    assert "Sysmem Fallback Policy" in found.text
    assert watch.look_at_all() is None
    card.now += 1000
    assert watch.look() is None


def test_memory_that_is_moved_while_it_is_used_is_found() -> None:
    card = FakeCard([VRAM] * 40)
    watch = card.watch()
    assert watch.look_at_all() is None
    card.rates[:] = [VRAM] * 30 + [BUS] * 10
    card.now += 60

    found = watch.look()

    assert found is not None
    assert set(found.slow) <= set(range(30, 40))


def test_looks_during_use_are_rare_few_and_reach_every_piece() -> None:
    card = FakeCard([VRAM] * 40)
    watch = card.watch()
    assert watch.look() is None
    num_reads = len(card.reads)
    assert len(set(card.reads)) == 8
    assert watch.look() is None
    assert len(card.reads) == num_reads
    for _ in range(5):
        card.now += 60
        assert watch.look() is None
    assert set(card.reads) == set(range(40))


def test_look_that_no_second_one_confirms_is_no_alarm() -> None:
    card = FakeCard([VRAM] * 4, slowed=lambda number: 20.0 if number < 20 else 1.0)

    assert card.watch().look_at_all() is None
    assert len(card.reads) > 40  # It looked again.


def test_card_that_wakes_up_late_is_no_alarm() -> None:
    card = FakeCard([VRAM] * 2)
    card.slowed = lambda number: 26.0 if card.now < 1000.4 else 1.0

    assert card.watch().look_at_all() is None


@pytest.mark.parametrize("card", [CARD, UNKNOWN], ids=["rates-known", "rates-unknown"])
def test_noise_is_never_an_alarm(card: CardRates) -> None:
    """Each read of a busy card takes up to five times as long, some twenty times."""
    draw = random.Random(7)

    def slowed(number: int) -> float:
        return draw.uniform(1.0, 5.0) if draw.random() < 0.9 else draw.uniform(5.0, 20.0)

    for _ in range(300):
        assert FakeCard([VRAM] * 12, slowed).watch(card).look_at_all() is None


def test_moved_memory_is_found_in_spite_of_noise() -> None:
    draw = random.Random(7)
    for _ in range(100):
        card = FakeCard([VRAM] * 11 + [BUS], lambda number: draw.uniform(1.0, 2.5))
        found = card.watch().look_at_all()
        assert found is not None
        assert found.slow == (11,)


def test_arena_too_small_to_say_anything_is_never_read() -> None:
    card = FakeCard([])
    watch = card.watch()

    assert watch.look_at_all() is None
    assert watch.look() is None


def test_arenas_are_cut_into_pieces_worth_a_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "PIECE_BYTES", 64)
    monkeypatch.setattr(spill, "MIN_PIECE_BYTES", 16)
    arenas = [torch.zeros(size, dtype=torch.uint8) for size in (150, 8, 70)]

    assert [piece.numel() for piece in cut(arenas)] == [64, 64, 22, 64]


def test_pieces_are_read_as_whole_words_wherever_they_begin() -> None:
    arena = torch.arange(150, dtype=torch.uint8)
    words = CudaReads(list(arena.split(64)), torch.device("cpu"))._pieces

    assert [len(part) for part in words] == [8, 8, 2]
    assert words[2].view(torch.uint8).tolist() == list(range(128, 144))


def test_bus_rate_is_known_for_whole_links_only() -> None:
    assert bus_rate(4, 16) == pytest.approx(31.5 * GB, rel=0.01)
    assert bus_rate(0, 16) is None
    assert bus_rate(4, 0) is None


def _card(index: int) -> Card:
    return Card(
        index=index,
        name="RTX 3060",
        total_bytes=12 << 30,
        free_bytes=11 << 30,
        capability=(8, 6),
        link_generation=4,
        max_link_width=16,
        memory_bytes_per_s=360 * GB if index else 0.0,
    )


@pytest.mark.parametrize(
    ("changes", "memory", "bus"),
    [
        ({"memory_bytes_per_s": 350 * GB}, 350 * GB, 31.5 * GB),
        ({}, 360 * GB, 31.5 * GB),
        ({"link_generation": 3, "max_link_width": 8}, 360 * GB, 7.9 * GB),
        ({"link_generation": 0}, 360 * GB, 31.5 * GB),
        ({"total_bytes": 8 << 30, "link_generation": 0}, None, None),
        ({"name": "NVIDIA GeForce RTX 3060 Laptop GPU", "link_generation": 0}, None, None),
    ],
    ids=["driver-says", "table-says", "narrow-slot", "silent-link", "other-memory", "other-card"],
)
def test_rates_are_the_drivers_or_the_tables_or_unknown(
    changes: dict, memory: float | None, bus: float | None
) -> None:
    fields = {"name": "NVIDIA GeForce RTX 3060", "memory_bytes_per_s": 0.0} | changes
    found = rates_of(dataclasses.replace(_card(1), **fields))

    assert found.memory_bytes_per_s == (memory and pytest.approx(memory))
    assert found.bus_bytes_per_s == (bus and pytest.approx(bus, rel=0.01))


@pytest.mark.parametrize("kind", list(HostKind))
def test_watch_is_made_where_windows_drives_the_card(
    kind: HostKind, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spill, "PIECE_BYTES", 64)
    monkeypatch.setattr(spill, "MIN_PIECE_BYTES", 16)
    seen: list[int] = []

    def make_reads(pieces: list, device: torch.device) -> spill.Reads:
        seen.extend(piece.numel() for piece in pieces)
        return lambda number: pieces[number].numel() / BUS

    watch = make_watch(
        HostSystem(kind=kind),
        [torch.zeros(128, dtype=torch.uint8)],
        torch.device("cuda", 1),
        cards=lambda: (_card(0), _card(1)),
        make_reads=make_reads,
    )

    assert (watch is not None) == kind.is_wddm
    if watch is not None:
        watch._clock = iter(range(100)).__next__
        found = watch.look_at_all()
        assert seen == [64, 64]
        assert found is not None
        assert found.slow == (0, 1)  # Only the second card's own rate can say so.
