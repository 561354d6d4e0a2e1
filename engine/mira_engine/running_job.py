"""Which job runs, and who was asked to stop.

Knows neither what jobs are nor what computes them. The reader thread asks jobs to stop, the
main thread begins and ends them; every method may be called from either.
"""

from __future__ import annotations

import threading
from typing import Protocol

from .errors import CancelledError


class Stoppable(Protocol):
    """What computes jobs, and asks for itself whether to stop."""

    def cancel(self) -> None:
        """Stops what runs now as soon as can be. Any thread."""

    def clear_cancel(self) -> None:
        """Forgets that it was told to stop."""


class RunningJob:
    """The one job that runs, and those that were asked to stop, this one or a later one."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._request_id: str | None = None
        self._cancelled_ids: set[str] = set()
        self._computing: Stoppable | None = None
        self._ending = threading.Event()

    def begin(self, request_id: str) -> None:
        """A job begins; a stop that was meant for the one before does not reach it.

        Raises:
            CancelledError: It was asked to stop before.
        """
        with self._lock:
            if self._computing is not None:
                self._computing.clear_cancel()
            self._request_id = request_id
            is_cancelled = request_id in self._cancelled_ids
        if is_cancelled:
            raise CancelledError("Stopped before it began.")

    def end(self, request_id: str) -> None:
        """The job is over, however it went."""
        with self._lock:
            self._request_id = None
            self._cancelled_ids.discard(request_id)

    def cancel(self, request_id: str) -> None:
        """Asks a job to stop: at once where it runs, else when its turn comes."""
        with self._lock:
            self._cancelled_ids.add(request_id)
            if self._computing is not None and self._request_id == request_id:
                self._computing.cancel()  # Under the lock: no other job may have begun by then.

    def cancel_for_good(self) -> None:
        """Asks the job that runs to stop, as no other will follow."""
        self._ending.set()
        with self._lock:
            if self._request_id is not None:
                self._cancelled_ids.add(self._request_id)
            if self._computing is not None:
                self._computing.cancel()

    def is_cancelled(self, request_id: str) -> bool:
        """Whether a job was asked to stop."""
        with self._lock:
            return request_id in self._cancelled_ids

    def is_ending(self) -> bool:
        """Whether the process is about to end."""
        return self._ending.is_set()

    def attach(self, computing: Stoppable) -> None:
        """Tells of stops from now on, and of one that came when there was none to tell."""
        with self._lock:
            self._computing = computing
            if self._request_id in self._cancelled_ids:
                computing.cancel()

    def detach(self) -> None:
        """Lets go of what computes."""
        with self._lock:
            self._computing = None
