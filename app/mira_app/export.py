"""Chats as text: JSONL that keeps everything, Markdown that people read.

JSONL: a line `{"type": "chat", ...}` and one line `{"type": "turn", ...}` for each of its
turns, siblings included; any number of chats one after the other. ASCII only.

Markdown: the path that is shown, with the system prompt and thoughts. Comments that no
viewer shows mark where a message begins, so that it can be read back; a line of a message
that looks like such a mark gets a backslash in front. Escape sequences are left out, since
such a file ends up on a terminal sooner or later. Siblings and figures are not in it.

Pure: reading and writing files is for whoever calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime

from mira_engine.api import MiraError, to_plain

from .conversation import Role, Turn, TurnStatus
from .sanitise import sanitise
from .stored_chat import (
    StoredChat,
    check_turn,
    conversation_of,
    new_chat_id,
    optional_integer,
    sampling_from_plain,
    text,
    turn_from_plain,
    turn_to_plain,
)

FORMAT_VERSION = 1

_MARK = "<!-- mira-chat:"
_MARK_LINE = re.compile(r"<!-- mira-chat:(chat|system|turn|thinking|content|end)(?: (\{.*\}))? -->")
_LOOKS_LIKE_MARK = re.compile(r"^(\\*<!-- mira-chat:)", re.MULTILINE)
_ESCAPED_MARK = re.compile(r"^\\(\\*<!-- mira-chat:)", re.MULTILINE)
_DETAILS = ("<details><summary>Thinking</summary>\n\n", "\n\n</details>")


class ImportFormatError(MiraError):
    """A text is no export of chats, or was changed into something that is none."""

    @classmethod
    def at_line(cls, number: int, reason: str) -> ImportFormatError:
        """Builds the error from the line's number, from 1, and what is wrong there."""
        return cls(f"Line {number}: {reason}.", hint="Nothing was imported.")


# -- JSONL -----------------------------------------------------------------------------------


def to_jsonl(chats: Iterable[StoredChat]) -> str:
    """Returns chats, whole."""
    lines = []
    for chat in chats:
        head = {
            "type": "chat",
            "format": FORMAT_VERSION,
            "chat_id": chat.chat_id,
            "title": chat.title,
            "model": chat.model,
            "updated_at": None if chat.updated_at is None else chat.updated_at.isoformat(),
            "system_prompt": chat.conversation.system_prompt,
            "sampling": to_plain(chat.sampling),
            "head_id": chat.conversation.head_id,
            "visited": list(chat.conversation.visited),
        }
        lines.append(head)
        lines += [{"type": "turn", **turn_to_plain(turn)} for turn in chat.conversation.turns]
    return "".join(json.dumps(line) + "\n" for line in lines)


def from_jsonl(exported: str) -> tuple[StoredChat, ...]:
    """Reads what `to_jsonl` wrote; empty lines are passed over.

    Raises:
        ImportFormatError: A line cannot be read; names it.
    """
    chats: list[StoredChat] = []
    head: tuple[int, Mapping[str, object]] | None = None
    turns: list[Turn] = []
    for number, line in enumerate(exported.split("\n"), start=1):
        if not line.strip():
            continue
        plain = _json_object(line, number)
        try:
            kind = text(plain, "type")
            if kind == "turn" and head is not None:
                turn = turn_from_plain(plain)
                check_turn(turn, turns)
                turns.append(turn)
            elif kind == "chat":
                if head is not None:
                    chats.append(_chat(*head, turns))
                head, turns = (number, plain), []
            else:
                raise ValueError("a chat has to come first" if kind == "turn" else f"type {kind!r}")
        except ValueError as error:
            raise ImportFormatError.at_line(number, str(error)) from None
    if head is not None:
        chats.append(_chat(*head, turns))
    return tuple(chats)


def _json_object(line: str, number: int) -> Mapping[str, object]:
    try:
        plain = json.loads(line)
    except (ValueError, RecursionError):
        raise ImportFormatError.at_line(number, "this is no JSON") from None
    if not isinstance(plain, dict):
        raise ImportFormatError.at_line(number, "this is no JSON object")
    return plain


def _chat(number: int, plain: Mapping[str, object], turns: Iterable[Turn]) -> StoredChat:
    try:
        if plain.get("format") != FORMAT_VERSION:
            raise ValueError(f"format {plain.get('format')!r} is not known to this version")
        return StoredChat(
            chat_id=text(plain, "chat_id") or new_chat_id(),
            title=text(plain, "title"),
            model=text(plain, "model"),
            conversation=conversation_of(
                turns,
                head_id=optional_integer(plain, "head_id"),
                system_prompt=text(plain, "system_prompt"),
                visited=plain.get("visited"),
            ),
            sampling=sampling_from_plain(plain.get("sampling")),
            updated_at=_moment(plain.get("updated_at")),
        )
    except ValueError as error:
        raise ImportFormatError.at_line(number, str(error)) from None


def _moment(plain: object) -> datetime | None:
    if plain is None:
        return None
    moment = datetime.fromisoformat(plain) if isinstance(plain, str) else None
    if moment is None or moment.tzinfo is None:
        raise ValueError(f"updated_at is no time with a zone: {plain!r}")
    return moment


# -- Markdown --------------------------------------------------------------------------------


def to_markdown(chat: StoredChat) -> str:
    """Returns the path that is shown."""
    title = " ".join(sanitise(chat.shown_title).split()) or "Chat"
    head = {"format": FORMAT_VERSION, "model": chat.model, "sampling": to_plain(chat.sampling)}
    parts = [f"{_mark('chat', head)}\n# {title}"]
    if system_prompt := _escaped(chat.conversation.system_prompt):
        parts.append(f"{_mark('system')}\n## System\n\n{system_prompt}")
    for turn in chat.conversation.path():
        parts.append(_turn_markdown(turn))
    return "\n\n".join([*parts, _mark("end")]) + "\n"


def _turn_markdown(turn: Turn) -> str:
    fields = {
        "role": turn.role.value,
        "status": turn.status.value,
        "model": turn.model,
        "error": turn.error,
    }
    speaker = "You" if turn.role is Role.USER else sanitise(turn.model) or "Model"
    how = "" if turn.status is TurnStatus.COMPLETE else f" ({turn.status.value})"
    head = f"{_mark('turn', fields)}\n## {' '.join(speaker.split())}{how}\n\n"
    if thinking := _escaped(turn.thinking):
        before, after = _DETAILS
        head += f"{_mark('thinking')}\n{before}{thinking}{after}\n\n"
        head += f"{_mark('content')}\n\n"
    return head + _escaped(turn.content)


def from_markdown(exported: str) -> StoredChat:
    """Reads what `to_markdown` wrote, as a new chat.

    Raises:
        ImportFormatError: It is no such text, or was cut off; names the line.
    """
    reader = _MarkdownReader()
    kind, number = "", 1
    for number, kind, fields, body in _sections(exported):
        try:
            reader.take(kind, fields, body)
        except ValueError as error:
            raise ImportFormatError.at_line(number, str(error)) from None
    if kind != "end":
        raise ImportFormatError.at_line(number, "the text ends before its end mark")
    return reader.chat()


class _MarkdownReader:
    """Puts a chat together from the sections of a text, in their order."""

    def __init__(self) -> None:
        self._head: Mapping[str, object] = {}
        self._title = self._system_prompt = self._thinking = ""
        self._turns: list[Turn] = []
        self._open: Mapping[str, object] | None = None  # a turn whose text is still to come

    def take(self, kind: str, fields: Mapping[str, object], body: str) -> None:
        """Takes one section.

        Raises:
            ValueError: It does not belong here, or is not whole.
        """
        if (self._open is not None) != (kind in ("thinking", "content")):
            raise ValueError(f"{kind} does not belong here")
        if kind == "chat":
            self._head, self._title = fields, body.removeprefix("# ")
        elif kind == "system":
            self._system_prompt = _unescaped(_below_heading(body))
        elif kind == "turn" and "\n" in body:
            self._add(fields, _below_heading(body))
        elif kind == "turn":
            self._open, self._thinking = fields, ""
        elif kind == "thinking":
            before, after = _DETAILS
            if not (body.startswith(before) and body.endswith(after)):
                raise ValueError("the thoughts are not whole")
            self._thinking = _unescaped(body[len(before) : -len(after)])
        elif kind == "content" and self._open is not None:
            self._add(self._open, body.removeprefix("\n"))
            self._open, self._thinking = None, ""

    def _add(self, fields: Mapping[str, object], body: str) -> None:
        number = len(self._turns)
        plain = {
            **fields,
            "turn_id": number,
            "parent_id": number - 1 if number else None,
            "content": _unescaped(body),
            "thinking": self._thinking,
        }
        self._turns.append(turn_from_plain(plain))

    def chat(self) -> StoredChat:
        """Returns what was read."""
        plain = {
            **self._head,
            "chat_id": "",
            "title": self._title,
            "system_prompt": self._system_prompt,
            "head_id": len(self._turns) - 1 if self._turns else None,
        }
        return _chat(1, plain, self._turns)


def _sections(exported: str) -> Iterator[tuple[int, str, Mapping[str, object], str]]:
    """Yields each mark's line number, kind and fields, and the text up to the next mark."""
    lines = exported.split("\n")
    marks = [number for number, line in enumerate(lines) if line.startswith(_MARK)]
    if marks[:1] != [0] or not lines[0].startswith(f"{_MARK}chat "):
        raise ImportFormatError.at_line(1, "this is no chat that mira-chat exported")
    for number, following in zip(marks, [*marks[1:], len(lines)], strict=True):
        matched = _MARK_LINE.fullmatch(lines[number])
        if matched is None:
            raise ImportFormatError.at_line(number + 1, "this mark cannot be read")
        kind, fields = matched.groups()
        body = "\n".join(lines[number + 1 : following])
        yield (
            number + 1,
            kind,
            _json_object(fields, number + 1) if fields else {},
            body.removesuffix("\n"),  # the empty line before the next mark
        )


def _mark(kind: str, fields: Mapping[str, object] | None = None) -> str:
    # The end of a comment inside of a value would be the end of the comment.
    plain = "" if fields is None else json.dumps(fields).replace(">", "\\u003e") + " "
    return f"{_MARK}{kind} {plain}-->"


def _escaped(message: str) -> str:
    return _LOOKS_LIKE_MARK.sub(r"\\\1", sanitise(message))


def _unescaped(body: str) -> str:
    return _ESCAPED_MARK.sub(r"\1", body)


def _below_heading(body: str) -> str:
    heading, gap, message = body.partition("\n\n")
    if not gap or not heading.startswith("## "):
        raise ValueError("the heading and the empty line below it are missing")
    return message
