"""The text side of a loaded model: chats in, events of a reply out.

Owns rendering, what is left out at the context's limit, and what of the reply's text is
thinking. Knows nothing of experts; the tokens come from whoever replies. Runs in the engine
thread.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from typing import Protocol

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from .config import SamplingConfig
from .errors import ContextLengthError, GenerationError
from .events import (
    ChatMessage,
    ContextTrimmed,
    GenerationDone,
    Notice,
    PromptProgress,
    ReplyStats,
    ResidencySample,
    StatsSample,
    TokenDelta,
)
from .model.chat import ChatRenderer, Detokeniser, reply_marks
from .model.context_limit import CountTokens, FittedChat, fit_chat, reply_room
from .model.reply_parts import ReplyParts, ReplyPiece, split_reply
from .runtime.telemetry import LiveSamples
from .types import FinishReason, ReplyPart

ReplyEvent = (
    ContextTrimmed
    | PromptProgress
    | TokenDelta
    | StatsSample
    | ResidencySample
    | Notice
    | GenerationDone
)


class Replier(Protocol):
    """Who makes tokens after tokens."""

    context_length: int
    """Tokens of prompt and reply together."""

    @property
    def end_ids(self) -> Collection[int]:
        """Tokens that end a reply."""

    @property
    def longest_context(self) -> int:
        """Most tokens that the model can read."""

    def reply(
        self, prompt: Sequence[int], sampling: SamplingConfig
    ) -> Iterator[int | tuple[int, int]]:
        """Yields `(done, total)` while it reads, then tokens; returns why it ended."""

    def stats(self) -> ReplyStats:
        """Returns the figures so far."""

    def residency_sample(self, request_id: str) -> ResidencySample:
        """Returns where every expert is, and how busy."""


class ChatStream:
    """Answers chats with the tokens of a replier.

    Args:
        tokenizer: The model's, `None` where it has none.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase | None) -> None:
        self._tokenizer = tokenizer
        self._left_out: tuple[ChatMessage, ...] = ()
        """Of the last chat that did not fit."""

    def render(self, messages: Sequence[ChatMessage]) -> list[int]:
        """Returns a chat's tokens, ready for the assistant's turn."""
        return ChatRenderer(self._known_tokenizer()).render(messages)

    def stream(
        self,
        request_id: str,
        messages: Sequence[ChatMessage],
        sampling: SamplingConfig,
        live: LiveSamples,
        replier: Replier,
    ) -> Iterator[ReplyEvent]:
        """Answers a chat with a replier's tokens; see `Engine.stream`."""
        tokenizer = self._known_tokenizer()
        renderer = ChatRenderer(tokenizer)
        rendered: dict[tuple[ChatMessage, ...], tuple[str, list[int]]] = {}

        def count(some: Sequence[ChatMessage]) -> int:
            text = renderer.text(some)
            tokens = renderer.tokens(text)
            rendered[tuple(some)] = text, tokens
            return len(tokens)

        chat = self._fit(messages, count, sampling, replier)
        if chat.left_out:
            yield ContextTrimmed(
                request_id=request_id,
                num_turns=len(chat.left_out),
                num_tokens=chat.num_tokens,
                limit=replier.context_length,
            )
        text, prompt = rendered[chat.messages]
        writer = _ReplyWriter(
            request_id,
            Detokeniser(tokenizer, reply_marks(tokenizer, renderer.template)),
            split_reply(renderer.template, text),
        )
        reply = replier.reply(prompt, sampling)
        reason = FinishReason.STOP
        while True:
            try:
                step = next(reply)
            except StopIteration as stop:
                reason = stop.value
                break
            if isinstance(step, int):
                yield from writer.take(step, is_end=step in replier.end_ids)
            else:
                yield PromptProgress(request_id=request_id, done=step[0], total=step[1])
            yield from live.due()
        yield from writer.finish()
        yield from live.last()
        yield GenerationDone(
            request_id=request_id,
            text=writer.whole(ReplyPart.ANSWER),
            thinking=writer.whole(ReplyPart.THINKING),
            reason=reason,
            stats=replier.stats(),
        )

    def _fit(
        self,
        messages: Sequence[ChatMessage],
        count: CountTokens,
        sampling: SamplingConfig,
        replier: Replier,
    ) -> FittedChat:
        limit = replier.context_length
        try:
            chat = fit_chat(
                messages,
                count,
                context_length=limit,
                room=reply_room(limit, sampling.max_new_tokens),
                left_out=self._left_out,
            )
        except ContextLengthError as error:
            hint, longest = (
                "Shorten the question or the system prompt",
                replier.longest_context,
            )
            if limit < longest:
                hint += f", or give a larger --context (this model reads up to {longest} tokens)"
            raise ContextLengthError(error.message, hint=f"{hint}.") from None
        if chat.left_out:
            self._left_out = chat.left_out
        return chat

    def _known_tokenizer(self) -> PreTrainedTokenizerBase:
        if self._tokenizer is None:
            raise GenerationError("The model has no tokenizer.", hint="Download it whole.")
        return self._tokenizer


class _ReplyWriter:
    """Turns a reply's tokens into text deltas, and keeps the text of each part."""

    def __init__(self, request_id: str, detokeniser: Detokeniser, parts: ReplyParts) -> None:
        self._request_id = request_id
        self._detokeniser = detokeniser
        self._parts = parts
        self._texts: dict[ReplyPart, list[str]] = {part: [] for part in ReplyPart}

    def take(self, token: int, *, is_end: bool) -> Iterator[TokenDelta]:
        """Yields at least one delta, so that every token is counted."""
        text = "" if is_end else self._detokeniser.push(token)
        pieces = self._parts.push(text) if text else []
        yield from self._deltas(pieces or [(self._parts.part, "")], num_tokens=1)

    def finish(self) -> Iterator[TokenDelta]:
        """Yields what was held back."""
        rest = self._detokeniser.flush()
        pieces = self._parts.push(rest) if rest else []
        yield from self._deltas([*pieces, *self._parts.flush()], num_tokens=0)

    def whole(self, part: ReplyPart) -> str:
        """Returns all text of a part."""
        return "".join(self._texts[part])

    def _deltas(self, pieces: Sequence[ReplyPiece], *, num_tokens: int) -> Iterator[TokenDelta]:
        for part, text in pieces:
            self._texts[part].append(text)
            yield TokenDelta(
                request_id=self._request_id, text=text, num_tokens=num_tokens, part=part
            )
            num_tokens = 0
