"""The endpoints: chats, the list of models, and whether the server is well."""

from __future__ import annotations

import time
import uuid
from http import HTTPStatus

from mira_engine.api import ModelLoaded, SamplingConfig
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from .answers import Answer
from .chat_requests import read_chat_request
from .completions import Completion
from .errors import ApiError
from .guard import Guard, error_response, read_json
from .replies import ReplyDesk

CHAT_PATH = "/v1/chat/completions"


class Service:
    """Answers for one loaded model.

    Args:
        desk: Has the engine answer.
        loaded: The model.
        name: What clients call it.
        defaults: How tokens are chosen where a request does not say.
    """

    def __init__(
        self, desk: ReplyDesk, loaded: ModelLoaded, *, name: str, defaults: SamplingConfig
    ) -> None:
        self._desk = desk
        self._loaded = loaded
        self._name = name
        self._defaults = defaults
        self._created = int(time.time())

    async def chat(self, request: Request) -> Answer:
        """Answers a chat."""
        wanted = read_chat_request(await read_json(request), self._defaults)
        if wanted.model is not None:
            self._check_name(wanted.model)
        completion = Completion(
            id=f"chatcmpl-{uuid.uuid4().hex}", created=int(time.time()), model=self._name
        )
        return Answer(
            self._desk.reply(wanted),
            completion,
            is_streamed=wanted.is_streamed,
            is_usage_wanted=wanted.is_usage_wanted,
        )

    async def models(self, request: Request) -> Response:
        """Lists the one model."""
        del request
        return JSONResponse({"object": "list", "data": [self._model()]})

    async def model(self, request: Request) -> Response:
        """Tells of the model."""
        self._check_name(request.path_params["name"])
        return JSONResponse(self._model())

    async def health(self, request: Request) -> Response:
        """Says whether a request would find the engine at work."""
        del request
        if self._desk.is_lost:
            self._desk.revive()  # Whoever asks here first asks no chat of a server that is down.
        if self._desk.is_lost:
            return JSONResponse({"status": "the engine is being started again"}, 503)
        return JSONResponse({"status": "ok"})

    def _model(self) -> dict[str, object]:
        return {
            "id": self._name,
            "object": "model",
            "created": self._created,
            "owned_by": "mira-chat",
            "max_model_len": self._loaded.context_length,
        }

    def _check_name(self, name: str) -> None:
        if name != self._name:
            raise ApiError(
                404,
                f"There is no model {name[:80]!r} here, only {self._name!r}.",
                param="model",
                code="model_not_found",
            )


def make_application(service: Service, *, key: str | None) -> ASGIApp:
    """Puts the endpoints behind the guard.

    Args:
        service: What answers.
        key: What clients have to know, `None` for nothing.
    """
    application = Starlette(
        routes=[
            Route(CHAT_PATH, service.chat, methods=["POST"]),
            Route("/v1/models", service.models),
            Route("/v1/models/{name:path}", service.model),
            Route("/health", service.health),
        ],
        exception_handlers={
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _gone,
        },
    )
    return Guard(application, key=key)


async def _api_error(request: Request, error: Exception) -> Response:
    del request
    assert isinstance(error, ApiError)
    return error_response(error)


async def _gone(request: Request, error: Exception) -> Response:
    """Answers nobody: who asked has left before all of the question was there."""
    del request, error
    return Response(status_code=HTTPStatus.BAD_REQUEST)


async def _http_error(request: Request, error: Exception) -> Response:
    """Answers for paths and methods that are none."""
    assert isinstance(error, HTTPException)
    what = HTTPStatus(error.status_code).phrase
    text = f"{what}: {request.method} {request.url.path}. Chats are answered at {CHAT_PATH}."
    return error_response(ApiError(error.status_code, text, headers=error.headers))
