"""The store of chats: a SQLite file with full-text search, shared by all apps that run.

Every method may be called from any thread and waits for the disk. There are two
connections: one writes, one reads, so that a search in a worker thread does not hold up
a save. What `save` returned from is on the disk: neither a killed process nor a power
cut takes it back.

Where the disk refuses (full, read-only), the store goes on in memory with a copy of what
could be read. `HistoryError` says so once; every later write tries the disk again first
and brings along what was only in memory.
"""

from __future__ import annotations

import dataclasses
import sqlite3
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import TypeVar

from . import history_file, history_rows, history_search
from .conversation import Conversation, Turn
from .history_rows import ChatSummary, ModelUsage
from .history_search import Hit
from .stored_chat import HistoryError, StoredChat, new_chat_id, title_of

__all__ = [
    "ChatSummary",
    "HistoryError",
    "HistoryStore",
    "Hit",
    "ModelUsage",
    "StoredChat",
    "new_chat_id",
    "title_of",
]

KEPT_DELETED = timedelta(days=1)
"""Chats deleted by an app that was killed before it purged them stay that long."""
RETRY_LOCK_S = 0.2
"""How long a write in memory waits to get back to the disk."""

_T = TypeVar("_T")
_Operation = Callable[[sqlite3.Connection], object]


def utc_now() -> datetime:
    """Returns the time, with its zone."""
    return datetime.now(UTC)


@dataclass(slots=True)
class _Known:
    """Turns that this store itself wrote or read last: they need no comparing."""

    chat_id: str = ""
    turns: tuple[Turn, ...] = ()


class HistoryStore:
    """Chats on the disk. `open` comes first, `close` last.

    Attributes:
        path: The file.
        is_in_memory: Whether the disk was given up for now.
    """

    def __init__(self, path: Path, *, clock: Callable[[], datetime] = utc_now) -> None:
        self.path = path
        self.is_in_memory = False
        self._clock = clock
        self._write_lock = threading.RLock()
        self._read_lock = threading.RLock()  # taken after the other one, never before it
        self._writer: sqlite3.Connection | None = None
        self._reader: sqlite3.Connection | None = None
        self._pending: dict[tuple[str, ...], _Operation] = {}
        self._known = _Known()
        self._notices: list[str] = []

    # -- life

    def open(self) -> list[str]:
        """Opens the file or begins a new one; what cannot be used is set aside.

        Without a disk the store works in memory.

        Returns:
            What a person should know, one sentence or two each.

        Raises:
            HistoryError: There can be no history on this machine at all.
        """
        with self._write_lock:
            try:
                notices = self._open_disk(history_file.LOCK_S)
                self._forget_deleted()
            except (OSError, sqlite3.Error) as error:
                self._go_to_memory()
                notices = [str(self._refusal(error))]
            return notices

    def close(self) -> None:
        """Closes the file, after a last try to write what is only in memory."""
        with self._write_lock:
            if self._pending:
                self._settle()
            self._close_connections()

    def take_notices(self) -> list[str]:
        """Returns what a person should know since the last call."""
        with self._write_lock:
            notices, self._notices = self._notices, []
            return notices

    @property
    def num_unsaved(self) -> int:
        """Changes that are in memory alone and would be lost with the process."""
        return len(self._pending)

    # -- chats

    def chats(self) -> list[ChatSummary]:
        """Returns the chats that are not deleted, newest first.

        Raises:
            HistoryError: The history cannot be read.
        """
        return self._read(history_rows.read_summaries)

    def load(self, chat_id: str) -> StoredChat:
        """Reads a chat, deleted ones too until they are purged.

        Raises:
            HistoryError: There is none, or it cannot be read.
        """
        chat = self._read(lambda connection: history_rows.read_chat(connection, chat_id))
        if chat is None:
            raise HistoryError("This chat is not in the history any more.")
        self._known = _Known(chat_id, chat.conversation.turns)
        return chat

    def save(self, chat: StoredChat) -> Conversation:
        """Writes what is new of a chat in one transaction; a chat without turns is not kept.

        Turns are only ever added: those written before are left alone. Where another app
        has added other turns to the same chat meanwhile, this one's are added as a branch
        beside them. The title is taken for a new chat only; afterwards `rename` is what
        changes it. A deleted chat is restored.

        Returns:
            The conversation as it is kept: the very same, unless another app changed the
            chat; then one with its turns too, to go on with.

        Raises:
            HistoryError: The disk refused; the chat is kept in memory.
        """
        kept = chat.conversation

        def save(connection: sqlite3.Connection) -> None:
            nonlocal kept
            kept = self._save(connection, chat)

        if chat.conversation.turns:
            self._write(("save", chat.chat_id), save)
        return kept

    def add(self, chats: Sequence[StoredChat]) -> list[str]:
        """Adds chats from elsewhere, all or none; one that is there already is left out.

        Returns:
            The names of those added.

        Raises:
            HistoryError: The disk refused; the chats are kept in memory.
        """
        added: list[str] = []

        def add_all(connection: sqlite3.Connection) -> None:
            added.clear()
            for chat in chats:
                if chat.conversation.turns:
                    added.extend(history_rows.add_chat(connection, chat, _microseconds(now)))

        now = self._clock()
        self._write(("add", new_chat_id()), add_all)
        return added

    def rename(self, chat_id: str, title: str) -> None:
        """Gives a chat another title.

        Raises:
            HistoryError: The disk refused; the title is kept in memory.
        """
        title = " ".join(title.split())
        self._write(
            ("title", chat_id),
            lambda connection: connection.execute(
                "UPDATE chats SET title = CAST(? AS TEXT) WHERE chat_id = ?",
                (history_file.encode(title), chat_id),
            ),
        )

    def delete(self, chat_id: str) -> None:
        """Hides a chat, until it is restored or purged.

        Raises:
            HistoryError: The disk refused; it is hidden in memory.
        """
        self._mark_deleted(chat_id, _microseconds(self._clock()))

    def restore(self, chat_id: str) -> None:
        """Takes `delete` back.

        Raises:
            HistoryError: The disk refused; it is shown again in memory.
        """
        self._mark_deleted(chat_id, None)

    def purge(self, chat_ids: Sequence[str]) -> None:
        """Removes those of these chats that are deleted, for good.

        Raises:
            HistoryError: The disk refused.
        """
        ids = [(chat_id,) for chat_id in chat_ids]
        self._write(
            ("purge", *chat_ids),
            lambda connection: connection.executemany(
                "DELETE FROM chats WHERE chat_id = ? AND deleted_us IS NOT NULL", ids
            ),
        )

    def search(self, text: str) -> list[Hit]:
        """Finds the turns and titles in which every word of `text` occurs, as a part of any word.

        Returns:
            Hits, those in chats used last first.

        Raises:
            HistoryError: The history cannot be read.
        """
        return self._read(lambda connection: history_search.search(connection, text))

    def usage(self) -> list[ModelUsage]:
        """Returns what each model was used for, the most used first; deleted chats left out.

        Raises:
            HistoryError: The history cannot be read.
        """
        return self._read(history_rows.read_usage)

    @property
    def last_chat_id(self) -> str | None:
        """The chat that was open last, by any app.

        Raises:
            HistoryError: The history cannot be read.
        """
        return self._read(history_rows.read_last_chat)

    def set_last_chat(self, chat_id: str | None) -> None:
        """Remembers which chat is open.

        Raises:
            HistoryError: The disk refused.
        """
        self._write(("last",), lambda connection: history_rows.write_last_chat(connection, chat_id))

    # -- how

    def _mark_deleted(self, chat_id: str, deleted_us: int | None) -> None:
        self._write(
            ("deleted", chat_id),
            lambda connection: connection.execute(
                "UPDATE chats SET deleted_us = ? WHERE chat_id = ?", (deleted_us, chat_id)
            ),
        )

    def _forget_deleted(self) -> None:
        before = _microseconds(self._clock() - KEPT_DELETED)
        assert self._writer is not None
        _in_transaction(
            self._writer,
            [lambda c: c.execute("DELETE FROM chats WHERE deleted_us < ?", (before,))],
        )

    def _save(self, connection: sqlite3.Connection, chat: StoredChat) -> Conversation:
        """Writes a chat, beside another app's turns where there are any; returns all of it."""
        chat_id, conversation = chat.chat_id, chat.conversation
        known = self._known.turns if self._known.chat_id == chat_id else ()
        now_us = _microseconds(self._clock())
        if history_rows.is_other(connection, chat_id, conversation.turns, known):
            theirs = history_rows.read_chat(connection, chat_id)
            assert theirs is not None
            conversation = conversation.grafted_on(theirs.conversation)
            chat = dataclasses.replace(chat, conversation=conversation)
        history_rows.write_chat(connection, chat_id, chat, now_us)
        self._known = _Known(chat_id, conversation.turns)
        return conversation

    def _read(self, query: Callable[[sqlite3.Connection], _T]) -> _T:
        with self._read_lock:
            if self._reader is None:
                raise HistoryError("The history is closed.")
            try:
                return query(self._reader)
            except (sqlite3.Error, ValueError) as error:
                raise HistoryError(
                    f"The history cannot be read: {error}.",
                    hint="A damaged file is set aside when the app starts again.",
                ) from error

    def _write(self, key: tuple[str, ...], operation: _Operation) -> None:
        """Does what is pending and `operation`; a later one with the same key replaces it."""
        with self._write_lock:
            if self._writer is None:
                raise HistoryError("The history is closed.")
            self._pending.pop(key, None)
            self._pending[key] = operation
            # What is pending beside it, memory has already.
            due = [operation] if self.is_in_memory else list(self._pending.values())
            try:
                _in_transaction(self._writer, due)
            except (sqlite3.IntegrityError, sqlite3.ProgrammingError, ValueError) as error:
                del self._pending[key]
                self._known = _Known()
                raise HistoryError(f"This cannot be kept in the history: {error}.") from error
            except sqlite3.Error as error:
                self._known = _Known()
                raise self._failed(error) from error
            if self.is_in_memory:
                self._settle()
            else:
                self._pending.clear()

    def _failed(self, error: sqlite3.Error) -> HistoryError:
        """Keeps in memory what the disk refused."""
        if history_file.is_busy(error):
            return HistoryError(
                "Another app keeps the history busy.",
                hint="Nothing is lost; it is tried again with the next change.",
            )
        self._go_to_memory()
        assert self._writer is not None
        _in_transaction(self._writer, list(self._pending.values()))
        return self._refusal(error)

    def _refusal(self, error: Exception) -> HistoryError:
        reason = str(error).strip().rstrip(".")
        return HistoryError(
            f"The history cannot be written to {self.path}: {reason}.",
            hint="Chats are kept in memory; free the disk, or export what you want to keep.",
        )

    def _go_to_memory(self) -> None:
        self._close_connections()
        try:
            memory = history_file.open_memory(self.path)
        except sqlite3.Error as error:
            raise HistoryError(
                f"There can be no history: {error}.",
                hint="It needs SQLite 3.34 or newer with FTS5; chats are not kept.",
            ) from error
        with self._read_lock:
            self._writer = self._reader = memory
        self.is_in_memory = True
        self._known = _Known()

    def _settle(self) -> None:
        """Writes to the disk what is pending, if the disk has come back."""
        memory = (self._writer, self._reader)
        known, self._known = self._known, _Known()
        try:
            notices = self._open_disk(RETRY_LOCK_S) if self.is_in_memory else []
            assert self._writer is not None
            _in_transaction(self._writer, list(self._pending.values()))
        except (OSError, sqlite3.Error):
            if self._writer is not memory[0]:
                self._close_connections()
                with self._read_lock:
                    self._writer, self._reader = memory
                self.is_in_memory = True
            self._known = known
            return
        self._pending.clear()
        if self._writer is not memory[0] and memory[0] is not None:
            memory[0].close()
            self._notices += [*notices, f"The history is kept in {self.path} again."]

    def _open_disk(self, lock_s: float) -> list[str]:
        writer, notices = history_file.open_file(self.path, self._clock, lock_s)
        try:
            reader = history_file.connect(self.path)
        except sqlite3.Error:
            writer.close()
            raise
        with self._read_lock:
            self._writer, self._reader = writer, reader
        self.is_in_memory = False
        return notices

    def _close_connections(self) -> None:
        with self._read_lock:
            for connection in {self._reader, self._writer} - {None}:
                connection.close()
            self._writer = self._reader = None


def _in_transaction(connection: sqlite3.Connection, operations: Sequence[_Operation]) -> None:
    """Runs all operations, or none."""
    connection.execute("BEGIN IMMEDIATE")
    try:
        for operation in operations:
            operation(connection)
        connection.execute("COMMIT")
    except BaseException:
        if connection.in_transaction:
            connection.execute("ROLLBACK")
        raise


def _microseconds(moment: datetime) -> int:
    return round(moment.timestamp() * 1e6)
