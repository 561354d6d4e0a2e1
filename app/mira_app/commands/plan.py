"""`mira-chat plan`: where the memory would go."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import wiring
from ..options import Flags, Json, option, takes_settings
from ..reporting import reporting_errors


@takes_settings(
    "budget", "memory", "k", "precision", "dtype", "context", "threads", "compile", "draft_dense"
)
def plan(
    flags: Flags,
    model: Annotated[
        str | None,
        typer.Argument(
            help="`builtin`, `owner/name` on the hub, or a folder with at least a config.json."
        ),
    ] = None,
    machine: Annotated[
        str | None,
        option(
            "--machine",
            metavar="FILE|CARD",
            help="Plan for another machine: a card such as rtx-4070, or a file of rates.",
        ),
    ] = None,
    is_compact_allowed: Annotated[
        bool, typer.Option("--compact", help="Let INT4 experts answer, if that is the fastest.")
    ] = False,
    is_json: Json = False,
) -> None:
    """Says where the memory would go and how fast replies would be; loads no weight."""
    from ..planning import PlanReporter

    reporter = PlanReporter(machine, is_compact_allowed=is_compact_allowed, is_json=is_json)
    with reporting_errors():
        reporter.report(
            lambda: wiring.read_settings({**flags, "model": model}),
            lambda: wiring.make_client(),
            typer.echo,
        )
