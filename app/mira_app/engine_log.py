"""Log files of engine processes: each app process has one, and only the newest few stay.

Knows nothing of the process that writes them. Several apps may share a folder, so a log
may be gone at any time.
"""

from __future__ import annotations

import contextlib
import os
import re
from pathlib import Path

from mira_engine.api import EngineProcessError

_NUM_KEPT_LOGS = 5
_NUM_TAIL_LINES = 6
_MAX_TAIL_BYTES = 16384
_NAME = re.compile(r"engine-(\d+)\.log")


def log_path(log_dir: Path) -> Path:
    """Returns where this app process's engine log is, or would be."""
    return log_dir / f"engine-{os.getpid()}.log"


def make_log_file(log_dir: Path) -> Path:
    """Returns this app process's engine log; removes old ones of processes that are gone.

    Of those, the newest few that are not empty stay.

    Raises:
        EngineProcessError: The folder cannot be written.
    """
    try:
        log_dir.mkdir(parents=True, exist_ok=True)
        mine = log_path(log_dir)
        mine.touch()
        kept = []
        for path in log_dir.glob("engine-*.log"):
            if _is_in_use(path):
                continue
            try:
                status = path.stat()
            except FileNotFoundError:
                continue  # Another app has just removed it.
            if status.st_size == 0:
                _remove(path)
            else:
                kept.append((status.st_mtime, path))
        for _, path in sorted(kept)[: max(0, len(kept) - _NUM_KEPT_LOGS)]:
            _remove(path)
    except OSError as error:
        raise EngineProcessError(
            f"The log folder {log_dir} cannot be written: {error.strerror}.",
            hint="Set MIRA_CHAT_DATA_DIR to a folder that can be written.",
        ) from error
    return mine


def log_tail(path: Path, start: int) -> list[str]:
    """Returns the last lines behind byte `start` of a log; none where it cannot be read."""
    try:
        with path.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(start, size - _MAX_TAIL_BYTES))
            text = log.read().decode("utf-8", "replace")
    except OSError:
        return []  # It explains a failure; a second failure must not hide the first.
    return [line.rstrip() for line in text.splitlines() if line.strip()][-_NUM_TAIL_LINES:]


def _remove(path: Path) -> None:
    # Windows does not delete what an engine still has open whose app has died.
    with contextlib.suppress(PermissionError):
        path.unlink(missing_ok=True)


def _is_in_use(path: Path) -> bool:
    """Whether the app process that the log is named after is alive."""
    import psutil

    found = _NAME.fullmatch(path.name)
    return found is not None and psutil.pid_exists(int(found.group(1)))
