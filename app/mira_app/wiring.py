"""What commands are put together from: client, catalog, history, settings.

One place, so that each command names only what it needs, and so that a test or another
front end can put something else in. Nothing is started or opened before it is used.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, TextIO

if TYPE_CHECKING:
    from .answer import Answerer
    from .catalog import Catalog, Shelf
    from .engine_client import EngineClient
    from .history import HistoryStore
    from .options import Flags
    from .remote.client import RemoteClient
    from .settings import Settings
    from .settings_file import OpenedSettings


def make_client() -> EngineClient:
    """Makes the client of the engine process; nothing is started yet."""
    from mira_engine.api import default_engine_command

    from .engine_client import EngineClient
    from .paths import cache_dir, data_dir, log_dir

    command = default_engine_command(data_dir(), cache_dir())
    return EngineClient(command, log_dir=log_dir())


def make_catalog() -> Shelf:
    """Makes the catalog of the platform's data directory; models can be removed by it."""
    from .catalog import LibraryCatalog
    from .paths import data_dir

    return LibraryCatalog(data_dir())


def make_remote_client(address: str) -> RemoteClient:
    """Makes the client of a server; nothing is sent yet.

    Raises:
        ConfigError: The library that talks to servers is not installed.
    """
    from mira_engine.api import ConfigError

    from .remote.address import api_key

    try:
        from .remote.client import RemoteClient
    except ModuleNotFoundError as error:
        raise ConfigError(
            f"Connecting to a server needs the Python package {error.name}.",
            hint="Install mira-chat again, with all that it needs.",
        ) from None
    return RemoteClient(address, key=api_key(os.environ, address))


@contextlib.contextmanager
def opened_engine(
    settings: Settings, *, is_model_needed: bool = True
) -> Iterator[tuple[EngineClient | RemoteClient, Catalog, Settings]]:
    """Whoever answers chats, started: the engine here, or the server that the settings name.

    Args:
        settings: What the person chose.
        is_model_needed: Whether one model has to be known, since nobody can be asked.

    Yields:
        The client, its models, and the settings with the server's model where it has one only.

    Raises:
        MiraError: The server cannot be reached, or has several models and none was named.
    """
    if settings.connect is None:
        with make_client() as client:
            yield client, make_catalog(), settings
        return
    with make_remote_client(settings.connect) as remote:
        from .remote.catalog import RemoteCatalog, with_served_model

        settings = with_served_model(remote, settings, is_needed=is_model_needed)
        yield remote, RemoteCatalog(remote), settings


@contextlib.contextmanager
def opened_history() -> Iterator[HistoryStore]:
    """The store of chats, open; what it has to say about its file goes to standard error.

    Raises:
        MiraError: The settings file cannot be used, or there can be no history here.
    """
    from .history import HistoryStore
    from .paths import history_path

    store = HistoryStore(history_path(os.environ, read_settings({}).interface.history_path))
    try:
        _note(store.open())
        yield store
    finally:
        store.close()
        _note(store.take_notices())


def _note(texts: list[str]) -> None:
    for text in texts:
        print(f"note: {text}", file=sys.stderr)


def read_settings(flags: Flags) -> Settings:
    """Returns what the person chose: defaults, settings file, environment, then these flags.

    Raises:
        ConfigError: A value cannot be used.
    """
    return open_settings_of(flags).settings


def open_settings_of(flags: Flags, *, is_lenient: bool = False) -> OpenedSettings:
    """Reads what the person chose, and what of the settings file cannot be used.

    Args:
        flags: Settings that were given.
        is_lenient: Whether a mistaken file is told in the result and not raised.

    Raises:
        ConfigError: A value cannot be used.
    """
    from .paths import config_path
    from .settings_file import open_settings

    given = dict(flags)
    if given.get("trace") is not None:
        given["trace"] = str(Path(given["trace"]).absolute())
    return open_settings(given, os.environ, config_path(), is_lenient=is_lenient)


def refuse_engine_flags(flags: Flags, settings: Settings) -> None:
    """Refuses options of the engine here where a server runs the model.

    Only those given on the command line: file and environment hold for other runs, too.

    Raises:
        ConfigError: There are some; names them.
    """
    if settings.connect is None:
        return
    from mira_engine.api import ConfigError

    from .remote.address import host_of
    from .setting_fields import FIELDS_BY_NAME, Section

    idle = [
        _typed(name, value)
        for name, value in flags.items()
        if value is not None and FIELDS_BY_NAME[name].section is Section.ENGINE
    ]
    if idle:
        raise ConfigError(
            f"Without effect on a model that {host_of(settings.connect)} runs: {', '.join(idle)}.",
            hint="Leave that out; or chat with a model of this machine by --connect ''.",
        )


def _typed(name: str, value: object) -> str:
    """Returns a flag as it is typed for this value."""
    if name == "k":
        return "-k"
    return f"--{'no-' if value is False else ''}{name.replace('_', '-')}"


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream can show bars and screens; a dumb terminal is as good as a file."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def make_answerer(
    client: EngineClient | RemoteClient,
    settings: Settings,
    *,
    is_plain: bool,
    catalog: Catalog | None = None,
) -> Answerer:
    """Makes what talks to the engine for a command, its progress on standard error.

    Args:
        client: Whoever answers.
        settings: What the person chose.
        is_plain: No bars, no colours.
        catalog: The client's models, `None` for those of this machine.
    """
    from .answer import Answerer
    from .progress import BarProgress, LineProgress

    is_drawing = is_terminal(sys.stderr) and not is_plain
    return Answerer(
        client,
        make_catalog() if catalog is None else catalog,
        settings,
        err=sys.stderr,
        make_progress=BarProgress if is_drawing else LineProgress,
    )
