"""Who may ask: the key, the host that was meant, and how much may be sent."""

from __future__ import annotations

import hmac
import json
from collections.abc import Mapping

from starlette.datastructures import Headers
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Receive, Scope, Send

from mira_app.remote.address import is_loopback

from .errors import ApiError

MAX_BODY_BYTES = 4 * 2**20
OPEN_PATHS = ("/health",)
"""Answered without a key; they say nothing of models or chats."""


def error_response(error: ApiError) -> JSONResponse:
    """Returns an error as an answer."""
    return JSONResponse(error.body(), error.status, error.headers)


class Guard:
    """Lets through what comes from those who may ask.

    Args:
        app: What answers.
        key: What they have to know, `None` where nothing: then only this machine is listened
            to, and a page in a browser here that has a name of its own point to this machine
            is sent away by the name it asks for.
    """

    def __init__(self, app: ASGIApp, *, key: str | None) -> None:
        self._app = app
        self._key = key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answers, or refuses."""
        if scope["type"] == "http":
            error = self._refusal(scope["path"], Headers(scope=scope))
            if error is not None:
                await error_response(error)(scope, receive, send)
                return
        await self._app(scope, receive, send)

    def _refusal(self, path: str, headers: Mapping[str, str]) -> ApiError | None:
        if self._key is None:
            if not is_loopback(host_name(headers.get("host", ""))):
                return ApiError(403, "This host name is not served here.", code="wrong_host")
            return None
        if path in OPEN_PATHS:
            return None
        given = headers.get("authorization", "")
        scheme, _, key = given.partition(" ")
        # Compared whole whatever it is: how long it takes must not tell how much is right.
        is_right = hmac.compare_digest(key.strip().encode(), self._key.encode())
        if scheme.lower() == "bearer" and is_right:
            return None
        what = "The key is wrong." if given else "A key is needed: Authorization: Bearer KEY."
        return ApiError(401, what, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})


def host_name(host: str) -> str:
    """Returns the name in a `Host` header, without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.rpartition(":")[0] if host.count(":") == 1 else host


async def read_json(request: Request) -> object:
    """Reads a body.

    Raises:
        ApiError: It is too large, of another type, or no JSON.
    """
    kind = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if kind != "application/json":
        # Also what keeps pages in browsers out: this type they cannot send unasked.
        raise ApiError(415, "The body has to be of the type application/json.")
    body = bytearray()
    async for chunk in request.stream():
        body += chunk
        if len(body) > MAX_BODY_BYTES:
            raise ApiError(413, f"The body is larger than {MAX_BODY_BYTES} bytes.")
    try:
        return json.loads(bytes(body))
    except (ValueError, RecursionError):
        raise ApiError(400, "The body is no JSON.") from None
