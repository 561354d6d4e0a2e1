"""A chat as a tree of turns. Pure: every operation returns a new conversation.

A turn's children are the alternatives of what came next: the replies of a regenerated
question, the versions of an edited one. `head_id` marks the turn where the chat now
stands; the path from the root to it is what is shown and what the model reads. `visited`
remembers where it stood on other branches, so that one comes back to what one saw there.
"""

from __future__ import annotations

import dataclasses
import enum
import itertools
from dataclasses import dataclass, field

from mira_engine.api import ChatMessage, ReplyStats


class Role(enum.StrEnum):
    """Who speaks."""

    USER = "user"
    ASSISTANT = "assistant"


class TurnStatus(enum.StrEnum):
    """How a turn ended."""

    COMPLETE = "complete"
    STOPPED = "stopped"
    ERROR = "error"


@dataclass(frozen=True, slots=True, kw_only=True)
class Turn:
    """One message as it was written: the model's own text, not what a terminal may show.

    Attributes:
        turn_id: Its number in the conversation, from 0.
        parent_id: The turn before it, `None` for a first one.
        status: Users' turns are always complete.
        error: What went wrong, where `status` is `ERROR`.
        stats: Figures of a reply.
        thinking: What a model thought before its reply.
        model: What `--model` calls the model that replied, empty for a question.
    """

    turn_id: int
    parent_id: int | None
    role: Role
    content: str
    status: TurnStatus = TurnStatus.COMPLETE
    error: str = ""
    stats: ReplyStats | None = None
    thinking: str = ""
    model: str = ""

    def said_after(self, parent_id: int | None) -> tuple[object, ...]:
        """Returns what makes it the same turn in another version of the chat.

        Args:
            parent_id: The turn before it there.
        """
        return parent_id, self.role, self.content, self.thinking, self.status


@dataclass(frozen=True, slots=True, kw_only=True)
class Conversation:
    """Turns by number, and where the chat stands.

    Attributes:
        system_prompt: First message; empty leaves it to the model's template.
        turns: All of them, in the order they were added.
        head_id: The turn where the chat stands, `None` before the first one.
        visited: Heads of branches that were left, the one left last at the end.
    """

    system_prompt: str = ""
    turns: tuple[Turn, ...] = field(default=())
    head_id: int | None = None
    visited: tuple[int, ...] = ()

    @property
    def head(self) -> Turn | None:
        """The turn where the chat stands."""
        return None if self.head_id is None else self.turns[self.head_id]

    def path(self) -> tuple[Turn, ...]:
        """Returns the turns from the first to the head."""
        return self._path_to(self.head_id)

    def _path_to(self, turn_id: int | None) -> tuple[Turn, ...]:
        turns: list[Turn] = []
        while turn_id is not None:
            turns.append(self.turns[turn_id])
            turn_id = turns[-1].parent_id
        return tuple(reversed(turns))

    def messages(self) -> tuple[ChatMessage, ...]:
        """Returns what the model reads: the system prompt and the path.

        A question whose reply stayed empty (an error, or stopped at once) is left out with
        it, so that roles alternate, which many chat templates insist on.
        """
        path = self.path()
        kept: list[ChatMessage] = []
        if self.system_prompt:
            kept.append(ChatMessage(role="system", content=self.system_prompt))
        for turn, following in itertools.zip_longest(path, path[1:]):
            if turn.role is Role.ASSISTANT and not turn.content:
                continue
            is_unanswered = (
                turn.role is Role.USER
                and following is not None
                and (following.role is Role.USER or not following.content)
            )
            if not is_unanswered:
                kept.append(
                    ChatMessage(role=turn.role.value, content=turn.content, thinking=turn.thinking)
                )
        return tuple(kept)

    def with_user(self, content: str) -> Conversation:
        """Adds a question after the head."""
        return self._with_turn(Role.USER, content)

    def with_reply(
        self,
        content: str,
        *,
        status: TurnStatus = TurnStatus.COMPLETE,
        error: str = "",
        stats: ReplyStats | None = None,
        thinking: str = "",
        model: str = "",
    ) -> Conversation:
        """Adds a reply to the question at the head.

        Raises:
            ValueError: The head is no question.
        """
        if self.head is None or self.head.role is not Role.USER:
            raise ValueError("a reply needs a question before it")
        return self._with_turn(
            Role.ASSISTANT,
            content,
            status=status,
            error=error,
            stats=stats,
            thinking=thinking,
            model=model,
        )

    def _with_turn(self, role: Role, content: str, **fields: object) -> Conversation:
        turn = Turn(
            turn_id=len(self.turns),
            parent_id=self.head_id,
            role=role,
            content=content,
            **fields,  # type: ignore[arg-type]
        )
        return dataclasses.replace(self, turns=(*self.turns, turn), head_id=turn.turn_id)

    def at(self, turn_id: int | None) -> Conversation:
        """Moves the head: `None` before the first turn."""
        if turn_id is not None and not 0 <= turn_id < len(self.turns):
            raise ValueError(f"no turn {turn_id}")
        visited = self.visited
        if self.head_id is not None and turn_id != self.head_id:
            left = {turn.turn_id for turn in self.path()}
            visited = (*(each for each in visited if each not in left), self.head_id)
        return dataclasses.replace(self, head_id=turn_id, visited=visited)

    def before_reply(self, turn_id: int | None = None) -> Conversation:
        """Moves the head to a question, ready for another reply to it.

        Args:
            turn_id: The question, or a reply to it; `None` for the last one.

        Raises:
            ValueError: There is no question yet.
        """
        turn = self.head if turn_id is None else self.at(turn_id).head
        if turn is not None and turn.role is Role.ASSISTANT:
            turn = None if turn.parent_id is None else self.turns[turn.parent_id]
        if turn is None:
            raise ValueError("there is no question to answer again")
        return self.at(turn.turn_id)

    def before_edit(self, turn_id: int) -> Conversation:
        """Moves the head before a question, ready for another version of it.

        Raises:
            ValueError: The turn is no question.
        """
        turn = self.at(turn_id).head
        if turn is None or turn.role is not Role.USER:
            raise ValueError(f"turn {turn_id} is no question")
        return self.at(turn.parent_id)

    def at_sibling(self, turn_id: int, step: int) -> Conversation:
        """Moves the head to where an alternative was left, or to its newest end.

        Args:
            turn_id: A turn of the path.
            step: How many alternatives further; stops at the first and the last.
        """
        siblings = self.siblings(turn_id)
        index = [turn.turn_id for turn in siblings].index(turn_id) + step
        wanted = siblings[max(0, min(index, len(siblings) - 1))]
        for place in (self.head_id, *reversed(self.visited)):
            if wanted in self._path_to(place):
                return self.at(place)
        last_children: dict[int | None, int] = {t.parent_id: t.turn_id for t in self.turns}
        newest = wanted.turn_id
        while newest in last_children:
            newest = last_children[newest]
        return self.at(newest)

    def reaching(self, turn_id: int) -> Conversation:
        """Returns a conversation whose path holds the turn: this one, where it does."""
        if any(turn.turn_id == turn_id for turn in self.path()):
            return self
        return self.at_sibling(turn_id, 0)

    def grafted_on(self, kept: Conversation) -> Conversation:
        """Adds to another version of this chat the turns that it lacks.

        The other's turns keep their numbers; those of this one that it lacks come behind them,
        as alternatives of what follows the last turn of both. The chat stands where this one
        does. To graft a version twice adds nothing the second time.

        Args:
            kept: The other version.
        """
        turns, numbers = self._graft(kept)
        return dataclasses.replace(
            self,
            turns=turns,
            head_id=None if self.head_id is None else numbers[self.head_id],
            visited=tuple(numbers[turn_id] for turn_id in self.visited),
        )

    def numbers_in(self, grafted: Conversation) -> dict[int, int]:
        """Returns the numbers of this version's turns in what came of grafting it, by its own."""
        return self._graft(grafted)[1]

    def _graft(self, kept: Conversation) -> tuple[tuple[Turn, ...], dict[int, int]]:
        """Returns the turns of both, and which of them this one's are, by its own numbers."""
        turns = list(kept.turns)
        alike: dict[tuple[object, ...], list[int]] = {}
        for turn in reversed(turns):
            alike.setdefault(turn.said_after(turn.parent_id), []).append(turn.turn_id)
        numbers: dict[int, int] = {}
        for turn in self.turns:
            parent_id = None if turn.parent_id is None else numbers[turn.parent_id]
            found = alike.get(turn.said_after(parent_id))
            numbers[turn.turn_id] = found.pop() if found else len(turns)
            if numbers[turn.turn_id] == len(turns):
                placed = dataclasses.replace(turn, turn_id=len(turns), parent_id=parent_id)
                turns.append(placed)
        return tuple(turns), numbers

    def siblings(self, turn_id: int) -> tuple[Turn, ...]:
        """Returns the alternatives of a turn, itself among them, oldest first."""
        parent_id = self.turns[turn_id].parent_id
        return tuple(turn for turn in self.turns if turn.parent_id == parent_id)
