"""`mira-chat simulate`: from flags to a comparison, and its table."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from mira_engine.api import ConfigError, MemoryAmount, to_plain

from .setting_parsers import parse_rate

if TYPE_CHECKING:
    from mira_engine.api import SimulationReport, SimulationRequest, SimulationRow

_NAMES = {
    "trace": "trace_path",
    "train": "training_path",
    "k": "num_draft_tokens",
    "max_tokens": "num_tokens",
    "acceptance": "acceptance",
    "fidelity": "fidelity",
    "seed": "seed",
}


def run_simulation(
    flags: Mapping[str, object], *, is_json: bool, out: TextIO, err: TextIO
) -> SimulationReport:
    """Simulates what the flags name and prints it.

    Raises:
        ConfigError: A flag cannot be used.
        TraceError: A trace cannot be read.
    """
    from mira_engine.api import simulate

    def on_row(row: SimulationRow) -> None:
        if err.isatty():
            print(
                f"\r{row.policy} at {row.slots_per_layer:g} …\033[K", end="", file=err, flush=True
            )

    report = simulate(simulation_request(flags), on_row)
    if err.isatty():
        print("\r\033[K", end="", file=err, flush=True)
    if is_json:
        print(json.dumps(to_plain(report)), file=out)
    else:
        print_report(report, out)
    return report


def simulation_request(flags: Mapping[str, object]) -> SimulationRequest:
    """Builds the request; a flag that is `None` was not given."""
    from mira_engine.api import SimulationRequest

    fields = {_NAMES[n]: v for n, v in flags.items() if n in _NAMES and v is not None}
    for flag, field in (("policy", "policies"), ("slots_per_layer", "slots_per_layer")):
        if flags.get(flag):
            fields[field] = tuple(flags[flag])  # type: ignore[arg-type]
    if flags.get("link_rate"):
        rates = flags["link_rate"]
        fields["link_rates"] = tuple(parse_rate("link_rate", rate) for rate in rates)  # type: ignore[attr-defined]
    if flags.get("record") is not None:
        amount = MemoryAmount.parse(str(flags["record"]))
        if amount.num_bytes is None:
            raise ConfigError.for_field("record", flags["record"], "Write a size such as 8MiB.")
        fields["record_bytes"] = amount.num_bytes
    for flag, field in (("resident_ms", "resident_s"), ("draft_ms", "draft_s")):
        value = flags.get(flag)
        if value is not None:
            fields[field] = float(value) / 1e3  # type: ignore[arg-type]
    return SimulationRequest(**fields)  # type: ignore[arg-type]


def print_report(report: SimulationReport, out: TextIO) -> None:
    """Prints one table for each link and cache."""
    print(
        f"{report.title}: {report.num_layers} layers, {report.top_k} of {report.num_experts} "
        f"experts; draft acceptance {report.acceptance:.3f}, fidelity {report.fidelity:.3f}. "
        "Virtual time.",
        file=out,
    )
    head = ("policy", "slots", "memory", "hits", "ahead", "MiB/token", "stall", "TPOT", "tokens")
    first_policy = report.rows[0].policy
    for row in report.rows:
        if row.policy == first_policy:
            print(f"\nlink {row.link_bytes_per_s / 1e9:g} GB/s", file=out)
            print(_LINE.format(*head), file=out)
        print(
            _LINE.format(
                row.policy,
                f"{row.slots_per_layer:g}",
                f"{row.memory_share:.0%}",
                f"{row.hit_rate:.3f}",
                f"{row.prefetched_share:.3f}",
                f"{row.bytes_per_token / 2**20:.1f}",
                f"{1e3 * row.stall_s:.1f} ms",
                f"{1e3 * row.tpot_s:.1f} ms",
                f"{row.tokens_per_round:.2f}",
            ),
            file=out,
        )


_LINE = "{:<22}" + "{:>8}" * 4 + "{:>11}" + "{:>11}" * 2 + "{:>8}"
"""One row; `slots` and `tokens` are whole experts a layer and new tokens a target pass."""
