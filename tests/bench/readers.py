"""What does a record cost the interpreter, read by Python's threads and by native ones?

Question: of moving an expert's record from the disk into a slot, how much processor time
does the engine's thread spend, how much the process, and how long does a call take?

Method: one file of `--records` records of `--kibibytes`, read with O_DIRECT where that works
by `--threads` readers. A round asks for all of them, at most `--ahead` at a time, a third
as demands, and polls or waits as an engine does. Both links take turns, `--rounds` times,
and the medians count. `thread_us` is the engine thread's processor time a record,
`process_us` that of all threads, `wall_us` the time that passed; `work_us` how long some
plain Python takes in the engine's thread while records come, `work_alone_us` when none do.

Left out: what an engine does between its calls; other disks than this one.

Run: python tests/bench/readers.py [--records 2000] [--kibibytes 882] [--cache FOLDER]
The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path

from mira_engine.runtime.disk import DiskTransfer
from mira_engine.runtime.native_disk import NativeDiskTransfer
from mira_engine.types import ExpertId, Plane
from mira_kernels import native
from mira_kernels.pages import huge_bytes
from mira_kernels.reader import find_library

AnyTransfer = DiskTransfer | NativeDiskTransfer
FILE_RECORDS = 256


def move(transfer: AnyTransfer, num_records: int, ahead: int) -> dict[str, float]:
    """Moves records, at most `ahead` at a time. Returns microseconds a record."""
    wall, thread, process = time.perf_counter(), time.thread_time(), time.process_time()
    free, num_asked, num_landed = list(range(ahead)), 0, 0
    while num_landed < num_records:
        while free and num_asked < num_records:
            expert = ExpertId(num_asked // FILE_RECORDS, num_asked % FILE_RECORDS)
            transfer.submit(expert, free.pop(), is_demand=num_asked % 3 == 0)
            num_asked += 1
        for item in transfer.poll() or transfer.wait_any(1.0):
            if item.error is not None:
                raise item.error
            free.append(item.slot)
            num_landed += 1
    return {
        "thread_us": (time.thread_time() - thread) / num_records * 1e6,
        "process_us": (time.process_time() - process) / num_records * 1e6,
        "wall_us": (time.perf_counter() - wall) / num_records * 1e6,
    }


def idle_poll_us(transfer: AnyTransfer) -> float:
    """Microseconds of a poll that finds nothing."""
    started = time.perf_counter()
    for _ in range(20_000):
        transfer.poll()
    return (time.perf_counter() - started) / 20_000 * 1e6


def submit_us(transfer: AnyTransfer, ahead: int) -> float:
    """Microseconds of a submit, the first of each expert left out. Ends with nothing queued."""
    seconds = []
    for _ in range(20):
        started = time.perf_counter()
        for i in range(ahead):
            transfer.submit(ExpertId(0, i), i, is_demand=False)
        seconds.append(time.perf_counter() - started)
        num_landed = 0
        while num_landed < ahead:
            num_landed += len(transfer.wait_any(1.0))
    return statistics.median(seconds[1:]) / ahead * 1e6


def work_us(transfer: AnyTransfer, num_records: int, ahead: int) -> dict[str, float]:
    """Microseconds of some plain Python, alone and while records come."""
    seconds: dict[bool, list[float]] = {True: [], False: []}
    free, num_asked = list(range(ahead)), 0
    while num_asked < num_records or len(free) < ahead:
        free += [item.slot for item in transfer.poll()]
        if free and num_asked < num_records:
            expert = ExpertId(num_asked // FILE_RECORDS, num_asked % FILE_RECORDS)
            transfer.submit(expert, free.pop(), is_demand=num_asked % 3 == 0)
            num_asked += 1
        seconds[True].append(_work_s())
    for _ in seconds[True]:
        seconds[False].append(_work_s())
    return {
        "work_us": statistics.fmean(seconds[True]) * 1e6,
        "work_alone_us": statistics.fmean(seconds[False]) * 1e6,
    }


def _work_s() -> float:
    started = time.perf_counter()
    sum(range(2000))
    return time.perf_counter() - started


def run(arguments: argparse.Namespace, cache_dir: Path) -> dict[str, dict[str, float]]:
    """Measures both links in turns. Returns medians by link."""
    if not native.is_built(cache_dir):
        status = native.build(cache_dir)
        if not status.is_available:
            raise SystemExit(status.reason)
    library = find_library(cache_dir)
    if library is None:
        raise SystemExit("the native readers do not work here")
    size = arguments.kibibytes << 10
    memory = huge_bytes(arguments.ahead * size).numpy()
    slots = [memory[i * size : (i + 1) * size] for i in range(arguments.ahead)]
    found: dict[str, list[dict[str, float]]] = {"python": [], "native": []}
    kinds: dict[str, Callable[..., AnyTransfer]] = {
        "python": DiskTransfer,
        "native": partial(NativeDiskTransfer, library),
    }
    with tempfile.TemporaryDirectory(dir=arguments.folder) as folder:
        path = Path(folder) / "records"
        path.write_bytes(bytes(FILE_RECORDS * size))
        for _ in range(arguments.rounds):
            for name, make in kinds.items():
                transfer = make(
                    locate=lambda expert, plane: (path, expert.expert * size, size),
                    planes=(Plane.WHOLE,),
                    slot_buffers=[{Plane.WHOLE: memoryview(slot)} for slot in slots],
                    num_threads=arguments.threads,
                    is_direct=True,
                )
                try:
                    move(transfer, arguments.records, arguments.ahead)  # Warms up.
                    figures = move(transfer, arguments.records, arguments.ahead)
                    figures["idle_poll_us"] = idle_poll_us(transfer)
                    figures["submit_us"] = submit_us(transfer, arguments.ahead)
                    figures |= work_us(transfer, arguments.records, arguments.ahead)
                finally:
                    transfer.close()
                found[name].append(figures)
    return {
        name: {key: round(statistics.median(row[key] for row in rows), 2) for key in rows[0]}
        for name, rows in found.items()
    }


def main() -> None:
    """Parses the arguments, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--records", type=int, default=2000)
    parser.add_argument("--kibibytes", type=int, default=882)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--ahead", type=int, default=16)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--cache", type=Path, help="folder of the built kernels")
    parser.add_argument("--folder", type=Path, help="where the file of records is made")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        medians = run(arguments, arguments.cache or Path(folder))
    for name, figures in medians.items():
        print(name, *(f"{key} {value}" for key, value in figures.items()))
    print(json.dumps(medians))


if __name__ == "__main__":
    main()
