"""Cuts Markdown that is still arriving into passages that can be shown one by one.

What a screen does for a new piece of text grows with the text it stands in. So a reply is
shown as passages of a few kilobytes: the last one grows, the others are finished. A cut
is made where Markdown does not mind: before a line that follows an empty one, outside of
code. Only a block that is far too long is cut inside; code is then closed and opened anew.
Pure.
"""

from __future__ import annotations

import re

SOFT_CHARS = 2000
"""A passage this long ends at the next good place."""

HARD_CHARS = 6000
"""A passage this long ends at the next line, a line this long where it stands."""

_LANGUAGE_CHARS = 40

_OPENING = re.compile(r"^\s*(?P<mark>`{3,}(?=[^`]*$)|~{3,})")


class PassageSplitter:
    """Splits a stream; the passages do not depend on how the text was cut into pieces."""

    def __init__(self) -> None:
        self._num_chars = 0
        self._line = ""
        self._is_after_blank = False
        self._opening = ""  # the line that opened the code the stream stands in

    def feed(self, text: str) -> list[str]:
        """Returns what to append to the passage under way, then one text per new passage."""
        pieces = [""]
        for part in text.splitlines(keepends=True):
            self._add_part(part, pieces)
        return pieces

    def _add_part(self, part: str, pieces: list[str]) -> None:
        """Adds one line or a part of one."""
        while part:
            if self._must_cut(part[0]):
                self._cut(pieces)
            room = HARD_CHARS - len(self._line)
            head, part = part[:room], part[room:]
            pieces[-1] += head
            self._num_chars += len(head)
            self._line += head
            if head.endswith("\n"):
                self._end_line()

    def _must_cut(self, first: str) -> bool:
        """Whether a new passage begins with this character."""
        if len(self._line) >= HARD_CHARS:
            return True
        if self._line or first == "\n":
            return False
        if self._opening:
            # A line of the code's own marks may be its end: it stays with its code.
            return self._num_chars >= HARD_CHARS and first != self._opening.lstrip()[0]
        is_block = self._is_after_blank and not first.isspace()
        return self._num_chars >= (SOFT_CHARS if is_block else HARD_CHARS)

    def _cut(self, pieces: list[str]) -> None:
        again = ""
        if self._opening:
            mark = self._mark(self._opening)
            pieces[-1] += f"\n{mark}\n" if self._line else f"{mark}\n"
            language = self._opening.strip()[len(mark) :].split()[:1]
            again = mark + "".join(language)[:_LANGUAGE_CHARS] + "\n"
        pieces.append(again)
        self._num_chars, self._line = len(again), ""

    def _end_line(self) -> None:
        line, self._line = self._line.rstrip("\n"), ""
        self._is_after_blank = not line.strip()
        mark = self._mark(line)
        if not self._opening:
            self._opening = line if mark else ""
        elif mark == line.strip() and mark.startswith(self._mark(self._opening)):
            self._opening = ""

    @staticmethod
    def _mark(line: str) -> str:
        found = _OPENING.match(line)
        return found["mark"] if found else ""


def split_passages(text: str) -> list[str]:
    """Returns the passages of a text that is complete."""
    return PassageSplitter().feed(text)


def code_blocks(text: str) -> list[tuple[str, str]]:
    """Returns language and code of every fenced block; one left open counts as well."""
    blocks: list[tuple[str, list[str]]] = []
    opening = ""
    for line in text.split("\n"):
        found = _OPENING.match(line)
        if not opening:
            if found:
                opening = found["mark"]
                blocks.append((line.strip()[len(opening) :].strip(), []))
        elif found and found["mark"] == line.strip() and found["mark"].startswith(opening):
            opening = ""
        else:
            blocks[-1][1].append(line)
    return [(language, "\n".join(lines)) for language, lines in blocks]
