"""`mira-chat serve`: the local model for other programs, over an OpenAI-compatible interface."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from .. import wiring
from ..options import CHAT_SETTINGS, Flags, Plain, takes_settings
from ..reporting import reporting_errors

if TYPE_CHECKING:
    from ..settings import Settings

_NOT_SERVED = ("connect", "system")
"""Settings that say nothing about a server: each request has its own messages."""

_KEEP_ALIVE_S = 5.0


@takes_settings(*(name for name in CHAT_SETTINGS if name not in _NOT_SERVED))
def serve(
    flags: Flags,
    host: Annotated[
        str, typer.Option("--host", help="Where to listen; other machines only with a key.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option("--port", min=0, max=65535, help="Port; 0 takes any that is free.")
    ] = 8000,
    key: Annotated[
        str | None,
        typer.Option(
            "--api-key",
            metavar="KEY",
            help="What clients have to know. Others here can read it: better in MIRA_API_KEY.",
            show_default=False,
        ),
    ] = None,
    max_waiting: Annotated[
        int, typer.Option("--max-waiting", min=0, help="Requests that may wait for their turn.")
    ] = 16,
    is_plain: Plain = False,
) -> None:
    """Serves the model at /v1/chat/completions, one reply at a time, until Ctrl-C."""
    with reporting_errors():
        settings = wiring.read_settings({**flags, "connect": ""})
        key = key or os.environ.get("MIRA_API_KEY") or None
        check_key(host, key)
        serve_model(
            settings, host=host, port=port, key=key, max_waiting=max_waiting, is_plain=is_plain
        )


def check_key(host: str, key: str | None) -> None:
    """Refuses to let other machines in without a key, and keys that no header can hold.

    Raises:
        ConfigError: There is none, or it cannot be used.
    """
    from mira_engine.api import ConfigError

    from ..remote.address import is_loopback

    if key is None and not is_loopback(host):
        raise ConfigError(
            f"Other machines could ask at {host}, so a key is needed.",
            hint="Put one into MIRA_API_KEY, or listen at 127.0.0.1.",
        )
    if key is not None and not (key.isascii() and key.isprintable() and " " not in key):
        raise ConfigError("The key has signs that no header can hold.", hint="Use letters, digits.")


def serve_model(
    settings: Settings, *, host: str, port: int, key: str | None, max_waiting: int, is_plain: bool
) -> None:
    """Loads the chosen model and serves it until a signal ends that.

    Raises:
        MiraError: The port is taken, the model cannot be loaded, or a package is missing.
        KeyboardInterrupt: The person interrupted before the model was loaded.
    """
    from ..answer import Answer

    try:
        from ..serving.application import Service, make_application
        from ..serving.replies import ReplyDesk
        from ..serving.server import address_of, open_socket, run_server
    except ModuleNotFoundError as error:
        from mira_engine.api import ConfigError

        raise ConfigError(
            f"Serving needs the Python package {error.name}.",
            hint="Install it with: pip install 'mira-chat[serve]'",
        ) from None

    with open_socket(host, port) as listener, wiring.make_client() as client:
        answerer = wiring.make_answerer(client, settings, is_plain=is_plain)
        loaded = answerer.load(Answer())

        def reload() -> None:
            client.restart()
            answerer.load(Answer())

        desk = ReplyDesk(client, reload, max_waiting=max_waiting, keep_alive_s=_KEEP_ALIVE_S)
        name = served_name(loaded.model)
        service = Service(desk, loaded, name=name, defaults=settings.sampling)
        where = address_of(listener, host)
        _say(f"Serving {loaded.title} as {name} at {where}. Ctrl+C ends it.")
        if key is not None:
            _say("Clients need the key.")
        try:
            run_server(make_application(service, key=key), listener, on_exit=desk.close)
        except KeyboardInterrupt:
            _say("Ended.")  # The usual way to end a server, in order: no failure.


def served_name(model: str) -> str:
    """Returns what clients call a model; a folder's own name, not where it is."""
    return Path(model).name if Path(model).is_absolute() else model


def _say(text: str) -> None:
    from ..sanitise import sanitise

    print(sanitise(text), file=sys.stderr, flush=True)
