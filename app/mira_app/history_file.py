"""The history's file: opened, checked, brought to this version, or set aside.

Two apps may start at once: a lock file beside the history lets one after the other look
at it. A file that is damaged, of a newer version or not a history at all is renamed and
never written to. Knows nothing of chats; the schema is in `history_schema/`.
"""

from __future__ import annotations

import importlib.resources
import os
import sqlite3
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path

BUSY_S = 5.0
"""How long a write waits for another app's."""
LOCK_S = 10.0
"""How long opening waits for another app that opens."""
MAX_CHECKED_BYTES = 64 * 2**20
"""Bigger files are not read through at every start; damage is then found when it is met."""

_BUSY_CODES = {sqlite3.SQLITE_BUSY, sqlite3.SQLITE_LOCKED}
_DAMAGE_CODES = {sqlite3.SQLITE_CORRUPT, sqlite3.SQLITE_NOTADB}
_SIDES = ("", "-wal", "-shm")


class _UnusableError(sqlite3.DatabaseError):
    """The file is to be set aside; `word` goes into its new name."""

    def __init__(self, word: str, reason: str) -> None:
        super().__init__(reason)
        self.word = word


def migrations() -> tuple[str, ...]:
    """Returns the scripts that lead from an empty file to this version, in order."""
    folder = importlib.resources.files(__package__) / "history_schema"
    scripts = sorted((f for f in folder.iterdir() if f.name.endswith(".sql")), key=lambda f: f.name)
    return tuple(script.read_text(encoding="utf-8") for script in scripts)


def is_busy(error: sqlite3.Error) -> bool:
    """Whether another app was at it for too long."""
    return _primary_code(error) in _BUSY_CODES


def connect(path: Path | str) -> sqlite3.Connection:
    """Opens one connection, which any thread may use, one at a time."""
    connection = sqlite3.connect(
        path, timeout=BUSY_S, isolation_level=None, check_same_thread=False
    )
    try:
        connection.text_factory = decode
        connection.execute("PRAGMA foreign_keys = ON")
        # In this order a power cut, too, loses nothing that was reported as saved.
        connection.execute("PRAGMA journal_mode = WAL")
        connection.execute("PRAGMA synchronous = FULL")
    except sqlite3.Error:
        connection.close()
        raise
    return connection


def encode(text: str) -> bytes:
    """Returns text for `CAST(? AS TEXT)`; a model's lone surrogates are no UTF-8."""
    return text.encode("utf-8", "surrogatepass")


def decode(stored: bytes) -> str:
    """Takes back what `encode` made."""
    return stored.decode("utf-8", "surrogatepass")


def open_file(
    path: Path, clock: Callable[[], datetime], lock_s: float = LOCK_S
) -> tuple[sqlite3.Connection, list[str]]:
    """Opens the history, beginning it where there is none.

    Returns:
        A connection, and what a person should know.

    Raises:
        OSError: The folder cannot be made or written, or another app holds the lock.
        sqlite3.Error: The file cannot be opened for writing.
    """
    import filelock  # costs the start more than all the rest of this module

    path.parent.mkdir(parents=True, exist_ok=True)
    notices = []
    with filelock.FileLock(f"{path}.lock", timeout=lock_s):
        try:
            connection = _open_checked(path)
        except _UnusableError as error:
            aside = _set_aside(path, error.word, clock())
            notices.append(f"{error} It was renamed to {aside} and a new history was begun.")
            connection = _open_checked(path)
    if connection.execute("PRAGMA journal_mode").fetchone()[0] != "wal":
        notices.append("The history's disk has no write-ahead log: two apps wait for each other.")
    return connection, notices


def open_memory(path: Path) -> sqlite3.Connection:
    """Opens a history in memory, with what can be read of the one at `path`."""
    for flags in ("mode=ro", "immutable=1"):  # the second needs no file beside it
        memory = connect(":memory:")
        try:
            source = sqlite3.connect(f"{path.absolute().as_uri()}?{flags}", uri=True)
            try:
                _check(source, path)
                source.backup(memory)
            finally:
                source.close()
            migrate(memory)
        except (sqlite3.Error, OSError):
            memory.close()
        else:
            return memory
    memory = connect(":memory:")
    migrate(memory)
    return memory


def migrate(connection: sqlite3.Connection) -> None:
    """Runs the scripts that the file has not seen, each in one transaction with its number."""
    scripts = migrations()
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    for number, script in enumerate(scripts[version:], start=version + 1):
        connection.execute("BEGIN IMMEDIATE")
        try:
            for statement in _statements(script):
                connection.execute(statement)
            connection.execute(f"PRAGMA user_version = {number}")
            connection.execute("COMMIT")
        except sqlite3.Error:
            if connection.in_transaction:
                connection.execute("ROLLBACK")
            raise


def _open_checked(path: Path) -> sqlite3.Connection:
    try:
        connection = connect(path)
    except sqlite3.DatabaseError as error:
        raise _judged(error) from None
    try:
        _check(connection, path)
        migrate(connection)
        # Every table is there, and the file can be written.
        for table in ("chats", "turns", "state", "turn_text"):
            connection.execute(f"SELECT 1 FROM {table} LIMIT 1")
        connection.execute("BEGIN IMMEDIATE")
        connection.execute("ROLLBACK")
    except sqlite3.Error as error:
        connection.close()
        raise _judged(error) from None
    return connection


def _check(connection: sqlite3.Connection, path: Path) -> None:
    version = connection.execute("PRAGMA user_version").fetchone()[0]
    if version > len(migrations()):
        raise _UnusableError("newer", "The history was written by a newer version of mira-chat.")
    num_tables = connection.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]
    if (version == 0) != (num_tables == 0):
        raise _UnusableError("foreign", "The history's file is not one of mira-chat.")
    if path.stat().st_size <= MAX_CHECKED_BYTES:
        verdict = connection.execute("PRAGMA quick_check(1)").fetchone()[0]
        if verdict != "ok":
            raise _UnusableError("damaged", "The history's file is damaged.")


def _judged(error: sqlite3.Error) -> sqlite3.Error:
    """Returns what an error means: damage, or itself."""
    if isinstance(error, _UnusableError):
        return error
    is_damage = _primary_code(error) in _DAMAGE_CODES
    if is_damage or str(error).startswith(("no such table", "no such column")):
        return _UnusableError("damaged", "The history's file is damaged.")
    return error


def _primary_code(error: sqlite3.Error) -> int:
    return getattr(error, "sqlite_errorcode", 0) & 0xFF


def _set_aside(path: Path, word: str, now: datetime) -> str:
    """Renames the file and its log; returns the new name, which was nobody's before."""
    name = f"{path.name}.{word}-{now:%Y%m%d-%H%M%S}"
    number = 1
    while (aside := path.with_name(name if number == 1 else f"{name}-{number}")).exists():
        number += 1
    for side in reversed(_SIDES):
        part = path.with_name(path.name + side)
        if part.exists():
            os.rename(part, aside.with_name(aside.name + side))
    return aside.name


def _statements(script: str) -> Iterator[str]:
    """Splits a script; triggers have semicolons inside."""
    statement = ""
    for line in script.splitlines(keepends=True):
        statement += line
        if line.rstrip().endswith(";") and sqlite3.complete_statement(statement):
            yield statement
            statement = ""
