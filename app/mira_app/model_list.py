"""The list of models as text and as JSON. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence

from mira_engine.api import Precision, format_bytes, to_plain

from .catalog import CatalogEntry, ModelState, is_repo_name
from .sanitise import sanitise

_STATES = {
    ModelState.READY: "ready",
    ModelState.PREPARED: "prepared in another precision",
    ModelState.DOWNLOADED: "downloaded, not prepared",
}


def model_lines(entries: Sequence[CatalogEntry], precision: Precision) -> Iterator[str]:
    """Yields three lines a model: its name, what it is, its state and figures."""
    for entry in entries:
        yield sanitise(entry.model)
        yield f"    {sanitise(entry.title)}: {sanitise(entry.about)}"
        yield "    " + " · ".join([f"{precision}: {_state(entry)}", *_figures(entry)])


def models_json(entries: Sequence[CatalogEntry]) -> str:
    """Returns the entries as one JSON array, with all that the catalog knows."""
    return json.dumps([to_plain(entry) for entry in entries])


def _state(entry: CatalogEntry) -> str:
    if entry.is_ready:
        return _STATES[ModelState.READY]
    is_of_hub = is_repo_name(entry.model)
    return _STATES.get(entry.state, "not downloaded" if is_of_hub else "not prepared")


def _figures(entry: CatalogEntry) -> Iterator[str]:
    facts = entry.facts
    if facts is not None:
        yield f"{facts.total_billions:g}B parameters, {facts.active_billions:g}B of them per token"
        yield f"download {format_bytes(facts.download_bytes)}"
    if entry.prepared_bytes is not None:
        size = format_bytes(entry.prepared_bytes)
        yield f"takes {size}" if entry.is_size_measured else f"about {size} once prepared"
    if facts is not None:
        yield sanitise(facts.licence) if facts.licence else "licence not known"
