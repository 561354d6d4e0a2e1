"""`mira-chat eval`: how near each precision comes to the model's own experts."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from .. import wiring
from ..options import Flags, Json, ModelArgument, Plain, takes_settings
from ..reporting import reporting_errors


@takes_settings("budget", "memory", "dtype", "context", "threads")
def evaluate(
    flags: Flags,
    model: ModelArgument = None,
    precisions: Annotated[
        list[str] | None,
        typer.Option(
            "--precision",
            metavar="P",
            help="Only this one: nested, int8, int4, bf16 or float32; repeatable. All that are "
            "prepared without it.",
            show_default=False,
        ),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--file",
            metavar="FILE",
            help="Read this text file instead of the shipped texts; repeatable.",
            show_default=False,
        ),
    ] = None,
    max_tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            metavar="N",
            help="Most tokens of text that are read in each precision; 4096 without it.",
            show_default=False,
        ),
    ] = None,
    is_json: Json = False,
    is_plain: Plain = False,
) -> None:
    """Compares precisions with the experts in bf16: perplexity, divergence, agreement.

    Arithmetic is float32 unless --dtype says otherwise, so that formats are compared and not
    the rounding between their products.
    """
    with reporting_errors():
        from mira_engine.api import DEFAULT_EVALUATION_TOKENS

        from ..evaluation_report import evaluation_json, evaluation_lines, parse_precisions

        chosen = parse_precisions(precisions or ())
        settings = wiring.read_settings(
            {**flags, "model": model, "dtype": flags["dtype"] or "float32"}
        )
        with wiring.make_client() as client:
            report = wiring.make_answerer(client, settings, is_plain=is_plain).evaluate(
                precisions=chosen,
                files=[str(path.absolute()) for path in files or ()],
                max_tokens=DEFAULT_EVALUATION_TOKENS if max_tokens is None else max_tokens,
            )
        typer.echo(evaluation_json(report) if is_json else "\n".join(evaluation_lines(report)))
