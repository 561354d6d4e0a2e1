"""Programs that a test starts, talks to and interrupts."""

from __future__ import annotations

import contextlib
import signal
import subprocess
from collections.abc import Iterator, Sequence


@contextlib.contextmanager
def interruptible() -> Iterator[None]:
    """Programs that are started meanwhile can be interrupted.

    Also where the tests run in the background of a shell, which has them ignore interrupts,
    and children inherit that.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


@contextlib.contextmanager
def begun(command: Sequence[str], **options: object) -> Iterator[subprocess.Popen]:
    """A program under way, its streams piped; interruptible, killed where the test fails."""
    with interruptible():
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, **options
        )
    with process:
        try:
            yield process
        finally:
            process.kill()  # does nothing to one that has ended
