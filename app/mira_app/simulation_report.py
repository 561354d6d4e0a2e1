"""What `mira-chat simulate` prints: a table for each card and memory, then the best of each.

Pure. `slots` are whole experts a layer, `tokens` new tokens a target pass.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mira_engine.api import SimulationReport, SimulationRow

_HEADINGS = (
    "policy", "K", "slots", "memory", "hits", "ahead", "MiB/token", "stall", "TPOT", "tokens",
)  # fmt: skip
_LINE = "{:<22}{:>4}" + "{:>8}" * 4 + "{:>11}" + "{:>11}" * 2 + "{:>8}"
_BEST = ("at", "fastest", "K", "hits", "TPOT")


def report_lines(report: SimulationReport) -> Iterator[str]:
    """Yields the report's lines."""
    subject = f"{report.model}; routing: {report.title}" if report.model else report.title
    yield (
        f"{subject}: {report.num_layers} layers, {report.top_k} of {report.num_experts} "
        f"experts; draft acceptance {report.acceptance:.3f}, fidelity {report.fidelity:.3f}. "
        "Virtual time."
    )
    groups = [(place, list(rows)) for place, rows in itertools.groupby(report.rows, key=_place_of)]
    for place, rows in groups:
        yield ""
        yield place
        yield _LINE.format(*_HEADINGS)
        yield from map(_line_of, rows)
    if len(groups) > 1 and len({row.policy for row in report.rows}) > 1:
        yield ""
        yield from _best_lines(groups)
    for note in report.notes:
        yield f"note: {note}"


def _place_of(row: SimulationRow) -> str:
    places = filter(None, (row.machine, row.memory, f"link {row.link_bytes_per_s / 1e9:.3g} GB/s"))
    return ", ".join(places)


def _line_of(row: SimulationRow) -> str:
    return _LINE.format(
        row.policy,
        row.num_draft_tokens,
        f"{row.slots_per_layer:.4g}",
        f"{row.memory_share:.0%}",
        f"{row.hit_rate:.3f}",
        f"{row.prefetched_share:.3f}",
        f"{row.bytes_per_token / 2**20:.1f}",
        f"{1e3 * row.stall_s:.1f} ms",
        f"{1e3 * row.tpot_s:.1f} ms",
        f"{row.tokens_per_round:.2f}",
    )


def _best_lines(groups: Sequence[tuple[str, Sequence[SimulationRow]]]) -> Iterator[str]:
    """The fastest policy of each place; bounds, which nobody can run, are left out."""
    table = [_BEST]
    for place, rows in groups:
        best = min(
            (row for row in rows if not row.is_bound), key=lambda row: row.tpot_s, default=None
        )
        if best is not None:
            k, hits = str(best.num_draft_tokens), f"{best.hit_rate:.3f}"
            table.append((place, best.policy, k, hits, f"{1e3 * best.tpot_s:.1f} ms"))
    widths = [max(map(len, column)) for column in zip(*table, strict=True)]
    for place, policy, *figures in table:
        names = f"{place:<{widths[0]}}  {policy:<{widths[1]}}"
        yield names + "".join(
            f"  {figure:>{width}}" for figure, width in zip(figures, widths[2:], strict=True)
        )
