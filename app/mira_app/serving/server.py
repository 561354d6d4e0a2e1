"""The socket and the HTTP server around the application.

Order of a shutdown, at the first Ctrl-C: nobody is let in any more, the reply under way is
stopped and told so, all who wait are sent away, the engine is ended, the program ends. A
second Ctrl-C does not wait for connections.
"""

from __future__ import annotations

import asyncio
import socket
from collections.abc import Callable
from types import FrameType

import uvicorn
from mira_engine.api import ConfigError
from starlette.types import ASGIApp

_BACKLOG = 64
_GRACE_S = 5


def open_socket(host: str, port: int) -> socket.socket:
    """Takes a port; done before the model is loaded, so that a busy one is told at once.

    Raises:
        ConfigError: It cannot be had.
    """
    try:
        family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
        return socket.create_server((host, port), family=family, backlog=_BACKLOG)
    except OSError as error:
        reason = error.strerror or str(error)
        raise ConfigError(
            f"The server cannot listen at {host}, port {port}: {reason}.",
            hint="Give another --port; 0 takes any that is free.",
        ) from error


def address_of(listener: socket.socket, host: str) -> str:
    """Returns where clients reach a socket."""
    shown = f"[{host}]" if ":" in host else host
    return f"http://{shown}:{listener.getsockname()[1]}/v1"


class _Server(uvicorn.Server):
    """Tells of the end at once: replies would go on until they are done."""

    def __init__(self, config: uvicorn.Config, on_exit: Callable[[], None]) -> None:
        super().__init__(config)
        self._on_exit = on_exit

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        super().handle_exit(sig, frame)
        asyncio.get_running_loop().call_soon_threadsafe(self._on_exit)


def run_server(
    application: ASGIApp, listener: socket.socket, *, on_exit: Callable[[], None]
) -> None:
    """Serves until a signal ends it; blocks.

    Args:
        application: What answers.
        listener: Where.
        on_exit: Called between two steps of the event loop when the end has begun.

    Raises:
        KeyboardInterrupt: It was ended by Ctrl-C, in order.
    """
    config = uvicorn.Config(
        application,
        log_level="warning",
        access_log=False,
        lifespan="off",
        ws="none",
        timeout_graceful_shutdown=_GRACE_S,
    )
    _Server(config, on_exit).run(sockets=[listener])
