"""What each running app has not sent or finished: its draft, and a reply under way.

Apps that run at once must not share it, so each takes a place of its own: a small JSON
file beside the app's state, and a lock that ends with the process. An app that starts
takes a place that nobody holds, one where something was left first: no text waits for an
app that is never started again.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from .atomic_file import UnwritableFileError, replace_file
from .state_files import read_json

if TYPE_CHECKING:
    import filelock

_MAX_FILE_BYTES = 16 * 2**20


@dataclass(frozen=True, slots=True, kw_only=True)
class Unsent:
    """What one app would lose with its process.

    Attributes:
        draft: Text in the composer that was not sent.
        chat_id: The chat whose reply was under way, empty for none.
        partial: That reply, as far as it had come.
    """

    draft: str = ""
    chat_id: str = ""
    partial: str = ""


class UnsentPlace:
    """The file of one app, held until `close` or the end of the process."""

    def __init__(self, path: Path, lock: filelock.BaseFileLock) -> None:
        self._path = path
        self._lock = lock
        self._written = read_unsent(path)

    @property
    def unsent(self) -> Unsent:
        """What was left here, or written since."""
        return self._written

    def save(self, unsent: Unsent) -> None:
        """Writes what changed.

        Raises:
            UnwritableFileError: It cannot be written.
        """
        if unsent != self._written:
            replace_file(self._path, json.dumps(dataclasses.asdict(unsent)) + "\n")
            self._written = unsent

    def close(self) -> None:
        """Leaves the place, and what is in it, to the next app."""
        self._lock.release()


def take_place(folder: Path) -> UnsentPlace:
    """Takes a place that no other app holds.

    Args:
        folder: Where the app's state is; made where it is missing.

    Raises:
        UnwritableFileError: Nothing can be locked there.
    """
    import filelock  # costs the start more than all the rest of this module

    try:
        folder.mkdir(parents=True, exist_ok=True)
        for path in _places(folder):
            lock = filelock.FileLock(f"{path}.lock", timeout=0, thread_local=False)
            try:
                lock.acquire()
            except filelock.Timeout:
                continue  # of an app that runs
            return UnsentPlace(path, lock)
    except (OSError, NotImplementedError) as error:
        problem = error if isinstance(error, OSError) else OSError(str(error))
        raise UnwritableFileError.from_os(folder, problem) from None
    raise AssertionError("there is always one more place")


def read_unsent(path: Path) -> Unsent:
    """Returns what a file holds; what cannot be read is nothing."""
    try:
        is_readable = path.stat().st_size <= _MAX_FILE_BYTES
    except OSError:
        return Unsent()
    plain = read_json(path) if is_readable else None
    if not isinstance(plain, dict):
        return Unsent()
    names = [field.name for field in dataclasses.fields(Unsent)]
    return Unsent(**{name: plain[name] for name in names if isinstance(plain.get(name), str)})


def _places(folder: Path) -> Iterator[Path]:
    """Yields places: those with something in them, then all by number, without an end."""
    yield from (
        path for path in sorted(folder.glob("unsent-*.json")) if read_unsent(path) != Unsent()
    )
    for number in itertools.count(1):
        yield folder / f"unsent-{number}.json"
