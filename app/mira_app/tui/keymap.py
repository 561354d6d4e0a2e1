"""Every key of the app by the id of its binding, and the keys that a person put instead.

The bindings are read from the screens and widgets themselves, so a new one is known here
without a line added.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
import sys
import unicodedata
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from mira_engine.api import ConfigError
from textual.binding import Binding, Keymap
from textual.dom import DOMNode
from textual.keys import KEY_TO_UNICODE_NAME, REPLACED_KEYS, Keys, format_key

import mira_app.tui

_MODIFIERS = frozenset({"ctrl", "shift", "alt", "super", "meta", "hyper"})
_KEY_NAMES = frozenset(key.value for key in Keys)
_KEY_WORDS = {"escape": "Esc", "pageup": "Page Up", "pagedown": "Page Down", "delete": "Del"}
_EVERYWHERE = "app"
_TITLES = {
    _EVERYWHERE: "Everywhere",
    "chat": "In the chat",
    "composer": "Where you write",
    "message": "On a message",
    "messages": "On a message",
    "models": "In the menu of models",
    "history": "In the history",
    "controls": "In the live controls",
    "details": "In the details",
    "panels": "On the live panels",
    "chat_settings": "In a chat's settings",
    "code_picker": "Where several blocks of code can be copied",
}
_SELF_EXPLAINING = frozenset({"help", "tour"})


@dataclass(frozen=True, slots=True, kw_only=True)
class KeymapReport:
    """A keymap that can be used, and what of it cannot.

    Attributes:
        keymap: Keys by binding id, as Textual takes them.
        problems: By binding id, why an entry is left out.
    """

    keymap: Keymap
    problems: Mapping[str, ConfigError]


def known_bindings() -> dict[str, Binding]:
    """Returns every binding with an id; imports all screens and widgets."""
    package = mira_app.tui.__name__
    for module in pkgutil.walk_packages(mira_app.tui.__path__, f"{package}."):
        importlib.import_module(module.name)
    found: dict[str, Binding] = {}
    for name in sorted(name for name in sys.modules if name.startswith(f"{package}.")):
        for member in list(vars(sys.modules[name]).values()):
            is_own = isinstance(member, type) and member.__module__ == name
            if is_own and issubclass(member, DOMNode):
                for binding in vars(member).get("BINDINGS", ()):
                    if isinstance(binding, Binding) and binding.id is not None:
                        found.setdefault(binding.id, binding)
    return found


def group_of(binding_id: str) -> str:
    """Returns where a binding holds: the first part of its id."""
    return binding_id.partition(".")[0]


def check_keymap(wanted: Mapping[str, str], known: Mapping[str, Binding]) -> KeymapReport:
    """Checks each entry: there is such a binding, such keys, and they are free.

    Args:
        wanted: Keys by binding id, separated by commas where there are several.
        known: All bindings by id.
    """
    keymap: Keymap = {}
    problems: dict[str, ConfigError] = {}
    for binding_id, keys in wanted.items():
        try:
            _check_entry(binding_id, keys, wanted, known)
        except ConfigError as error:
            problems[binding_id] = error
        else:
            keymap[binding_id] = ",".join(key.strip() for key in keys.split(","))
    return KeymapReport(keymap=keymap, problems=problems)


def _check_entry(
    binding_id: str, keys: str, wanted: Mapping[str, str], known: Mapping[str, Binding]
) -> None:
    if binding_id not in known:
        hint = _nearest(binding_id, known, "F1 lists what there is.")
        raise ConfigError(f"keymap: there is no binding {binding_id!r}.", hint=hint)
    for key in (key.strip() for key in keys.split(",")):
        if not is_key(key):
            hint = _nearest_key(key)
            raise ConfigError(f"keymap: {binding_id} cannot be on {key!r}.", hint=hint)
        for other_id, other in known.items():
            if other_id != binding_id and _do_meet(binding_id, other_id):
                taken = wanted.get(other_id, other.key)
                if key in (name.strip() for name in taken.split(",")):
                    hint = f"Give {other_id} another key in the keymap too."
                    raise ConfigError(
                        f"keymap: {binding_id} cannot be on {key!r}, which is {other_id} "
                        f"({other.description}).",
                        hint=hint,
                    )


def _do_meet(one: str, other: str) -> bool:
    groups = {group_of(one), group_of(other)}
    return len(groups) == 1 or _EVERYWHERE in groups


def _nearest(word: str, known: Iterable[str], otherwise: str) -> str:
    close = _closest(word, known)
    return f"Did you mean {close}?" if close else otherwise


def _nearest_key(key: str) -> str:
    *modifiers, base = key.split("+")
    parts = [_closest(modifier, _MODIFIERS) or modifier for modifier in modifiers]
    meant = "+".join([*parts, base if len(base) == 1 else _closest(base, _KEY_NAMES) or base])
    if is_key(meant):
        return f"Did you mean {meant}?"
    return "Write keys as ctrl+k, f9, shift+tab or a letter."


def _closest(word: str, known: Iterable[str]) -> str:
    close = difflib.get_close_matches(word.lower(), sorted(known), n=1, cutoff=0.6)
    return close[0] if close else ""


def is_key(key: str) -> bool:
    """Whether a terminal could send such a key, as far as its name tells."""
    *modifiers, base = key.split("+") if key != "+" else (key,)
    if not set(modifiers) <= _MODIFIERS or not base:
        return False
    return len(base) == 1 or base in _KEY_NAMES or _is_character_name(base)


def _is_character_name(base: str) -> bool:
    name = KEY_TO_UNICODE_NAME.get(base, REPLACED_KEYS.get(base, base).replace("_", " ").upper())
    try:
        unicodedata.lookup(name)
    except KeyError:
        return False
    return True


def key_text(keys: str) -> str:
    """Returns keys for people: `Ctrl+R`, `F1`, `[`."""
    return ", ".join(_one_key_text(key.strip()) for key in keys.split(","))


def _one_key_text(key: str) -> str:
    *modifiers, base = key.split("+") if key != "+" else (key,)
    name = _KEY_WORDS.get(base)
    if name is None:
        name = base if base in _KEY_NAMES else format_key(base)
        name = name.capitalize() if len(name) > 1 or modifiers else name
    return "+".join([*(modifier.capitalize() for modifier in modifiers), name])


@dataclass(frozen=True, slots=True, kw_only=True)
class KeyRow:
    """One line of the help: keys in force, what they do, and the id that a keymap names."""

    keys: str
    about: str
    binding_id: str


def key_sections(
    known: Mapping[str, Binding], keymap: Mapping[str, str]
) -> tuple[tuple[str, tuple[KeyRow, ...]], ...]:
    """Returns the keys in force by where they hold, those that hold everywhere first."""
    groups = {group_of(binding_id) for binding_id in known} - _SELF_EXPLAINING
    order = sorted(groups, key=lambda group: (list(_TITLES).index(group), "")
                   if group in _TITLES else (len(_TITLES), group))  # fmt: skip
    sections = []
    for group in order:
        rows = tuple(
            KeyRow(
                keys=key_text(keymap.get(binding_id, binding.key)),
                about=binding.tooltip or binding.description,
                binding_id=binding_id,
            )
            for binding_id, binding in known.items()
            if group_of(binding_id) == group and binding.description
        )
        sections.append((_TITLES.get(group, group.capitalize()), rows))
    return tuple(sections)
