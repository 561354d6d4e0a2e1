"""Has the engine answer chats, one at a time, and stops it where nobody listens any more.

Runs in the server's event loop. The engine's calls block, so each next event is waited for
in a thread; while one is on its way the call joins what comes after it, so that a slow
client holds no more than the text of its reply.
"""

from __future__ import annotations

import asyncio
import contextlib
import threading
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Protocol

from mira_engine.api import (
    ContextTrimmed,
    EngineProcessError,
    FinishReason,
    Generate,
    GenerationDone,
    MiraError,
    PromptProgress,
    ReplyPart,
    ReplyStats,
    TokenDelta,
)

from mira_app.engine_call import EngineCall

from .chat_requests import ChatRequest
from .errors import from_engine, shutting_down, too_long
from .stops import StopText
from .turns import Line


class Engine(Protocol):
    """What is needed of the engine's client."""

    lost: EngineProcessError | None

    def new_request_id(self) -> str:
        """Returns an id no other request has."""

    def submit(self, request: Generate) -> EngineCall:
        """Sends a request."""

    def cancel(self, call: EngineCall) -> None:
        """Stops a call; it then ends by itself."""

    def close(self) -> None:
        """Ends the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Waiting:
    """Nothing to say yet.

    Attributes:
        about: What is waited for.
    """

    about: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """New text of a reply."""

    part: ReplyPart
    text: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Ended:
    """The reply is over."""

    reason: FinishReason
    stats: ReplyStats


ReplyStep = Waiting | Piece | Ended


class ReplyDesk:
    """Answers chat requests with the one engine there is.

    Args:
        engine: Its client; the model is loaded.
        reload: Starts the engine anew and loads the model, where it was lost; blocks.
        max_waiting: Most requests that may wait for their turn.
        keep_alive_s: Longest silence before who waits is told that this goes on.
    """

    def __init__(
        self,
        engine: Engine,
        reload: Callable[[], None],
        *,
        max_waiting: int,
        keep_alive_s: float,
    ) -> None:
        self._engine = engine
        self._reload = reload
        self._keep_alive_s = keep_alive_s
        self.line = Line(max_waiting)
        self._call: EngineCall | None = None
        self._loading: asyncio.Future[None] | None = None
        self._is_loaded = True

    @property
    def is_lost(self) -> bool:
        """Whether the engine has died, or has no model; the next request starts it again."""
        return self._engine.lost is not None or not self._is_loaded

    def close(self) -> None:
        """Stops the reply under way and sends away all others; returns at once."""
        self.line.close()
        if self._call is not None:
            self._engine.cancel(self._call)
        if self._loading is not None:  # Nothing else ends a load.
            threading.Thread(target=self._engine.close, daemon=True).start()

    async def reply(self, request: ChatRequest) -> AsyncIterator[ReplyStep]:
        """Answers a request; closing the iterator stops the engine.

        Raises:
            ApiError: There is no reply, or it broke off.
        """
        turn = self.line.join()
        try:
            while turn.num_before:
                yield Waiting(about=f"waiting, {turn.num_before} before this one")
                await turn.wait_moved(self._keep_alive_s)
            try:
                async with contextlib.aclosing(self._answer(request)) as steps:
                    async for step in steps:
                        yield step
            except MiraError as error:
                raise from_engine(error) from error
        finally:
            self.line.leave(turn)

    async def _answer(self, request: ChatRequest) -> AsyncIterator[ReplyStep]:
        if self.is_lost:
            async for waiting in self._reloading():
                yield waiting
        call = self._call = self._engine.submit(
            Generate(
                request_id=self._engine.new_request_id(),
                messages=request.messages,
                sampling=request.sampling,
                is_residency_wanted=False,
            )
        )
        stop = StopText(request.stops)
        try:
            async for event in self._events(call):
                if isinstance(event, Waiting):
                    yield event
                elif isinstance(event, ContextTrimmed):
                    raise too_long(_trimmed_text(event))
                elif isinstance(event, PromptProgress):
                    yield Waiting(about=f"reading the prompt, {event.done} of {event.total} tokens")
                elif isinstance(event, TokenDelta):
                    text = self._before_stop(event, stop, call)
                    if text:
                        yield Piece(part=event.part, text=text)
                elif isinstance(event, GenerationDone):
                    if rest := stop.flush():
                        yield Piece(part=ReplyPart.ANSWER, text=rest)
                    yield self._ended(event, stop)
        finally:
            self._call = None
            self._engine.cancel(call)  # Does nothing to one that has ended.

    def _before_stop(self, event: TokenDelta, stop: StopText, call: EngineCall) -> str:
        """Returns what of new text is wanted; ends the reply where a stop is reached."""
        if event.part is ReplyPart.THINKING:
            return event.text
        was_reached = stop.is_reached
        text = stop.push(event.text)
        if stop.is_reached and not was_reached:
            self._engine.cancel(call)
        return text

    def _ended(self, event: GenerationDone, stop: StopText) -> Ended:
        if stop.is_reached:
            return Ended(reason=FinishReason.STOP, stats=event.stats)
        if event.reason is FinishReason.CANCELLED:
            raise shutting_down()
        return Ended(reason=event.reason, stats=event.stats)

    def revive(self) -> None:
        """Begins to start a lost engine again, unless that goes on; returns at once."""
        if self._loading is not None and self._loading.done():
            self._is_loaded = self._loading.exception() is None
            self._loading = None
        if self.is_lost and self._loading is None:
            self._is_loaded = False
            self._loading = asyncio.ensure_future(asyncio.to_thread(self._reload))

    async def _reloading(self) -> AsyncIterator[Waiting]:
        """Starts the engine again, in a thread, and says meanwhile that this goes on.

        One start at a time: who asks while one goes on, its client gone perhaps, waits for it.
        """
        if self._loading is None:
            self.revive()
        loading = self._loading
        assert loading is not None
        while not (await asyncio.wait({loading}, timeout=self._keep_alive_s))[0]:
            yield Waiting(about="the engine is being started again")
        if self._loading is loading:
            self._loading = None
        loading.result()
        self._is_loaded = True

    async def _events(self, call: EngineCall) -> AsyncIterator[object]:
        """Yields a call's events, and `Waiting` where none comes for long."""
        events = iter(call)
        while True:
            step = asyncio.ensure_future(asyncio.to_thread(next, events, None))
            try:
                while not (await asyncio.wait({step}, timeout=self._keep_alive_s))[0]:
                    yield Waiting(about="the reply is being made")
                event = step.result()
            finally:
                step.cancel()
            if event is None:
                return
            yield event


def _trimmed_text(event: ContextTrimmed) -> str:
    return (
        f"The messages do not fit the context of {event.limit} tokens: the oldest "
        f"{event.num_turns} would have to be left out."
    )
