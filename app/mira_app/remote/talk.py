"""What is asked of one server and what it answers, as the engine's requests and events.

Owns what is known of the server: its models, what it does not take, what of the chat it found
too long. Runs in the event loop of the client's thread.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence

from mira_engine.api import (
    ChatMessage,
    ConfigError,
    ContextLengthError,
    ContextTrimmed,
    FinishReason,
    Generate,
    GenerationDone,
    LoadModel,
    ModelLoaded,
    Notice,
    PrepareDone,
    PrepareModel,
    Reconfigure,
    StatsSample,
    UnknownModelError,
)

from mira_app.engine_call import EngineCall

from .address import host_of, is_unprotected
from .body import LIMIT_FIELD, USAGE_FIELD, message_fields, option_fields, refused_field
from .errors import (
    ConnectionLostError,
    RefusedRequestError,
    context_limit,
    cut_error,
    not_openai_error,
)
from .figures import ServerFigures
from .metrics import Metrics, server_figures
from .reply import ReplyReader
from .server import ServedModel, Server
from .trimming import Messages, left_out, shortened, without

_SAMPLE_INTERVAL_S = 0.25


class Talk:
    """The requests of one client to one server.

    Args:
        server: The server.
        address: Where it is.
        has_key: Whether a key is sent.

    Attributes:
        served: What the server offered when it was last asked.
        notices: What a person should know of it, by code.
    """

    def __init__(self, server: Server, address: str, *, has_key: bool) -> None:
        self._server = server
        self._address = address
        self._has_key = has_key
        self.served: tuple[ServedModel, ...] = ()
        self.notices: dict[str, Notice] = {}
        self._model = ""
        self._figures = ServerFigures(address=address)
        self._has_metrics = False
        self._not_taken: set[str] = set()
        self._left_out: Messages = ()

    async def close(self) -> None:
        """Gives up the connections."""
        await self._server.close()

    async def list_models(self) -> tuple[ServedModel, ...] | None:
        """Asks what the server offers; `None` where it has no list."""
        listed = await self._server.models()
        self.served = listed or ()
        return listed

    async def answer(self, request: object, call: EngineCall) -> None:
        """Does what a request asks, and delivers the events that answer it.

        Raises:
            MiraError: The request failed.
        """
        if isinstance(request, Generate):
            await self._generate(request, call)
        elif isinstance(request, LoadModel):
            await self._load(request.model, call)
        elif isinstance(request, Reconfigure):
            await self._load(self._model, call)
        elif isinstance(request, PrepareModel):
            call.deliver(
                PrepareDone(
                    request_id=call.request_id, model=request.model, precision=request.precision
                )
            )
        else:
            raise ConfigError(
                f"The model runs at {host_of(self._address)}, not in the engine here.",
                hint="Leave --connect out.",
            )

    def _note(self, call: EngineCall, code: str, text: str) -> None:
        """Tells something once, and keeps it among the notices."""
        notice = Notice(code=code, text=text)
        if self.notices.get(code) != notice:
            self.notices[code] = notice
            call.deliver(notice)

    # -- the model

    async def _load(self, model: str, call: EngineCall) -> None:
        """Finds the model on the server; there is nothing to load."""
        began_s = time.monotonic()
        served = {each.name: each for each in await self.list_models() or ()}
        if served and model not in served:
            raise UnknownModelError(
                f"The server at {host_of(self._address)} has no model {model!r}.",
                hint=f"It has: {', '.join(served)}.",
            )
        self._model = model
        if self._has_key and is_unprotected(self._address):
            text = "The key is sent without encryption: anyone on the way can read it."
            self._note(call, "key-exposed", text)
        length = served[model].context_length if model in served else None
        metrics = await self._server.metrics()
        self._has_metrics = metrics is not None
        self._tell_figures(call, server_figures(self._address, length, metrics or {}))
        call.deliver(
            ModelLoaded(
                request_id=call.request_id,
                model=model,
                title=model,
                context_length=length or 0,
                plan=None,
                load_s=time.monotonic() - began_s,
            )
        )

    def _tell_figures(self, call: EngineCall, figures: ServerFigures) -> None:
        self._figures = figures
        call.deliver(figures)  # type: ignore[arg-type]

    # -- replies

    async def _generate(self, request: Generate, call: EngineCall) -> None:
        reader = ReplyReader(call.request_id, time.monotonic)
        before = await self._read_metrics()
        try:
            await self._read_reply(request, call, reader)
        except asyncio.CancelledError:
            self._finish(call, reader, FinishReason.CANCELLED)
            raise
        finally:
            for delta in reader.end():
                call.deliver(delta)  # Dropped where the call has ended.
            call.deliver(StatsSample(request_id=call.request_id, stats=reader.stats()))
        if before is not None:
            now = await self._read_metrics()
            length = self._figures.context_length
            self._tell_figures(call, server_figures(self._address, length, now or {}, before))
        if not reader.has_usage:
            text = "This server does not report tokens: pieces of text are counted instead."
            self._note(call, "no-usage", text)
        self._finish(call, reader, reader.reason)

    async def _read_metrics(self) -> Metrics | None:
        return await self._server.metrics() if self._has_metrics else None

    def _finish(self, call: EngineCall, reader: ReplyReader, reason: FinishReason) -> None:
        for delta in reader.end():
            call.deliver(delta)
        answer, thinking = reader.whole()
        call.deliver(
            GenerationDone(
                request_id=call.request_id,
                text=answer,
                thinking=thinking,
                reason=reason,
                stats=reader.stats(),
            )
        )

    async def _read_reply(self, request: Generate, call: EngineCall, reader: ReplyReader) -> None:
        """Asks until the server takes the request, leaving out what it does not take."""
        messages = without(request.messages, self._left_out)
        while True:
            if len(messages) < len(request.messages):
                self._tell_trimmed(request.messages, messages, call)
            fields = option_fields(request.sampling, self._not_taken)
            rows = message_fields(messages, self._not_taken)
            try:
                await self._read_stream(rows, fields, call, reader)
                return
            except RefusedRequestError as error:
                name = refused_field(error.param, error.said, fields, rows)
                if name is None or name in self._not_taken:
                    raise
                self._leave_out(name, fields.get(name), error.said, call)
            except ContextLengthError as error:
                if reader.has_text:
                    raise
                messages = self._shortened(request.messages, messages, error)

    async def _read_stream(
        self,
        rows: Sequence[object],
        fields: dict[str, object],
        call: EngineCall,
        reader: ReplyReader,
    ) -> None:
        sampled_s = time.monotonic()
        has_answered = False
        try:
            async with self._server.chat(self._model, rows, fields) as pieces:
                async for piece in pieces:
                    has_answered = True
                    for delta in reader.take(piece):
                        call.deliver(delta)
                    if time.monotonic() - sampled_s >= _SAMPLE_INTERVAL_S:
                        sampled_s = time.monotonic()
                        call.deliver(StatsSample(request_id=call.request_id, stats=reader.stats()))
        except ConnectionLostError as error:
            if reader.has_text:
                raise cut_error(self._address) from error
            raise
        if not has_answered:
            raise not_openai_error(self._address)
        if reader.finish is None:
            raise cut_error(self._address)

    # -- what a server does not take

    def _leave_out(self, name: str, value: object, said: str, call: EngineCall) -> None:
        self._not_taken.add(name)
        if name in (LIMIT_FIELD, USAGE_FIELD):
            return  # The same is asked by another name, or told as missing at the end.
        shown = "" if value is None else f" {value}"
        self._note(
            call,
            f"left-out-{name}",
            f"The server does not take {name}{shown}, so it is left out: {said}",
        )

    def _shortened(
        self,
        whole: Sequence[ChatMessage],
        messages: Sequence[ChatMessage],
        error: ContextLengthError,
    ) -> Messages:
        """Returns what is asked instead; raises where nothing is left to take away."""
        length = self._figures.context_length or context_limit(error.message)
        kept = shortened(messages)
        if kept is None or length is None:
            raise error
        if self._figures.context_length is None:
            self._figures = ServerFigures(address=self._address, context_length=length)
        self._left_out = left_out(whole, kept)
        return kept

    def _tell_trimmed(
        self, whole: Sequence[ChatMessage], messages: Sequence[ChatMessage], call: EngineCall
    ) -> None:
        call.deliver(
            ContextTrimmed(
                request_id=call.request_id,
                num_turns=len(whole) - len(messages),
                num_tokens=0,
                limit=self._figures.context_length or 0,
            )
        )
