"""What this machine has, looked up when the engine starts."""

from __future__ import annotations

import os

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


def bound_kernel_cache() -> None:
    """Keeps oneDNN from holding a compiled kernel, and its scratch, for every row count.

    Experts get any number of a prompt's tokens, and each count is a kernel of its own; the
    library keeps 1024. Measured 2026-11-30, two Zen 4 cores, torch 2.13, the built-in
    model, 2048 prompt tokens in chunks of 256: peak 933 MiB with 1024 kept, 820 with 32, at
    the same speed. Has no effect once the process has used the library.
    """
    os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", "32")
