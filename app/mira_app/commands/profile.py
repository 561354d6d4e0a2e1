"""`mira-chat profile`: which K is fastest here."""

from __future__ import annotations

from typing import Annotated

import typer

from .. import wiring
from ..options import LOAD_SETTINGS, Flags, Json, ModelArgument, Plain, takes_settings
from ..reporting import reporting_errors


@takes_settings(*LOAD_SETTINGS)
def profile(
    flags: Flags,
    model: ModelArgument = None,
    is_quick: Annotated[
        bool, typer.Option("--quick", help="5 prompts, once, and few K's: minutes, not hours.")
    ] = False,
    is_json: Json = False,
    is_plain: Plain = False,
) -> None:
    """Measures which K is fastest for a model on this machine, and keeps it for later chats."""
    with reporting_errors():
        settings = wiring.read_settings({**flags, "model": model})
        with wiring.make_client() as client:
            answerer = wiring.make_answerer(client, settings, is_plain=is_plain)
            found = answerer.profile(is_quick=is_quick)
        from ..figures import profile_figures, profile_lines

        if is_json:
            import dataclasses
            import json

            whole = {"model": settings.model, **dataclasses.asdict(found)}
            typer.echo(json.dumps(whole | profile_figures(found)))
            return
        typer.echo("\n".join(profile_lines(found)))
