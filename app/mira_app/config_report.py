"""What `mira-chat config` says: each setting, its value, and where that comes from.

Reads the settings file and the environment; a mistaken file is reported, not refused,
since this is the command that finds the mistake.
"""

from __future__ import annotations

import difflib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

from mira_engine.api import ConfigError

from .paths import CONFIG_VARIABLE, DATA_DIR_VARIABLE, is_config_named
from .setting_fields import FIELDS, Section, SettingField
from .settings import (
    VARIABLE_PREFIX,
    Chosen,
    Origin,
    build_settings,
    choose_settings,
    variable_of,
)
from .settings_file import SettingsFile, read_settings_file, write_default_file

_NO_VALUE = "-"


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigRow:
    """One setting in force.

    Attributes:
        setting: Its line of the table.
        value: What a settings file would hold, `None` for no value.
        origin: Where it comes from.
        source: The same for people, with the variable's name.
    """

    setting: SettingField
    value: object
    origin: Origin
    source: str


@dataclass(frozen=True, slots=True, kw_only=True)
class ConfigReport:
    """Every setting in force.

    Attributes:
        file: The settings file.
        rows: A line for each setting.
        problems: What is wrong with the file or a variable.
        notes: Variables that look like settings and are none.
    """

    file: SettingsFile
    rows: tuple[ConfigRow, ...]
    problems: tuple[ConfigError, ...]
    notes: tuple[ConfigError, ...] = ()

    def lines(self) -> list[str]:
        """Returns the report for people, section by section."""
        state = "" if self.file.is_there else " (not there; `mira-chat config --init` writes it)"
        lines = [f"settings file: {self.file.path}{state}"]
        width = max(len(row.setting.name) for row in self.rows)
        texts = {row.setting.name: _value_text(row.value) for row in self.rows}
        value_width = min(24, max(len(text) for text in texts.values()))
        for section in Section:
            lines += ["", f"[{section}]"]
            for row in self.rows:
                if row.setting.section is section:
                    name = row.setting.name
                    value = texts[name].ljust(value_width)
                    lines.append(f"{name.ljust(width)}  {value}  {row.source}".rstrip())
        told = [("problem", each) for each in self.problems]
        told += [("note", each) for each in self.notes]
        for kind, each in told:
            lines += ["", f"{kind}: {each.message}"]
            if each.hint:
                lines.append(f"hint: {each.hint}")
        return lines

    def to_json(self) -> str:
        """Returns the report as one JSON object."""
        report = {
            "file": str(self.file.path),
            "is_there": self.file.is_there,
            "settings": {
                row.setting.name: {
                    "value": row.value,
                    "origin": row.origin.value,
                    "section": row.setting.section.value,
                    "about": row.setting.about,
                }
                for row in self.rows
            },
            "problems": [problem.to_fields() for problem in self.problems],
            "notes": [note.to_fields() for note in self.notes],
        }
        return json.dumps(report)


def make_config_report(
    environ: Mapping[str, str], path: Path, flags: Mapping[str, object] | None = None
) -> ConfigReport:
    """Gathers the report; raises nothing for what the file or a variable says."""
    file = read_settings_file(path, is_named=is_config_named(environ))
    usable, mistakes = _usable_variables(environ)
    chosen = choose_settings(flags or {}, usable, file.values)
    rows = tuple(
        ConfigRow(
            setting=setting,
            value=setting.shown(chosen[setting.name].value),
            origin=chosen[setting.name].origin,
            source=_source(setting, chosen[setting.name].origin, usable),
        )
        for setting in FIELDS
    )
    interface = _interface_problems(chosen, file, usable)
    return ConfigReport(
        file=file,
        rows=rows,
        problems=(*file.problems, *mistakes, *interface),
        notes=tuple(variable_notes(environ)),
    )


def _usable_variables(environ: Mapping[str, str]) -> tuple[dict[str, str], list[ConfigError]]:
    """Takes out what cannot be used; a setting may have two variables, both wrong."""
    usable, mistakes = dict(environ), []
    for setting in FIELDS:
        while (variable := variable_of(setting, usable)) in usable:
            try:
                choose_settings({}, {variable: usable[variable]})
            except ConfigError as error:
                mistakes.append(error)
                del usable[variable]
            else:
                break
    return usable, mistakes


def variable_notes(environ: Mapping[str, str]) -> Iterator[ConfigError]:
    """Yields a note for each variable that is named like a setting and is none."""
    known = [VARIABLE_PREFIX + setting.name.upper() for setting in FIELDS]
    known += [DATA_DIR_VARIABLE, CONFIG_VARIABLE]
    for variable in sorted(environ):
        if variable.startswith(VARIABLE_PREFIX) and variable not in known:
            close = difflib.get_close_matches(variable, known, n=1, cutoff=0.8)
            yield ConfigError(
                f"The variable {variable} is no setting and changes nothing.",
                hint=f"Did you mean {close[0]}?" if close else "Take it away, or correct its name.",
            )


def _interface_problems(
    chosen: Mapping[str, Chosen], file: SettingsFile, environ: Mapping[str, str]
) -> Iterator[ConfigError]:
    """Yields what only the terminal interface knows to be wrong; it is loaded where it must."""
    if all(chosen[name].origin is Origin.DEFAULT for name in ("theme", "keymap")):
        return
    try:
        from .tui.settings_check import interface_problems
    except ModuleNotFoundError:
        return  # Without the interface nothing looks like anything; the doctor says that.
    try:
        interface = build_settings(chosen).interface
    except ConfigError as error:
        yield error  # Each value holds by itself: together they do not.
        return
    for name, key, problem in interface_problems(interface):
        place, hint = file.place_of(name, chosen[name].value, key), problem.hint
        if chosen[name].origin is Origin.ENVIRONMENT:
            place = ""
            setting = next(each for each in FIELDS if each.name == name)
            hint = f"{hint} It comes from the variable {variable_of(setting, environ)}."
        yield ConfigError(f"{place}{problem.message}", hint=hint)


def init_config(path: Path) -> str:
    """Writes the documented settings file; returns the line that says so.

    Raises:
        ConfigError: There is a file already.
        UnwritableFileError: It cannot be written.
    """
    write_default_file(path)
    return f"wrote {path}; every setting in it is documented and none is changed."


def _source(setting: SettingField, origin: Origin, environ: Mapping[str, str]) -> str:
    if origin is Origin.ENVIRONMENT:
        return f"{origin} ({variable_of(setting, environ)})"
    return origin.value


def _value_text(value: object) -> str:
    if value is None or value == {}:
        return _NO_VALUE
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, Mapping):
        return " ".join(f"{binding}={key}" for binding, key in value.items())
    return str(value) if value != "" else '""'
