"""Ends a reply at a text that it must not contain. Pure."""

from __future__ import annotations

from collections.abc import Sequence


class StopText:
    """Passes text on up to the first of the stop texts, which may come in pieces.

    What could still become one is held back.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        self._stops = tuple(stops)
        self._held = ""
        self.is_reached = False

    def push(self, text: str) -> str:
        """Takes the next piece; returns what is certainly before a stop."""
        if self.is_reached:
            return ""
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.is_reached = True
            before, self._held = self._held[: min(found)], ""
            return before
        safe = len(self._held) - self._num_begun()
        before, self._held = self._held[:safe], self._held[safe:]
        return before

    def flush(self) -> str:
        """Returns what was held back; the reply is over."""
        rest, self._held = self._held, ""
        return rest

    def _num_begun(self) -> int:
        """Returns how many characters at the end may be the beginning of a stop."""
        longest = max(map(len, self._stops), default=1) - 1
        for size in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0
