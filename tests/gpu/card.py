"""The card that the check runs on, or what stands for one.

Imported before anything of triton's: the interpreter is chosen here. A machine with a card
runs as one without where TRITON_INTERPRET is 1.
"""

from __future__ import annotations

import gc
import os
import statistics
from collections.abc import Callable

import torch

HAS_CARD = torch.cuda.is_available() and os.environ.get("TRITON_INTERPRET") != "1"
if not HAS_CARD:
    os.environ["TRITON_INTERPRET"] = "1"

DEVICE = torch.device("cuda", 0) if HAS_CARD else torch.device("cpu")
GIB = 1 << 30


def card_name() -> str | None:
    """The card's name, `None` without one."""
    return torch.cuda.get_device_name(DEVICE) if HAS_CARD else None


def card_bytes() -> int:
    """All memory of the card."""
    return int(torch.cuda.get_device_properties(DEVICE).total_memory)


def limit_memory(num_bytes: int | None) -> None:
    """Lets torch take so much of the card from now on, `None` for all of it.

    What it held and does not use is given back first; peaks are counted anew.
    """
    if not HAS_CARD:
        return
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(DEVICE)
    share = 1.0 if num_bytes is None else min(1.0, num_bytes / card_bytes())
    torch.cuda.set_per_process_memory_fraction(share, DEVICE)


def peak_bytes() -> int | None:
    """The most that torch has taken of the card since `limit_memory`; `None` without one."""
    return int(torch.cuda.max_memory_reserved(DEVICE)) if HAS_CARD else None


def num_device_allocations() -> int:
    """How often torch has asked the card for memory so far; 0 without one."""
    return int(torch.cuda.memory_stats(DEVICE)["num_device_alloc"]) if HAS_CARD else 0


def synchronize() -> None:
    """Waits for all that was put into the card's queues."""
    if HAS_CARD:
        torch.cuda.synchronize(DEVICE)


def median_ms(work: Callable[[], object], repeats: int = 30) -> float:
    """Median of a card's milliseconds for `work`, each measured between two events."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def kernels_ms(work: Callable[[], object], repeats: int = 10) -> float:
    """Median of what the launches of `work` take on the card, however slow the host is.

    The card is kept busy until the host has launched everything, so nothing between the two
    events waits for a launch.
    """
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        for _ in range(20):
            a @ a
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)
