"""A reply's figures for people and for machines. Pure; one place for both."""

from __future__ import annotations

from mira_engine.api import KProfile, ReplyStats, format_bytes


def bytes_per_load(stats: ReplyStats) -> float:
    """Bytes that one load of a missing expert moves, prefetched ones included; 0 without."""
    return stats.bytes_moved / stats.num_records_loaded if stats.num_records_loaded else 0.0


NO_DRAFT = "no draft"
"""What stands for an acceptance where nothing was drafted: 0 % would mean that all of it failed."""


def acceptance_rate(stats: ReplyStats) -> float | None:
    """Share of draft tokens that were accepted; `None` where none was proposed."""
    return stats.num_accepted / stats.num_drafted if stats.num_drafted else None


REPORTED = (
    "num_prompt_tokens", "num_cached_tokens", "num_new_tokens", "elapsed_s", "ttft_s", "decode_s",
    "tokens_per_s",
)  # fmt: skip
"""What can be told of a reply that no engine of ours made."""


def derived(stats: ReplyStats) -> dict[str, float | None]:
    """Returns what follows from the counted figures, for `--json`; `None` for what has none."""
    return {
        "tokens_per_s": stats.tokens_per_s,
        "hit_rate": stats.hit_rate,
        "host_share": stats.host_share,
        "stall_ms_per_token": stats.stall_ms_per_token,
        "accepted_per_round": stats.accepted_per_round if stats.num_drafted else None,
        "acceptance_rate": acceptance_rate(stats),
        "bytes_per_miss": bytes_per_load(stats),
    }


def count(number: int, what: str) -> str:
    """Formats a number of things: `1 token`, `2 tokens`."""
    return f"{number} {what}" if number == 1 else f"{number} {what}s"


def stats_line(stats: ReplyStats, *, budget_bytes: int | None) -> str:
    """Returns the one line that `run` ends with.

    Args:
        stats: Of the reply.
        budget_bytes: What the experts may hold, `None` where no engine of ours ran the model:
            then only what a server reports is told.
    """
    if budget_bytes is None:
        return " | ".join(_remote_parts(stats))
    on_host = f", {stats.host_share:.1%} on the processor" if stats.num_on_host else ""
    parts = [
        count(stats.num_new_tokens, "token"),
        f"{stats.tokens_per_s:.1f} tok/s",
        f"TTFT {stats.ttft_s:.2f} s",
        f"hits {stats.hit_rate:.1%}{on_host}",
        f"moved {format_bytes(stats.bytes_moved)} ({format_bytes(bytes_per_load(stats))} per miss)",
        f"stalls {stats.stall_ms_per_token:.1f} ms/token",
        f"accepted {stats.accepted_per_round:.2f} per round" if stats.num_drafted else NO_DRAFT,
        f"memory {format_bytes(stats.peak_memory_bytes)}"
        f" of {format_bytes(stats.planned_memory_bytes)} planned",
        f"experts {format_bytes(stats.expert_peak_bytes)} of {format_bytes(budget_bytes)}",
    ]
    return " | ".join(parts)


def _remote_parts(stats: ReplyStats) -> list[str]:
    parts = [
        count(stats.num_new_tokens, "token"),
        f"{stats.tokens_per_s:.1f} tok/s",
        f"TTFT {stats.ttft_s:.2f} s",
    ]
    if stats.num_prompt_tokens:
        cached = f" ({stats.num_cached_tokens} cached)" if stats.num_cached_tokens else ""
        parts.append(f"prompt {count(stats.num_prompt_tokens, 'token')}{cached}")
    return parts


def profile_lines(profile: KProfile) -> list[str]:
    """Returns a profile of K as lines for people."""
    lines = ["  K   ms/token   tok/s"]
    for result in profile.results:
        mark = "  <- picked" if result.num_draft_tokens == profile.best else ""
        k, tpot_s = result.num_draft_tokens, result.tpot_s
        lines.append(f"{k:3d} {1e3 * tpot_s:10.2f} {1 / tpot_s:7.1f}{mark}")
    if any(result.num_draft_tokens for result in profile.results):
        lines.append(
            f"acceptance {profile.acceptance:.1%}, so {profile.expected_accepted:.1f} draft "
            "tokens in a row are expected to be accepted"
        )
    return lines


def profile_figures(profile: KProfile) -> dict[str, float | None]:
    """Returns what follows from a profile, for `--json`.

    `None` is an expectation without a bound, and all that is said of drafts where none was
    measured.
    """
    if not any(result.num_draft_tokens for result in profile.results):
        return {"acceptance": None, "expected_accepted": None}
    expected = profile.expected_accepted
    return {
        "acceptance": profile.acceptance,
        "expected_accepted": expected if expected < float("inf") else None,
    }
