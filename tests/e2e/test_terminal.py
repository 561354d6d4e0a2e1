"""The test terminal itself: what it shows, waits for and reports."""

from __future__ import annotations

import signal
import sys

import pytest
from e2e.terminal import ScreenTimeoutError, Terminal


def python(code: str, **options) -> Terminal:
    return Terminal([sys.executable, "-c", code], **options)


def test_screen_shows_what_the_program_draws():
    code = r"print('\x1b[2J\x1b[3;5HHé 漢\x1b[1;1H\x1b[31mred\x1b[0m', end='', flush=True); input()"
    with python(code, columns=40, lines=6) as terminal:
        terminal.wait_for("red", "Hé")
        assert terminal.text.splitlines()[2].startswith("    Hé 漢")


def test_typed_text_reaches_the_program_and_its_status_returns():
    code = "name = input('name? '); print('hello', name); raise SystemExit(3)"
    with python(code) as terminal:
        terminal.wait_for("name?")
        terminal.type("Ada\r")
        terminal.wait_for("hello Ada")
        assert terminal.wait_exit() == 3


def test_waiting_in_vain_shows_the_screen():
    with python("print('here'); input()") as terminal:
        terminal.wait_for("here")
        with pytest.raises(ScreenTimeoutError, match=r"(?s)'there'.*\|here"):
            terminal.wait_for("there", timeout_s=0.05)


def test_program_that_ends_too_early_is_reported():
    with (
        python("print('bye')") as terminal,
        pytest.raises(ScreenTimeoutError, match=r"(?s)ended before 'more'.*\|bye"),
    ):
        terminal.wait_for("more")


def test_program_that_does_not_end_is_reported():
    with (
        python("print('up', flush=True); input()") as terminal,
        pytest.raises(ScreenTimeoutError, match="does not end"),
    ):
        terminal.wait_exit(timeout_s=0.05)


def test_resize_reaches_the_program():
    # Waited for, not handled: Python does not see a signal that comes just before it reads.
    code = (
        "import os, signal\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGWINCH])\n"
        "while True:\n"
        "    size = os.get_terminal_size()\n"
        "    print(f'{size.columns} by {size.lines}.', flush=True)\n"
        "    signal.sigwait([signal.SIGWINCH])"
    )
    with python(code, columns=60, lines=20) as terminal:
        terminal.wait_for("60 by 20.")
        terminal.resize(90, 25)
        terminal.wait_for("90 by 25.")


def test_cursor_is_waited_for():
    code = (
        r"print('one\ntwo\x1b[1;1H', end='', flush=True); input();"
        r"print('\x1b[2;2H', end='', flush=True); input()"
    )
    with python(code) as terminal:
        terminal.wait_for_cursor_at("one")
        with pytest.raises(ScreenTimeoutError, match="the cursor beside 'two'"):
            terminal.wait_for_cursor_at("two", timeout_s=0.05)
        terminal.type("\r")
        terminal.wait_for_cursor_at("two")


def test_keys_and_signals_reach_the_program():
    code = (
        "import sys, tty\n"
        "tty.setraw(0)\n"
        "print('ready', end='', flush=True)\n"
        "print(repr(sys.stdin.buffer.raw.read(1)), end='', flush=True)\n"
        "print(repr(sys.stdin.buffer.raw.read(1)), end='', flush=True)\n"
        "sys.stdin.buffer.raw.read(1)"
    )
    with python(code) as terminal:
        terminal.wait_for("ready")
        terminal.press("ctrl+q")
        terminal.wait_for(r"b'\x11'")
        terminal.press("escape")
        terminal.wait_for(r"b'\x1b'")
        terminal.send_signal(signal.SIGTERM)
        assert terminal.wait_exit() == 128 + signal.SIGTERM


def test_sequences_of_newer_terminals_leave_no_traces():
    """Also where a read ends in the middle of one."""
    code = (
        "import sys, tty\n"
        "tty.setraw(0)\n"
        "for part in (b'\\x1b[>1u\\x1b[?2026$p\\x1b[?u\\x1bP+q54\\x1b\\\\A\\x1b[', b'<u', b'B'):\n"
        "    sys.stdout.buffer.write(part); sys.stdout.flush()\n"
        "    sys.stdin.buffer.raw.read(1)"
    )
    with python(code) as terminal:
        terminal.wait_for("A")
        terminal.type("12")
        terminal.wait_for("B")
        assert "".join(terminal.text.split()) == "AB"


@pytest.mark.parametrize("columns", [80, 120])
def test_textual_program_is_drawn_and_answers_keys(columns):
    code = (
        "from textual.app import App\n"
        "from textual.widgets import Input, Label\n"
        "class Echo(App):\n"
        "    def compose(self):\n"
        "        yield Input(placeholder='say')\n"
        "        yield Label('nothing', id='out')\n"
        "    def on_input_submitted(self, event):\n"
        "        self.query_one('#out').update('you said ' + event.value)\n"
        "Echo().run()"
    )
    with python(code, columns=columns) as terminal:
        terminal.wait_for("say", "nothing")
        terminal.type("hello\r")
        terminal.wait_for("you said hello")
        terminal.press("ctrl+q")
        assert terminal.wait_exit() == 0
