"""What of a chat is read when not all of it fits the context.

Pure. Whole turns, a question with its reply, are left out from the oldest on; the system
prompt and the last question always stay. Cutting anew at every turn would change the prompt's
head every time, and the whole context would be read again for each reply: a cut makes some
room in advance, and holds until that is used up.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from ..errors import ContextLengthError
from ..events import ChatMessage

_MAX_REPLY_ROOM = 256
_KEPT_SHARE = 0.75
"""Share of the context that a cut leaves to the chat at most, where turns are short enough."""

CountTokens = Callable[[Sequence[ChatMessage]], int]


@dataclass(frozen=True, slots=True, kw_only=True)
class FittedChat:
    """A chat that fits.

    Attributes:
        messages: What is read.
        left_out: What is not, oldest first.
        num_tokens: Tokens of `messages`, rendered.
    """

    messages: tuple[ChatMessage, ...]
    left_out: tuple[ChatMessage, ...]
    num_tokens: int


def reply_room(context_length: int, max_new_tokens: int | None = None) -> int:
    """Returns the tokens that a chat leaves to its reply: 256, a quarter, or what is wanted."""
    room = max(1, min(_MAX_REPLY_ROOM, context_length // 4))
    return min(room, max_new_tokens) if max_new_tokens else room


def fit_chat(
    messages: Sequence[ChatMessage],
    count: CountTokens,
    *,
    context_length: int,
    room: int,
    left_out: Sequence[ChatMessage] = (),
) -> FittedChat:
    """Leaves out the oldest turns of a chat that does not fit.

    Args:
        messages: The chat; ends with the question to answer.
        count: Returns the tokens of a rendered chat.
        context_length: Tokens of the context.
        room: Of those, kept for the reply.
        left_out: What was left out of this chat before; holds as long as it suffices.

    Raises:
        ContextLengthError: System prompt and last question alone do not fit.
    """
    num_tokens = count(messages)
    if num_tokens + room <= context_length:
        return FittedChat(messages=tuple(messages), left_out=(), num_tokens=num_tokens)
    head, turns = _turns(messages)

    def without(num_turns: int) -> tuple[ChatMessage, ...]:
        return (*head, *(m for turn in turns[num_turns:] for m in turn))

    def gone(num_turns: int) -> tuple[ChatMessage, ...]:
        return tuple(m for turn in turns[:num_turns] for m in turn)

    def fitted(num_turns: int) -> FittedChat:
        kept = without(num_turns)
        return FittedChat(messages=kept, left_out=gone(num_turns), num_tokens=count(kept))

    for num_turns in range(1, len(turns)):
        if left_out and gone(num_turns) == tuple(left_out):
            chat = fitted(num_turns)
            if chat.num_tokens + room <= context_length:
                return chat
    least = fitted(len(turns) - 1)
    if least.num_tokens + room > context_length:
        raise ContextLengthError(
            f"The system prompt and the last question have {least.num_tokens} tokens; the "
            f"context holds {context_length}, of which a reply needs {room}."
        )
    wanted = min(int(_KEPT_SHARE * context_length), context_length - room)
    low, high = 1, len(turns) - 1  # `high` turns fewer always fit.
    while low < high:
        middle = (low + high) // 2
        if count(without(middle)) <= wanted:
            high = middle
        else:
            low = middle + 1
    return fitted(high)


def _turns(
    messages: Sequence[ChatMessage],
) -> tuple[tuple[ChatMessage, ...], list[list[ChatMessage]]]:
    """Splits a chat into its system prompt and its turns, each from a question on."""
    num_head = 0
    while num_head < len(messages) and messages[num_head].role == "system":
        num_head += 1
    turns: list[list[ChatMessage]] = []
    for message in messages[num_head:]:
        if message.role == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    return tuple(messages[:num_head]), turns or [[]]
