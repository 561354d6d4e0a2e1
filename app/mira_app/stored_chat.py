"""A chat as it is kept: what belongs to it beside its turns, and its parts as plain values.

Plain values are what JSON knows. The history's columns and the lines of an export are
both made of them here, so that the two cannot drift apart. Pure.
"""

from __future__ import annotations

import dataclasses
import uuid
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime

from mira_engine.api import ConfigError, MiraError, ReplyStats, SamplingConfig, to_plain

from .conversation import Conversation, Role, Turn, TurnStatus

MAX_TITLE_CHARS = 60

CHANGED_ELSEWHERE = (
    "This chat was changed by another window. All of it is kept; what is said here goes on as a "
    "branch beside that."
)
"""What a person is told whose chat another app went on with."""


class HistoryError(MiraError):
    """Chats cannot be read or written."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChat:
    """One chat.

    Attributes:
        chat_id: Its name among all chats, from `new_chat_id`.
        title: What the list shows; empty takes the beginning of the first question.
        model: What `--model` calls the model used last.
        conversation: Turns, head and system prompt.
        sampling: How its tokens are chosen, `None` for the settings'.
        updated_at: When a turn was added last, in UTC; known of chats that were loaded.
    """

    chat_id: str
    title: str = ""
    model: str = ""
    conversation: Conversation = dataclasses.field(default_factory=Conversation)
    sampling: SamplingConfig | None = None
    updated_at: datetime | None = None

    @property
    def shown_title(self) -> str:
        """The title, or what stands in for it."""
        return self.title or title_of(self.conversation)


def new_chat_id() -> str:
    """Returns a name that no other chat has."""
    return uuid.uuid4().hex


def title_of(conversation: Conversation) -> str:
    """Returns the beginning of the first question, on one line."""
    words = conversation.turns[0].content.split() if conversation.turns else []
    title = " ".join(words)
    return title if len(title) <= MAX_TITLE_CHARS else title[: MAX_TITLE_CHARS - 1].rstrip() + "…"


# -- to plain values and back ----------------------------------------------------------------


def turn_to_plain(turn: Turn) -> dict[str, object]:
    """Returns every field of a turn."""
    plain = to_plain(turn)
    assert isinstance(plain, dict)
    return plain


def turn_from_plain(plain: Mapping[str, object]) -> Turn:
    """Rebuilds a turn; fields that this version does not know are left out.

    Raises:
        ValueError: A field is missing, or is not what it should be.
    """
    return Turn(
        turn_id=integer(plain, "turn_id"),
        parent_id=optional_integer(plain, "parent_id"),
        role=_member(Role, plain, "role"),
        content=text(plain, "content"),
        status=_member(TurnStatus, plain, "status"),
        error=text(plain, "error"),
        stats=stats_from_plain(plain.get("stats")),
        thinking=text(plain, "thinking"),
        model=text(plain, "model"),
    )


def stats_from_plain(plain: object) -> ReplyStats | None:
    """Rebuilds the figures of a reply; figures that this version does not know are left out.

    Raises:
        ValueError: It is no object, or a figure is no figure.
    """
    if plain is None:
        return None
    fields = {}
    for name, value in _known_fields(ReplyStats, plain, "stats").items():
        default = getattr(ReplyStats(), name)
        if isinstance(default, float) and type(value) is int:
            value = float(value)
        if type(value) is not type(default):
            raise ValueError(f"stats.{name} cannot be {value!r}")
        fields[name] = value
    return ReplyStats(**fields)


def sampling_from_plain(plain: object) -> SamplingConfig | None:
    """Rebuilds how tokens are chosen.

    Raises:
        ValueError: It is no object, or a value is out of its range.
    """
    if plain is None:
        return None
    try:
        return SamplingConfig(**_known_fields(SamplingConfig, plain, "sampling"))
    except (ConfigError, TypeError) as error:
        raise ValueError(f"sampling: {error}") from None


def conversation_of(
    turns: Iterable[Turn], *, head_id: int | None, system_prompt: str, visited: object = None
) -> Conversation:
    """Puts turns together and checks that they are a tree.

    Args:
        turns: In the order of their numbers.
        head_id: Where the chat stands.
        system_prompt: First message.
        visited: Plain list of where it stood on other branches, `None` for nowhere.

    Raises:
        ValueError: A number is out of order, or a parent, the head or a place visited is no turn.
    """
    checked: list[Turn] = []
    for turn in turns:
        check_turn(turn, checked)
        checked.append(turn)
    if head_id is not None and not 0 <= head_id < len(checked):
        raise ValueError(f"the chat stands at turn {head_id}, which it does not have")
    places = [] if visited is None else visited
    numbers = range(len(checked))
    if not isinstance(places, list) or any(type(n) is not int or n not in numbers for n in places):
        raise ValueError(f"visited is no list of turns: {visited!r}")
    return Conversation(
        system_prompt=system_prompt,
        turns=tuple(checked),
        head_id=head_id,
        visited=tuple(places),
    )


def check_turn(turn: Turn, before: Sequence[Turn]) -> None:
    """Checks that a turn fits behind the turns with lower numbers.

    Raises:
        ValueError: It does not.
    """
    number, parent = len(before), turn.parent_id
    if turn.turn_id != number:
        raise ValueError(f"turn {turn.turn_id} stands where turn {number} should")
    if parent is not None and not 0 <= parent < number:
        raise ValueError(f"turn {number} cannot follow turn {parent}")
    is_answer_to_nothing = parent is None or before[parent].role is not Role.USER
    if turn.role is Role.ASSISTANT and is_answer_to_nothing:
        raise ValueError(f"turn {number} is a reply without a question")


def text(plain: Mapping[str, object], name: str) -> str:
    """Returns a field that is text.

    Raises:
        ValueError: It is missing or something else.
    """
    value = plain.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} is no text: {value!r}")
    return value


def integer(plain: Mapping[str, object], name: str) -> int:
    """Returns a field that is a whole number.

    Raises:
        ValueError: It is missing or something else.
    """
    value = plain.get(name)
    if type(value) is not int:
        raise ValueError(f"{name} is no whole number: {value!r}")
    return value


def optional_integer(plain: Mapping[str, object], name: str) -> int | None:
    """Returns a field that is a whole number or null.

    Raises:
        ValueError: It is missing or something else.
    """
    return None if name in plain and plain[name] is None else integer(plain, name)


def _member(kind, plain: Mapping[str, object], name: str):
    value = text(plain, name)
    try:
        return kind(value)
    except ValueError:
        raise ValueError(f"{name} cannot be {value!r}") from None


def _known_fields(cls: type, plain: object, name: str) -> dict:
    if not isinstance(plain, dict):
        raise ValueError(f"{name} is no object: {plain!r}")
    known = {field.name for field in dataclasses.fields(cls)}
    return {key: value for key, value in plain.items() if key in known}
