"""Shortens a chat that a server found too long, by whole turns from the oldest on. Pure.

A server tells that a chat does not fit, not by how much: each refusal costs half of the
turns that are left. The system prompt and the last question always stay.
"""

from __future__ import annotations

from collections.abc import Sequence

from mira_engine.api import ChatMessage

Messages = tuple[ChatMessage, ...]


def shortened(messages: Sequence[ChatMessage]) -> Messages | None:
    """Returns the chat without the older half of its turns; `None` where only one is left."""
    head, turns = _turns(messages)
    if len(turns) < 2:
        return None
    kept = turns[-(len(turns) // 2) :]
    return (*head, *(message for turn in kept for message in turn))


def without(messages: Sequence[ChatMessage], left_out: Sequence[ChatMessage]) -> Messages:
    """Returns the chat without what was left out of it before, where it still begins with it."""
    head, turns = _turns(messages)
    rest = [message for turn in turns for message in turn]
    is_same_chat = len(rest) > len(left_out) and rest[: len(left_out)] == list(left_out)
    return (*head, *(rest[len(left_out) :] if is_same_chat else rest))


def left_out(messages: Sequence[ChatMessage], kept: Sequence[ChatMessage]) -> Messages:
    """Returns the messages that a shortened chat lacks, oldest first."""
    head, _ = _turns(messages)
    num_gone = len(messages) - len(kept)
    return tuple(messages[len(head) : len(head) + num_gone])


def _turns(messages: Sequence[ChatMessage]) -> tuple[Messages, list[list[ChatMessage]]]:
    """Splits a chat into its system prompt and its turns, each from a question on."""
    num_head = 0
    while num_head < len(messages) and messages[num_head].role == "system":
        num_head += 1
    turns: list[list[ChatMessage]] = []
    for message in messages[num_head:]:
        if message.role == "user" or not turns:
            turns.append([])
        turns[-1].append(message)
    return tuple(messages[:num_head]), turns
