"""Where a prompt comes from: an argument, standard input, files, or several of them."""

from __future__ import annotations

import contextlib
import re
import sys
from collections.abc import Sequence
from pathlib import Path

from mira_engine.api import ConfigError, format_bytes

MAX_FILE_BYTES = 4 * 2**20
"""Most bytes of one attached file: more text than any context holds."""

_FENCE = re.compile(r"^`{3,}", re.MULTILINE)


def read_prompt(given: str | None, files: Sequence[Path] = ()) -> str:
    """Returns the prompt, the text of the files appended under their names.

    Args:
        given: The prompt itself, `-` for standard input. `None` is standard input too,
            unless there are files.
        files: Text files.

    Raises:
        ConfigError: There is none, or something is not UTF-8 text.
    """
    if given == "-" or (given is None and not files):
        prompt = _read_standard_input(is_asked_for=given is not None)
    else:
        prompt = _checked(given or "")
    parts = [prompt] if prompt.strip() else []
    parts += [_attached(path) for path in files]
    if not parts:
        raise ConfigError("The prompt is empty.", hint="Ask something.")
    return "\n\n".join(parts)


def _read_standard_input(*, is_asked_for: bool) -> str:
    if sys.stdin is None or (not is_asked_for and sys.stdin.isatty()):
        raise ConfigError("There is no prompt.", hint='Write: mira-chat run "your question".')
    # Not as the locale says: another encoding would pass for a strange question.
    with contextlib.suppress(AttributeError):
        sys.stdin.reconfigure(encoding="utf-8", errors="strict")
    try:
        return _checked(sys.stdin.read())
    except UnicodeError:
        raise _not_text("The prompt") from None


def _checked(prompt: str) -> str:
    try:
        prompt.encode("utf-8")
    except UnicodeError:
        raise _not_text("The prompt") from None
    return prompt


def _attached(path: Path) -> str:
    """Returns a file's name and, fenced, its text."""
    try:
        with path.open("rb") as file:
            data = file.read(MAX_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be read: {error.strerror}.", hint="Give a text file."
        ) from None
    if len(data) > MAX_FILE_BYTES:
        raise ConfigError(
            f"{path} is too large to attach: at most {format_bytes(MAX_FILE_BYTES)}.",
            hint="Attach the part that matters.",
        )
    try:
        text = data.decode("utf-8-sig")
    except UnicodeError:
        raise _not_text(str(path)) from None
    if "\x00" in text:
        raise ConfigError(f"{path} is no text: it holds zero bytes.", hint="Give a text file.")
    longest = max((len(fence) for fence in _FENCE.findall(text)), default=2)
    fence = "`" * (longest + 1)
    return f"{path.name}:\n{fence}\n{text.rstrip()}\n{fence}"


def _not_text(what: str) -> ConfigError:
    return ConfigError(
        f"{what} is not UTF-8 text.", hint="Convert it, for example with iconv -t utf-8."
    )
