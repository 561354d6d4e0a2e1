"""What this machine has, looked up when the engine starts."""

from __future__ import annotations

import contextlib
import json
import os
import platform
from collections.abc import Callable
from pathlib import Path

import psutil
import torch


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
        path: A JSON object of numbers by name. A damaged or missing one is begun anew.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._numbers: dict[str, int] = {}
        try:
            read = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError):
            return
        if isinstance(read, dict):
            self._numbers = {k: v for k, v in read.items() if isinstance(v, int) and v >= 0}

    def get(self, name: str, measure: Callable[[], int]) -> int:
        """Returns the number of this name; measures and keeps it where there is none yet."""
        if name not in self._numbers:
            self._numbers[name] = measure()
            self._write()
        return self._numbers[name]

    def _write(self) -> None:
        partial = self._path.with_suffix(f".{os.getpid()}")
        with contextlib.suppress(OSError):  # Then it is measured again at the next start.
            partial.write_text(json.dumps(self._numbers, indent=1), encoding="utf-8")
            partial.replace(self._path)
