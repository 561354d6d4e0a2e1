"""Which way a text is copied, and that it says so."""

from __future__ import annotations

import pyperclip
import pytest
from mira_app.clipboard import ClipboardError, ClipboardRoute, copy_text, has_native_clipboard


def has(*programs: str):
    return lambda name: f"/usr/bin/{name}" if name in programs else None


@pytest.mark.parametrize(
    ("environ", "platform", "programs", "is_native"),
    [
        ({"DISPLAY": ":0"}, "linux", ["xclip"], True),
        ({"WAYLAND_DISPLAY": "w"}, "linux", ["wl-copy"], True),
        ({"DISPLAY": ":0"}, "linux", ["wl-copy"], False),
        ({}, "linux", ["xclip", "wl-copy"], False),
        ({}, "darwin", ["pbcopy"], True),
        ({"SSH_CONNECTION": "1"}, "darwin", ["pbcopy"], False),
        ({"SSH_TTY": "/dev/pts/1", "DISPLAY": ":0"}, "linux", ["xclip"], False),
    ],
)
def test_native_clipboard_is_used_on_this_machines_screen_only(
    environ, platform, programs, is_native
):
    assert has_native_clipboard(environ, platform=platform, which=has(*programs)) is is_native


def copied(*, is_native: bool, copy_natively=None, ask_terminal=None) -> tuple:
    native, terminal = [], []
    route = copy_text(
        "text",
        environ={},
        ask_terminal=ask_terminal or terminal.append,
        copy_natively=copy_natively or native.append,
        has_native=lambda environ: is_native,
    )
    return route, native, terminal


def raising(error: Exception):
    def fail(text: str) -> None:
        raise error

    return fail


def test_text_goes_one_way_only():
    assert copied(is_native=True) == (ClipboardRoute.NATIVE, ["text"], [])
    assert copied(is_native=False) == (ClipboardRoute.TERMINAL, [], ["text"])


def test_native_program_that_fails_leaves_it_to_the_terminal():
    for error in (pyperclip.PyperclipException("no"), OSError("gone")):
        route, _, terminal = copied(is_native=True, copy_natively=raising(error))
        assert (route, terminal) == (ClipboardRoute.TERMINAL, ["text"])


def test_no_way_left_says_what_to_do():
    with pytest.raises(ClipboardError) as caught:
        copied(is_native=False, ask_terminal=raising(OSError("closed")))
    assert "mouse" in caught.value.hint


def test_nothing_to_copy_is_said():
    with pytest.raises(ClipboardError, match="nothing"):
        copy_text("", environ={}, ask_terminal=print)
