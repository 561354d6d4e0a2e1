"""Requests and events as lines of JSON, one message a line.

`encode` and `decode` are each other's inverse for every message class of
`mira_engine.events`. The types are read from the annotations, so a new field needs no
code here. Torch-free; no I/O.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import types
import typing

from . import events
from .errors import EngineProcessError

_MESSAGES: dict[str, type] = {
    cls.__name__: cls for cls in (*typing.get_args(events.Request), *typing.get_args(events.Event))
}


def to_plain(value: object) -> object:
    """Turns dataclasses, enums and tuples into what JSON knows."""
    if isinstance(value, enum.Enum):
        return value.value
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        return {f.name: to_plain(getattr(value, f.name)) for f in dataclasses.fields(value)}
    if isinstance(value, (tuple, list)):
        return [to_plain(item) for item in value]
    return value


def _from_plain(annotation: object, value: object) -> object:
    origin = typing.get_origin(annotation)
    if origin in (types.UnionType, typing.Union):
        if value is None:
            return None
        inner = [arg for arg in typing.get_args(annotation) if arg is not type(None)]
        return _from_plain(inner[0], value)
    if origin is tuple:
        item = typing.get_args(annotation)[0]
        return tuple(_from_plain(item, v) for v in typing.cast(list, value))
    if isinstance(annotation, type):
        if dataclasses.is_dataclass(annotation):
            hints = typing.get_type_hints(annotation)
            fields = typing.cast(dict, value)
            known = {f.name for f in dataclasses.fields(annotation)}
            return annotation(
                **{k: _from_plain(hints[k], v) for k, v in fields.items() if k in known}
            )
        if issubclass(annotation, enum.Enum):
            return annotation(value)
        if annotation is float and isinstance(value, int):
            return float(value)
    return value


def encode(message: events.Request | events.Event) -> str:
    """Returns the message as one line of JSON, without the newline."""
    plain = typing.cast(dict, to_plain(message))
    return json.dumps({"type": type(message).__name__, **plain}, ensure_ascii=True)


def decode(line: str) -> events.Request | events.Event:
    """Reads one line.

    Raises:
        EngineProcessError: The line is no message this version knows.
    """
    try:
        fields = json.loads(line)
        cls = _MESSAGES[fields.pop("type")]
        return typing.cast("events.Request | events.Event", _from_plain(cls, fields))
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise EngineProcessError(
            f"The engine process sent a line that cannot be read: {line[:80]!r}.",
            hint="App and engine may come from different versions; install again.",
        ) from error
