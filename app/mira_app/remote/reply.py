"""Turns the pieces of a server's reply into the engine's events, and counts them. Pure.

Thinking comes in a field of its own, by one of two names, or between tags in the text. Only
what the server or the clock here says is counted: without a report of usage, pieces of text
stand for tokens, and the person is told.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from mira_engine.api import (
    THINK_TAGS,
    FinishReason,
    ReplyPart,
    ReplyStats,
    ThinkTags,
    TokenDelta,
)

_THINKING_FIELDS = ("reasoning_content", "reasoning")
_REASONS = {"length": FinishReason.LENGTH}
"""Any other end is one that the model or the server chose."""


class Usage(Protocol):
    """What a server counted."""

    prompt_tokens: int
    completion_tokens: int


class ReplyReader:
    """One reply while it comes.

    Args:
        request_id: Of the request that it answers.
        now: The clock, in seconds.
    """

    def __init__(self, request_id: str, now: Callable[[], float]) -> None:
        self._request_id = request_id
        self._now = now
        self._parts = ThinkTags()
        self._texts: dict[ReplyPart, list[str]] = {part: [] for part in ReplyPart}
        self._usage: Usage | None = None
        self._num_pieces = 0
        self._begun_s = now()
        self._first_s: float | None = None
        self._last_s = self._begun_s
        self.finish: str | None = None
        """Why the server says that the reply ended, `None` while it does not."""

    def take(self, chunk: object) -> list[TokenDelta]:
        """Takes a piece of the stream; returns the new text."""
        self._usage = getattr(chunk, "usage", None) or self._usage
        deltas: list[TokenDelta] = []
        for choice in getattr(chunk, "choices", None) or ():
            self.finish = getattr(choice, "finish_reason", None) or self.finish
            deltas += self._take_delta(getattr(choice, "delta", None))
        return deltas

    def _take_delta(self, delta: object) -> list[TokenDelta]:
        thought = next(
            (text for name in _THINKING_FIELDS if (text := getattr(delta, name, None))), ""
        )
        text = getattr(delta, "content", None) or ""
        if not (text or thought):
            return []
        self._num_pieces += 1
        self._last_s = self._now()
        self._first_s = self._last_s if self._first_s is None else self._first_s
        pieces = [(ReplyPart.THINKING, thought)] if thought else []
        pieces += self._parts.push(text) if text else []
        return self._deltas(pieces, num_tokens=1)

    def end(self) -> list[TokenDelta]:
        """Returns what was held back; the reply is over."""
        return self._deltas(self._parts.flush(), num_tokens=0)

    def _deltas(self, pieces: list[tuple[ReplyPart, str]], *, num_tokens: int) -> list[TokenDelta]:
        deltas: list[TokenDelta] = []
        for part, text in pieces:
            self._texts[part].append(text)
            deltas.append(
                TokenDelta(request_id=self._request_id, text=text, num_tokens=num_tokens, part=part)
            )
            num_tokens = 0
        return deltas

    @property
    def has_text(self) -> bool:
        """Whether anything was said or thought so far."""
        return self._num_pieces > 0

    @property
    def has_usage(self) -> bool:
        """Whether the server counted the tokens."""
        return self._usage is not None

    @property
    def reason(self) -> FinishReason:
        """Why the reply ended."""
        return _REASONS.get(self.finish or "", FinishReason.STOP)

    def whole(self) -> tuple[str, str]:
        """Returns the answer, and the thinking before it.

        Where a server's template opened the thinking itself, only the closing tag came, and
        what stands before it was taken for the answer.
        """
        answer = "".join(self._texts[ReplyPart.ANSWER])
        thinking = "".join(self._texts[ReplyPart.THINKING])
        if not thinking:
            for opening, closing in THINK_TAGS:
                thought, tag, rest = answer.partition(closing)
                if tag and opening not in answer:
                    return rest.lstrip(), thought.strip()
        return answer, thinking

    def stats(self) -> ReplyStats:
        """Returns the figures so far; those that only an engine of our own has are 0."""
        usage, now = self._usage, self._now()
        details = getattr(usage, "prompt_tokens_details", None)
        first_s = self._first_s
        return ReplyStats(
            num_prompt_tokens=getattr(usage, "prompt_tokens", None) or 0,
            num_cached_tokens=getattr(details, "cached_tokens", None) or 0,
            num_new_tokens=getattr(usage, "completion_tokens", None) or self._num_pieces,
            elapsed_s=now - self._begun_s,
            ttft_s=first_s - self._begun_s if first_s is not None else 0.0,
            decode_s=self._last_s - first_s if first_s is not None else 0.0,
        )
