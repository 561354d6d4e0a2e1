"""How a command ends: its exit code, what it says of a failure, and the object of `--json`.

Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from typing import TextIO

    from mira_engine.api import MiraError

    from .answer import Answer


@contextlib.contextmanager
def reporting_errors(answer: Answer | None = None, style: str = "text") -> Iterator[None]:
    """Turns what can go wrong into a message, a hint and an exit code.

    Args:
        answer: Told how it ended.
        style: `json` prints the answer as one object at the end, whatever the end is; `events`
            prints a failure as the event `RequestFailed`.
    """
    from mira_engine.api import (
        BudgetError,
        CancelledError,
        ConfigError,
        FinishReason,
        MiraError,
        RequestFailed,
        encode,
    )

    code, reason, failure = 0, None, None
    try:
        yield
    except MiraError as error:
        print_error(error)
        failure, reason = error, FinishReason.ERROR
        if isinstance(error, CancelledError):
            code, reason = 130, FinishReason.CANCELLED
        else:
            code = 2 if isinstance(error, ConfigError | BudgetError) else 1
    except KeyboardInterrupt:
        typer.echo("interrupted", err=True)
        code, reason = 130, FinishReason.CANCELLED
    if answer is not None:
        answer.error = failure
        answer.reason = reason or answer.reason
        if style == "json":
            typer.echo(answer.to_json())
    if style == "events" and failure is not None:
        typer.echo(encode(RequestFailed(request_id="", **failure.to_fields())))
    if code:
        raise typer.Exit(code)


@contextlib.contextmanager
def reporting_streams() -> Iterator[None]:
    """Ends the program with exit code 1 where the output cannot be written.

    A reader that has gone is told nothing; anything else is one line on standard error. A
    character that a terminal does not have is written as `?`; files and pipes get UTF-8, since
    what Windows would write there lacks most characters.
    """
    with contextlib.suppress(AttributeError):  # None, or what a caller has put there.
        if sys.stdout.isatty():
            sys.stdout.reconfigure(errors="replace")
        else:
            # Bytes of a path that are no text come out as they went in, where they did before.
            is_escaping = sys.stdout.errors == "surrogateescape"
            errors = "surrogateescape" if is_escaping else "replace"
            sys.stdout.reconfigure(encoding="utf-8", errors=errors)
    try:
        yield
        if sys.stdout is not None:
            sys.stdout.flush()
    except OSError as error:
        # What is still buffered would fail once more when the interpreter ends.
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        if not _is_reader_gone(error):
            what = error.filename if error.filename is not None else "The output"
            typer.echo(f"error: {what} cannot be used: {error.strerror or error}.", err=True)
        raise SystemExit(1) from None


def _is_reader_gone(error: OSError) -> bool:
    # Windows calls a pipe that nobody reads an invalid argument.
    is_windows = sys.platform == "win32"
    return isinstance(error, BrokenPipeError) or (is_windows and error.errno == errno.EINVAL)


def print_error(error: MiraError, stream: TextIO | None = None) -> None:
    """Says what failed and what to do about it, on standard error or another stream."""
    from .sanitise import sanitise

    typer.echo(f"error: {sanitise(error.message)}", file=stream or sys.stderr)
    if error.hint:
        typer.echo(f"hint: {sanitise(error.hint)}", file=stream or sys.stderr)
