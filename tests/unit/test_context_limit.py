"""What is left out of a chat that does not fit."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mira_engine.errors import ContextLengthError
from mira_engine.events import ChatMessage
from mira_engine.model.context_limit import FittedChat, fit_chat, reply_room


def count(messages: Sequence[ChatMessage]) -> int:
    """A token a character, and one a message."""
    return sum(1 + len(message.content) for message in messages)


def chat(*lengths: int, system: int | None = None) -> tuple[ChatMessage, ...]:
    """Questions and replies in turn, of so many characters; each text is its own."""
    roles = ("user", "assistant")
    messages = [
        ChatMessage(role=roles[i % 2], content=chr(97 + i % 26) * length)
        for i, length in enumerate(lengths)
    ]
    if system is not None:
        messages.insert(0, ChatMessage(role="system", content="S" * system))
    return tuple(messages)


def fit(
    messages: Sequence[ChatMessage], limit: int, room: int = 10, **more: Sequence[ChatMessage]
) -> FittedChat:
    return fit_chat(messages, count, context_length=limit, room=room, **more)


def test_chat_that_fits_is_left_alone() -> None:
    messages = chat(9, 9, 9, system=9)
    fitted = fit(messages, 50)
    assert fitted == FittedChat(messages=messages, left_out=(), num_tokens=40)


def test_oldest_turns_go_whole_and_the_system_prompt_stays() -> None:
    messages = chat(9, 9, 9, 9, 9, system=9)
    fitted = fit(messages, 69)
    assert fitted.left_out == messages[1:3]
    assert fitted.messages == (messages[0], *messages[3:])
    assert fitted.num_tokens == 40


def test_cut_makes_room_in_advance() -> None:
    messages = chat(*[9] * 21)
    fitted = fit(messages, 200)
    assert fitted.num_tokens <= 150 < fitted.num_tokens + 20


def test_cut_holds_until_its_room_is_used_up() -> None:
    """Or else every turn at the limit would read the whole chat again."""
    messages, left_out, heads = chat(*[9] * 21), (), []
    for _ in range(9):
        fitted = fit(messages, 200, left_out=left_out)
        left_out = fitted.left_out
        assert fitted.num_tokens + 10 <= 200
        heads.append(fitted.messages[0])
        turn = (ChatMessage(role="assistant", content="r" * 9),)
        messages = (*messages, *turn, ChatMessage(role="user", content=f"{len(messages):09}"))
    changes = sum(a is not b for a, b in zip(heads, heads[1:], strict=False))
    assert changes < 4


def test_cut_of_another_chat_is_not_taken() -> None:
    messages = chat(*[9] * 21)
    other = (ChatMessage(role="user", content="?"), ChatMessage(role="assistant", content="!"))
    assert fit(messages, 200, left_out=other) == fit(messages, 200)


def test_long_last_question_takes_what_room_there_is() -> None:
    messages = chat(9, 9, 85)
    fitted = fit(messages, 100)
    assert fitted.messages == messages[2:]
    assert fitted.num_tokens == 86


def test_system_prompt_and_question_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(ContextLengthError, match=r"have 91 tokens.*holds 100.*needs 10"):
        fit(chat(9, 9, 40, system=49), 100)
    with pytest.raises(ContextLengthError):
        fit(chat(200), 100)
    with pytest.raises(ContextLengthError):
        fit(chat(system=200), 100)


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=24),
    system=st.none() | st.integers(0, 30),
    limit=st.integers(20, 300),
)
def test_what_is_read_fits_and_is_the_end_of_the_chat(
    lengths: list[int], system: int | None, limit: int
) -> None:
    if len(lengths) % 2 == 0:
        lengths = lengths[1:]
    messages = chat(*lengths, system=system)
    num_head = system is not None
    room = reply_room(limit)
    try:
        fitted = fit(messages, limit, room)
    except ContextLengthError:
        assert count([*messages[:num_head], messages[-1]]) + room > limit
        return
    assert fitted.num_tokens == count(fitted.messages)
    assert fitted.num_tokens + room <= limit
    num_out = len(fitted.left_out)
    assert num_out % 2 == 0
    assert fitted.left_out == messages[num_head : num_head + num_out]
    assert fitted.messages == (*messages[:num_head], *messages[num_head + num_out :])


@pytest.mark.parametrize(
    ("context", "wanted", "room"),
    [(64, None, 16), (4096, None, 256), (4096, 20, 20), (4096, 1000, 256), (2, None, 1)],
)
def test_reply_room_is_a_quarter_and_256_at_most(
    context: int, wanted: int | None, room: int
) -> None:
    assert reply_room(context, wanted) == room
