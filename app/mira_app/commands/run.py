"""`mira-chat run`: one prompt, one answer."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import wiring
from ..options import CHAT_SETTINGS, Flags, Json, Plain, takes_settings
from ..reporting import reporting_errors

if TYPE_CHECKING:
    from ..answer import Answer, OnEvent
    from ..settings import Settings


@takes_settings(*CHAT_SETTINGS, "trace")
def run(
    flags: Flags,
    prompt: Annotated[
        str | None,
        typer.Argument(help="The prompt; `-` reads standard input, as does nothing at all."),
    ] = None,
    files: Annotated[
        list[Path] | None,
        typer.Option(
            "--file",
            metavar="FILE",
            help="Append a text file under its name, 4 MiB at most; repeatable.",
            show_default=False,
        ),
    ] = None,
    is_json: Json = False,
    is_streaming_events: Annotated[
        bool,
        typer.Option(
            "--json-events", help="Print each event of the engine as a line of JSON, as it comes."
        ),
    ] = False,
    is_thinking_shown: Annotated[
        bool | None,
        typer.Option(
            "--think/--no-think",
            help="Print what the model thinks first, on stderr; unsaid, on terminals only.",
            show_default=False,
        ),
    ] = None,
    is_plain: Plain = False,
) -> None:
    """Answers one prompt: the reply alone on stdout, one line of figures on stderr."""
    if is_json and is_streaming_events:
        raise typer.BadParameter("--json prints one object, --json-events many: give one of them")
    from ..answer import Answer
    from ..prompts import read_prompt

    answer = Answer()
    style = "json" if is_json else "events" if is_streaming_events else "text"
    with reporting_errors(answer, style):
        settings = wiring.read_settings(flags)
        wiring.refuse_engine_flags(flags, settings)
        if is_thinking_shown is None:
            is_thinking_shown = wiring.is_terminal(sys.stderr)
        answer_prompt(
            read_prompt(prompt, files or ()),
            settings,
            answer,
            style=style,
            is_plain=is_plain,
            is_thinking_shown=is_thinking_shown,
        )


def answer_prompt(
    prompt: str,
    settings: Settings,
    answer: Answer,
    *,
    style: str = "text",
    is_plain: bool = False,
    is_thinking_shown: bool = False,
) -> None:
    """Answers a prompt on the standard streams.

    Args:
        prompt: The question.
        settings: What the person chose.
        answer: Takes what comes of it, also where this raises.
        style: `text` writes the reply, `events` the engine's events, `json` nothing.
        is_plain: No bars, no colours.
        is_thinking_shown: Whether thinking goes to standard error.

    Raises:
        MiraError: Something failed.
        KeyboardInterrupt: The person interrupted.
    """
    from ..answer import ReplyStreams

    # A terminal that cannot show a character gets a question mark, not a crash.
    with contextlib.suppress(AttributeError):
        sys.stdout.reconfigure(errors="replace")
    streams = ReplyStreams(
        sys.stdout if style == "text" else None,
        sys.stderr if is_thinking_shown and style == "text" else None,
        is_dimmed=wiring.is_terminal(sys.stderr) and not (is_plain or os.environ.get("NO_COLOR")),
    )
    with wiring.opened_engine(settings) as (client, catalog, settings):
        answerer = wiring.make_answerer(client, settings, is_plain=is_plain, catalog=catalog)
        if style == "events":
            answerer.on_event = _event_printer()
        try:
            answerer.ask(prompt, answer, streams)
        finally:
            if answer.stats.num_new_tokens and style == "text":
                typer.echo(answerer.stats_line(answer), err=True)
    if answer.reason.value == "cancelled":
        raise KeyboardInterrupt


def _event_printer() -> OnEvent:
    from mira_engine.api import encode

    def show(event: object) -> None:
        sys.stdout.write(encode(event) + "\n")  # type: ignore[arg-type]
        sys.stdout.flush()

    return show
