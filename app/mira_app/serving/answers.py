"""Sends replies while they are made; stops making one when who asked for it has gone."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator

from mira_engine.api import FinishReason, ReplyPart, ReplyStats
from starlette.responses import JSONResponse
from starlette.types import Receive, Scope, Send

from .completions import DONE, Completion, comment, event
from .errors import ApiError
from .guard import error_response
from .replies import Ended, Piece, ReplyStep, Waiting

_SENDING_S = 60.0
"""How long a client may take to read on before it counts as gone."""

_STREAM_HEADERS = (
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
)


class Answer:
    """The answer to one chat request, as an ASGI application.

    Args:
        steps: The reply while it is made.
        completion: What its bodies share.
        is_streamed: Whether it is sent as it comes.
        is_usage_wanted: Whether a stream ends with the count of tokens.
    """

    def __init__(
        self,
        steps: AsyncIterator[ReplyStep],
        completion: Completion,
        *,
        is_streamed: bool,
        is_usage_wanted: bool,
    ) -> None:
        self._steps = steps
        self._completion = completion
        self._is_streamed = is_streamed
        self._is_usage_wanted = is_usage_wanted
        self._has_begun = False

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Sends it, until it is over or nobody is there."""
        sending = asyncio.ensure_future(self._send(scope, receive, send))
        leaving = asyncio.ensure_future(_wait_gone(receive))
        try:
            await asyncio.wait({sending, leaving}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            leaving.cancel()
            if not sending.done():
                sending.cancel()  # Closes the steps, which stops the engine.
            with contextlib.suppress(asyncio.CancelledError, OSError):
                await sending

    async def _send(self, scope: Scope, receive: Receive, send: Send) -> None:
        async with contextlib.aclosing(self._steps) as steps:
            try:
                if self._is_streamed:
                    await self._stream(steps, send)
                else:
                    body = JSONResponse(await self._collect(steps))
                    await body(scope, receive, send)
            except ApiError as error:
                if self._has_begun:
                    await self._write(send, event(error.body()), is_last=True)
                else:
                    await error_response(error)(scope, receive, send)
            except TimeoutError:
                return  # There, but reading no more: leaving frees the engine for others.

    async def _collect(self, steps: AsyncIterator[ReplyStep]) -> dict[str, object]:
        texts = dict.fromkeys(ReplyPart, "")
        ended = Ended(reason=FinishReason.ERROR, stats=ReplyStats())
        async for step in steps:
            if isinstance(step, Piece):
                texts[step.part] += step.text
            elif isinstance(step, Ended):
                ended = step
        return self._completion.whole(
            texts[ReplyPart.ANSWER], texts[ReplyPart.THINKING], ended.reason, ended.stats
        )

    async def _stream(self, steps: AsyncIterator[ReplyStep], send: Send) -> None:
        """Sends chunks; none before there is something to say: a refusal has its own status."""
        has_opened = False
        async for step in steps:
            if isinstance(step, Waiting):
                await self._write(send, comment(step.about))
                continue
            if not has_opened:
                has_opened = True
                await self._write(send, event(self._completion.opening()))
            if isinstance(step, Piece):
                await self._write(send, event(self._completion.piece(step.part, step.text)))
            else:
                await self._write(send, event(self._completion.ending(step.reason)))
                if self._is_usage_wanted:
                    await self._write(send, event(self._completion.counted(step.stats)))
                await self._write(send, DONE, is_last=True)

    async def _write(self, send: Send, data: bytes, *, is_last: bool = False) -> None:
        # Who stays and reads no more would hold the engine for ever.
        async with asyncio.timeout(_SENDING_S):
            if not self._has_begun:
                self._has_begun = True
                await send(
                    {"type": "http.response.start", "status": 200, "headers": list(_STREAM_HEADERS)}
                )
            await send({"type": "http.response.body", "body": data, "more_body": not is_last})


async def _wait_gone(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
