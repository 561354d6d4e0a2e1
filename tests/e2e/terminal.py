"""A terminal for tests: a program in a pseudo-terminal, and the screen it has drawn.

Owns the child process and an emulated screen. Everything waits on output with a time
limit, nothing sleeps; a wait that fails shows the screen as it was. One thread; the
child is only read while a wait runs.

    with Terminal([sys.executable, "-m", "program"], columns=100, lines=30) as terminal:
        terminal.wait_for("Ready")
        terminal.type("hello\r")
        terminal.press("escape")
        assert terminal.wait_exit() == 0
"""

from __future__ import annotations

import os
import re
import signal
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import pexpect
import pyte
from programs import interruptible

DEFAULT_TIMEOUT_S = 120.0
"""Only a failure takes so long."""

KEYS = {
    "enter": "\r",
    "escape": "\x1b",
    "tab": "\t",
    "backspace": "\x7f",
    "up": "\x1b[A",
    "down": "\x1b[B",
    "right": "\x1b[C",
    "left": "\x1b[D",
    "home": "\x1b[H",
    "end": "\x1b[F",
    "pageup": "\x1b[5~",
    "pagedown": "\x1b[6~",
    "f1": "\x1bOP",
    "f2": "\x1bOQ",
    "f3": "\x1bOR",
    "f4": "\x1bOS",
}
"""What a terminal sends for a key; `ctrl+<letter>` is worked out."""

# Sequences that newer terminals understand and the emulator would print in part: keyboard
# protocols, mode queries, and strings meant for the terminal itself.
_NOT_EMULATED = re.compile(
    rb"\x1b\[[<>=][0-9;:]*[A-Za-z]"
    rb"|\x1b\[\??[0-9;]*\$[A-Za-z]"
    rb"|\x1b\[\?[0-9;]*u"
    rb"|\x1b[P_^X][^\x1b]*\x1b\\"
)
_LEFT_SCREEN = b"\x1b[?1049l"
_UNFINISHED = re.compile(rb"\x1b(?:\[[0-9;:?<>=$]*|[P_^X][^\x1b]*\x1b?)?$")


class ScreenTimeoutError(AssertionError):
    """The screen did not show what was waited for; the message holds the screen."""


class Terminal:
    """A running program and its screen.

    Args:
        command: Program and arguments.
        columns: Width of the screen in cells.
        lines: Height of the screen in cells.
        environment: Variables added to this process's own.
        folder: Working folder of the program.
        timeout_s: Seconds that a wait takes at most unless it says otherwise.
    """

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        columns: int = 100,
        lines: int = 30,
        environment: Mapping[str, str] | None = None,
        folder: Path | None = None,
        timeout_s: float = DEFAULT_TIMEOUT_S,
    ) -> None:
        program, *arguments = [str(part) for part in command]
        self.timeout_s = timeout_s
        self.is_given_back = False
        """Whether the program has left its own screen for the one before it."""
        self._screen = pyte.Screen(columns, lines)
        self._stream = pyte.ByteStream(self._screen)
        self._pending = b""
        with interruptible():
            self._child = pexpect.spawn(
                program,
                arguments,
                dimensions=(lines, columns),
                cwd=folder,
                env={
                    **os.environ,
                    "TERM": "xterm-256color",
                    "COLORTERM": "truecolor",
                    "LANG": "C.UTF-8",
                    **(environment or {}),
                },
            )
        self._child.delaybeforesend = None

    def __enter__(self) -> Terminal:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    @property
    def pid(self) -> int:
        """Process id of the program."""
        return self._child.pid

    @property
    def text(self) -> str:
        """The screen as lines, trailing blanks removed."""
        return "\n".join(line.rstrip() for line in self._screen.display)

    @property
    def cursor_line(self) -> str:
        """The line that the cursor is in, where the program puts it there."""
        return self._screen.display[self._screen.cursor.y].rstrip()

    @property
    def is_alive(self) -> bool:
        """Whether the program still runs."""
        return self._child.isalive()

    def dump(self) -> str:
        """The screen in a frame, for messages."""
        edge = "+" + "-" * self._screen.columns + "+"
        rows = [f"|{row}|" for row in self._screen.display]
        return "\n".join([edge, *rows, edge])

    def type(self, text: str) -> None:
        """Sends text as if typed; `\\r` is Enter."""
        self._child.send(text.encode())

    def paste(self, text: str) -> None:
        """Sends text as a bracketed paste."""
        self.type(f"\x1b[200~{text}\x1b[201~")

    def press(self, key: str) -> None:
        """Sends one key by name, for example `enter`, `escape`, `ctrl+q`.

        Raises:
            KeyError: No such key is known.
        """
        if key.startswith("ctrl+") and len(key) == 6 and key[5].isalpha():
            self.type(chr(ord(key[5].upper()) - ord("@")))
        else:
            self.type(KEYS[key])

    def resize(self, columns: int, lines: int) -> None:
        """Changes the size of the terminal; the program gets a SIGWINCH."""
        self._screen.resize(lines, columns)
        self._child.setwinsize(lines, columns)

    def send_signal(self, number: signal.Signals) -> None:
        """Sends a signal to the program alone."""
        self._child.kill(number)

    def wait_for(self, *texts: str, timeout_s: float | None = None) -> str:
        """Waits until the screen shows all of `texts`, and returns the screen.

        Raises:
            ScreenTimeoutError: They did not appear in time, or the program ended first.
        """
        return self.wait_until(
            lambda screen: all(text in screen for text in texts),
            what=" and ".join(map(repr, texts)),
            timeout_s=timeout_s,
        )

    def wait_gone(self, text: str, timeout_s: float | None = None) -> str:
        """Waits until the screen no longer shows `text`, and returns the screen.

        Raises:
            ScreenTimeoutError: It was still there, or the program ended first.
        """
        return self.wait_until(
            lambda screen: text not in screen, what=f"no {text!r}", timeout_s=timeout_s
        )

    def wait_for_cursor_at(self, text: str, timeout_s: float | None = None) -> str:
        """Waits until the cursor is in a line with `text`, and returns the screen.

        Programs hand keys on at their own pace: who moves the cursor and types at once may
        type into the field before.

        Raises:
            ScreenTimeoutError: It did not come there in time, or the program ended first.
        """
        return self.wait_until(
            lambda _: text in self.cursor_line,
            what=f"the cursor beside {text!r}",
            timeout_s=timeout_s,
        )

    def wait_until(
        self, is_there: Callable[[str], bool], *, what: str, timeout_s: float | None = None
    ) -> str:
        """Waits until `is_there(screen text)` holds, and returns the screen.

        Raises:
            ScreenTimeoutError: It did not hold in time, or the program ended first.
        """
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        while not is_there(self.text):
            remaining = deadline - time.monotonic()
            if remaining <= 0:
                raise ScreenTimeoutError(f"Waited for {what}; the screen is\n{self.dump()}")
            if not self._read(remaining) and not is_there(self.text):
                raise ScreenTimeoutError(
                    f"The program ended before {what}; the screen is\n{self.dump()}"
                )
        return self.text

    def wait_exit(self, timeout_s: float | None = None) -> int:
        """Waits until the program ends.

        Returns:
            Its exit status; 128 + the signal's number where a signal ended it.

        Raises:
            ScreenTimeoutError: It still ran when the time was up.
        """
        deadline = time.monotonic() + (self.timeout_s if timeout_s is None else timeout_s)
        while self._read(max(0.0, deadline - time.monotonic())):
            if time.monotonic() >= deadline:
                raise ScreenTimeoutError(f"The program does not end; the screen is\n{self.dump()}")
        self._child.wait()
        if self._child.signalstatus is not None:
            return 128 + self._child.signalstatus
        return self._child.exitstatus

    def close(self) -> None:
        """Ends the program if it still runs, first by hanging up."""
        self._child.close(force=True)

    def _read(self, timeout_s: float) -> bool:
        """Feeds what the program writes next to the screen; False at its end."""
        try:
            data = self._child.read_nonblocking(size=65536, timeout=timeout_s)
        except pexpect.TIMEOUT:
            return True
        except pexpect.EOF:
            return False
        data = self._pending + data
        self.is_given_back = self.is_given_back or _LEFT_SCREEN in data
        unfinished = _UNFINISHED.search(data)
        cut = unfinished.start() if unfinished else len(data)
        self._pending = data[cut:]
        self._stream.feed(_NOT_EMULATED.sub(b"", data[:cut]))
        return True
