"""The bodies of answers: a completion whole, or in chunks of a stream. Pure."""

from __future__ import annotations

import json
from dataclasses import dataclass

from mira_engine.api import FinishReason, ReplyPart, ReplyStats

DONE = b"data: [DONE]\n\n"
"""Ends a stream."""

_FIELDS = {ReplyPart.ANSWER: "content", ReplyPart.THINKING: "reasoning_content"}
_REASONS = {FinishReason.LENGTH: "length", FinishReason.CONTEXT: "length"}


def finish_reason(reason: FinishReason) -> str:
    """Returns the interface's word for why a reply ended."""
    return _REASONS.get(reason, "stop")


def usage(stats: ReplyStats) -> dict[str, object]:
    """Returns the count of tokens."""
    return {
        "prompt_tokens": stats.num_prompt_tokens,
        "completion_tokens": stats.num_new_tokens,
        "total_tokens": stats.num_prompt_tokens + stats.num_new_tokens,
        "prompt_tokens_details": {"cached_tokens": stats.num_cached_tokens},
    }


def event(data: dict[str, object]) -> bytes:
    """Returns one event of a stream."""
    return b"data: " + json.dumps(data, ensure_ascii=False).encode("utf-8", "replace") + b"\n\n"


def comment(text: str) -> bytes:
    """Returns a line that clients pass over; it keeps the connection alive."""
    return f": {' '.join(text.split())}\n\n".encode()


@dataclass(frozen=True, slots=True, kw_only=True)
class Completion:
    """What all bodies of one answer share.

    Attributes:
        id: Names the answer.
        created: When it was begun, in seconds since 1970.
        model: Who answers.
    """

    id: str
    created: int
    model: str

    def opening(self) -> dict[str, object]:
        """Returns the first chunk, which says who speaks."""
        return self._chunk({"role": "assistant", "content": ""})

    def piece(self, part: ReplyPart, text: str) -> dict[str, object]:
        """Returns a chunk with new text."""
        return self._chunk({_FIELDS[part]: text})

    def ending(self, reason: FinishReason) -> dict[str, object]:
        """Returns the chunk that says why it ended."""
        return self._chunk({}, finish_reason(reason))

    def counted(self, stats: ReplyStats) -> dict[str, object]:
        """Returns the chunk with the count of tokens."""
        return self._shared("chat.completion.chunk") | {"choices": [], "usage": usage(stats)}

    def whole(
        self, answer: str, thinking: str, reason: FinishReason, stats: ReplyStats
    ) -> dict[str, object]:
        """Returns the answer in one body."""
        message = {"role": "assistant", "content": answer}
        if thinking:
            message["reasoning_content"] = thinking
        choice = {"index": 0, "message": message, "finish_reason": finish_reason(reason)}
        return self._shared("chat.completion") | {"choices": [choice], "usage": usage(stats)}

    def _chunk(self, delta: dict[str, str], reason: str | None = None) -> dict[str, object]:
        choice = {"index": 0, "delta": delta, "finish_reason": reason}
        return self._shared("chat.completion.chunk") | {"choices": [choice]}

    def _shared(self, kind: str) -> dict[str, object]:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}
