"""The live panel of a model that a server runs: what it reports, and what it does not.

Pure functions from a `PanelState` to lines, as the sections of the engine here.
"""

from __future__ import annotations

from textual.content import Content

from mira_app.panel_history import PanelState
from mira_app.remote.figures import ServerFigures
from mira_app.sanitise import sanitise

from .drawing import LABEL, VALUE, bar, row, spark, title
from .sections import notes, rate_text

UNKNOWN = "not reported"
_MISSING = "Experts, link and memory: not reported by this server."


def server_column(state: PanelState, width: int) -> list[Content]:
    """Returns the panel as a column's lines."""
    figures = state.server
    assert figures is not None
    lines = [*_speed(state, width), Content(""), *_server(figures, width)]
    lines += [Content(""), Content.styled(_MISSING, LABEL)]
    told = notes(state, width)
    return [*lines, Content(""), *told] if told else lines


def server_strip(state: PanelState, width: int = 78) -> list[Content]:
    """Returns the panel as two lines."""
    del width
    figures, stats = state.server, state.stats
    assert figures is not None
    first = [
        ("tok/s", rate_text(stats)),
        ("first", f"{stats.ttft_s:.2f} s" if stats.ttft_s else "-"),
        ("prompt", str(stats.num_prompt_tokens) if stats.num_prompt_tokens else "-"),
        ("reply", str(stats.num_new_tokens)),
    ]
    second = [
        ("KV cache", _share(figures.cache_share)),
        ("accepted", _share(figures.acceptance_rate)),
        ("waiting", _number(figures.num_waiting)),
    ]
    if state.notices:
        second.append(("notes", f"{len(state.notices)} (F1)"))
    return [_joined(first), _joined(second)]


def _speed(state: PanelState, width: int) -> list[Content]:
    stats = state.stats
    rates = state.recent_values(lambda interval: interval.tokens_per_s)
    cached = f" ({stats.num_cached_tokens} cached)" if stats.num_cached_tokens else ""
    prompt = f"{stats.num_prompt_tokens}{cached}" if stats.num_prompt_tokens else "-"
    return [
        title("Speed", f"{rate_text(stats)} tok/s", width=width),
        spark(rates, width),
        row("first token", f"{stats.ttft_s:.2f} s" if stats.ttft_s else "-", width=width),
        row("prompt", prompt, width=width),
        row("reply", str(stats.num_new_tokens), width=width),
    ]


def _server(figures: ServerFigures, width: int) -> list[Content]:
    """What the server says of itself; other people's requests are in it."""
    lines = [title("Server", width=width), Content(sanitise(figures.address))]
    if figures.cache_share is not None:
        lines.append(bar(figures.cache_share, width))
    return [
        *lines,
        row("KV cache in use", _share(figures.cache_share), width=width),
        row("drafts accepted", _share(figures.acceptance_rate), width=width),
        row("prefix cache hits", _share(figures.prefix_hit_rate), width=width),
        row("requests running", _number(figures.num_running), width=width),
        row("requests waiting", _number(figures.num_waiting), width=width),
    ]


def _share(value: float | None) -> str:
    return UNKNOWN if value is None else f"{value:.1%}"


def _number(value: int | None) -> str:
    return UNKNOWN if value is None else str(value)


def _joined(parts: list[tuple[str, str]]) -> Content:
    return Content("  ").join(
        Content.assemble((f"{name} ", LABEL), (value, VALUE)) for name, value in parts
    )
