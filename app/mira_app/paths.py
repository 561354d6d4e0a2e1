"""Where the app keeps its files, by the platform's own customs.

`MIRA_CHAT_DATA_DIR` moves everything that the app writes by itself (models, chats, state,
logs, what can be made again) under one directory; `MIRA_CHAT_CONFIG` names another
settings file. Nothing is made here.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_APP_NAME = "mira-chat"

DATA_DIR_VARIABLE = "MIRA_CHAT_DATA_DIR"
"""Environment variable that moves the data directory: models, stores and chats."""

CONFIG_VARIABLE = "MIRA_CHAT_CONFIG"
"""Environment variable that names another settings file."""


def home_expanded(path: str) -> Path:
    """Returns a path with `~` written out; as it is where nobody has the home that it names."""
    return Path(os.path.expanduser(path))  # `Path.expanduser` raises there.


def data_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the directory of models and stores; it may not exist yet."""
    if given := environ.get(DATA_DIR_VARIABLE):
        return home_expanded(given).absolute()
    import platformdirs

    return Path(platformdirs.user_data_dir(_APP_NAME, appauthor=False))


def config_dir() -> Path:
    """Returns the directory of settings; it may not exist yet."""
    import platformdirs

    return Path(platformdirs.user_config_dir(_APP_NAME, appauthor=False))


def config_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the settings file; it may not exist yet."""
    if given := environ.get(CONFIG_VARIABLE):
        return home_expanded(given).absolute()
    return config_dir() / "config.toml"


def is_config_named(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether the person named the settings file, so that it ought to be there."""
    return bool(environ.get(CONFIG_VARIABLE))


def state_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the directory of what the app remembers, beside the data where that was moved."""
    if environ.get(DATA_DIR_VARIABLE):
        return data_dir(environ) / "state"
    import platformdirs

    return Path(platformdirs.user_state_dir(_APP_NAME, appauthor=False))


def state_path(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the file of what the app remembers; it may not exist yet."""
    return state_dir(environ) / "state.json"


def history_path(environ: Mapping[str, str] = os.environ, given: str | None = None) -> Path:
    """Returns the file of the chats; it may not exist yet.

    Args:
        environ: Environment variables.
        given: What the setting `history` says, `None` for nothing.
    """
    if given is not None:
        return home_expanded(given).absolute()
    return data_dir(environ) / "history.sqlite3"


def log_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the directory of log files, beside the data where that was moved."""
    if environ.get(DATA_DIR_VARIABLE):
        return data_dir(environ) / "logs"
    import platformdirs

    return Path(platformdirs.user_log_dir(_APP_NAME, appauthor=False))


def cache_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the directory of what can be made again, beside the data where that was moved."""
    if environ.get(DATA_DIR_VARIABLE):
        return data_dir(environ) / "cache"
    import platformdirs

    return Path(platformdirs.user_cache_dir(_APP_NAME, appauthor=False))


@dataclass(frozen=True, slots=True, kw_only=True)
class AppPaths:
    """Where the app's files are; any of them may not exist yet.

    Attributes:
        config: The settings file.
        state: What the app remembers.
        history: The chats.
        data_dir: Models and expert stores.
        log_dir: What the engine writes to its log.
    """

    config: Path
    state: Path
    history: Path
    data_dir: Path
    log_dir: Path


def app_paths(environ: Mapping[str, str] = os.environ, history: str | None = None) -> AppPaths:
    """Returns where the app's files are.

    Args:
        environ: Environment variables.
        history: What the setting `history` says, `None` for nothing.
    """
    return AppPaths(
        config=config_path(environ),
        state=state_path(environ),
        history=history_path(environ, history),
        data_dir=data_dir(environ),
        log_dir=log_dir(environ),
    )
