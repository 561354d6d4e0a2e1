"""Small JSON files that the app keeps beside the models: written whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
from pathlib import Path


def read_json(path: Path) -> object | None:
    """Returns what a file holds; `None` where it is missing or no JSON."""
    try:
        return json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None


def write_json(path: Path, value: object) -> bool:
    """Replaces a file in one step.

    Returns:
        Whether that worked; on a full or read-only disk the file stays as it was.
    """
    partial = path.with_name(f"{path.name}.{os.getpid()}.tmp")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with partial.open("w", encoding="utf-8") as file:
            json.dump(value, file, indent=1)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
    except OSError:
        with contextlib.suppress(OSError):
            partial.unlink(missing_ok=True)
        return False
    return True
