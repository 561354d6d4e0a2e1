"""Whose turn it is: one reply at a time, the others wait in line. Runs in one event loop."""

from __future__ import annotations

import asyncio

from .errors import ApiError, shutting_down

_RETRY_S = "5"


class Turn:
    """A place in the line."""

    def __init__(self, line: Line) -> None:
        self._line = line
        self.has_moved = asyncio.Event()
        """Set whenever the place is another one, or the line is closed."""

    @property
    def num_before(self) -> int:
        """How many are before this one, the one whose turn it is included."""
        return self._line.place_of(self)

    async def wait_moved(self, timeout_s: float) -> None:
        """Waits until the place is another one, or the time is up.

        Raises:
            ApiError: The line was closed.
        """
        try:
            await asyncio.wait_for(self.has_moved.wait(), timeout_s)
        except TimeoutError:
            return
        self.has_moved.clear()
        if self._line.is_closed:
            raise shutting_down()


class Line:
    """Those whose turn it is or will be, in the order they came.

    Args:
        max_waiting: Most that may wait besides the one whose turn it is.
    """

    def __init__(self, max_waiting: int) -> None:
        self._max_waiting = max_waiting
        self._turns: list[Turn] = []
        self.is_closed = False

    def __len__(self) -> int:
        return len(self._turns)

    def join(self) -> Turn:
        """Takes a place at the end.

        Raises:
            ApiError: Too many wait already, or the line is closed.
        """
        if self.is_closed:
            raise shutting_down()
        if len(self._turns) > self._max_waiting:
            raise ApiError(
                503,
                f"The server is busy: {len(self._turns) - 1} requests wait already.",
                kind="server_error",
                code="queue_full",
                headers={"Retry-After": _RETRY_S},
            )
        self._turns.append(Turn(self))
        return self._turns[-1]

    def leave(self, turn: Turn) -> None:
        """Gives a place up; those behind move on."""
        behind = self._turns[self.place_of(turn) + 1 :]
        self._turns.remove(turn)
        for each in behind:
            each.has_moved.set()

    def place_of(self, turn: Turn) -> int:
        """Returns how many are before a place."""
        return self._turns.index(turn)

    def close(self) -> None:
        """Sends away all who wait, and those who come."""
        self.is_closed = True
        for turn in self._turns[1:]:
            turn.has_moved.set()
