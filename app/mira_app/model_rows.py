"""How one model is told in a table and in a pane beside it. Pure; text only."""

from __future__ import annotations

import enum
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from mira_engine.api import format_bytes

from .catalog import BUILTIN, CatalogEntry, ModelState
from .job import Job, JobState, JobStep
from .verdicts import FitVerdict

_GAP = 2
_MIN_NAME_WIDTH = 16
_MAX_NAME_WIDTH = 32
_WIDEST = 999


class Tone(enum.StrEnum):
    """How a state is to be taken; never the only sign of it."""

    PLAIN = "plain"
    GOOD = "good"
    WORK = "work"
    BAD = "bad"


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelRow:
    """Everything that is known of a model now.

    Attributes:
        entry: What it is and what of it is on the disk.
        job: Its download or preparation, where there is one.
        verdict: How it would run here, `None` where that is not known.
        is_judged: Whether the verdict is being worked out.
        is_loaded: Whether the chat's engine holds it.
    """

    entry: CatalogEntry
    job: Job | None = None
    verdict: FitVerdict | None = None
    is_judged: bool = False
    is_loaded: bool = False


class Column(enum.StrEnum):
    """Columns of the table, from left to right; the value is the heading."""

    NAME = "Model"
    PARAMETERS = "Params, B"
    DOWNLOAD = "Download"
    PREPARED = "Prepared"
    VERDICT = "Here"
    STATE = "State"


_WIDTHS = {
    Column.PARAMETERS: 10,
    Column.DOWNLOAD: 9,
    Column.PREPARED: 10,
    Column.VERDICT: 24,
    Column.STATE: 14,
}
_BY_PRIORITY = (
    Column.STATE, Column.VERDICT, Column.PARAMETERS, Column.DOWNLOAD, Column.PREPARED
)  # fmt: skip


def columns_for(width: int) -> dict[Column, int]:
    """Returns the columns that a table has room for, with their widths; the name always.

    Args:
        width: Characters in all, gaps between columns included.
    """
    kept: list[Column] = []
    left = width - _MIN_NAME_WIDTH
    for column in _BY_PRIORITY:
        left -= _WIDTHS[column] + _GAP
        if left < 0:
            left += _WIDTHS[column] + _GAP
            break
        kept.append(column)
    name = min(_MAX_NAME_WIDTH, _MIN_NAME_WIDTH + left)
    widths = {column: _WIDTHS[column] for column in Column if column in kept}
    if Column.VERDICT in widths:
        # What the name does not want: a whole verdict is longer than its rate.
        widths[Column.VERDICT] += min(16, left - (name - _MIN_NAME_WIDTH))
    return {Column.NAME: max(1, min(name, width))} | widths


def cell(row: ModelRow, column: Column, width: int = _WIDEST) -> str:
    """Returns one cell; of a verdict what the width holds."""
    facts, entry = row.entry.facts, row.entry
    if column is Column.NAME:
        return entry.title
    if column is Column.PARAMETERS:
        if facts is None:
            return "-"
        return f"{_short(facts.total_billions, 100)} / {_short(facts.active_billions, 10)}"
    if column is Column.DOWNLOAD:
        return format_bytes(facts.download_bytes) if facts else "-"
    if column is Column.PREPARED:
        if entry.prepared_bytes is None:
            return "-"
        about = "" if entry.is_size_measured else "~"
        return about + format_bytes(entry.prepared_bytes)
    return verdict_text(row, width) if column is Column.VERDICT else state_text(row)


def _short(number: float, bound: float) -> str:
    return f"{number:.1f}" if number < bound else f"{number:.0f}"


def verdict_text(row: ModelRow, width: int = _WIDEST) -> str:
    """Tells in a few words how the model would run here."""
    if row.verdict is not None:
        return row.verdict.fitting(width)
    return "working it out ..." if row.is_judged else "-"


def state_text(row: ModelRow) -> str:
    """Tells in a word or two where the model is."""
    job = row.job
    if row.is_loaded:
        return "loaded"
    if job is not None:
        share = "" if job.share is None else f" {job.share:.0%}"
        if job.state is JobState.RUNNING:
            return f"{job.step or 'starting'}{share if job.step else ''}"
        is_going = job.state in (JobState.PAUSING, JobState.PAUSED)
        state = "put off" if job.is_put_off else job.state.value
        return state + (share if is_going else "")
    if row.entry.is_ready:
        return "ready"
    is_own = row.entry.facts is None and "/" not in row.entry.model
    if row.entry.state is ModelState.AVAILABLE and (is_own or row.entry.model == BUILTIN):
        return "not prepared"
    return row.entry.state.value


def tone(row: ModelRow) -> Tone:
    """Tells how the state is to be taken."""
    if row.job is not None and not row.is_loaded:
        return Tone.BAD if row.job.state is JobState.FAILED else Tone.WORK
    return Tone.GOOD if row.is_loaded or row.entry.is_ready else Tone.PLAIN


def matching(rows: Sequence[ModelRow], text: str) -> list[ModelRow]:
    """Returns the rows that have every word of a filter somewhere in their texts."""
    words = text.casefold().split()
    return [row for row in rows if all(word in _searched(row) for word in words)]


def _searched(row: ModelRow) -> str:
    entry = row.entry
    family = entry.facts.family if entry.facts is not None else ""
    return " ".join((entry.model, entry.title, entry.about, family, state_text(row))).casefold()


def ordered(rows: Sequence[ModelRow], column: Column | None, *, is_down: bool) -> list[ModelRow]:
    """Sorts rows by a column; what is not known comes last either way.

    Args:
        rows: The rows in the catalog's order.
        column: Which, or `None` for the catalog's order.
        is_down: Whether the largest comes first.
    """
    if column is None:
        return list(rows)
    known = [row for row in rows if _sort_value(row, column) is not None]
    unknown = [row for row in rows if _sort_value(row, column) is None]
    return sorted(known, key=lambda row: _sort_value(row, column), reverse=is_down) + unknown


def _sort_value(row: ModelRow, column: Column) -> str | float | None:
    facts = row.entry.facts
    if column is Column.NAME:
        return row.entry.title.casefold()
    if column is Column.PARAMETERS:
        return facts.total_billions if facts else None
    if column is Column.DOWNLOAD:
        return facts.download_bytes if facts else None
    if column is Column.PREPARED:
        return row.entry.prepared_bytes
    if column is Column.STATE:
        return state_text(row)
    return row.verdict.tokens_per_s if row.verdict is not None else None


# -- the pane


def details(row: ModelRow, *, free_bytes: int | None) -> Iterator[tuple[str, Tone]]:
    """Yields the lines of the pane with their tones, the most important first.

    Args:
        row: The marked row.
        free_bytes: Of the disk that models are kept on, `None` where unknown.
    """
    entry, job = row.entry, row.job
    yield (
        f"{entry.title} · {entry.about}" if entry.about != entry.title else entry.title,
        Tone.PLAIN,
    )
    if job is not None and job.state is JobState.FAILED and job.error is not None:
        yield f"Failed: {job.error.message} {job.error.hint}".strip(), Tone.BAD
        yield "What was finished is kept. r tries again, x gives up.", Tone.PLAIN
    if job is not None and job.is_put_off:
        yield "What is left to do for it is put off while you chat, and goes on here.", Tone.PLAIN
    yield _verdict_line(row)
    if free_bytes is not None:
        yield _disk_line(entry, free_bytes)
    if entry.facts is not None:
        yield _licence_line(entry), Tone.PLAIN
        yield _shape_line(entry), Tone.PLAIN


def _verdict_line(row: ModelRow) -> tuple[str, Tone]:
    verdict = row.verdict
    if row.entry.is_remote:
        return "It runs on the server; nothing of it is needed here.", Tone.PLAIN
    if verdict is None:
        if row.is_judged:
            return "Here: working it out ...", Tone.PLAIN
        is_ahead = row.entry.state is ModelState.AVAILABLE
        when = "known once it is downloaded" if is_ahead else "not worked out yet"
        return f"Here: {when}.", Tone.PLAIN
    reason = verdict.reason[:1].upper() + verdict.reason[1:]
    text = f"Here: {verdict.text}. {reason}".strip()
    return text, Tone.PLAIN if verdict.mode is not None else Tone.BAD


def _disk_line(entry: CatalogEntry, free_bytes: int) -> tuple[str, Tone]:
    free = f"{format_bytes(free_bytes)} free on the disk"
    if entry.is_ready:
        size = (
            "" if entry.prepared_bytes is None else f"{format_bytes(entry.prepared_bytes)} used, "
        )
        return f"Disk: {size}{free}.", Tone.PLAIN
    if entry.prepared_bytes is None:
        return f"Disk: {free}.", Tone.PLAIN
    is_on_disk = entry.state is not ModelState.AVAILABLE
    download = entry.facts.download_bytes if entry.facts is not None and not is_on_disk else 0
    after = free_bytes - entry.prepared_bytes
    if after < 0:
        return f"Disk: {free}, {format_bytes(-after)} too few for this model.", Tone.BAD
    parts = [free, f"{format_bytes(after)} once it is prepared"]
    if download > after:
        parts.append("too few to hold the whole download beside it")
    elif download:
        parts.append(f"{format_bytes(after - download)} while the whole download is there too")
    return f"Disk: {', '.join(parts)}.", Tone.PLAIN


def _shape_line(entry: CatalogEntry) -> str:
    facts = entry.facts
    assert facts is not None
    shared = f" and {facts.num_shared_experts} shared" if facts.num_shared_experts else ""
    context = "" if facts.context_tokens is None else f", reads {facts.context_tokens:,} tokens"
    return (
        f"{facts.repo}: {facts.num_layers} layers, {facts.num_experts} experts of "
        f"{facts.hidden_size} x {facts.expert_width}, {facts.top_k}{shared} for a token{context}."
    )


def _licence_line(entry: CatalogEntry) -> str:
    facts = entry.facts
    assert facts is not None
    licence = (
        f"Licence: {facts.licence}, as others state it; read the model's page."
        if facts.licence is not None
        else "Licence: not known here; read the model's page."
    )
    if facts.is_verified:
        return f"{licence} Shape checked against its published configuration."
    return f"{licence} Shape NOT checked against its published configuration."


def steps_line(step: JobStep | None) -> str:
    """Lists all steps on one line, with a mark at the one that runs."""
    return "  ".join(f"[{each}]" if each is step else each.value for each in JobStep)
