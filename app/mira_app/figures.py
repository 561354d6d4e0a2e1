"""A reply's figures for people and for machines. Pure; one place for both."""

from __future__ import annotations

from mira_engine.api import ReplyStats, format_bytes


def bytes_per_load(stats: ReplyStats) -> float:
    """Bytes that one load of a missing expert moves, prefetched ones included; 0 without."""
    return stats.bytes_moved / stats.num_records_loaded if stats.num_records_loaded else 0.0


def derived(stats: ReplyStats) -> dict[str, float]:
    """Returns what follows from the counted figures, for `--json`."""
    return {
        "tokens_per_s": stats.tokens_per_s,
        "hit_rate": stats.hit_rate,
        "stall_ms_per_token": stats.stall_ms_per_token,
        "accepted_per_round": stats.accepted_per_round,
        "acceptance_rate": stats.num_accepted / stats.num_drafted if stats.num_drafted else 0.0,
        "bytes_per_miss": bytes_per_load(stats),
    }


def count(number: int, what: str) -> str:
    """Formats a number of things: `1 token`, `2 tokens`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def stats_line(stats: ReplyStats, *, budget_bytes: int) -> str:
    """Returns the one line that `run` ends with."""
    parts = [
        count(stats.num_new_tokens, "token"),
        f"{stats.tokens_per_s:.1f} tok/s",
        f"TTFT {stats.ttft_s:.2f} s",
        f"hits {stats.hit_rate:.1%}",
        f"moved {format_bytes(stats.bytes_moved)} ({format_bytes(bytes_per_load(stats))} per miss)",
        f"stalls {stats.stall_ms_per_token:.1f} ms/token",
        f"accepted {stats.accepted_per_round:.2f} per round"
        if stats.num_rounds
        else "no speculation",
        f"memory {format_bytes(stats.peak_memory_bytes)}"
        f" of {format_bytes(stats.planned_memory_bytes)} planned",
        f"experts {format_bytes(stats.expert_peak_bytes)} of {format_bytes(budget_bytes)}",
    ]
    return " | ".join(parts)
