"""`mira-chat simulate`: from flags to a comparison."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import TYPE_CHECKING, TextIO

from mira_engine.api import ConfigError, MemoryAmount, to_plain

from .card_cases import PLANNING_FLAGS
from .sanitise import sanitise
from .setting_parsers import parse_rate
from .simulation_report import report_lines

if TYPE_CHECKING:
    from mira_engine.api import SimulationReport, SimulationRequest, SimulationRow

    from .card_cases import CasePlanner

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
    flags: Mapping[str, object],
    *,
    is_json: bool,
    out: TextIO,
    err: TextIO,
    planner: CasePlanner | None = None,
) -> SimulationReport:
    """Simulates what the flags name and prints it.

    Args:
        flags: By name; `None` was not given.
        is_json: Whether the report is printed as one JSON object.
        out: Takes the report.
        err: Takes what is under way, where that is a terminal.
        planner: Plans for cards and memories; not used where the flags name none.

    Raises:
        ConfigError: A flag cannot be used.
        TraceError: A trace cannot be read.
        MiraError: A plan was asked for and there is none.
    """
    from mira_engine.api import simulate

    def tell(text: str) -> None:
        if err.isatty():
            print(f"\r{text}\033[K", end="", file=err, flush=True)

    def on_row(row: SimulationRow) -> None:
        tell(f"{row.policy} at {', '.join(filter(None, (row.machine, row.memory)))} …")

    request, notes = simulation_request(flags), ()
    if planner is not None and any(map(flags.get, PLANNING_FLAGS)):
        tell("planning …")
        planned = planner.plan(flags)
        request, notes = dataclasses.replace(request, cases=planned.cases), planned.notes
    report = simulate(request, on_row)
    report = dataclasses.replace(report, notes=(*report.notes, *notes))
    tell("")
    if is_json:
        print(json.dumps(to_plain(report)), file=out)
    else:
        for line in report_lines(report):
            print(sanitise(line), file=out)
    return report


def simulation_request(flags: Mapping[str, object]) -> SimulationRequest:
    """Builds the request, without cards; a flag that is `None` was not given."""
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
