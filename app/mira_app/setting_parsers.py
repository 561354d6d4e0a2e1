"""What a setting's value may be: each parser takes text or a ready value and returns the value.

A value comes from a settings file (already a number, a switch or a text), from the
environment (always text) or from a flag. Pure; whatever cannot be used ends in a
`ConfigError` that says what can. The `show_*` functions are the way back, for files and
reports.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping
from typing import TypeVar

from mira_engine.api import ConfigError, MemoryAmount

_E = TypeVar("_E", bound=enum.StrEnum)

_UNITS = (
    ("TiB", 2**40), ("TB", 10**12), ("GiB", 2**30), ("GB", 10**9),
    ("MiB", 2**20), ("MB", 10**6), ("KiB", 2**10), ("KB", 10**3),
)  # fmt: skip


def flag_name(name: str) -> str:
    """Returns how messages call a setting: as its flag, without the dashes."""
    return "K" if name == "k" else name.replace("_", "-")


def parse_text(name: str, value: object) -> str:
    """Takes any text."""
    if not isinstance(value, str):
        raise ConfigError.for_field(flag_name(name), value, "Give a text, in quotes.")
    return value


def parse_server(name: str, value: object) -> str | None:
    """Takes the address of a server, and completes it; an empty text is none."""
    from .remote.address import server_address

    text = parse_text(name, value)
    return server_address(text) if text.strip() else None


def make_number_parser(
    kind: type[int] | type[float], what: str
) -> Callable[[str, object], int | float]:
    """Makes the parser of a number; `what` it takes is for the message."""

    def parse(name: str, value: object) -> int | float:
        try:
            return kind(str(value))
        except ValueError:
            raise ConfigError.for_field(flag_name(name), value, f"Give {what}.") from None

    return parse


def make_choice_parser(choices: type[_E]) -> Callable[[str, object], _E]:
    """Makes the parser of one of several names."""

    def parse(name: str, value: object) -> _E:
        try:
            return choices(str(value).lower())
        except ValueError:
            known = ", ".join(choices)
            hint = f"Choose one of {known}."
            raise ConfigError.for_field(flag_name(name), value, hint) from None

    return parse


def parse_switch(name: str, value: object) -> bool:
    """Takes yes or no, and the other words for it."""
    if isinstance(value, bool):
        return value
    if str(value).lower() in ("1", "true", "yes", "on"):
        return True
    if str(value).lower() in ("0", "false", "no", "off"):
        return False
    raise ConfigError.for_field(flag_name(name), value, "Give yes or no.")


def parse_budget(name: str, value: object) -> MemoryAmount:
    """Takes `300MiB` or `40%`."""
    del name
    return MemoryAmount.parse(str(value))


def parse_memory(name: str, value: object) -> int:
    """Takes `8GiB`; a share would be of what?"""
    hint = "Write a size such as 8GiB or 600MiB."
    return _parse_bytes(name, value, str(value), hint)


def parse_rate(name: str, value: object) -> float:
    """Takes `500MB` or `500MB/s` to bytes per second."""
    hint = "Write a size per second such as 500MB or 2GiB."
    return float(_parse_bytes(name, value, str(value).strip().removesuffix("/s"), hint))


def _parse_bytes(name: str, value: object, text: str, hint: str) -> int:
    try:
        amount = MemoryAmount.parse(text)
    except ConfigError:
        raise ConfigError.for_field(flag_name(name), value, hint) from None
    if amount.num_bytes is None:
        raise ConfigError.for_field(flag_name(name), value, hint)
    return amount.num_bytes


def parse_milliseconds(name: str, value: object) -> float:
    """Takes milliseconds, returns seconds."""
    return float(make_number_parser(float, "milliseconds")(name, value)) / 1e3


def parse_keymap(name: str, value: object) -> dict[str, str]:
    """Takes a table of binding to key; as text `chat.new=ctrl+k app.help=f10`.

    Whether there is such a binding and such a key, the terminal interface knows.
    """
    hint = 'Write a table such as "chat.new" = "ctrl+k".'
    if isinstance(value, Mapping):
        keymap = _with_dotted_keys(value)
    else:
        pairs = (pair.partition("=") for pair in str(value).split())
        keymap = {binding: key for binding, _, key in pairs}
    keys: dict[str, str] = {}
    for binding, key in keymap.items():
        if not (isinstance(key, str) and key.strip()):
            field = f"{flag_name(name)} {binding}"
            raise ConfigError.for_field(field, key, hint)
        keys[binding] = key
    return keys


def _with_dotted_keys(table: Mapping[str, object], prefix: str = "") -> dict[str, object]:
    """Undoes what TOML makes of `chat.new = ...` without quotes: a table in a table."""
    flat: dict[str, object] = {}
    for key, value in table.items():
        if isinstance(value, Mapping):
            flat |= _with_dotted_keys(value, f"{prefix}{key}.")
        else:
            flat[prefix + key] = value
    return flat


def show_plain(value: object) -> object:
    """Returns a value as a settings file writes it."""
    return str(value) if isinstance(value, enum.Enum) else value


def show_bytes(value: object) -> str:
    """Returns bytes in the largest unit that holds them exactly: `8GiB`, `500MB`."""
    num_bytes = int(value)  # type: ignore[call-overload]
    for unit, factor in _UNITS:
        if num_bytes and num_bytes % factor == 0:
            return f"{num_bytes // factor}{unit}"
    return f"{num_bytes}B"


def show_budget(value: object) -> str:
    """Returns a budget: bytes, or a share in per cent."""
    assert isinstance(value, MemoryAmount)
    return f"{value.share * 100:g}%" if value.share is not None else show_bytes(value.num_bytes)


def show_milliseconds(value: object) -> float:
    """Returns seconds as milliseconds."""
    return round(float(value) * 1e3, 6)  # type: ignore[arg-type]
