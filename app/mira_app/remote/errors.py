"""What can go wrong with a server, each in one sentence that a person can act on.

    ServerError                the server, or the way to it
    ├── RefusedRequestError    it does not take the request as it is
    └── ConnectionLostError    it was there, and the connection ended

A chat that is too long ends in the engine's own `ContextLengthError`. What a server says
is quoted, but never a key: some servers repeat the one they were given.
"""

from __future__ import annotations

import re
import socket
import ssl
from collections.abc import Iterator

import httpx2
import openai
from mira_engine.api import ContextLengthError, MiraError

from .address import KEY_VARIABLES, host_of

_TOO_LONG = re.compile(
    r"context[ _](length|size|window)|maximum context|too many tokens|prompt is too long",
    re.IGNORECASE,
)
_LIMIT = re.compile(r"(?:context[^.\d]{0,40}|limit[^.\d]{0,20})(\d{2,})", re.IGNORECASE)
_MAX_SAID_CHARS = 300
_NOT_ITS_KIND = "Give the address of an OpenAI-compatible server, such as http://host:8000/v1."


class ServerError(MiraError):
    """The server, or the way to it."""


class RefusedRequestError(ServerError):
    """The server does not take the request as it is.

    Attributes:
        param: The field that it names, empty where it names none.
        said: What it says.
    """

    def __init__(self, message: str, *, hint: str = "", param: str = "", said: str = "") -> None:
        super().__init__(message, hint=hint)
        self.param = param
        self.said = said


class ConnectionLostError(ServerError):
    """The server was there, and the connection ended."""


def server_error(error: Exception, address: str, *, key: str | None) -> MiraError:
    """Turns what the client library raised into an error for people.

    Args:
        error: Of the library, or of the HTTP client below it.
        address: Where the server is.
        key: What must not be told.
    """
    host = host_of(address)
    if isinstance(error, openai.APIStatusError):
        return _status_error(error, host, key)
    if isinstance(error, openai.APITimeoutError | httpx2.TimeoutException):
        return ServerError(
            f"The server at {host} did not answer in time.",
            hint="It may be busy or far away; try again.",
        )
    if isinstance(error, openai.APIConnectionError | httpx2.TransportError):
        return _connection_error(error, host)
    if isinstance(error, openai.APIError) and not isinstance(
        error, openai.APIResponseValidationError
    ):
        return _said_error(error, host, key)  # told in the middle of a stream
    return not_openai_error(address)


def not_openai_error(address: str) -> ServerError:
    """Returns the error of a server that speaks something else."""
    return ServerError(
        f"What answers at {host_of(address)} is no OpenAI-compatible server.", hint=_NOT_ITS_KIND
    )


def cut_error(address: str) -> ServerError:
    """Returns the error of a reply that ended without its end."""
    return ServerError(
        f"The connection to {host_of(address)} ended in the middle of the reply.",
        hint="What had come is kept; ask again for the rest.",
    )


def context_limit(text: str) -> int | None:
    """Returns the tokens of context that a refusal names, `None` where it names none."""
    match = _LIMIT.search(text)
    return int(match[1]) if match is not None else None


def _status_error(error: openai.APIStatusError, host: str, key: str | None) -> MiraError:
    status, said = error.status_code, _said(error, key)
    quoted = f": {said}" if said else "."
    if 300 <= status < 400:
        where = " ".join(error.response.headers.get("location", "elsewhere").split())
        return ServerError(f"The server at {host} sends to {where}.", hint="Connect to that one.")
    if status == 401:
        what = "refuses the key" if key else "wants a key"
        return ServerError(f"The server at {host} {what}.", hint=_key_hint(key))
    if status == 403:
        return ServerError(f"The server at {host} does not allow this{quoted}", hint=_key_hint(key))
    if status == 404:
        hint = _NOT_ITS_KIND if not said else "`--model` names another one."
        return ServerError(f"The server at {host} has no such model or address{quoted}", hint=hint)
    if status == 429:
        after = error.response.headers.get("retry-after", "")
        when = f"in {after} s" if after.isdecimal() else "in a moment"
        return ServerError(
            f"The server at {host} takes no more requests now{quoted}", hint=f"Try again {when}."
        )
    if status >= 500:
        return ServerError(
            f"The server at {host} failed with status {status}{quoted}", hint="Try again."
        )
    return _refusal(f"{error.code or ''} {said}", said, error.param or "", host)


def _refusal(text: str, said: str, param: str, host: str) -> MiraError:
    if _TOO_LONG.search(text):
        return ContextLengthError(
            f"The chat is longer than the model at {host} reads: {said}".strip(),
            hint="Begin a new chat, or shorten the question.",
        )
    quoted = f": {said}" if said else "."
    return RefusedRequestError(
        f"The server at {host} does not take the request{quoted}",
        hint="Another model or other sampling settings may be taken.",
        param=param,
        said=said,
    )


def _said_error(error: openai.APIError, host: str, key: str | None) -> MiraError:
    said = _said(error, key)
    if _TOO_LONG.search(f"{error.code or ''} {said}"):
        return _refusal(f"{error.code or ''} {said}", said, "", host)
    return ServerError(f"The server at {host} gave up: {said or 'it does not say why.'}")


def _said(error: openai.APIError, key: str | None) -> str:
    """Returns the server's own words, on one line and without the key."""
    body = error.body
    if isinstance(body, dict):
        text = str(body.get("message") or body.get("detail") or "")
    elif isinstance(body, str):
        text = "" if body.lstrip().startswith("<") else body  # a page says nothing of use
    else:
        text = "" if isinstance(error, openai.APIStatusError) else error.message
    text = " ".join(text.split())
    if key:
        text = text.replace(key, "***")
    return text if len(text) <= _MAX_SAID_CHARS else f"{text[:_MAX_SAID_CHARS]} ..."


def _key_hint(key: str | None) -> str:
    what = "another key" if key else "it"
    return f"Put {what} into the variable {KEY_VARIABLES[0]} or {KEY_VARIABLES[1]}."


def _connection_error(error: Exception, host: str) -> ServerError:
    causes = list(_causes(error))
    for cause in causes:
        if isinstance(cause, ssl.SSLCertVerificationError):
            return ServerError(
                f"The certificate of {host} is not to be trusted: {cause.verify_message}.",
                hint="Add its issuer to the system's certificates, or use the name it is for.",
            )
        if isinstance(cause, ssl.SSLError):
            return ServerError(
                f"There is no TLS with {host}: {_words(cause.reason or str(cause))}.",
                hint="A server without it is written http://, not https://.",
            )
        if isinstance(cause, socket.gaierror):
            return ServerError(
                f"No host is known as {host}.", hint="Check the address, and the network."
            )
    if any(isinstance(cause, httpx2.RemoteProtocolError | httpx2.ReadError) for cause in causes):
        return ConnectionLostError(
            f"The connection to {host} ended before an answer.",
            hint="Is it a server of this kind? One with TLS is written https://.",
        )
    return ServerError(
        f"Nothing can be reached at {host}.", hint="Is the server started, and the port right?"
    )


def _words(reason: str) -> str:
    return reason.replace("_", " ").lower().rstrip(".")


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yields an error, what it came from, and so on; members of groups, too."""
    seen: set[int] = set()
    due = [error]
    while due:
        each = due.pop()
        if each is None or id(each) in seen:
            continue
        seen.add(id(each))
        yield each
        due += [each.__cause__, each.__context__]
        if isinstance(each, BaseExceptionGroup):
            due += each.exceptions
