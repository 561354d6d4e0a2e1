"""Where a reply is written while it comes, made safe for a terminal."""

from __future__ import annotations

from typing import TextIO

from mira_engine.api import ReplyPart, TokenDelta

from .sanitise import Sanitiser


class ReplyStreams:
    """Where a reply is written while it comes: the answer, and the thinking before it.

    Args:
        out: Takes the answer, `None` for nobody.
        err: Takes the thinking, `None` for nobody.
        is_dimmed: Whether the thinking is dimmed, for terminals.
    """

    def __init__(
        self, out: TextIO | None, err: TextIO | None = None, *, is_dimmed: bool = False
    ) -> None:
        self._out, self._err = out, err
        self._dim = ("\x1b[2m", "\x1b[0m") if is_dimmed else ("", "")
        self._sanitisers = {part: Sanitiser() for part in ReplyPart}
        self._last = dict.fromkeys(ReplyPart, "")

    def write(self, delta: TokenDelta) -> None:
        """Writes a piece of the reply, made safe for a terminal."""
        text = self._sanitisers[delta.part].feed(delta.text)
        is_thinking = delta.part is ReplyPart.THINKING
        if not is_thinking and not self._last[ReplyPart.ANSWER]:
            self._end_thinking()
        # Noted before it is written: an interrupt in between must not cost the line's end.
        self._last[delta.part] = delta.text or self._last[delta.part]
        stream = self._err if is_thinking else self._out
        if stream is not None and text:
            stream.write(f"{self._dim[0]}{text}{self._dim[1]}" if is_thinking else text)
            stream.flush()

    def close(self) -> None:
        """Ends the last line."""
        self._end_thinking()
        last = self._last[ReplyPart.ANSWER]
        if self._out is not None and last and not last.endswith("\n"):
            self._out.write("\n")
            self._out.flush()

    def _end_thinking(self) -> None:
        last = self._last[ReplyPart.THINKING]
        if self._err is not None and last and not last.endswith("\n"):
            self._err.write("\n")
            self._err.flush()
        self._last[ReplyPart.THINKING] = ""
