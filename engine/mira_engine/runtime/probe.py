"""What this machine has and what it does in a second; looked up or measured, then kept."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import psutil
import torch

from ..config import MachineRates
from ..types import ExpertId, Plane
from .disk import DiskTransfer

PROFILE_FILE = "machine.json"
"""In the cache folder: what was measured on this machine."""

_MEASURED_BYTES = 96 * 2**20
"""Memory that the read rate is measured over; well above a processor's caches."""

_LINK_RECORDS = ((48, 64 * 2**10), (16, 2 * 2**20))
"""Number and bytes of the records that the link is measured with: small ones say what a
record costs, large ones what a byte costs."""

_LINK_TIMEOUT_S = 1.0
_RATE_FIELDS = (
    "device_bytes_per_s", "flops_per_s", "link_bytes_per_s", "link_latency_s",
)  # fmt: skip

_LAYER_OVERHEAD_S = 8e-5
"""What a layer of a step costs beside its bytes. Measured 2026-11-30 on two Zen 4 cores,
compiled steps of the built-in model: 2 to 3 ms for 30 layers."""


def default_num_threads() -> int:
    """Returns threads for the arithmetic: physical cores less one, `OMP_NUM_THREADS` at most.

    One core is left to the app, the readers and everybody else: torch's threads spin while
    they wait for each other, and when one of them does not get its core all of them stand
    still. Measured 2026-11-30 on two Zen 4 cores with one other busy process, the built-in
    model, a plain step: 58 ms with one thread, 95 to 680 ms with two (43 ms undisturbed).
    """
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    if hasattr(os, "sched_getaffinity"):
        cores = min(cores, len(os.sched_getaffinity(0)))
    return max(1, min(cores - 1, torch.get_num_threads()))


def machine_name() -> str:
    """Names what sets this machine's speed: processor, cores, and torch's threads in force."""
    model = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    cores = psutil.cpu_count(logical=False) or os.cpu_count() or 1
    return f"{model}, {cores} cores, {torch.get_num_threads()} threads"


def bound_kernel_cache() -> None:
    """Keeps oneDNN from holding a compiled kernel, and its scratch, for every row count.

    Experts get any number of a prompt's tokens, and each count is a kernel of its own; the
    library keeps 1024. Measured 2026-11-30, two Zen 4 cores, torch 2.13, the built-in
    model, 2048 prompt tokens in chunks of 256: peak 933 MiB with 1024 kept, 820 with 32, at
    the same speed. Has no effect once the process has used the library.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")


class MachineProfile:
    """What was measured on this machine, kept in a file so that it is measured once.

    Args:
        path: A JSON object of numbers by name. A damaged or missing one is begun anew, and
            so is every single number that is damaged.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers = self._read()

    def _read(self) -> dict[str, int | float]:
        try:
            read = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return {}
        if not isinstance(read, dict):
            return {}
        return {k: v for k, v in read.items() if _is_number(v)}

    def get(self, name: str, measure: Callable[[], int]) -> int:
        """Returns the count of this name; measures and keeps it where there is none yet."""
        kept = self._numbers.get(name)
        if not isinstance(kept, int):
            kept = self._numbers[name] = measure()
            self._write()
        return kept

    def rates(self, num_threads: int, device_memory_bytes: int) -> MachineRates | None:
        """Returns the rates kept for this many threads; `None` unless all of them are.

        Args:
            num_threads: Threads of the arithmetic.
            device_memory_bytes: Memory that the engine may use, which is never kept.
        """
        values = {name: self._numbers.get(_rate_name(name, num_threads)) for name in _RATE_FIELDS}
        if not all(value or name == "link_latency_s" for name, value in values.items()):
            return None
        if values["link_latency_s"] is None:
            return None
        return _own_rates(values, num_threads, device_memory_bytes)  # type: ignore[arg-type]

    def keep_rates(self, rates: MachineRates, num_threads: int) -> None:
        """Keeps rates that were measured with this many threads."""
        for name in _RATE_FIELDS:
            self._numbers[_rate_name(name, num_threads)] = getattr(rates, name)
        self._write()

    def _write(self) -> None:
        # What another process, or another profile of this one, has kept since stays.
        self._numbers = self._read() | self._numbers
        partial = self._path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):  # Then it is measured again at the next start.
            partial.write_text(json.dumps(self._numbers, indent=1), encoding="utf-8")
            partial.replace(self._path)


def _is_number(value: object) -> bool:
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    return math.isfinite(value) and value >= 0


def _rate_name(field: str, num_threads: int) -> str:
    return f"{field}, {num_threads} threads"


def _own_rates(
    values: Mapping[str, float], num_threads: int, device_memory_bytes: int
) -> MachineRates:
    return MachineRates(
        name=f"this machine, {num_threads} {'thread' if num_threads == 1 else 'threads'}",
        device_memory_bytes=device_memory_bytes,
        layer_overhead_s=_LAYER_OVERHEAD_S,
        **values,
    )


def measure_rates(
    folder: Path, *, num_threads: int, num_reader_threads: int, device_memory_bytes: int
) -> MachineRates:
    """Measures this machine; takes about half a second, and two at most on slow disks.

    The link is measured with the engine's own readers on a file written for it, which is
    removed again. The arithmetic is measured with torch's threads as they are set.

    Args:
        folder: On the disk where expert stores are.
        num_threads: Threads of the arithmetic.
        num_reader_threads: Threads that read records.
        device_memory_bytes: Memory that the engine may use.

    Raises:
        OSError: The folder cannot be written to.
        StoreError: What was written cannot be read.
    """
    link_bytes_per_s, link_latency_s = _measure_link(folder, num_reader_threads)
    values = {
        "device_bytes_per_s": _measure_reading(),
        "flops_per_s": _measure_products(),
        "link_bytes_per_s": link_bytes_per_s,
        "link_latency_s": link_latency_s,
    }
    return _own_rates(values, num_threads, device_memory_bytes)


def _seconds(work: Callable[[], object], rounds: int) -> float:
    """Seconds of the fastest run of `work`: what others take of the machine will pass."""
    taken = []
    for _ in range(rounds):
        started = time.perf_counter()
        work()
        taken.append(time.perf_counter() - started)
    return max(min(taken), 1e-9)


def _measure_reading() -> float:
    """Bytes per second at which memory is read."""
    values = torch.ones(_MEASURED_BYTES // 8, dtype=torch.int64)
    return _MEASURED_BYTES / _seconds(values.sum, rounds=7)


def _measure_products() -> float:
    """Operations per second of bfloat16 products with as many rows as a prompt's chunk."""
    rows, width = 256, 1024
    left = torch.ones(rows, width, dtype=torch.bfloat16)
    right = torch.ones(width, width, dtype=torch.bfloat16)
    return 2.0 * rows * width * width / _seconds(lambda: left @ right, rounds=7)


def _measure_link(folder: Path, num_readers: int) -> tuple[float, float]:
    """Bytes per second of the link, and seconds of each record beside its bytes."""
    path = folder / f".link-{os.getpid()}"
    try:
        _write_records(path, max(count * size for count, size in _LINK_RECORDS))
        (small_s, small), (large_s, large) = (
            (_move_records(path, count, size, num_readers) / count, size)
            for count, size in _LINK_RECORDS
        )
    finally:
        path.unlink(missing_ok=True)
    # Noise can make small records look as slow as large ones: then bytes are all there is.
    per_byte = max((large_s - small_s) / (large - small), 0.5 * large_s / large)
    return 1.0 / per_byte, max(0.0, small_s - small * per_byte)


def _write_records(path: Path, num_bytes: int) -> None:
    piece = os.urandom(2**20)
    with path.open("wb") as file:
        for _ in range(num_bytes // len(piece)):
            file.write(piece)
        file.flush()
        os.fsync(file.fileno())


def _move_records(path: Path, count: int, record_bytes: int, num_readers: int) -> float:
    """Seconds in which `DiskTransfer` moves so many records, all asked for at once."""
    arena = torch.empty(count * record_bytes + 4096, dtype=torch.uint8)
    start = -arena.data_ptr() % 4096  # O_DIRECT moves to aligned addresses only.
    view = memoryview(arena.numpy())[start : start + count * record_bytes]
    transfer = DiskTransfer(
        locate=lambda expert, plane: (path, expert.expert * record_bytes, record_bytes),
        planes=(Plane.WHOLE,),
        slot_buffers=[
            {Plane.WHOLE: view[i * record_bytes : (i + 1) * record_bytes]} for i in range(count)
        ],
        num_threads=num_readers,
        is_direct=True,
    )
    try:
        started = time.perf_counter()
        for i in range(count):
            transfer.submit(ExpertId(0, i), i, is_demand=True)
        num_landed = 0
        while num_landed < count:
            landed = transfer.wait_any(_LINK_TIMEOUT_S)
            for completion in landed:
                if completion.error is not None:
                    raise completion.error
            num_landed += len(landed)
            if not landed:
                break  # A very slow disk: what came so far says enough.
        return (time.perf_counter() - started) * count / max(1, num_landed)
    finally:
        transfer.close()
