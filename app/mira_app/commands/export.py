"""`mira-chat export` and `mira-chat import`: chats out of the history and into it."""

from __future__ import annotations

import enum
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import wiring
from ..reporting import reporting_errors

if TYPE_CHECKING:
    from ..stored_chat import StoredChat


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
    """Writes one chat, or all, as Markdown or JSON lines; a FILE's suffix chooses, too."""
    if is_all == (chat is not None):
        raise typer.BadParameter("name one chat, or give --all")
    if is_all and kind is ExportFormat.MARKDOWN:
        raise typer.BadParameter("--all writes jsonl; Markdown holds one chat a file")
    with reporting_errors(), wiring.opened_history() as store:
        from ..export import to_jsonl, to_markdown
        from ..kept_chat import find_chat

        if is_all:
            text = to_jsonl([store.load(each.chat_id) for each in store.chats()])
        else:
            found = find_chat(store, chat)
            is_lines = (kind or _format_of(output)) is ExportFormat.JSONL
            text = to_jsonl([found]) if is_lines else to_markdown(found)
        _write(text, output, is_replacing=is_replacing)


def import_chats(
    file: Annotated[
        Path, typer.Argument(metavar="FILE", help="What `export` wrote; `-` is standard input.")
    ],
) -> None:
    """Takes in chats that were exported. Chats that are here already stay as they are."""
    with reporting_errors():
        chats = _read(file)
        with wiring.opened_history() as store:
            num_added = len(store.add(chats))
        typer.echo(import_line(num_added, len(chats) - num_added), err=True)


def import_line(num_added: int, num_known: int) -> str:
    """Says what an import did."""
    from ..figures import count

    line = f"{count(num_added, 'chat')} imported."
    return f"{line} {count(num_known, 'chat')} left out: here already." if num_known else line


def _read(file: Path) -> list[StoredChat]:
    """Reads chats with something in them.

    Raises:
        ConfigError: There are none, or the file is none of ours.
    """
    from mira_engine.api import ConfigError

    from ..chat_files import parse_chats, read_chats
    from ..export import ImportFormatError
    from ..stored_chat import HistoryError

    is_piped = str(file) == "-"
    try:
        chats = parse_chats(sys.stdin.buffer.read()) if is_piped else read_chats(file)
    except ImportFormatError as error:
        name = "standard input" if is_piped else file
        raise ConfigError(
            f"This is no export of chats: {name}: {error.message}", hint=error.hint
        ) from None
    except HistoryError as error:
        raise ConfigError(error.message, hint=error.hint) from None
    found = [chat for chat in chats if chat.conversation.turns]
    if not found:
        raise ConfigError("There is nothing to import.", hint="Give a file of mira-chat export.")
    return found


def _format_of(output: Path | None) -> ExportFormat:
    from ..chat_files import JSONL_SUFFIX

    is_lines = output is not None and output.suffix.lower() == JSONL_SUFFIX
    return ExportFormat.JSONL if is_lines else ExportFormat.MARKDOWN


def _write(text: str, output: Path | None, *, is_replacing: bool) -> None:
    """Writes to a file, or to standard output."""
    from mira_engine.api import ConfigError

    from ..chat_files import replace_old, write_new

    if output is None:
        sys.stdout.buffer.write(text.encode("utf-8"))
        sys.stdout.flush()
    elif not output.exists():
        write_new(output, text)
    elif is_replacing:
        replace_old(output, text)
    else:
        raise ConfigError(f"{output} is there already.", hint="Give another name, or --force.")
