"""How long does an expert take to move in each format, and its scales alone?

Question: microseconds to move one expert as one record, and its scales alone as one vector
(Mira's shared one) or as one for each matrix (by rows), from the disk past the page cache,
from memory to memory, and from pinned memory to a graphics card where there is one. Mira's
Table I (transfer time by bit width) and its microbenchmark of scales.

Method: shapes of the built-in model and of two of the papers'; no model is loaded, the bytes
are random. A file of `--megabytes`, read at changing places, so that nothing is read twice in
a row; medians over `--rounds`, formats taking turns. Vectors of scales are moved one after
another, each by a call of its own; the disk moves whole pages of 4096 bytes.

Left out: dequantising, and several transfers at a time.

Run on an idle machine: python tests/bench/format_times.py [--rounds 30] [--megabytes 512]
The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import mmap
import os
import statistics
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

import torch
from format_variants import SHAPES, VARIANTS, Variant
from mira_engine.types import RECORD_ALIGNMENT, ExpertShape, align_up

Move = Callable[[Sequence[int]], None]
"""Moves pieces of so many bytes, one after another."""

SCALE_ONLY = ("int8-shared", "int8-row")


class DiskLink:
    """Reads pieces at changing places of a file, past the page cache where that is possible."""

    def __init__(self, path: Path, num_bytes: int, largest: int) -> None:
        self._num_bytes, self._place = num_bytes, 0
        block = os.urandom(1 << 20)
        with path.open("wb") as file:
            for _ in range(num_bytes >> 20):
                file.write(block)
            file.flush()
            os.fsync(file.fileno())
        self.is_direct = True
        try:
            self._file = os.open(path, os.O_RDONLY | os.O_DIRECT)
        except (AttributeError, OSError):
            self._file, self.is_direct = os.open(path, os.O_RDONLY), False
        self._target = mmap.mmap(-1, align_up(largest))

    def move(self, pieces: Sequence[int]) -> None:
        """Reads each piece by a call of its own."""
        for size in pieces:
            length = align_up(size)
            if self._place + length > self._num_bytes:
                self._place = 0
            with memoryview(self._target) as whole, whole[:length] as view:
                os.preadv(self._file, [view], self._place)
            self._place += length

    def close(self) -> None:
        """Closes the file."""
        os.close(self._file)
        self._target.close()


class CopyLink:
    """Copies pieces from one memory to another."""

    def __init__(self, num_bytes: int, largest: int, device: str) -> None:
        self._source = torch.randint(0, 255, (num_bytes,), dtype=torch.uint8)
        if device == "cuda":
            self._source = self._source.pin_memory()
        self._target = torch.empty(align_up(largest), dtype=torch.uint8, device=device)
        self._is_gpu, self._place = device == "cuda", 0

    def move(self, pieces: Sequence[int]) -> None:
        """Copies each piece by a call of its own, and waits for the last."""
        for size in pieces:
            if self._place + size > len(self._source):
                self._place = 0
            piece = self._source[self._place : self._place + size]
            self._target[:size].copy_(piece, non_blocking=True)
            self._place += align_up(size)
        if self._is_gpu:
            torch.cuda.synchronize()


def measure(move: Move, cases: dict[str, Sequence[int]], rounds: int) -> dict[str, float]:
    """Returns the median microseconds of each case; cases take turns."""
    times: dict[str, list[float]] = {name: [] for name in cases}
    for number in range(-2, rounds):
        for name, pieces in cases.items():
            started = time.perf_counter()
            move(pieces)
            if number >= 0:
                times[name].append(1e6 * (time.perf_counter() - started))
    return {name: statistics.median(values) for name, values in times.items()}


def cases_of(shape: ExpertShape) -> dict[str, Sequence[int]]:
    """Returns what is moved: whole experts, and scales alone."""
    cases: dict[str, Sequence[int]] = {}
    for variant in VARIANTS:
        cases[variant.name] = (align_up(variant.expert_bytes(shape)),)
        if variant.name.startswith("nested"):
            cases.setdefault("nested-lo", (align_up(variant.code_bytes(shape) // 2),))
    for name in SCALE_ONLY:
        cases[f"scales of {name}"] = _named(name).scale_bytes(shape)
    return cases


def _named(name: str) -> Variant:
    return next(variant for variant in VARIANTS if variant.name == name)


def run_times(folder: Path, *, rounds: int, megabytes: int) -> dict[str, object]:
    """Measures every shape on every link, and prints the tables."""
    largest = max(
        size for shape in SHAPES.values() for pieces in cases_of(shape).values() for size in pieces
    )
    num_bytes = max(megabytes << 20, 2 * align_up(largest, 1 << 20))
    result: dict[str, object] = {}
    with tempfile.NamedTemporaryFile(dir=folder) as file:
        disk = DiskLink(Path(file.name), num_bytes, largest)
        links: dict[str, Move] = {
            "disk" if disk.is_direct else "disk through the page cache": disk.move,
            "memory": CopyLink(num_bytes, largest, "cpu").move,
        }
        if torch.cuda.is_available():
            links[f"to {torch.cuda.get_device_name()}"] = CopyLink(num_bytes, largest, "cuda").move
        for link, move in links.items():
            for name, shape in SHAPES.items():
                found = measure(move, cases_of(shape), rounds)
                ratio = found["scales of int8-row"] / found["scales of int8-shared"]
                print(f"\n{name}, {link}; microseconds, medians of {rounds}")
                for case, value in found.items():
                    print(f"  {case:<22}{value:>12.1f}")
                print(f"  scales by row over shared: {ratio:.2f}")
                result[f"{name}, {link}"] = {
                    **{case: round(value, 2) for case, value in found.items()},
                    "scale_ratio": round(ratio, 3),
                }
        disk.close()
    return result


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--megabytes", type=int, default=512)
    parser.add_argument("--folder", type=Path, default=Path.cwd(), help="on the disk in question")
    arguments = parser.parse_args()
    times = run_times(arguments.folder, rounds=arguments.rounds, megabytes=arguments.megabytes)
    print(json.dumps({"bench": "format_times", "alignment": RECORD_ALIGNMENT, "us": times}))


if __name__ == "__main__":
    main()
