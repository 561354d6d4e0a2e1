"""The history's rows: chats and turns to SQL and back, and sums.

Functions of a connection; the transaction is the caller's. Knows nothing of files,
threads or other apps.
"""

from __future__ import annotations

import dataclasses
import json
import math
import sqlite3
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta

from mira_engine.api import ReplyStats, to_plain

from .conversation import Turn
from .history_file import encode
from .stored_chat import (
    StoredChat,
    conversation_of,
    new_chat_id,
    sampling_from_plain,
    turn_from_plain,
    turn_to_plain,
)

_LAST_CHAT = "last-chat"
_TURN_COLUMNS = "turn_id, parent_id, role, content, thinking, status, error, model, stats"
_TURN_FIELDS = ", ".join(f"turns.{column}" for column in _TURN_COLUMNS.split(", "))
_EPOCH = datetime(1970, 1, 1, tzinfo=UTC)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSummary:
    """A line of the list of chats; `updated_at` is UTC."""

    chat_id: str
    title: str
    model: str
    updated_at: datetime
    num_turns: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelUsage:
    """What a model did, over all chats.

    Attributes:
        num_replies: Replies, stopped and broken ones too.
        num_tokens: Tokens generated.
        seconds: From requests to last tokens.
        tokens_per_s: Decode rate over all replies, first tokens left out.
        hit_rate: Share of routed tokens served by a resident expert.
    """

    model: str
    num_replies: int
    num_tokens: int
    seconds: float
    tokens_per_s: float
    hit_rate: float


# -- writing ---------------------------------------------------------------------------------


def is_other(
    connection: sqlite3.Connection,
    chat_id: str,
    turns: Sequence[Turn],
    known: Sequence[Turn] = (),
) -> bool:
    """Whether a chat is kept with turns that are not these.

    Args:
        connection: The history.
        chat_id: The chat.
        turns: What it is expected to begin with, or to be the beginning of.
        known: Turns that are kept for certain; the same objects are not compared.
    """
    num_same = 0
    for mine, kept in zip(turns, known, strict=False):
        if mine is not kept:
            break
        num_same += 1
    rows = connection.execute(
        f"SELECT {_TURN_COLUMNS} FROM turns WHERE chat_id = ? AND turn_id >= ? ORDER BY turn_id",
        (chat_id, num_same),
    )
    return any(
        mine.said_after(mine.parent_id) != kept.said_after(kept.parent_id)
        for mine, kept in zip(turns[num_same:], map(_turn, rows), strict=False)
    )


def write_chat(connection: sqlite3.Connection, chat_id: str, chat: StoredChat, now_us: int) -> None:
    """Writes the chat's own fields, and the turns that are not kept yet."""
    turns = chat.conversation.turns
    num_kept = connection.execute(
        "SELECT count(*) FROM turns WHERE chat_id = ?", (chat_id,)
    ).fetchone()[0]
    sampling = None if chat.sampling is None else json.dumps(to_plain(chat.sampling))
    connection.execute(
        """
        INSERT INTO chats
            (chat_id, title, model, system_prompt, sampling, head_id, visited, updated_us)
        VALUES (?, CAST(? AS TEXT), CAST(? AS TEXT), CAST(? AS TEXT), ?, ?, ?, ?)
        ON CONFLICT (chat_id) DO UPDATE SET
            model = excluded.model, system_prompt = excluded.system_prompt,
            sampling = excluded.sampling, head_id = excluded.head_id,
            visited = excluded.visited, deleted_us = NULL,
            updated_us = CASE WHEN ? THEN excluded.updated_us ELSE updated_us END
        """,
        (
            chat_id,
            encode(chat.shown_title),
            encode(chat.model),
            encode(chat.conversation.system_prompt),
            sampling,
            chat.conversation.head_id,
            json.dumps(chat.conversation.visited),
            now_us,
            len(turns) > num_kept,
        ),
    )
    connection.executemany(
        f"""
        INSERT INTO turns (chat_id, {_TURN_COLUMNS})
        VALUES (?, ?, ?, ?, CAST(? AS TEXT), CAST(? AS TEXT), ?, CAST(? AS TEXT),
                CAST(? AS TEXT), ?)
        """,
        [(chat_id, *_turn_row(turn)) for turn in turns[num_kept:]],
    )


def add_chat(connection: sqlite3.Connection, chat: StoredChat, now_us: int) -> list[str]:
    """Adds a chat from elsewhere; returns its name, or nothing where it is there already."""
    chat_id, turns = chat.chat_id, chat.conversation.turns
    kept = read_chat(connection, chat_id)
    if kept is not None:
        is_all_there = len(kept.conversation.turns) >= len(turns)
        if is_all_there and not is_other(connection, chat_id, turns):
            connection.execute("UPDATE chats SET deleted_us = NULL WHERE chat_id = ?", (chat_id,))
            return []
        chat_id = new_chat_id()
    updated_us = now_us
    if chat.updated_at is not None:
        updated_us = (chat.updated_at - _EPOCH) // timedelta(microseconds=1)
    write_chat(connection, chat_id, chat, updated_us)
    return [chat_id]


def write_last_chat(connection: sqlite3.Connection, chat_id: str | None) -> None:
    """Remembers a chat, or none."""
    if chat_id is None:
        connection.execute("DELETE FROM state WHERE name = ?", (_LAST_CHAT,))
    else:
        connection.execute("REPLACE INTO state (name, value) VALUES (?, ?)", (_LAST_CHAT, chat_id))


# -- reading ---------------------------------------------------------------------------------


def read_summaries(connection: sqlite3.Connection) -> list[ChatSummary]:
    """Returns the chats that are not deleted, newest first."""
    rows = connection.execute(
        """
        SELECT chat_id, title, model, updated_us,
               (SELECT count(*) FROM turns WHERE turns.chat_id = chats.chat_id)
        FROM chats WHERE deleted_us IS NULL ORDER BY updated_us DESC, chat_id
        """
    )
    return [
        ChatSummary(
            chat_id=chat_id,
            title=title,
            model=model,
            updated_at=_moment(updated_us),
            num_turns=num_turns,
        )
        for chat_id, title, model, updated_us, num_turns in rows
    ]


def read_chat(connection: sqlite3.Connection, chat_id: str) -> StoredChat | None:
    """Reads a chat, deleted or not.

    Raises:
        ValueError: Its turns are no tree.
    """
    # In one statement, so that it is one moment's view: another app may be writing.
    rows = connection.execute(
        f"""
        SELECT title, chats.model, system_prompt, sampling, head_id, visited, updated_us,
               {_TURN_FIELDS}
        FROM chats JOIN turns USING (chat_id) WHERE chat_id = ? ORDER BY turn_id
        """,
        (chat_id,),
    ).fetchall()
    if not rows:
        return None
    title, model, system_prompt, sampling, head_id, visited, updated_us = rows[0][:7]
    return StoredChat(
        chat_id=chat_id,
        title=title,
        model=model,
        conversation=conversation_of(
            (_turn(row[7:]) for row in rows),
            head_id=head_id,
            system_prompt=system_prompt,
            visited=None if visited is None else json.loads(visited),
        ),
        sampling=None if sampling is None else sampling_from_plain(json.loads(sampling)),
        updated_at=_moment(updated_us),
    )


def read_last_chat(connection: sqlite3.Connection) -> str | None:
    """Returns the chat that was open last, if it is still there."""
    row = connection.execute(
        "SELECT value FROM state JOIN chats ON chat_id = value"
        " WHERE name = ? AND deleted_us IS NULL",
        (_LAST_CHAT,),
    ).fetchone()
    return None if row is None else row[0]


def read_usage(connection: sqlite3.Connection) -> list[ModelUsage]:
    """Sums the figures of all replies by model."""

    def figure(name: str) -> str:
        return f"total(json_extract(stats, '$.{name}'))"

    rows = connection.execute(
        f"""
        SELECT turns.model, count(*), {figure("num_new_tokens")},
               {figure("ttft_s")} + {figure("decode_s")}, {figure("decode_s")},
               total(max(json_extract(stats, '$.num_new_tokens') - 1, 0)),
               {figure("num_hits")}, {figure("num_misses")}
        FROM turns JOIN chats USING (chat_id)
        WHERE role = 'assistant' AND deleted_us IS NULL
        GROUP BY turns.model ORDER BY count(*) DESC, turns.model
        """
    )
    return [
        ModelUsage(
            model=model,
            num_replies=num_replies,
            num_tokens=int(num_tokens),
            seconds=seconds,
            tokens_per_s=num_decoded / decode_s if decode_s > 0 else 0.0,
            hit_rate=hits / (hits + misses) if hits + misses else 0.0,
        )
        for model, num_replies, num_tokens, seconds, decode_s, num_decoded, hits, misses in rows
    ]


# -- turns -----------------------------------------------------------------------------------


def _turn_row(turn: Turn) -> tuple:
    plain = turn_to_plain(turn)
    return (
        turn.turn_id,
        turn.parent_id,
        plain["role"],
        encode(turn.content),
        encode(turn.thinking),
        plain["status"],
        encode(turn.error),
        encode(turn.model),
        None if turn.stats is None else _stats_text(turn.stats),
    )


def _stats_text(stats: ReplyStats) -> str:
    """Returns JSON; what is not finite, which JSON does not know, becomes 0."""
    fields = dataclasses.asdict(stats)
    for name, value in fields.items():
        if isinstance(value, float) and not math.isfinite(value):
            fields[name] = 0.0
    return json.dumps(fields)


def _turn(row: tuple) -> Turn:
    plain = dict(zip(_TURN_COLUMNS.split(", "), row, strict=True))
    plain["stats"] = None if plain["stats"] is None else json.loads(plain["stats"])
    return turn_from_plain(plain)


def _moment(microseconds: int) -> datetime:
    return _EPOCH + timedelta(microseconds=microseconds)
