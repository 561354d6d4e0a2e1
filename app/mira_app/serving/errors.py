"""Errors as clients of this interface expect them: a status, and a body that names the field."""

from __future__ import annotations

from collections.abc import Mapping

from mira_engine.api import (
    CancelledError,
    ContextLengthError,
    EngineProcessError,
    GenerationError,
    MiraError,
    NonFiniteError,
)

INVALID = "invalid_request_error"


class ApiError(Exception):
    """A request that gets no reply.

    Attributes:
        status: HTTP status.
        message: What is wrong, for people.
        kind: Its kind, as the interface names kinds.
        param: The field that is wrong, `None` where it is no field.
        code: Its stable name, `None` where it has none.
        headers: Headers of the answer.
    """

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    def body(self) -> dict[str, object]:
        """Returns the body of the answer, or the event in a stream."""
        return {
            "error": {
                "message": self.message, "type": self.kind, "param": self.param, "code": self.code,
            }
        }  # fmt: skip


def unsupported(param: str, what: str) -> ApiError:
    """Returns the error of a field that asks for something the engine has not."""
    return ApiError(400, f"{what} (field {param!r}).", param=param, code="unsupported_parameter")


def wrong_value(param: str, what: str) -> ApiError:
    """Returns the error of a field whose value cannot be used."""
    return ApiError(400, f"{param}: {what}", param=param, code="invalid_value")


def too_long(message: str) -> ApiError:
    """Returns the error of a chat that does not fit the context."""
    return ApiError(400, message, param="messages", code="context_length_exceeded")


def shutting_down() -> ApiError:
    """Returns the error of every request once the server is being ended."""
    return ApiError(503, "The server is shutting down.", kind="server_error", code="shutting_down")


def from_engine(error: MiraError) -> ApiError:
    """Turns what the engine refused, or failed in, into an answer."""
    if isinstance(error, ContextLengthError):
        return too_long(str(error))
    if isinstance(error, CancelledError):
        return shutting_down()
    if isinstance(error, GenerationError) and not isinstance(error, NonFiniteError):
        return ApiError(400, str(error), param="messages", code="invalid_messages")
    status = 503 if isinstance(error, EngineProcessError) else 500
    # Its last words are for the person at this machine, who has the log.
    first_line = error.message.splitlines()[0]
    return ApiError(status, first_line, kind="server_error", code=error.code)
