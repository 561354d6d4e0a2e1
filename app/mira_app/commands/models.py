"""`mira-chat models` and `mira-chat rm`: what there is, and how to be rid of it."""

from __future__ import annotations

import sys
from typing import Annotated

import typer

from .. import wiring
from ..options import Flags, Json, takes_settings
from ..reporting import reporting_errors


@takes_settings("precision")
def models(flags: Flags, is_json: Json = False) -> None:
    """Lists the models one can pick: what they are, their state and their sizes."""
    with reporting_errors():
        wanted = wiring.read_settings(flags).engine.precision
        entries = wiring.make_catalog().entries(wanted)
        from ..model_list import model_lines, models_json

        if is_json:
            typer.echo(models_json(entries))
            return
        for line in model_lines(entries, wanted):
            typer.echo(line)


def remove(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="As `mira-chat models` names it.")],
    is_confirmed: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask.")] = False,
) -> None:
    """Removes what was downloaded and made for a model; a folder of your own is left alone."""
    with reporting_errors():
        from mira_engine.api import ConfigError, Precision, format_bytes

        from ..sanitise import sanitise

        shelf = wiring.make_catalog()
        entry = shelf.find(model, Precision.NESTED)  # Any will do: all of them are removed.
        name, num_bytes = sanitise(model), shelf.disk_bytes(entry.model)
        if not entry.is_removable:
            typer.echo(f"Nothing was made for {name}.", err=True)
            return
        if num_bytes and not is_confirmed:
            question = f"Remove {name}? This frees {format_bytes(num_bytes)}."
            if sys.stdin is None or not sys.stdin.isatty():
                raise ConfigError(f"{question} Nobody is here to answer.", hint="Give --yes.")
            if not typer.confirm(question, err=True):
                typer.echo("Nothing was removed.", err=True)
                return
        freed = shelf.remove(entry.model)
        if freed:
            typer.echo(f"Removed {name}: {format_bytes(freed)} are free again.", err=True)
        else:
            typer.echo(f"Took {name} off the list; nothing was made for it.", err=True)
