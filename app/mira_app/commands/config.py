"""`mira-chat config`: each setting, its value, and where it comes from."""

from __future__ import annotations

import os
from typing import Annotated

import typer

from ..options import Json
from ..reporting import reporting_errors


def config(
    is_json: Json = False,
    is_init: Annotated[
        bool, typer.Option("--init", help="Write a settings file with every setting documented.")
    ] = False,
    is_path: Annotated[bool, typer.Option("--path", help="Print where that file is.")] = False,
) -> None:
    """Shows each setting, its value and where it comes from; --init writes the file."""
    with reporting_errors():
        from ..config_report import init_config, make_config_report
        from ..paths import config_path

        path = config_path()
        if is_path:
            typer.echo(str(path))
            return
        if is_init:
            typer.echo(init_config(path))
            return
        report = make_config_report(os.environ, path)
        typer.echo(report.to_json() if is_json else "\n".join(report.lines()))
    if report.problems:
        raise typer.Exit(2)
