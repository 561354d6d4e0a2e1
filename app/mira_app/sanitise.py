"""Model text made safe for a terminal.

Removes escape sequences, C0 and C1 control characters (line feed and tab stay) and
bidirectional overrides; lone surrogates become U+FFFD. The one place where this is
done: everything that shows model text passes it through here. Pure.
"""

from __future__ import annotations

import enum
import re

MAX_STRING_CHARS = 4096
"""Longest OSC, DCS, ... that is swallowed. An unfinished one cannot eat a whole reply."""

_BIDI = "\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069"
_UNSAFE = re.compile(f"[\x00-\x08\x0b-\x1f\x7f-\x9f{_BIDI}\ud800-\udfff]")
_C1_CSI = "\x9b"
_C1_STRINGS = "\x90\x98\x9d\x9e\x9f"
_ESC_STRINGS = "PX]^_"


class _State(enum.Enum):
    GROUND = enum.auto()
    ESCAPE = enum.auto()
    INTERMEDIATE = enum.auto()
    CSI = enum.auto()
    STRING = enum.auto()


class Sanitiser:
    """Sanitises a stream; a sequence may be split over any number of pieces.

    `feed(a) + feed(b)` equals `feed(a + b)`. A character that cannot belong to the
    sequence it stands in ends that sequence and is judged anew, so ordinary text after a
    broken sequence is kept.
    """

    def __init__(self) -> None:
        self._state = _State.GROUND
        self._num_string_chars = 0

    def feed(self, text: str) -> str:
        """Returns what of `text` may be shown."""
        if self._state is _State.GROUND and not _UNSAFE.search(text):
            return text
        return "".join(kept for char in text if (kept := self._step(char)))

    def _step(self, char: str) -> str:
        state = self._state
        if state is _State.STRING:
            return self._step_string(char)
        if state is _State.ESCAPE:
            if char == "[":
                self._state = _State.CSI
                return ""
            if char in _ESC_STRINGS:
                self._begin_string()
                return ""
            if "\x20" <= char <= "\x2f":
                self._state = _State.INTERMEDIATE
                return ""
            self._state = _State.GROUND
            if "\x30" <= char <= "\x7e":
                return ""
        elif state is _State.INTERMEDIATE:
            if "\x20" <= char <= "\x2f":
                return ""
            self._state = _State.GROUND
            if "\x30" <= char <= "\x7e":
                return ""
        elif state is _State.CSI:
            if "\x20" <= char <= "\x3f":
                return ""
            self._state = _State.GROUND
            if "\x40" <= char <= "\x7e":
                return ""
        return self._step_ground(char)

    def _step_ground(self, char: str) -> str:
        if not _UNSAFE.match(char):
            return char
        if char == "\x1b":
            self._state = _State.ESCAPE
        elif char == _C1_CSI:
            self._state = _State.CSI
        elif char in _C1_STRINGS:
            self._begin_string()
        elif "\ud800" <= char <= "\udfff":
            return "\ufffd"
        return ""

    def _begin_string(self) -> None:
        self._state = _State.STRING
        self._num_string_chars = 0

    def _step_string(self, char: str) -> str:
        self._num_string_chars += 1
        if char == "\x1b":
            self._state = _State.ESCAPE
        elif char in "\x07\x9c\x18\x1a":
            self._state = _State.GROUND
        elif char == "\n" or self._num_string_chars > MAX_STRING_CHARS:
            self._state = _State.GROUND
            return self._step_ground(char)
        return ""


def sanitise(text: str) -> str:
    """Sanitises a text that is complete."""
    return Sanitiser().feed(text)
