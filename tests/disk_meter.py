"""How much of the disk folders hold at the most, exactly.

What files hold only falls when one is deleted, replaced or cut short. The interpreter tells
of that beforehand (`sys.addaudithook`), so the most is found by looking just then: no
moment is missed, and nothing has to be polled. One process, all of its threads.
"""

from __future__ import annotations

import contextlib
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

_FALLING = frozenset({"os.remove", "os.rename", "os.truncate", "shutil.rmtree"})

_listeners: list[Callable[[], None]] = []
_is_hooked = False


@contextlib.contextmanager
def before_each_fall(listener: Callable[[], None]) -> Iterator[None]:
    """Calls `listener` before this process deletes or replaces any file."""
    global _is_hooked
    if not _is_hooked:
        # Hooks stay until the process ends; this one is still where nobody listens.
        sys.addaudithook(_tell)
        _is_hooked = True
    _listeners.append(listener)
    try:
        yield
    finally:
        _listeners.remove(listener)


def _tell(event: str, args: tuple[object, ...]) -> None:
    if event in _FALLING:
        for listener in tuple(_listeners):
            listener()


def allocated_bytes(folder: Path) -> int:
    """Returns the bytes that a folder's files hold: blocks, holes left out, links once."""
    found: dict[tuple[int, int], int] = {}
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):
                status = os.lstat(os.path.join(parent, name))
                found[status.st_dev, status.st_ino] = status.st_blocks * 512
    return sum(found.values())


class DiskMeter:
    """The most that folders held at once while it watched.

    Attributes:
        most_bytes: Of all folders together.
    """

    def __init__(self, *folders: Path) -> None:
        self._folders = folders
        self._lock = threading.Lock()
        self.most_bytes = 0

    def look(self) -> None:
        """Counts what is there now."""
        with self._lock:
            now = sum(allocated_bytes(folder) for folder in self._folders)
            self.most_bytes = max(self.most_bytes, now)

    @contextlib.contextmanager
    def watching(self) -> Iterator[None]:
        """Watches what this process does meanwhile."""
        with before_each_fall(self.look):
            yield
        self.look()
