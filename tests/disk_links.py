"""Disk links for tests: slots over files, readers stopped piece by piece, random work."""

from __future__ import annotations

import random
import threading
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from mira_engine.runtime.disk import DiskTransfer
from mira_engine.runtime.native_disk import NativeDiskTransfer
from mira_engine.runtime.transfer import Completion
from mira_engine.types import RECORD_ALIGNMENT, ExpertId, Plane
from mira_kernels.pages import huge_bytes

RECORD = RECORD_ALIGNMENT
PIECE = 128 << 10
NUM_EXPERTS = 6

AnyTransfer = DiskTransfer | NativeDiskTransfer
OnPiece = Callable[[int, bool], None]
MakeTransfer = Callable[..., AnyTransfer]


class PieceGate:
    """Stops each piece that is read until it is let go."""

    def __init__(self) -> None:
        self.arrived, self.go = threading.Semaphore(0), threading.Semaphore(0)
        self.pieces: list[int] = []

    def __call__(self, num_bytes: int, is_end: bool) -> None:
        self.pieces.append(num_bytes)
        self.arrived.release()
        assert self.go.acquire(timeout=10)

    def open(self) -> None:
        """Lets all go from now on."""
        self.go.release(10_000)


class FakeThrottle:
    """Tells of pieces in place of holding them."""

    def __init__(self, on_piece: OnPiece) -> None:
        self._on_piece = on_piece

    def hold(self, num_bytes: int, started_at: float, *, is_end: bool = True) -> None:
        self._on_piece(num_bytes, is_end)


def write_records(folder: Path) -> Path:
    """Writes a file of records that differ in their one byte."""
    path = folder / "layer-0000.whole.safetensors"
    path.write_bytes(b"".join(bytes([e + 1]) * RECORD for e in range(NUM_EXPERTS)))
    return path


class Link:
    """A transfer over one file, with its slots."""

    def __init__(
        self,
        make_transfer: MakeTransfer,
        path: Path,
        *,
        num_slots: int = NUM_EXPERTS,
        record_bytes: int = RECORD,
        num_threads: int = 1,
        is_direct: bool = True,
        **arguments: object,
    ) -> None:
        self.memory = huge_bytes(num_slots * record_bytes)
        parts = [self.memory[i * record_bytes : (i + 1) * record_bytes] for i in range(num_slots)]
        self.slots = parts
        self.transfer = make_transfer(
            locate=lambda expert, plane: (path, expert.expert * record_bytes, record_bytes),
            planes=(Plane.WHOLE,),
            slot_buffers=[{Plane.WHOLE: memoryview(p.numpy())} for p in parts],
            num_threads=num_threads,
            is_direct=is_direct,
            **arguments,
        )

    def finish(self, count: int) -> list[Completion]:
        landed: list[Completion] = []
        while len(landed) < count:
            got = self.transfer.wait_any(10)
            assert got, "nothing landed in ten seconds"
            landed += got
        return landed


class Churn:
    """Random submits and promotes over records of two planes; each record is checked."""

    NUM_SLOTS, NUM_EXPERTS = 12, 16

    def __init__(self, make_transfer: MakeTransfer, folder: Path, planes: Sequence[int]) -> None:
        self.random = random.Random(5)
        self.truth: dict[Plane, np.ndarray] = {}
        kinds = dict(zip((Plane.HI, Plane.LO), planes, strict=True))
        for plane, size in kinds.items():
            data = np.random.default_rng(size).integers(
                0, 255, (self.NUM_EXPERTS, size), dtype=np.uint8
            )
            (folder / plane.value).write_bytes(data.tobytes())
            self.truth[plane] = data
        self.slots: list[Mapping[Plane, np.ndarray]] = [
            {plane: huge_bytes(size).numpy() for plane, size in kinds.items()}
            for _ in range(self.NUM_SLOTS)
        ]
        self.transfer = make_transfer(
            locate=lambda e, plane: (folder / plane.value, e.expert * kinds[plane], kinds[plane]),
            planes=tuple(kinds),
            slot_buffers=[{p: memoryview(b) for p, b in slot.items()} for slot in self.slots],
            num_threads=2,
            is_direct=True,
        )
        self.under_way: dict[ExpertId, int] = {}
        self.counts: Counter[str] = Counter()

    def run(self, count: int) -> None:
        while self.counts["landed"] < count:
            free = [s for s in range(self.NUM_SLOTS) if s not in self.under_way.values()]
            if free and self.counts["submitted"] < count:
                self._submit(self.random.choice(free))
                if self.random.random() < 0.6:
                    continue
            if self.random.random() < 0.3 and self.under_way:
                self.counts["promoted"] += 1
                self.transfer.promote(self.random.choice(list(self.under_way)))
            is_waiting = len(free) <= 1 or self.random.random() < 0.1
            for item in self.transfer.wait_any(10) if is_waiting else self.transfer.poll():
                self._check(item)

    def _submit(self, slot: int) -> None:
        experts = [ExpertId(0, e) for e in range(self.NUM_EXPERTS)]
        expert = self.random.choice([e for e in experts if e not in self.under_way])
        for buffer in self.slots[slot].values():
            buffer[:: self.random.choice((512, 4096))] = 255  # No record holds it.
        self.under_way[expert] = slot
        self.transfer.submit(expert, slot, is_demand=self.random.random() < 0.4)
        self.counts["submitted"] += 1

    def _check(self, item: Completion) -> None:
        assert item.error is None
        assert self.under_way.pop(item.expert) == item.slot
        for plane, data in self.truth.items():
            assert (self.slots[item.slot][plane] == data[item.expert.expert]).all()
        self.counts["landed"] += 1


def num_native_threads() -> int:
    """Native readers of this process."""
    names = [path.read_text() for path in Path("/proc/self/task").glob("*/comm")]
    return sum(name.startswith("mira-reader") for name in names)
