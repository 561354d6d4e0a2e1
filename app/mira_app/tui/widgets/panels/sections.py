"""The sections of the live panel: each a pure function from a `PanelState` to lines."""

from __future__ import annotations

from collections.abc import Sequence

from mira_engine.api import MemoryPlan, ReplyStats
from textual.content import Content

from mira_app.figures import NO_DRAFT, bytes_per_load, count
from mira_app.panel_history import PanelState
from mira_app.sanitise import sanitise

from .drawing import (
    LABEL,
    VALUE,
    Part,
    in_columns,
    legend,
    mib,
    row,
    short_bytes,
    short_count,
    spark,
    stacked_bar,
    title,
)

ROOMY = 44
"""Characters of a line from which on a legend's entries have lines of their own."""

HOT, STAGE = ("█", "$warning"), ("▒", "$primary")
"""As on the residency map."""

SERVED: dict[str, Part] = {"HOT": HOT, "STAGE": STAGE, "MISS": ("░", "$error")}
CAUSES: dict[str, Part] = {
    "ahead": ("▒", "$primary"),
    "missed": ("█", "$error"),
    "draft": ("░", "$accent"),
    "verify": ("▓", "$secondary"),
    "sample": ("=", "$success"),
    "other": (":", "$foreground 60%"),
}
"""The order of `TimeSplit.parts`."""

CAUSES_IN_FULL = (
    "waits, on its way", "waits, missed", "draft", "verify", "sampling", "other",
)  # fmt: skip
MEMORY: dict[str, Part] = {
    "dense": ("▓", "$secondary"),
    "KV": ("=", "$success"),
    "work": (":", "$foreground 60%"),
    "draft": ("░", "$accent"),
    "HOT": HOT,
    "STAGE": STAGE,
    "free": ("·", "$foreground 45%"),
}
"""The order of `memory_parts`."""


def speed(state: PanelState, width: int) -> list[Content]:
    """Tokens per second with its history, and the time to the first token."""
    stats = state.stats
    rates = state.recent_values(lambda interval: interval.tokens_per_s)
    return [
        title("Speed", f"{rate_text(stats)} tok/s", width=width),
        spark(rates, width),
        row("first token", f"{stats.ttft_s:.2f} s" if stats.ttft_s else "-", width=width),
        row("prompt", f"{stats.num_prompt_tokens} ({stats.num_cached_tokens} cached)", width=width),
        row("reply", count(stats.num_new_tokens, "token"), width=width),
    ]


def served_by(state: PanelState, width: int) -> list[Content]:
    """Routed tokens by what served them, each with its history."""
    stats, shares = state.stats, state.reply.served.shares
    lines = [
        title("Served by", f"hit rate {stats.hit_rate:.1%}" if shares else "-", width=width),
        _bar(shares, SERVED, width),
    ]
    history = [i.served.shares for i in state.recent if i.served.shares is not None]
    for index, (name, part) in enumerate(SERVED.items()):
        share = f"{shares[index]:.1%}" if shares else "-"
        entry = legend(part, name, share, width=14)
        past = spark([each[index] for each in history], width - 15, most=1.0)
        lines.append(Content.assemble(entry, " ", past))
    hits, misses = short_count(stats.num_hits), short_count(stats.num_misses)
    lines.append(row("hits / misses", f"{hits} / {misses}", width=width))
    if stats.num_on_host:
        lines.append(row("by the processor", short_count(stats.num_on_host), width=width))
    return lines


def time_per_token(state: PanelState, width: int) -> list[Content]:
    """Milliseconds of a token by what they went to."""
    stats, parts = state.stats, state.reply.ms_per_token
    whole = f"{sum(parts):.1f} ms" if parts else "-"
    lines = [
        title("Time per token", whole, width=width),
        row("stalls", f"{stats.stall_ms_per_token:.1f} ms/token", width=width),
        _bar(parts, CAUSES, width),
    ]
    values = list(map(_ms, parts)) if parts else ["-"] * len(CAUSES)
    if width < ROOMY:
        half = (width - 2) // 2
        named = zip(CAUSES.items(), values, strict=True)
        entries = [legend(part, name, value, width=half) for (name, part), value in named]
        return lines + in_columns(entries, gap=width - 2 * half)
    history = [i.ms_per_token for i in state.recent if i.ms_per_token is not None]
    top = max((max(each) for each in history), default=0.0)
    named = zip(CAUSES_IN_FULL, CAUSES.values(), values, strict=True)
    for index, (name, part, value) in enumerate(named):
        entry = legend(part, name, value, width=27)
        past = spark([each[index] for each in history], width - 28, most=top)
        lines.append(Content.assemble(entry, " ", past))
    return lines


def drafting(state: PanelState, width: int) -> list[Content]:
    """K and why it is that, and what of the draft was accepted."""
    stats, plan = state.stats, state.plan
    if stats.governor_reason:
        depth = f"K {stats.num_draft_tokens}"
    else:
        depth = f"K {plan.num_draft_tokens}" if plan is not None else "-"
    lines = [title("Drafting", depth, width=width)]
    _, _, reason = stats.governor_reason.partition(": ")
    if reason:
        lines.append(Content.styled(sanitise(reason), LABEL))
    lines.append(row("accepted per round", accepted_text(stats, plan), width=width))
    accepted = state.recent_values(lambda interval: interval.accepted_per_round)
    if accepted:
        drafted = state.recent_values(lambda interval: interval.drafted_per_round)
        lines.append(spark(accepted, width, most=max(drafted)))
    return lines


def link(state: PanelState, width: int) -> list[Content]:
    """What the link moves, against what it can move."""
    stats = state.stats
    rates = state.recent_values(lambda interval: interval.link_bytes_per_s)
    now = rates[-1] if rates else 0.0
    limit = state.link_bytes_per_s
    moved = f"{short_bytes(stats.bytes_moved)}, {short_bytes(bytes_per_load(stats))} each"
    if not limit:
        return [
            title("Link", f"{short_bytes(now)}/s", width=width),
            spark(rates, width),
            row("moved", moved, width=width),
        ]
    return [
        title("Link", f"{short_bytes(now)} of {short_bytes(limit)}/s", width=width),
        spark(rates, width, most=max(limit, *rates) if rates else limit),
        row("moved", moved, width=width),
    ]


def memory_parts(state: PanelState) -> tuple[int, ...] | None:
    """Returns bytes in the order of `MEMORY`; they add up to the plan. `None` without."""
    plan, picture = state.plan, state.residency
    if plan is None:
        return None
    draft = plan.draft_bytes + plan.draft_dense_bytes
    if picture is not None:
        hot = plan.slot_bytes * sum(row.count("H") for row in picture.regions)
        stage = plan.slot_bytes * sum(row.count("S") + row.count("s") for row in picture.regions)
    else:
        hot, stage = 0, max(0, state.stats.expert_peak_bytes - draft)
    used = (plan.non_expert_bytes, plan.kv_bytes, plan.workspace_bytes, draft, hot, stage)
    return (*used, max(0, plan.total_bytes - sum(used)))


def memory(state: PanelState, width: int) -> list[Content]:
    """Where the planned memory is."""
    stats, plan, parts = state.stats, state.plan, memory_parts(state)
    if plan is None or parts is None:
        return [title("Memory"), Content.styled("no model loaded", LABEL)]
    planned = stats.planned_memory_bytes or plan.total_bytes
    half = (width - 2) // 2
    entries = [
        legend(part, name, short_bytes(num_bytes), width=half)
        for (name, part), num_bytes in zip(MEMORY.items(), parts, strict=True)
    ]
    return [
        title("Memory", f"{mib(stats.peak_memory_bytes)} / {mib(planned)} MiB", width=width),
        _bar(parts, MEMORY, width),
        *in_columns(entries, gap=width - 2 * half),
        row("slots", f"{plan.num_slots} of {plan.num_experts} experts", width=width),
    ]


def notes(state: PanelState, width: int) -> list[Content]:
    """Every fallback in force."""
    del width
    if not state.notices:
        return []
    return [title("Notes"), *(Content(sanitise(notice.text)) for notice in state.notices)]


def _bar(sizes: Sequence[float] | None, parts: dict[str, Part], width: int) -> Content:
    return stacked_bar(sizes or [0.0] * len(parts), tuple(parts.values()), width)


def _ms(value: float) -> str:
    """Formats milliseconds in four characters where they are below ten seconds."""
    return f"{value:.1f}" if value < 100 else f"{value:.0f}"


def rate_text(stats: ReplyStats) -> str:
    """Formats tokens per second."""
    return f"{stats.tokens_per_s:.1f}" if stats.tokens_per_s else "-"


def accepted_text(stats: ReplyStats, plan: MemoryPlan | None) -> str:
    """Formats accepted draft tokens of a round against those proposed."""
    if plan is not None and plan.num_draft_tokens == 0:
        return NO_DRAFT
    if not stats.num_drafted or not stats.num_rounds:
        return NO_DRAFT if stats.num_new_tokens else "-"
    return f"{stats.accepted_per_round:.2f} of {stats.num_drafted / stats.num_rounds:.3g}"


SECTIONS = (speed, served_by, time_per_token, link, drafting, memory, notes)
"""The column, from top to bottom."""


def column(state: PanelState, width: int) -> list[Content]:
    """Returns the panel as a column's lines."""
    lines: list[Content] = []
    for section in SECTIONS:
        drawn = section(state, width)
        if lines and drawn:
            lines.append(Content(""))
        lines += drawn
    return lines


def _joined(parts: list[Content | tuple[str, str]]) -> Content:
    whole = [
        part
        if isinstance(part, Content)
        else Content.assemble((part[0] + " ", LABEL), (part[1], VALUE))
        for part in parts
    ]
    return Content("  ").join(whole)


def strip(state: PanelState, width: int = 78) -> list[Content]:
    """Returns the panel as two lines of at most 78 characters."""
    del width
    stats, plan, shares = state.stats, state.plan, state.reply.served.shares
    served = "-"
    if shares:
        named = zip(SERVED, shares, strict=True)
        served = " ".join(f"{name} {share:.0%}" for name, share in named)
    first: list[Content | tuple[str, str]] = [
        ("tok/s", rate_text(stats)),
        ("first", f"{stats.ttft_s:.2f} s" if stats.ttft_s else "-"),
        Content.assemble(_bar(shares, SERVED, 10), (f" {served}", VALUE)),
    ]
    second: list[Content | tuple[str, str]] = [
        ("stalls", f"{_ms(stats.stall_ms_per_token)} ms"),
        ("accepted", accepted_text(stats, plan)),
        ("moved", short_bytes(stats.bytes_moved)),
    ]
    if plan is not None:
        planned = stats.planned_memory_bytes or plan.total_bytes
        second.append(("mem", f"{short_bytes(stats.peak_memory_bytes)}/{short_bytes(planned)}"))
    if state.notices:
        second.append(("notes", f"{len(state.notices)} (F1)"))
    return [_joined(first), _joined(second)]
