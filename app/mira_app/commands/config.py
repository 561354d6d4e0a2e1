"""`mira-chat config`: each setting, its value, and where it comes from."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from .. import wiring
from ..options import Json
from ..reporting import reporting_errors


def config(
    is_json: Json = False,
    is_init: Annotated[
        bool, typer.Option("--init", help="Write a settings file with every setting documented.")
    ] = False,
) -> None:
    """Shows each setting, its value and where it comes from; --init writes the file."""
    with reporting_errors():
        from ..paths import config_dir

        reports = wiring.config_report_module()
        path = wiring.settings_path(config_dir())
        if is_init:
            typer.echo(reports.init_config(path))
            return
        report = reports.make_config_report(os.environ, path)
        typer.echo(report.to_json() if is_json else "\n".join(report.lines()))
    if report.problems:
        raise typer.Exit(2)
