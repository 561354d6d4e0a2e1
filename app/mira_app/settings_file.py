"""The settings file: read with every mistake located, written with comments kept.

What is wrong with a file never hides the rest of it: a syntax error costs the whole file,
any other mistake its own line. A command refuses to run with a mistaken file, because it
would do something else than was asked for; the app opens, takes what can be used and
tells the rest as notices.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from mira_engine.api import ConfigError

from .atomic_file import replace_file
from .paths import CONFIG_VARIABLE, is_config_named
from .setting_fields import FIELDS, FIELDS_BY_NAME, SECTION_TITLES, Section, SettingField
from .settings import Settings, build_settings, choose_settings

if TYPE_CHECKING:
    from tomlkit import TOMLDocument

_SYNTAX_PLACE = re.compile(
    r"^(?P<what>.*?) \(at (?P<place>line \d+, column \d+|end of document)\)$"
)
_LINE_WIDTH = 88


@dataclass(frozen=True, slots=True, kw_only=True)
class SettingsFile:
    """What a settings file holds.

    Attributes:
        path: Where it is, or would be.
        is_there: Whether it exists.
        values: Raw values that can be used, by setting name.
        problems: What cannot be used; each names the file and, where known, the line.
        text: The file as it is written.
    """

    path: Path
    is_there: bool = False
    values: Mapping[str, object] = field(default_factory=dict)
    problems: tuple[ConfigError, ...] = ()
    text: str = field(default="", repr=False)

    def place_of(self, name: str, value: object, key: str = "") -> str:
        """Says where the file sets a setting to this value, to stand before a message.

        Args:
            name: The setting.
            value: What was read of it.
            key: A line of it, where it is a whole table.

        Returns:
            Nothing where the value comes from elsewhere.
        """
        setting = FIELDS_BY_NAME[name]
        if name not in self.values or setting.read(self.values[name]) != value:
            return ""
        return _place(self.path, self.text, setting.section.value, key or name)


def read_settings_file(path: Path, *, is_named: bool = False) -> SettingsFile:
    """Reads a file; raises nothing: what is wrong is in `problems`.

    Args:
        path: The file.
        is_named: Whether the person named it: then it is a mistake that it is not there.
    """
    try:
        text = path.read_text(encoding="utf-8-sig")
        document = tomllib.loads(text)
    except FileNotFoundError:
        return SettingsFile(path=path, problems=(_absence_problem(path),) if is_named else ())
    except OSError as error:
        what = f"{path} cannot be read: {error.strerror or error}."
        problem = ConfigError(what, hint="Make it readable, or move it away.")
    except UnicodeDecodeError:
        problem = ConfigError(f"{path} is not UTF-8 text.", hint="Save it as UTF-8.")
    except tomllib.TOMLDecodeError as error:
        problem = _syntax_problem(path, text, str(error))
    except RecursionError:
        problem = ConfigError(f"{path} is nested too deeply.", hint="Settings are two levels deep.")
    else:
        return _take(path, text, document)
    return SettingsFile(path=path, is_there=True, problems=(problem,))


def _absence_problem(path: Path) -> ConfigError:
    return ConfigError(
        f"The settings file {path} is not there, though {CONFIG_VARIABLE} names it.",
        hint="Correct the variable; or `mira-chat config --init` writes the file.",
    )


def _syntax_problem(path: Path, text: str, said: str) -> ConfigError:
    found = _SYNTAX_PLACE.match(said)
    place = f", {found['place']}" if found else ""
    if found and not found["place"].startswith("line"):
        lines = text.split("\n")
        place = f", line {len(lines)}, column {len(lines[-1]) + 1} (the end)"
    what = found["what"] if found else said
    hint = 'Write name = value; texts stand in quotes: theme = "terminal".'
    return ConfigError(f"{path}{place} is not TOML: {what}.", hint=hint)


def _take(path: Path, text: str, document: Mapping[str, object]) -> SettingsFile:
    values: dict[str, object] = {}
    problems: list[ConfigError] = []
    for section, key, value in _flattened(document):
        try:
            setting = _find_setting(section, key, value)
            setting.read(value)
        except ConfigError as error:
            place = _place(path, text, section, key)
            problems.append(ConfigError(f"{place}{error.message}", hint=error.hint))
        else:
            values[setting.name] = value
    return SettingsFile(
        path=path, is_there=True, values=values, problems=tuple(problems), text=text
    )


def _place(path: Path, text: str, section: str | None, key: str) -> str:
    line = _find_line(text, section, key)
    return f"{path}, line {line}: " if line is not None else f"{path}: "


def _flattened(document: Mapping[str, object]) -> Iterable[tuple[str | None, str, object]]:
    """Yields section, key and value; the keymap is one value, and so is what is no table."""
    for key, value in document.items():
        is_section = isinstance(value, Mapping) and key in tuple(Section)
        if is_section and key != Section.KEYMAP:
            for inner, inner_value in value.items():
                yield key, inner, inner_value
        elif value != {} or key not in tuple(Section):
            yield None, key, value


def _find_setting(section: str | None, key: str, value: object) -> SettingField:
    setting = FIELDS_BY_NAME.get(key)
    if setting is not None:
        place = None if setting.is_table else setting.section.value
        if section == place:
            return setting
        where = f"[{setting.section}]"
        raise ConfigError(f"{key} belongs to {where}.", hint=f"Move it under a line {where}.")
    if section is None and isinstance(value, Mapping):
        raise ConfigError(f"There is no section [{key}].", hint=_nearest(key, tuple(Section)))
    raise ConfigError(f"There is no setting {key!r}.", hint=_nearest(key, FIELDS_BY_NAME))


def _nearest(word: str, known: Iterable[str]) -> str:
    known = tuple(str(name) for name in known)
    close = difflib.get_close_matches(word.lower().replace("-", "_"), known, n=1, cutoff=0.5)
    return f"Did you mean {close[0]}?" if close else f"Known: {', '.join(known)}."


def _find_line(text: str, section: str | None, key: str) -> int | None:
    """Finds where a key stands; good for every ordinary way to write one, else `None`."""
    name = rf"""["']?{re.escape(key)}["']?"""
    begins = re.compile(rf"^\s*(?:{name}\s*[=.]|\[\s*{name}\s*[\].])")
    current: str | None = None
    for number, line in enumerate(text.splitlines(), start=1):
        if begins.match(line) and (current == section or line.lstrip().startswith("[")):
            return number
        if header := re.match(r"^\s*\[\s*([^\]]+?)\s*\]", line):
            current = header[1].strip("\"'")
    return None


# -- opening


@dataclass(frozen=True, slots=True, kw_only=True)
class OpenedSettings:
    """Settings in force, and what of the file is not.

    Attributes:
        settings: What was chosen.
        file: The file as it was read.
        problems: What of the file is not in force, for the person to see.
    """

    settings: Settings
    file: SettingsFile
    problems: tuple[ConfigError, ...] = ()


def open_settings(
    flags: Mapping[str, object], environ: Mapping[str, str], path: Path, *, is_lenient: bool = False
) -> OpenedSettings:
    """Combines defaults, file, environment and flags.

    Args:
        flags: Values by setting name; `None` was not given.
        environ: Environment variables.
        path: The settings file; it need not exist unless a variable names one.
        is_lenient: Whether mistakes in the file are returned instead of raised.

    Raises:
        ConfigError: A flag or a variable cannot be used; or the file, unless lenient.
    """
    file = read_settings_file(path, is_named=is_config_named(environ))
    if file.problems and not is_lenient:
        first, *others = file.problems
        more = f" `mira-chat config` lists {len(others)} more." if others else ""
        raise ConfigError(first.message, hint=f"{first.hint}{more}".strip())
    try:
        settings = build_settings(choose_settings(flags, environ, file.values))
    except ConfigError as error:
        if not (file.values and is_lenient):
            raise
        # Each value holds by itself: together they do not. Flags alone may well.
        settings = build_settings(choose_settings(flags, environ))
        problem = ConfigError(f"{path} is left out: {error.message}", hint=error.hint)
        return OpenedSettings(settings=settings, file=file, problems=(*file.problems, problem))
    return OpenedSettings(settings=settings, file=file, problems=file.problems)


# -- writing


def default_document() -> str:
    """Returns a settings file with every setting documented, and none of them in force."""
    parts = [
        "# Settings of mira-chat. Take the # away before a line to change it; MIRA_CHAT_<NAME>\n"
        "# in the environment and options on the command line win over this file.\n"
    ]
    for section in Section:
        parts.append(f"\n[{section}]\n# {SECTION_TITLES[section]}\n")
        for setting in FIELDS:
            if setting.section is section:
                parts.append(_documented(setting))
    return "".join(parts)


def _documented(setting: SettingField) -> str:
    default = setting.shown(setting.default)
    value = setting.example if default in (None, {}) else default
    about = "".join(f"# {line}\n" for line in _wrapped(setting.about))
    if isinstance(value, Mapping):
        lines = "".join(f"# {_literal(key)} = {_literal(k)}\n" for key, k in value.items())
        return f"\n{about}{lines}"
    return f"\n{about}# {setting.name} = {_literal(value)}\n"


def _wrapped(text: str) -> list[str]:
    import textwrap

    return textwrap.wrap(text, _LINE_WIDTH)


def _literal(value: object) -> str:
    import tomlkit

    return tomlkit.item(value).as_string()


def write_default_file(path: Path) -> None:
    """Writes the documented file where there is none.

    Raises:
        ConfigError: There is a file already; it stays as it is.
        UnwritableFileError: It cannot be written.
    """
    if path.exists():
        hint = "Edit it, or move it away first; `mira-chat config` shows what is in force."
        raise ConfigError(f"{path} is there already.", hint=hint)
    replace_file(path, default_document())


def change_settings(path: Path, changes: Mapping[str, object]) -> None:
    """Writes changed settings into the file; everything else of it stays as it is.

    Args:
        path: The settings file; made, with every setting documented, where there is none.
        changes: Values as the settings hold them, by name; `None` takes the line out.

    Raises:
        ConfigError: The file is no TOML as it stands: nothing is written.
        UnwritableFileError: It cannot be written.
    """
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    try:
        text = path.read_text(encoding="utf-8-sig") if path.exists() else default_document()
        document = tomlkit.parse(text)
    except (OSError, UnicodeDecodeError, TOMLKitError):
        found = read_settings_file(path).problems
        what = found[0].message if found else f"{path} cannot be read."
        hint = "The change holds until the app ends; mend the file to keep it."
        raise ConfigError(what, hint=hint) from None
    for name, value in changes.items():
        document = _with_change(document, FIELDS_BY_NAME[name], value)
    replace_file(path, tomlkit.dumps(document))


def _with_change(document: TOMLDocument, setting: SettingField, value: object) -> TOMLDocument:
    import tomlkit

    shown = setting.shown(value)
    if shown is not None and not setting.is_table:
        document = _with_line_in_force(document, setting)
    section = setting.section.value
    if not isinstance(document.get(section), MutableMapping):
        document[section] = tomlkit.table()
    home = document[section]
    lines = (shown or {}) if setting.is_table else {setting.name: shown}
    gone = set(home) - set(lines) if setting.is_table else set()
    for key in gone | {key for key, line in lines.items() if line is None}:
        home.pop(key, None)
    for key, line in lines.items():
        if line is not None and home.get(key) != line:
            home[key] = line
    return document


def _with_line_in_force(document: TOMLDocument, setting: SettingField) -> TOMLDocument:
    """Takes the # away before a documented line, so that the value stands under its text."""
    import tomlkit
    from tomlkit.exceptions import TOMLKitError

    if setting.name in (document.get(setting.section.value) or {}):
        return document
    text, line = tomlkit.dumps(document), re.compile(rf"^# ({setting.name} = .*)$", re.MULTILINE)
    try:
        candidate = tomlkit.parse(line.sub(r"\1", text, count=1))
    except TOMLKitError:
        return document
    is_right = setting.name in (candidate.get(setting.section.value) or {})
    return candidate if is_right else document
