"""Where the app keeps its files, by the platform's own customs."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

_APP_NAME = "mira-chat"

DATA_DIR_VARIABLE = "MIRA_CHAT_DATA_DIR"
"""Environment variable that moves the data directory: models and expert stores."""


def data_dir(environ: Mapping[str, str] = os.environ) -> Path:
    """Returns the directory of models and stores; it may not exist yet."""
    if given := environ.get(DATA_DIR_VARIABLE):
        return Path(given).expanduser().absolute()
    import platformdirs

    return Path(platformdirs.user_data_dir(_APP_NAME, appauthor=False))


def config_dir() -> Path:
    """Returns the directory of settings; it may not exist yet."""
    import platformdirs

    return Path(platformdirs.user_config_dir(_APP_NAME, appauthor=False))


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
