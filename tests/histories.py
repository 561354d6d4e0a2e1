"""Histories of chats, and what tests write into them."""

from __future__ import annotations

import sqlite3
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from mira_app.conversation import Conversation
from mira_app.history import HistoryStore, StoredChat, new_chat_id


class FakeClock:
    """Moves on by a second at every look."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    def __call__(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now


@contextmanager
def opened(path: Path, **arguments):
    store = HistoryStore(path, clock=FakeClock(), **arguments)
    store.open()
    try:
        yield store
    finally:
        store.close()


def talk(*texts: str) -> Conversation:
    """A conversation of questions and replies in turn."""
    chat = Conversation()
    for number, text in enumerate(texts):
        chat = chat.with_reply(text, model="m") if number % 2 else chat.with_user(text)
    return chat


def chat_of(*texts: str, chat_id: str | None = None, **fields) -> StoredChat:
    return StoredChat(chat_id=chat_id or new_chat_id(), conversation=talk(*texts), **fields)


def contents(store: HistoryStore, chat_id: str) -> list[str]:
    return [turn.content for turn in store.load(chat_id).conversation.turns]


def check_file(path: Path) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("PRAGMA foreign_key_check").fetchone() is None
    connection.execute("INSERT INTO turn_text (turn_text) VALUES ('integrity-check')")
    connection.close()
