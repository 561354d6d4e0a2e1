"""Chats written to files and read from them. Blocks; nothing is ever overwritten."""

from __future__ import annotations

import re
from pathlib import Path

from .atomic_file import UnwritableFileError, replace_file
from .export import ImportFormatError, from_jsonl, from_markdown, to_jsonl, to_markdown
from .stored_chat import HistoryError, StoredChat

MARKDOWN_SUFFIXES = (".md", ".markdown")
JSONL_SUFFIX = ".jsonl"

_MAX_NAME_CHARS = 48
_DEVICE = re.compile(r"con|prn|aux|nul|(com|lpt)[0-9]")
"""Names that are no files on Windows, with whatever suffix."""
_OTHER_FOLDER = "Choose another folder."


def export_chat(chat: StoredChat, path: Path) -> None:
    """Writes a chat to a new file; its suffix says how.

    Raises:
        HistoryError: The suffix is unknown, the file is there already, or cannot be written.
    """
    suffix = path.suffix.lower()
    if suffix in MARKDOWN_SUFFIXES:
        text = to_markdown(chat)
    elif suffix == JSONL_SUFFIX:
        text = to_jsonl([chat])
    else:
        raise HistoryError(
            f"{path.name!r} does not say how to export.",
            hint="End it in .md for reading, or in .jsonl for all of the chat.",
        )
    write_new(path, text)


def write_new(path: Path, text: str) -> None:
    """Writes a file that was not there before, whole or not at all.

    Raises:
        HistoryError: It is there already, or cannot be written.
    """
    try:
        file = path.open("x", encoding="utf-8", newline="\n")
    except FileExistsError:
        raise HistoryError(f"{path} is there already.", hint="Give another name.") from None
    except OSError as error:
        raise _cannot_write(path, error) from error
    try:
        with file:
            file.write(text)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise _cannot_write(path, error) from error


def replace_old(path: Path, text: str) -> None:
    """Writes a file in place of one that is there; the old one stays where that fails.

    Raises:
        HistoryError: It cannot be written.
    """
    try:
        replace_file(path, text)
    except UnwritableFileError as error:
        raise HistoryError(error.message, hint=_OTHER_FOLDER) from None


def read_chats(path: Path) -> tuple[StoredChat, ...]:
    """Reads an exported file.

    Raises:
        HistoryError: The file cannot be read.
        ImportFormatError: It is no export; names the line.
    """
    try:
        stored = path.read_bytes()
    except OSError as error:
        raise HistoryError(f"{path} cannot be read: {error.strerror}.") from error
    return parse_chats(stored)


def parse_chats(stored: bytes) -> tuple[StoredChat, ...]:
    """Reads what an exported file holds, JSONL or Markdown by what is in it.

    Raises:
        ImportFormatError: It is no export; names the line.
    """
    try:
        text = stored.decode("utf-8-sig").replace("\r\n", "\n")
    except UnicodeDecodeError as error:
        line = stored.count(b"\n", 0, error.start) + 1
        raise ImportFormatError.at_line(line, "this is no text in UTF-8") from None
    return from_jsonl(text) if text.lstrip()[:1] in ("{", "") else (from_markdown(text),)


def free_path(folder: Path, title: str, suffix: str = ".md") -> Path:
    """Returns a name made of a title that no file in the folder has."""
    words = re.findall(r"\w+", title.lower())
    name = "-".join(words)[:_MAX_NAME_CHARS].strip("-") or "chat"
    if _DEVICE.fullmatch(name):
        name = f"chat-{name}"
    path, number = folder / f"{name}{suffix}", 2
    while path.exists():
        path, number = folder / f"{name}-{number}{suffix}", number + 1
    return path


def _cannot_write(path: Path, error: OSError) -> HistoryError:
    return HistoryError(f"{path} cannot be written: {error.strerror or error}.", hint=_OTHER_FOLDER)
