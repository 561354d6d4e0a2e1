"""What commands are put together from: client, catalog, library, history, settings.

One place, so that each command names only what it needs, and so that a test or another
front end can put something else in. Nothing is started or opened before it is used.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:
    from mira_engine.api import ConfigError

    from .answer import Answerer
    from .catalog import Catalog
    from .engine_client import EngineClient
    from .options import Flags
    from .settings import Settings


def make_client() -> EngineClient:
    """Makes the client of the engine process; nothing is started yet."""
    from mira_engine.api import default_engine_command

    from .engine_client import EngineClient
    from .paths import cache_dir, data_dir, log_dir

    command = default_engine_command(data_dir(), cache_dir())
    return EngineClient(command, log_dir=log_dir())


def make_catalog() -> Catalog:
    """Makes the catalog of the platform's data directory."""
    from .catalog import LibraryCatalog
    from .paths import data_dir

    return LibraryCatalog(data_dir())


def make_library() -> Any:
    """Makes the library of installed models: `remove` and `disk_bytes`, by name."""
    from mira_engine.api import ModelLibrary

    from .paths import data_dir

    return ModelLibrary(data_dir())


def history_module() -> Any | None:
    """Returns what keeps chats: `HistoryStore` and `StoredChat`; `None` where nothing does."""
    if importlib.util.find_spec("mira_app.history") is None:
        return None
    return importlib.import_module("mira_app.history")


@contextlib.contextmanager
def opened_history() -> Iterator[tuple[Any | None, Any | None]]:
    """The store of chats, open, and what makes a chat for it; both `None` without history.

    What the store has to say about its file goes to standard error.
    """
    history = history_module()
    if history is None:
        yield None, None
        return
    from .paths import data_dir

    store = history.HistoryStore(data_dir() / "history.sqlite3")
    try:
        for notice in store.open():
            print(f"note: {notice}", file=sys.stderr)
        yield store, history.StoredChat
    finally:
        store.close()


def export_module(store: Any | None) -> Any:
    """Returns what turns chats into text and back.

    Raises:
        ConfigError: This build keeps no chats.
    """
    if store is None or importlib.util.find_spec("mira_app.export") is None:
        raise _missing("keeps no chats")
    return importlib.import_module("mira_app.export")


def config_report_module() -> Any:
    """Returns what reports settings and their origins.

    Raises:
        ConfigError: This build has none.
    """
    if importlib.util.find_spec("mira_app.config_report") is None:
        raise _missing("reports no settings")
    return importlib.import_module("mira_app.config_report")


def settings_path(folder: Path) -> Path:
    """Returns the settings file; it may not exist yet."""
    return folder / "config.toml"


def _missing(what: str) -> ConfigError:
    from mira_engine.api import ConfigError

    return ConfigError(f"This build {what}.", hint="Install mira-chat again.")


def read_settings(flags: Flags) -> Settings:
    """Returns what the person chose: defaults, environment, then these flags.

    Raises:
        ConfigError: A value cannot be used.
    """
    from .settings import load_settings

    given = dict(flags)
    if given.get("trace") is not None:
        given["trace"] = str(Path(given["trace"]).absolute())
    return load_settings(given, os.environ)


def is_terminal(stream: TextIO | None) -> bool:
    """Whether a stream can show bars and screens; a dumb terminal is as good as a file."""
    return stream is not None and stream.isatty() and os.environ.get("TERM") != "dumb"


def make_answerer(client: EngineClient, settings: Settings, *, is_plain: bool) -> Answerer:
    """Makes what talks to the engine for a command, its progress on standard error."""
    from .answer import Answerer
    from .progress import BarProgress, LineProgress

    is_drawing = is_terminal(sys.stderr) and not is_plain
    return Answerer(
        client,
        make_catalog(),
        settings,
        err=sys.stderr,
        make_progress=BarProgress if is_drawing else LineProgress,
    )
