"""What `mira-chat doctor` reports: the program's own facts, then the engine's.

The first part needs no engine, so that it is there when the engine cannot start; why it
cannot is then a fact like others. Changes nothing.
"""

from __future__ import annotations

import json
import locale
import os
import platform
import shutil
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from mira_engine.api import (
    DescribeMachine,
    FactMark,
    MachineDescribed,
    MachineFact,
    MiraError,
    to_plain,
)

from .config_report import ConfigReport
from .engine_client import EngineClient
from .paths import CONFIG_VARIABLE, DATA_DIR_VARIABLE
from .sanitise import sanitise
from .settings import Settings
from .settings_file import OpenedSettings

_UNICODE_REMEDY = "Set PYTHONUTF8=1" if sys.platform == "win32" else "Set LANG to a UTF-8 locale"

_MIN_COLUMNS, _MIN_LINES = 60, 15
"""Below this the screens are cramped."""


def program_facts(environ: Mapping[str, str], folders: Mapping[str, Path]) -> Iterator[MachineFact]:
    """Yields what holds without an engine.

    Args:
        environ: Environment variables.
        folders: Where the program keeps its files, by what is in them.
    """
    from .commands import program_version

    yield MachineFact(code="mira-chat", text=program_version())
    yield MachineFact(code="python", text=f"{platform.python_version()} at {sys.executable}")
    yield MachineFact(code="system", text=f"{platform.system()} {platform.release()}")
    try:
        yield MachineFact(code="textual", text=version("textual"))
    except PackageNotFoundError:
        yield MachineFact(
            code="textual",
            text="not installed",
            mark=FactMark.PROBLEM,
            hint="Install mira-chat again; until then there is mira-chat --plain.",
        )
    yield from _terminal(environ)
    for what, folder in folders.items():
        yield _folder(what, folder)


def _terminal(environ: Mapping[str, str]) -> Iterator[MachineFact]:
    term = environ.get("TERM", "")
    size = shutil.get_terminal_size()
    colours = "no colours, as NO_COLOR asks" if environ.get("NO_COLOR") else ""
    parts = (f"TERM={term or 'unset'}", f"{size.columns} by {size.lines}", colours)
    shown = ", ".join(part for part in parts if part)
    if not sys.stdout.isatty():
        yield MachineFact(code="terminal", text="none: the output goes elsewhere")
    elif term == "dumb" or (not term and sys.platform != "win32"):  # Windows sets none.
        yield MachineFact(
            code="terminal",
            text=shown,
            mark=FactMark.NOTE,
            hint="It draws nothing, so chats are line by line.",
        )
    elif size.columns < _MIN_COLUMNS or size.lines < _MIN_LINES:
        yield MachineFact(
            code="terminal",
            text=shown,
            mark=FactMark.NOTE,
            hint=f"{_MIN_COLUMNS} by {_MIN_LINES} or more shows the panels, too.",
        )
    else:
        yield MachineFact(code="terminal", text=shown)
    encoding = locale.getpreferredencoding(False)
    is_unicode = encoding.lower().replace("-", "") == "utf8"
    yield MachineFact(
        code="encoding",
        text=encoding,
        mark=FactMark.OK if is_unicode else FactMark.NOTE,
        hint="" if is_unicode else f"{_UNICODE_REMEDY}, or some characters show as ?.",
    )


def _folder(what: str, folder: Path) -> MachineFact:
    """Whether a folder, or the first one above it that is there, can be written."""
    nearest = folder
    while not nearest.exists() and nearest != nearest.parent:
        nearest = nearest.parent
    variable = CONFIG_VARIABLE if what == "settings-folder" else DATA_DIR_VARIABLE
    is_usable = nearest.is_dir() and os.access(nearest, os.W_OK | os.X_OK)
    return MachineFact(
        code=what,
        text=str(folder) if is_usable else f"{folder} cannot be written",
        mark=FactMark.OK if is_usable else FactMark.PROBLEM,
        hint="" if is_usable else f"Let this account write there, or set {variable}.",
    )


def settings_facts(opened: OpenedSettings, report: ConfigReport) -> Iterator[MachineFact]:
    """Yields whether the settings can be used, each mistake in them by itself.

    Args:
        opened: The settings in force.
        report: What `mira-chat config` finds beside it: looks and keys, and variables.
    """
    known = [str(problem) for problem in opened.problems]
    problems = [
        *opened.problems,
        *(problem for problem in report.problems if str(problem) not in known),
    ]
    if not problems:
        state = "" if opened.file.is_there else "none, so all settings have their defaults: "
        yield MachineFact(code="settings", text=f"{state}{opened.file.path}")
    for problem in problems:
        yield MachineFact(
            code="settings",
            text=problem.message,
            mark=FactMark.PROBLEM,
            hint=problem.hint or "Mend the file; mira-chat config shows what is in force.",
        )
    for note in report.notes:
        yield MachineFact(code="variable", text=note.message, mark=FactMark.NOTE, hint=note.hint)


def engine_facts(
    make_client: Callable[[], EngineClient], settings: Settings
) -> tuple[MachineFact, ...]:
    """Asks the engine; where it cannot start, that is the one fact, with its log's path."""
    client = make_client()
    try:
        call = client.submit(
            DescribeMachine(
                request_id=client.new_request_id(), model=settings.model, config=settings.engine
            )
        )
        described = [event for event in call if isinstance(event, MachineDescribed)]
        return (MachineFact(code="engine", text="starts and answers"), *described[-1].facts)
    except MiraError as error:
        log = f"Its log is {client.log_path}."
        return (
            MachineFact(
                code="engine",
                text=f"cannot be asked: {error.message}",
                mark=FactMark.PROBLEM,
                hint=error.hint if log in error.hint else f"{log} {error.hint}".strip(),
            ),
        )
    finally:
        client.close()


def report_lines(facts: Sequence[MachineFact]) -> Iterator[str]:
    """Yields a line for each fact, a hint below each that is not ok, and the sum of it."""
    width = max(len(fact.code) for fact in facts)
    for fact in facts:
        first, *others = sanitise(fact.text).splitlines() or [""]
        yield f"{fact.mark:<8} {fact.code:<{width}}  {first}"
        indent = " " * (width + 11)
        for line in others:
            yield indent + line
        if fact.hint and fact.mark is not FactMark.OK:
            yield f"{indent}hint: {sanitise(fact.hint)}"
    marks = Counter(fact.mark for fact in facts)
    if not marks[FactMark.PROBLEM] and not marks[FactMark.NOTE]:
        yield "Everything is as it should be."
        return
    problems, notes = marks[FactMark.PROBLEM], marks[FactMark.NOTE]
    yield (
        f"{problems} problem{'' if problems == 1 else 's'}, "
        f"{notes} note{'' if notes == 1 else 's'}, {marks[FactMark.OK]} ok."
    )


def report_json(facts: Sequence[MachineFact]) -> str:
    """Returns the facts as one JSON object, ASCII only."""
    is_well = all(fact.mark is not FactMark.PROBLEM for fact in facts)
    return json.dumps({"is_well": is_well, "facts": [to_plain(fact) for fact in facts]})
