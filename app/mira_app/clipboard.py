"""Copies text to where the person can paste it, and says where that is.

The system's own clipboard where there is one on this machine's screen; over SSH, or
without one, the terminal is asked to do it (OSC 52). Knows nothing of Textual.
"""

from __future__ import annotations

import enum
import shutil
import subprocess
import sys
from collections.abc import Callable, Mapping

import pyperclip
from mira_engine.api import MiraError


class ClipboardError(MiraError):
    """The text could not be copied."""


class ClipboardRoute(enum.StrEnum):
    """Where a text went."""

    NATIVE = "the system clipboard"
    TERMINAL = "the terminal's clipboard (OSC 52)"


_NATIVE_PROGRAMS = (
    ("WAYLAND_DISPLAY", "wl-copy"),
    ("DISPLAY", "xclip"),
    ("DISPLAY", "xsel"),
)


def has_native_clipboard(
    environ: Mapping[str, str],
    *,
    platform: str = sys.platform,
    which: Callable[[str], str | None] = shutil.which,
) -> bool:
    """Returns whether the person's own clipboard can be reached from here.

    Over SSH it cannot: a clipboard there is that of the other machine.
    """
    if environ.get("SSH_CONNECTION") or environ.get("SSH_TTY"):
        return False
    if platform == "darwin":
        return which("pbcopy") is not None
    if platform.startswith("win"):
        return True
    return any(environ.get(name) and which(program) for name, program in _NATIVE_PROGRAMS)


def copy_text(
    text: str,
    *,
    environ: Mapping[str, str],
    ask_terminal: Callable[[str], None],
    copy_natively: Callable[[str], None] = pyperclip.copy,
    has_native: Callable[[Mapping[str, str]], bool] = has_native_clipboard,
) -> ClipboardRoute:
    """Copies by the best way there is; may take as long as the clipboard's program does.

    Args:
        ask_terminal: Writes the text to the terminal as OSC 52.

    Raises:
        ClipboardError: Neither way worked, or there is nothing to copy.
    """
    if not text:
        raise ClipboardError("There is nothing to copy.")
    if has_native(environ):
        try:
            copy_natively(text)
        except (pyperclip.PyperclipException, OSError, subprocess.SubprocessError):
            pass  # the terminal may still do it, and the route says that it did
        else:
            return ClipboardRoute.NATIVE
    try:
        ask_terminal(text)
    except OSError as error:
        raise ClipboardError(
            f"The text could not be copied: {error}.",
            hint="Select it with the mouse while Shift is held.",
        ) from error
    return ClipboardRoute.TERMINAL
