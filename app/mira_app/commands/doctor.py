"""`mira-chat doctor`: what this machine has, and what could be better."""

from __future__ import annotations

import os

import typer

from .. import wiring
from ..options import LOAD_SETTINGS, Flags, Json, ModelArgument, takes_settings
from ..reporting import reporting_errors


@takes_settings(*LOAD_SETTINGS, "memory", "k")
def doctor(flags: Flags, model: ModelArgument = None, is_json: Json = False) -> None:
    """Checks program, machine and model; exit code 1 where something is a problem."""
    with reporting_errors():
        from ..config_report import make_config_report
        from ..doctor import (
            engine_facts,
            program_facts,
            report_json,
            report_lines,
            settings_facts,
        )
        from ..paths import cache_dir, config_path, data_dir, log_dir, state_dir

        given = {**flags, "model": model}
        opened = wiring.open_settings_of(given, is_lenient=True)
        report = make_config_report(os.environ, config_path(), given)
        folders = {
            "settings-folder": config_path().parent,
            "data-folder": data_dir(),
            "state-folder": state_dir(),
            "cache-folder": cache_dir(),
            "log-folder": log_dir(),
        }
        facts = [
            *program_facts(os.environ, folders),
            *settings_facts(opened, report),
            *engine_facts(wiring.make_client, opened.settings),
        ]
        if is_json:
            typer.echo(report_json(facts))
        else:
            typer.echo("\n".join(report_lines(facts)))
    if any(fact.mark == "problem" for fact in facts):
        raise typer.Exit(1)
