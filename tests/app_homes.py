"""Data folders as an app finds them: with a prepared model, used before or not."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from mira_app.app_state import AppState, StateFile


def link_models(source: Path, target: Path, *without: str) -> None:
    """Links to each file of the source's models, but to none of the names in `without`."""
    shutil.copytree(
        source / "models", target / "models",
        copy_function=os.symlink, ignore=shutil.ignore_patterns("*.lock", *without),
    )  # fmt: skip


def make_home(source: Path, target: Path, *, is_known: bool) -> None:
    """Gives a data folder the models and the built kernels of another.

    Args:
        source: A data folder with a prepared built-in model; only read.
        target: The data folder of a home, empty.
        is_known: Whether the app was used there before, so that it opens the model by itself.
    """
    link_models(source, target)
    if (source / "cache").is_dir():
        shutil.copytree(source / "cache", target / "cache")
    if is_known:
        (target / "state").mkdir()
        state = AppState(is_tour_done=True, model="builtin")
        StateFile(target / "state" / "state.json").save(state)
