"""The live panel: where the time and the memory of a reply go.

A column beside the chat where there is room, two lines under it where there is not. What
it says is made by pure functions from a `PanelState`; no sign is by colour alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from mira_engine.api import MemoryPlan, Notice, ReplyStats, format_bytes
from textual.content import Content
from textual.widgets import Static

from mira_app.figures import bytes_per_load, count
from mira_app.sanitise import sanitise

COLUMN_WIDTH = 30
"""Characters of a line of the column."""

_LABEL, _VALUE, _FILLED, _EMPTY = "$foreground 60%", "bold", "$primary", "$foreground 20%"


@dataclass(frozen=True, slots=True, kw_only=True)
class PanelState:
    """Everything the panel shows."""

    stats: ReplyStats = field(default_factory=ReplyStats)
    plan: MemoryPlan | None = None
    notices: tuple[Notice, ...] = ()


def bar(share: float, width: int) -> Content:
    """Draws a share of 0 to 1; the two parts differ in form as well as in colour."""
    filled = round(max(0.0, min(1.0, share)) * width)
    return Content.assemble(("━" * filled, _FILLED), ("╌" * (width - filled), _EMPTY))


def _row(label: str, value: str) -> Content:
    gap = " " * max(1, COLUMN_WIDTH - len(label) - len(value))
    return Content.assemble((label, _LABEL), gap, (value, _VALUE))


def _title(text: str) -> Content:
    return Content.styled(text, "bold $primary")


def _memory_share(stats: ReplyStats) -> float:
    planned = stats.planned_memory_bytes
    return stats.peak_memory_bytes / planned if planned else 0.0


def _mib(num_bytes: int) -> str:
    """Formats bytes in short, for pairs such as `800/900 MiB`."""
    return f"{num_bytes / 2**20:.0f}"


def _accepted(stats: ReplyStats, plan: MemoryPlan | None) -> str:
    if plan is not None and plan.num_draft_tokens == 0:
        return "no drafting"
    if not stats.num_rounds:
        return "-"
    return f"{stats.accepted_per_round:.2f} of {stats.num_drafted / stats.num_rounds:.3g}"


def _depth(stats: ReplyStats, plan: MemoryPlan | None) -> list[Content]:
    """K in force, and why where that can change."""
    if not stats.governor_reason:
        return [_row("K", str(plan.num_draft_tokens) if plan is not None else "-")]
    _, _, reason = stats.governor_reason.partition(": ")
    return [
        _row("K", str(stats.num_draft_tokens)),
        Content.styled(sanitise(reason), _LABEL),
    ]


def column(state: PanelState) -> Content:
    """Returns the panel as a column, `COLUMN_WIDTH` wide."""
    stats, plan = state.stats, state.plan
    has_routed = stats.num_hits + stats.num_misses > 0
    lines = [
        _title("Speed"),
        _row("tokens/s", f"{stats.tokens_per_s:.1f}" if stats.tokens_per_s else "-"),
        _row("first token", f"{stats.ttft_s:.2f} s" if stats.ttft_s else "-"),
        _row("prompt", f"{stats.num_prompt_tokens} ({stats.num_cached_tokens} cached)"),
        _row("reply", count(stats.num_new_tokens, "token")),
        Content(""),
        _title("Experts"),
        _row("hit rate", f"{stats.hit_rate:.1%}" if has_routed else "-"),
        bar(stats.hit_rate, COLUMN_WIDTH),
        _row("hits / misses", f"{stats.num_hits} / {stats.num_misses}"),
        _row("stalls", f"{stats.stall_ms_per_token:.1f} ms/token"),
        _row("moved", format_bytes(stats.bytes_moved)),
        _row("per miss", format_bytes(bytes_per_load(stats))),
        Content(""),
        _title("Drafting"),
        *_depth(stats, plan),
        _row("accepted per round", _accepted(stats, plan)),
        Content(""),
        _title("Memory"),
    ]
    if plan is not None:
        planned = stats.planned_memory_bytes or plan.total_bytes
        lines += [
            _row("peak / plan", f"{_mib(stats.peak_memory_bytes)} / {_mib(planned)} MiB"),
            bar(_memory_share(stats), COLUMN_WIDTH),
            _row(
                "experts / budget",
                f"{_mib(stats.expert_peak_bytes)} / {_mib(plan.budget_bytes)} MiB",
            ),
            _row("slots", f"{plan.num_slots} of {plan.num_experts} experts"),
        ]
    else:
        lines.append(Content.styled("no model loaded", _LABEL))
    if state.notices:
        lines += [Content(""), _title("Notes")]
        lines += [Content(sanitise(notice.text)) for notice in state.notices]
    return Content("\n").join(lines)


def _joined(parts: list[Content | tuple[str, str]]) -> Content:
    whole = [
        part
        if isinstance(part, Content)
        else Content.assemble((part[0] + " ", _LABEL), (part[1], _VALUE))
        for part in parts
    ]
    return Content("   ").join(whole)


def strip(state: PanelState) -> Content:
    """Returns the panel as two lines of at most 78 characters."""
    stats, plan = state.stats, state.plan
    has_routed = stats.num_hits + stats.num_misses > 0
    hits = Content.assemble(
        ("hits ", _LABEL),
        bar(stats.hit_rate, 10),
        (f" {stats.hit_rate:.0%}" if has_routed else " -", _VALUE),
    )
    first: list[Content | tuple[str, str]] = [
        ("tok/s", f"{stats.tokens_per_s:.1f}" if stats.tokens_per_s else "-"),
        ("first", f"{stats.ttft_s:.2f} s" if stats.ttft_s else "-"),
        hits,
        ("stalls", f"{stats.stall_ms_per_token:.1f} ms/tok"),
    ]
    second: list[Content | tuple[str, str]] = [
        ("accepted", _accepted(stats, plan)),
        ("moved", format_bytes(stats.bytes_moved)),
    ]
    if plan is not None:
        planned = stats.planned_memory_bytes or plan.total_bytes
        second.append(("mem", f"{_mib(stats.peak_memory_bytes)}/{_mib(planned)} MiB"))
    if state.notices:
        second.append(("notes", f"{len(state.notices)} (F1)"))
    return Content("\n").join([_joined(first), _joined(second)])


class LivePanel(Static):
    """Shows a `PanelState`; draws only when it changed."""

    def __init__(self, *, is_column: bool, id: str) -> None:
        super().__init__(id=id)
        self._draw = column if is_column else strip
        self._state: PanelState | None = None

    def on_mount(self) -> None:
        """Shows an empty state first."""
        self.show(PanelState())

    def show(self, state: PanelState) -> None:
        """Shows a state."""
        if state != self._state:
            self._state = state
            self.update(self._draw(state))
