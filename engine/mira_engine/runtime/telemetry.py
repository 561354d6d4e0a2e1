"""Counters of one reply, how they become `ReplyStats`, and when these are due.

Written by the engine thread only. Prefill is counted apart from what follows it, since
its hits and stalls say nothing about decoding.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path

import psutil

from ..events import ReplyStats, ResidencySample, StatsSample

STATS_INTERVAL_S = 0.25
RESIDENCY_INTERVAL_S = 0.5


@dataclass(slots=True)
class TrafficCounters:
    """Routed tokens by what served them, and what was moved for them."""

    num_hits: int = 0
    num_stage_hits: int = 0
    num_prefetch_hits: int = 0
    num_misses: int = 0
    num_on_host: int = 0
    num_records: int = 0
    num_prefetched: int = 0
    num_prefetch_used: int = 0
    num_skipped: int = 0
    num_bytes: int = 0
    transfer_s: float = 0.0
    planning_s: float = 0.0
    predicting_s: float = 0.0
    stall_s: float = 0.0
    prefetch_stall_s: float = 0.0
    host_s: float = 0.0


@dataclass(slots=True)
class ReplyMeter:
    """What is counted while one reply is made."""

    clock: Callable[[], float] = time.perf_counter
    prefill: TrafficCounters = field(default_factory=TrafficCounters)
    decode: TrafficCounters = field(default_factory=TrafficCounters)
    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_new_tokens: int = 0
    num_drafted: int = 0
    num_accepted: int = 0
    num_rounds: int = 0
    num_compiled_passes: int = 0
    num_eager_passes: int = 0
    draft_s: float = 0.0
    verify_s: float = 0.0
    sample_s: float = 0.0
    num_draft_tokens: int = 0
    governor_reason: str = ""
    started_at: float = 0.0
    first_token_at: float | None = None
    last_token_at: float | None = None

    def __post_init__(self) -> None:
        self.started_at = self.clock()

    def on_token(self) -> None:
        """Counts one emitted token."""
        now = self.clock()
        if self.first_token_at is None:
            self.first_token_at = now
        self.last_token_at = now
        self.num_new_tokens += 1

    def round_figures(self) -> tuple[float, float, float, int]:
        """Returns seconds of drafting, of target passes and of stalls, and records, so far."""
        traffic = self.decode
        return self.draft_s, self.verify_s, traffic.stall_s, traffic.num_records

    def snapshot(
        self, *, expert_peak_bytes: int, peak_memory_bytes: int, planned_memory_bytes: int
    ) -> ReplyStats:
        """Returns the figures so far."""
        first, last = self.first_token_at, self.last_token_at
        traffic = self.decode
        return ReplyStats(
            num_prompt_tokens=self.num_prompt_tokens,
            num_cached_tokens=self.num_cached_tokens,
            num_new_tokens=self.num_new_tokens,
            elapsed_s=self.clock() - self.started_at,
            ttft_s=first - self.started_at if first is not None else 0.0,
            decode_s=last - first if first is not None and last is not None else 0.0,
            num_hits=traffic.num_hits,
            num_misses=traffic.num_misses,
            num_on_host=traffic.num_on_host,
            num_stage_hits=traffic.num_stage_hits,
            num_prefetch_hits=traffic.num_prefetch_hits,
            num_records_loaded=traffic.num_records,
            num_records_prefetched=traffic.num_prefetched,
            num_prefetch_used=traffic.num_prefetch_used,
            num_prefetch_skipped=traffic.num_skipped,
            bytes_moved=traffic.num_bytes,
            prefill_bytes_moved=self.prefill.num_bytes,
            stall_s=traffic.stall_s,
            prefetch_stall_s=traffic.prefetch_stall_s,
            host_s=traffic.host_s,
            sample_s=self.sample_s,
            draft_s=self.draft_s,
            verify_s=self.verify_s,
            num_drafted=self.num_drafted,
            num_accepted=self.num_accepted,
            num_rounds=self.num_rounds,
            num_draft_tokens=self.num_draft_tokens,
            governor_reason=self.governor_reason,
            num_compiled_passes=self.num_compiled_passes,
            num_eager_passes=self.num_eager_passes,
            expert_peak_bytes=expert_peak_bytes,
            peak_memory_bytes=peak_memory_bytes,
            planned_memory_bytes=planned_memory_bytes,
        )


class LiveSamples:
    """Says at each step of a reply which figures are due.

    Args:
        request_id: Of the reply.
        stats: Takes the figures.
        residency: Makes a picture of the cache; `None` where nobody looks.
        clock: Monotonic seconds.
    """

    def __init__(
        self,
        request_id: str,
        *,
        stats: Callable[[], ReplyStats],
        residency: Callable[[str], ResidencySample] | None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._request_id = request_id
        self._stats = stats
        self._residency = residency
        self._clock = clock
        now = clock()
        self._stats_at = now + STATS_INTERVAL_S
        self._residency_at = now + RESIDENCY_INTERVAL_S

    def due(self) -> Iterator[StatsSample | ResidencySample]:
        """Yields what is due now."""
        now = self._clock()
        if now >= self._stats_at:
            self._stats_at = now + STATS_INTERVAL_S
            yield StatsSample(request_id=self._request_id, stats=self._stats())
        if self._residency is not None and now >= self._residency_at:
            self._residency_at = now + RESIDENCY_INTERVAL_S
            yield self._residency(self._request_id)

    def last(self) -> Iterator[ResidencySample]:
        """Yields what a reply ends with besides its own figures."""
        if self._residency is not None:
            yield self._residency(self._request_id)


class MemoryProbe:
    """Peak resident memory of this process above what it held when the probe was made.

    Linux keeps the peak itself (`VmHWM`); it is reset at the start so that earlier work
    does not count. Elsewhere the present size is sampled at each reading, which can miss
    a short peak (`is_exact` says which).
    """

    def __init__(self) -> None:
        self._process = psutil.Process()
        self._baseline = self._process.memory_info().rss
        self._peak = self._baseline
        self.is_exact = self._reset_peak()

    @staticmethod
    def _reset_peak() -> bool:
        try:
            Path("/proc/self/clear_refs").write_text("5", encoding="ascii")
        except OSError:
            return False
        return True

    def peak_bytes(self) -> int:
        """Returns bytes above the baseline, 0 or more."""
        self._peak = max(self._peak, self._read())
        return max(0, self._peak - self._baseline)

    def held_bytes(self) -> int:
        """Returns the bytes above the baseline at present, 0 or more."""
        return max(0, self._process.memory_info().rss - self._baseline)

    def _read(self) -> int:
        if self.is_exact:
            for line in Path("/proc/self/status").read_text(encoding="ascii").splitlines():
                if line.startswith("VmHWM:"):
                    return int(line.split()[1]) * 1024
        return self._process.memory_info().rss
