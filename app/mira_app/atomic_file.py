"""Small files of the app, replaced whole: a reader sees the old text or the new one.

Owns nothing else; what cannot be written ends in an `UnwritableFileError` that names the
file and what to do.
"""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from pathlib import Path

from mira_engine.api import MiraError


class UnwritableFileError(MiraError):
    """A file of the app cannot be written."""

    @classmethod
    def from_os(cls, path: Path, error: OSError) -> UnwritableFileError:
        """Says which file it is, why, and what a person can do."""
        reasons = {
            errno.ENOSPC: "Free some space on that disk.",
            errno.EROFS: "That disk can only be read; MIRA_CHAT_DATA_DIR and MIRA_CHAT_CONFIG "
            "name other places.",
        }
        hint = reasons.get(
            error.errno or 0,
            "Make the folder writable; MIRA_CHAT_DATA_DIR and MIRA_CHAT_CONFIG name other places.",
        )
        return cls(f"{path} cannot be written: {error.strerror or error}.", hint=hint)


def replace_file(path: Path, text: str) -> None:
    """Writes a file by rename, making its folder where there is none; a link is followed.

    Raises:
        UnwritableFileError: The folder or the file cannot be written; the old file stays.
    """
    path = path.resolve()
    temporary: str | None = None
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        mode = path.stat().st_mode & 0o777 if path.exists() else 0o600
        handle, temporary = tempfile.mkstemp(dir=path.parent, prefix=f".{path.name}.")
        with os.fdopen(handle, "w", encoding="utf-8", newline="\n") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, mode)
        os.replace(temporary, path)
    except OSError as error:
        if temporary is not None:
            with contextlib.suppress(OSError):
                os.unlink(temporary)
        raise UnwritableFileError.from_os(path, error) from None
