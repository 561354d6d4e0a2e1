"""Notices that a card's memory has moved into the computer's own, by how slowly it is read.

Windows' driver model (WDDM) gives a program more of a card's memory than there is and moves
what does not fit behind the bus, without an error and without a word; it also moves what
other programs push out later. A kernel that reads there runs at the bus' rate, ten to fifty
times slower. `judge` decides from rates alone and is pure; `SpillWatch` takes them now and
then, in the engine thread; `CudaReads` is the part that needs a card.

A false alarm would send somebody to lower `--memory` for nothing, so all doubts count for the
card. Other work can only slow a read down: the fastest of several counts. A piece is slow
only where it is far below the card's own rate *and* no faster than its bus. And an alarm is
given only when a second look at the same pieces, with the card awake for certain, agrees.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from mira_assets.gpus import load_gpus
from torch import Tensor

from ..config import format_bytes
from .cards import Card, find_cards
from .host_system import HostSystem

CODE = "spilled-memory"
"""Code of the notice."""

PIECE_BYTES = 128 << 20
"""Read at a time: more than any card's own cache holds (98 MB in 2026)."""

MIN_PIECE_BYTES = 16 << 20
"""A smaller arena says nothing: its reads last no longer than a launch."""

_NUM_READS = 5
"""Of each piece, in each of the two looks."""

_NUM_SAMPLED = 8
"""Pieces that are looked at during use; others each time."""

_INTERVAL_S = 20.0
"""Between two looks during use. One costs about 2 ms of a card at 500 GB/s."""

_WAKE_S = 0.5
"""Work before the second look: a card that slept has the clock of its memory turned down."""

_SLOW_SHARE = 0.25
"""A piece is slow below this part of the rate that it should have. The slowest memory of the
cards in the table does 272 GB/s, PCIe 4.0 with 8 lanes 16 GB/s."""

_BUS_SLACK = 1.15
"""Above so many times its bus' rate a piece cannot lie behind the bus."""

_LANE_BYTES_PER_S = {3: 0.985e9, 4: 1.969e9, 5: 3.938e9, 6: 7.563e9}
"""Of one PCIe lane, by generation. Source: PCI-SIG, after encoding."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CardRates:
    """What a card can do at best.

    Attributes:
        memory_bytes_per_s: Of its memory, `None` where the driver does not say.
        bus_bytes_per_s: Of its bus, `None` likewise.
    """

    memory_bytes_per_s: float | None = None
    bus_bytes_per_s: float | None = None


def bus_rate(generation: int, num_lanes: int) -> float | None:
    """Returns the bytes per second of a PCIe link, `None` where it is not known."""
    lane = _LANE_BYTES_PER_S.get(generation)
    return lane * num_lanes if lane is not None and num_lanes else None


@dataclass(frozen=True, slots=True, kw_only=True)
class SpillVerdict:
    """What a look found.

    Attributes:
        slow: Numbers of the pieces that lie behind the bus, in order.
        num_pieces: Looked at.
        slow_bytes_per_s: Fastest of the slow ones, 0 where there are none.
        expected_bytes_per_s: What pieces of the card's own memory do.
    """

    slow: tuple[int, ...]
    num_pieces: int
    slow_bytes_per_s: float = 0.0
    expected_bytes_per_s: float = 0.0

    @property
    def text(self) -> str:
        """For people: what it is, and what to do."""
        share = len(self.slow) / self.num_pieces
        return (
            f"About {share:.0%} of the experts' place on the card is read at "
            f"{format_bytes(self.slow_bytes_per_s)}/s where the card does "
            f"{format_bytes(self.expected_bytes_per_s)}/s: Windows has moved it into the "
            "computer's memory, which makes every token slower. Give a smaller --memory, close "
            "other programs that use the card, or choose 'Prefer No Sysmem Fallback' for 'CUDA - "
            "Sysmem Fallback Policy' in the NVIDIA Control Panel."
        )


def judge(rates: Mapping[int, Sequence[float]], card: CardRates) -> SpillVerdict:
    """Says which pieces are read as if they lay behind the bus.

    Args:
        rates: Bytes per second of each read of a piece, by the piece's number; at least one.
        card: What the card can do.
    """
    best = {piece: max(reads) for piece, reads in sorted(rates.items())}
    # The card's own rate shows that all of it was moved, too; without it pieces are compared.
    expected = max(*best.values(), card.memory_bytes_per_s or 0.0)
    bound = _SLOW_SHARE * expected
    if card.bus_bytes_per_s is not None:
        bound = min(bound, _BUS_SLACK * card.bus_bytes_per_s)
    slow = tuple(piece for piece, rate in best.items() if rate < bound)
    return SpillVerdict(
        slow=slow,
        num_pieces=len(best),
        slow_bytes_per_s=max((best[piece] for piece in slow), default=0.0),
        expected_bytes_per_s=expected,
    )


Reads = Callable[[int], float]
"""Reads a piece, and returns the seconds that took on the card."""


class SpillWatch:
    """Looks at an arena when it is made, and now and then while it is used.

    Args:
        read: Reads a piece.
        piece_bytes: Of each piece; none makes a watch that never says anything.
        card: What the card can do.
        clock: Seconds that pass.
    """

    def __init__(
        self,
        read: Reads,
        piece_bytes: Sequence[int],
        card: CardRates,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._read = read
        self._piece_bytes = tuple(piece_bytes)
        self._card = card
        self._clock = clock
        self._next_piece = 0
        self._looked_at = -_INTERVAL_S
        self._has_told = not self._piece_bytes

    def look_at_all(self) -> SpillVerdict | None:
        """Looks at every piece. Returns what was found, `None` where all is well."""
        return self._look(range(len(self._piece_bytes)))

    def look(self) -> SpillVerdict | None:
        """Looks at a few pieces, if it is time. Returns what was found, once.

        To be called often, in the engine thread: most calls only ask the clock.
        """
        if self._has_told or self._clock() - self._looked_at < _INTERVAL_S:
            return None
        count = len(self._piece_bytes)
        sampled = min(count, _NUM_SAMPLED)
        first, self._next_piece = self._next_piece, (self._next_piece + 1) % count
        return self._look([(first + each * count // sampled) % count for each in range(sampled)])

    def _look(self, pieces: Sequence[int]) -> SpillVerdict | None:
        if self._has_told:
            return None
        found = judge(self._rates(pieces), self._card)
        if found.slow:
            found = self._confirmed(found)
        self._looked_at = self._clock()
        if not found.slow:
            return None
        self._has_told = True
        return found

    def _confirmed(self, first: SpillVerdict) -> SpillVerdict:
        """Looks at the slow pieces once more; what is slow only once is not slow."""
        awake_at = self._clock() + _WAKE_S
        while self._clock() < awake_at:
            self._read(first.slow[0])
        again = self._rates(first.slow)
        # What was fast before is fast: it keeps the scale that the slow ones are measured by.
        card = CardRates(
            memory_bytes_per_s=first.expected_bytes_per_s,
            bus_bytes_per_s=self._card.bus_bytes_per_s,
        )
        second = judge(again, card)
        return SpillVerdict(
            slow=second.slow,
            num_pieces=first.num_pieces,
            slow_bytes_per_s=second.slow_bytes_per_s,
            expected_bytes_per_s=first.expected_bytes_per_s,
        )

    def _rates(self, pieces: Sequence[int]) -> dict[int, list[float]]:
        """Reads the pieces in turn, several times: what slows one turn meets all of them."""
        rates: dict[int, list[float]] = {piece: [] for piece in pieces}
        for _ in range(_NUM_READS):
            for piece in pieces:
                seconds = max(self._read(piece), 1e-9)
                rates[piece].append(self._piece_bytes[piece] / seconds)
        return rates


def cut(arenas: Sequence[Tensor]) -> list[Tensor]:
    """Cuts device memory, uint8 `[num_bytes]` each, into pieces that are worth a read.

    All but the last of an arena have `PIECE_BYTES`; a rest that is too short is left out.
    """
    return [
        piece
        for arena in arenas
        for piece in arena.split(PIECE_BYTES)
        if piece.numel() >= MIN_PIECE_BYTES
    ]


def make_watch(
    host: HostSystem,
    arenas: Sequence[Tensor],
    device: torch.device,
    *,
    cards: Callable[[], Sequence[Card]] = lambda: find_cards().cards,
    make_reads: Callable[[Sequence[Tensor], torch.device], Reads] | None = None,
) -> SpillWatch | None:
    """Makes the watch of a card's arenas; `None` where no driver moves memory by itself.

    Args:
        host: The system.
        arenas: Device memory, uint8 `[num_bytes]` each.
        device: The card.
        cards: Finds the cards and what their drivers say of them.
        make_reads: Makes what reads pieces; `CudaReads` unless a test has another.
    """
    if not host.kind.is_wddm:
        return None
    pieces = cut(arenas)
    card = next((each for each in cards() if each.index == device.index), None)
    rates = CardRates() if card is None else rates_of(card)
    reads = (make_reads or CudaReads)(pieces, device)
    return SpillWatch(reads, [piece.numel() for piece in pieces], rates)


def rates_of(card: Card) -> CardRates:
    """Returns what a card can do: as its driver says, else as the table of cards has it."""
    memory = card.memory_bytes_per_s or None
    bus = bus_rate(card.link_generation, card.max_link_width)
    for known in load_gpus().values():
        size = f" {known.memory_gib} GB"  # In the table's name where there are several.
        is_same = known.title.removesuffix(size).casefold() == card.name.casefold()
        if is_same and known.memory_gib == round(card.total_bytes / 2**30):
            memory = memory or 1e9 * known.bandwidth_gb_per_s
            bus = bus or bus_rate(known.pcie_generation, known.pcie_lanes)
    return CardRates(memory_bytes_per_s=memory, bus_bytes_per_s=bus)


class CudaReads:
    """Reads pieces on a card, timed by the card's own events.

    A sum reads every byte once and writes next to nothing; what is stored is not changed.

    Args:
        pieces: Device memory, uint8 `[num_bytes]` each.
        device: The card.
    """

    def __init__(self, pieces: Sequence[Tensor], device: torch.device) -> None:
        self._pieces = [piece[: piece.numel() // 8 * 8].view(torch.int64) for piece in pieces]
        self._device = device

    def __call__(self, number: int) -> float:
        """Reads a piece. Returns the seconds."""
        with torch.cuda.device(self._device):
            begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            begin.record()
            self._pieces[number].sum()
            end.record()
            end.synchronize()
            return begin.elapsed_time(end) / 1e3
