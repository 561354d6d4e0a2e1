"""The pinned link: its rate alone, and while products keep the card busy."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import torch
from gpu.card import DEVICE, synchronize
from gpu.sections import Deadline
from mira_engine.runtime.host_memory import pinned
from mira_engine.runtime.streams import CudaQueues, Lane

_COPY_BYTES = 1 << 30
_NUM_COPIES = 4
_NUM_ROUNDS = 5


def time_link(results: dict[str, Any], deadline: Deadline) -> None:
    """Measures both, in turn, with the engine's own queues."""
    source = pinned(_COPY_BYTES)
    target = torch.empty(_COPY_BYTES, dtype=torch.uint8, device=DEVICE)
    queues = CudaQueues(DEVICE)
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)

    def rate(*, is_busy: bool) -> float:
        event = queues.make_event()
        synchronize()
        started = time.perf_counter()
        for _ in range(_NUM_COPIES):
            queues.copy(target, source, Lane.DEMAND)
        queues.record(event, Lane.DEMAND)
        if is_busy:
            for _ in range(60):
                a @ a
        event.wait()
        elapsed = time.perf_counter() - started
        synchronize()
        return _NUM_COPIES * _COPY_BYTES / elapsed

    rate(is_busy=False)
    alone, busy = [], []
    for _ in deadline.each(range(_NUM_ROUNDS), lambda number: f"round {number + 1}"):
        alone.append(rate(is_busy=False))
        busy.append(rate(is_busy=True))
    results["alone_gb_per_s"] = statistics.median(alone) / 1e9
    results["overlapped_gb_per_s"] = statistics.median(busy) / 1e9
    results["kept"] = results["overlapped_gb_per_s"] / results["alone_gb_per_s"]


def describe_link(results: dict[str, Any]) -> Iterable[str]:
    """Lines for people."""
    if "kept" in results:
        yield (
            "  {alone_gb_per_s:.1f} GB/s alone, {overlapped_gb_per_s:.1f} GB/s while products "
            "run: {kept:.0%}"
        ).format(**results)
