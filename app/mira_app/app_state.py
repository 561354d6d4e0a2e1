"""What the app remembers from one time to the next: no setting, and nobody edits it.

A small JSON file beside the app's other data. Two apps at once: the later writer wins,
whole; chats are not here but in the history, and what is not sent yet is in `unsent`.
"""

from __future__ import annotations

import dataclasses
import json
from dataclasses import dataclass
from pathlib import Path

from .atomic_file import replace_file

_MAX_FILE_BYTES = 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class AppState:
    """What is remembered.

    Attributes:
        is_tour_done: Whether the first-start tour was seen.
        model: The model loaded last, empty for none.
    """

    is_tour_done: bool = False
    model: str = ""


class StateFile:
    """Reads and writes the state; writes only what changed."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._written: AppState | None = None

    def load(self) -> AppState:
        """Returns what is remembered; what cannot be read is forgotten."""
        try:
            if self._path.stat().st_size > _MAX_FILE_BYTES:
                return AppState()
            fields = json.loads(self._path.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            return AppState()
        if not isinstance(fields, dict):
            return AppState()
        defaults = dataclasses.asdict(AppState())
        known = {
            name: fields[name]
            for name, default in defaults.items()
            if type(fields.get(name)) is type(default)
        }
        state = AppState(**known)
        if len(known) == len(defaults):
            self._written = state
        return state

    def save(self, state: AppState) -> None:
        """Writes the state.

        Raises:
            UnwritableFileError: It cannot be written.
        """
        if state != self._written:
            replace_file(self._path, json.dumps(dataclasses.asdict(state)) + "\n")
            self._written = state
