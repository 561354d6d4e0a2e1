"""`mira-chat export` and `mira-chat import`: chats out of the history and into it."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import Annotated, Any

import typer

from .. import wiring
from ..reporting import reporting_errors


class ExportFormat(enum.StrEnum):
    """What chats are written as."""

    MARKDOWN = "md"
    JSONL = "jsonl"


def export_chats(
    chat: Annotated[
        str | None,
        typer.Argument(metavar="CHAT", help="An id, the beginning of one, or `last`."),
    ] = None,
    is_all: Annotated[bool, typer.Option("--all", help="Every chat, as JSON lines.")] = False,
    kind: Annotated[
        ExportFormat | None,
        typer.Option("--format", help="md for reading, jsonl with everything.", show_default=False),
    ] = None,
    output: Annotated[
        Path | None,
        typer.Option(
            "-o", "--output", metavar="FILE", help="Not to standard output.", show_default=False
        ),
    ] = None,
    is_replacing: Annotated[
        bool, typer.Option("--force", help="Replace a FILE that is there.")
    ] = False,
) -> None:
    """Writes one chat, or all, as Markdown or JSON lines."""
    if is_all == (chat is not None):
        raise typer.BadParameter("name one chat, or give --all")
    if is_all and kind is ExportFormat.MARKDOWN:
        raise typer.BadParameter("--all writes jsonl; Markdown holds one chat a file")
    with reporting_errors(), wiring.opened_history() as store:
        from .. import export
        from ..kept_chat import find_chat

        if is_all:
            text = export.to_jsonl([store.load(each.chat_id) for each in store.chats()])
        else:
            found = find_chat(store, chat)
            is_lines = kind is ExportFormat.JSONL
            text = export.to_jsonl([found]) if is_lines else export.to_markdown(found)
        _write(text, output, is_replacing=is_replacing)


def import_chats(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What `export` wrote; `-` is standard input.")
    ],
) -> None:
    """Takes in chats that were exported. Chats that are here already stay as they are."""
    with reporting_errors(), wiring.opened_history() as store:
        from .. import export

        chats = _read_chats(export, _read(file))
        num_added = len(store.add(chats))
        typer.echo(import_line(num_added, len(chats) - num_added), err=True)


def import_line(num_added: int, num_known: int) -> str:
    """Says what an import did."""
    from ..figures import count

    line = f"{count(num_added, 'chat')} imported."
    return f"{line} {count(num_known, 'chat')} left out: here already." if num_known else line


def _read_chats(export: Any, text: str) -> list[Any]:
    """Parses what `export` wrote; which form it has shows at its first character."""
    from mira_engine.api import ConfigError

    if not text.strip():
        raise ConfigError("There is nothing to import.", hint="Give a file of mira-chat export.")
    try:
        if text.lstrip().startswith("{"):
            return list(export.from_jsonl(text))
        return [export.from_markdown(text)]
    except ValueError as error:
        raise ConfigError(
            f"This is no export of chats: {error}.", hint="Give a file of mira-chat export."
        ) from None


def _read(file: Path) -> str:
    from mira_engine.api import ConfigError

    try:
        data = sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()
        return data.decode("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{file} cannot be read: {error.strerror}.", hint="") from None
    except UnicodeError:
        raise ConfigError(f"{file} is not UTF-8 text.", hint="Give what export wrote.") from None


def _write(text: str, output: Path | None, *, is_replacing: bool) -> None:
    """Writes to a file by rename, or to standard output."""
    from mira_engine.api import ConfigError, MiraError

    if output is None:
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.flush()
        return
    if output.exists() and not is_replacing:
        raise ConfigError(f"{output} is there already.", hint="Give another name, or --force.")
    partial = output.with_name(f"{output.name}.part")
    try:
        partial.write_text(text, encoding="utf-8")
        partial.replace(output)
    except OSError as error:
        partial.unlink(missing_ok=True)
        raise MiraError(f"{output} cannot be written: {error.strerror}.") from None
