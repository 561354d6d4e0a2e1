"""The list of models as text and as JSON. Pure.

Knows the four fields that every entry has; whatever else a catalog gives is shown by its
own name, sizes as sizes.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Sequence

from mira_engine.api import Precision, format_bytes, to_plain

from .catalog import CatalogEntry
from .sanitise import sanitise

_KNOWN = ("model", "title", "about", "is_ready", "state")


def model_lines(entries: Sequence[CatalogEntry], precision: Precision) -> Iterator[str]:
    """Yields three lines a model: its name, what it is, its state and figures."""
    for entry in entries:
        yield sanitise(entry.model)
        yield f"    {sanitise(entry.title)}: {sanitise(entry.about)}"
        state = getattr(entry, "state", None)
        if state is None:
            state = "ready" if entry.is_ready else "not prepared"
        yield "    " + " · ".join([f"{precision}: {sanitise(str(state))}", *_figures(entry)])


def models_json(entries: Sequence[CatalogEntry]) -> str:
    """Returns the entries as one JSON array, with all that the catalog knows."""
    return json.dumps([to_plain(entry) for entry in entries], default=str)


def _figures(value: object) -> Iterator[str]:
    """Yields the figures of a dataclass and of those inside of it, each with its name."""
    for field in dataclasses.fields(value):  # type: ignore[arg-type]
        inner = getattr(value, field.name)
        if dataclasses.is_dataclass(inner):
            yield from _figures(inner)
        elif field.name not in _KNOWN and (text := _figure(field.name, inner)) is not None:
            yield f"{field.name.removesuffix('_bytes').replace('_', ' ')} {text}"


def _figure(name: str, value: object) -> str | None:
    """Formats a number or a word; `None` for what no line has room for."""
    if value is None or value == "" or isinstance(value, bool):
        return None
    if isinstance(value, int | float):
        return format_bytes(value) if name.endswith("_bytes") else f"{value:,}"
    return sanitise(value) if isinstance(value, str) else None
