"""Full-text search over the history: words to SQL, rows to hits.

Functions of a connection, and pure ones. Every word has to occur, as a part of any word.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass

MAX_HITS = 200
MAX_SEARCH_CHARS = 200
SNIPPET_CHARS = 160
LEAD_CHARS = 24
"""Of those, before the hit: it is to be seen in a narrow terminal, in wide letters too."""
MIN_INDEXED_CHARS = 3
"""Shorter words are in no trigram; they are looked for in every text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Hit:
    """Where a search found something.

    Attributes:
        turn_id: The turn, `None` where the title itself was found.
        snippet: The text around it on one line, not sanitised.
    """

    chat_id: str
    turn_id: int | None
    title: str
    snippet: str


def search_words(text: str) -> list[str]:
    """Returns the words that are looked for."""
    return text[:MAX_SEARCH_CHARS].replace("\0", " ").split()


def search(connection: sqlite3.Connection, text: str) -> list[Hit]:
    """Finds titles and turns with every word of `text`, in the chats used last first."""
    words = search_words(text)
    if not words:
        return []
    rows = _find_turns(connection, words)
    found = {row[1] for row in rows}
    # A title is mostly the first question once more.
    rows += [row for row in _find_titles(connection, words) if row[1] not in found]
    rows.sort(key=lambda row: (-row[0], row[1], -1 if row[2] is None else row[2]))
    return [
        Hit(
            chat_id=chat_id,
            turn_id=turn_id,
            title=title,
            snippet="" if turn_id is None else snippet_of(content, thinking, words),
        )
        for _, chat_id, turn_id, title, content, thinking in rows
    ]


def snippet_of(content: str, thinking: str, words: Sequence[str]) -> str:
    """Cuts the text around the first word that is found, in what was said before thoughts."""
    for text in (content, thinking):
        for word in words:
            found = re.search(re.escape(word), text, re.IGNORECASE)
            if found is not None:
                return _cut(text, found.start())
    return _cut(content or thinking, 0)


def _cut(text: str, position: int) -> str:
    start = max(0, position - LEAD_CHARS)
    if start > 0:
        start += max(0, text[start:position].find(" "))  # no half of a word, where there are words
    cut = " ".join(text[start : start + SNIPPET_CHARS].split())
    before, after = start > 0, start + SNIPPET_CHARS < len(text)
    return f"{'…' if before else ''}{cut}{'…' if after else ''}"


def _find_titles(connection: sqlite3.Connection, words: Sequence[str]) -> list[tuple]:
    conditions = " AND ".join(["title LIKE ? ESCAPE '\\'"] * len(words))
    return connection.execute(
        f"""
        SELECT updated_us, chat_id, NULL, title, '', '' FROM chats
        WHERE deleted_us IS NULL AND {conditions}
        ORDER BY updated_us DESC LIMIT {MAX_HITS}
        """,
        [_like_pattern(word) for word in words],
    ).fetchall()


def _find_turns(connection: sqlite3.Connection, words: Sequence[str]) -> list[tuple]:
    """Finds long words by the index and short ones, of what is left, by reading."""
    indexed = [word for word in words if len(word) >= MIN_INDEXED_CHARS]
    conditions, values = [], []
    if indexed:
        quoted = " AND ".join('"' + word.replace('"', '""') + '"' for word in indexed)
        conditions.append("turn_key IN (SELECT rowid FROM turn_text WHERE turn_text MATCH ?)")
        values.append(quoted.encode("utf-8", "replace").decode())
    for word in words:
        if len(word) < MIN_INDEXED_CHARS:
            conditions.append("(content LIKE ? ESCAPE '\\' OR thinking LIKE ? ESCAPE '\\')")
            values += [_like_pattern(word)] * 2
    return connection.execute(
        f"""
        SELECT updated_us, chat_id, turn_id, title, content, thinking
        FROM turns JOIN chats USING (chat_id)
        WHERE deleted_us IS NULL AND {" AND ".join(conditions)}
        ORDER BY updated_us DESC, chat_id, turn_id LIMIT {MAX_HITS}
        """,
        values,
    ).fetchall()


def _like_pattern(word: str) -> str:
    """Returns the pattern of a text with this word in it."""
    escaped = re.sub(r"([\\%_])", r"\\\1", word)
    return "%" + escaped.encode("utf-8", "replace").decode() + "%"
