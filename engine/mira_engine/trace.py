"""Routing traces: which experts every token chose, and how each round went.

A trace is lines of JSON: the header, then one line a reply, a pass or a round in the order
in which they happened, and a last line that counts the others. The engine records one
(`TraceRecorder`), the simulator reads it (`read_trace`). Torch-free; the recorder keeps
finished lines and touches the disk once, when it writes the file whole and by rename.
"""

from __future__ import annotations

import dataclasses
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from .errors import TraceError
from .types import Phase

TRACE_FORMAT = "mira-trace"
TRACE_VERSION = 1
"""Raised when a reader of the version before would misunderstand a line."""

_HINT_DAMAGED = "Record it again, or read what is left with `is_partial_allowed`."


@dataclass(frozen=True, slots=True, kw_only=True)
class TraceHeader:
    """What a trace was recorded with.

    Attributes:
        model: Name of the model.
        precision: Expert format of the target.
        num_layers: MoE layers.
        num_experts: Routed experts of a layer.
        top_k: Experts of a token in a layer.
        num_draft_tokens: K of the plan.
        num_slots: Slots of the device.
        record_bytes: Bytes that one miss moves.
        budget_bytes: For experts, draft and slots together.
        eviction: Policy of the slots.
    """

    model: str
    precision: str
    num_layers: int
    num_experts: int
    top_k: int
    num_draft_tokens: int
    num_slots: int
    record_bytes: int
    budget_bytes: int
    eviction: str


@dataclass(frozen=True, slots=True)
class ReplyStart:
    """A reply begins; its first tokens are the prompt's."""

    num_prompt_tokens: int


@dataclass(frozen=True, slots=True)
class TracedPass:
    """One forward pass.

    Attributes:
        phase: What it was for.
        ids: Chosen experts `[num_layers][num_tokens][top_k]`.
    """

    phase: Phase
    ids: Sequence[Sequence[Sequence[int]]]

    @property
    def num_tokens(self) -> int:
        """Tokens of the pass."""
        return len(self.ids[0])


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRound:
    """How a round ended, whose passes stand before it. Times in seconds."""

    num_drafted: int
    num_accepted: int
    draft_s: float
    verify_s: float
    stall_s: float


TraceItem = ReplyStart | TracedPass | TracedRound


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingTrace:
    """A trace that was read.

    Attributes:
        header: What it was recorded with.
        items: In the order in which they happened.
        is_whole: Whether the file was read to its end.
    """

    header: TraceHeader
    items: tuple[TraceItem, ...]
    is_whole: bool = True


@dataclass(slots=True)
class TraceRecorder:
    """Keeps what the engine tells it. One thread; `write` may be called more than once."""

    header: TraceHeader
    _lines: list[str] = field(default_factory=list)
    _open: list[Sequence[Sequence[int]]] = field(default_factory=list)

    def start_reply(self, num_prompt_tokens: int) -> None:
        """A reply begins. A pass that was broken off is forgotten."""
        self._open = []
        self._keep("reply", {"num_prompt_tokens": num_prompt_tokens})

    def record_layer(self, phase: Phase, layer: int, ids: Sequence[Sequence[int]]) -> None:
        """The router of a layer has chosen; the last layer ends the pass.

        Args:
            phase: What the pass is for.
            layer: MoE layer; layer 0 begins a pass.
            ids: `[num_tokens][top_k]`.
        """
        if layer == 0:
            self._open = []
        self._open.append(ids)
        if len(self._open) == self.header.num_layers:
            self._keep("pass", {"phase": phase, "ids": self._open})
            self._open = []

    def end_round(self, outcome: TracedRound) -> None:
        """A target pass was accepted, with its draft where there was one."""
        self._keep("round", dataclasses.asdict(outcome))

    def _keep(self, kind: str, fields: dict[str, object]) -> None:
        self._lines.append(json.dumps({kind: fields}, separators=(",", ":")))

    def write(self, path: Path) -> None:
        """Writes everything recorded so far; an older file of that name is replaced whole.

        Raises:
            TraceError: The file cannot be written.
        """
        head = {"format": TRACE_FORMAT, "version": TRACE_VERSION}
        lines = [
            json.dumps(head | dataclasses.asdict(self.header)),
            *self._lines,
            json.dumps({"end": len(self._lines)}),
        ]
        unfinished = path.with_name(path.name + ".part")
        try:
            unfinished.write_text("\n".join(lines) + "\n", encoding="utf-8")
            os.replace(unfinished, path)
        except OSError as error:
            unfinished.unlink(missing_ok=True)
            raise TraceError(
                f"The trace {path} cannot be written: {error.strerror}.",
                hint="Name a file in a folder that can be written.",
            ) from error


def read_trace(path: Path, *, is_partial_allowed: bool = False) -> RoutingTrace:
    """Reads a recorded trace.

    Args:
        path: Of a file that `TraceRecorder.write` made.
        is_partial_allowed: Whether a damaged file gives what stands before the damage,
            instead of an error. The header must be whole in any case.

    Raises:
        TraceError: No trace, of another version, or damaged.
    """
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise TraceError(
            f"The trace {path} cannot be read: {error.strerror}.", hint="Check the name."
        ) from error
    header = _read_header(path, lines[0] if lines else b"")
    items: list[TraceItem] = []
    try:
        for item in _read_items(path, header, lines[1:]):
            items.append(item)  # One by one: what stands before the damage stays.
    except TraceError:
        if not is_partial_allowed:
            raise
        return RoutingTrace(header=header, items=tuple(items), is_whole=False)
    return RoutingTrace(header=header, items=tuple(items))


def _read_header(path: Path, line: bytes) -> TraceHeader:
    try:
        fields = json.loads(line)
        if fields["format"] != TRACE_FORMAT:
            raise ValueError
        version = fields["version"]
    except (ValueError, KeyError, TypeError):
        raise TraceError(
            f"{path.name} is no routing trace.", hint="Record one: mira-chat run --trace FILE."
        ) from None
    if version != TRACE_VERSION:
        raise TraceError(
            f"{path.name} is a trace of version {version}; this program reads {TRACE_VERSION}.",
            hint="Record it again with this version.",
        )
    try:
        return TraceHeader(**{f.name: fields[f.name] for f in dataclasses.fields(TraceHeader)})
    except KeyError as error:
        raise TraceError(
            f"{path.name} has no {error.args[0]} in its header.", hint="Record it again."
        ) from None


def _read_items(path: Path, header: TraceHeader, lines: Sequence[bytes]) -> Iterator[TraceItem]:
    for number, line in enumerate(lines, start=2):
        try:
            ((kind, fields),) = json.loads(line).items()
            if kind == "end":
                if fields != number - 2 or number != len(lines) + 1:
                    raise ValueError(f"it counts {fields} lines")
                return
            item = _read_item(header, kind, fields)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise TraceError(
                f"{path.name} is damaged in line {number}: {error}.", hint=_HINT_DAMAGED
            ) from None
        yield item
    raise TraceError(
        f"{path.name} ends after line {len(lines) + 1}, in the middle.", hint=_HINT_DAMAGED
    )


def _read_item(header: TraceHeader, kind: str, fields: dict) -> TraceItem:
    if kind == "reply":
        return ReplyStart(**fields)
    if kind == "round":
        return TracedRound(**fields)
    if kind != "pass":
        raise ValueError(f"nothing is called {kind!r}")
    ids = fields["ids"]
    num_tokens = len(ids[0])
    for layer in ids:
        if len(layer) != num_tokens or any(len(row) != header.top_k for row in layer):
            raise ValueError("a pass of another shape")
        if not all(0 <= expert < header.num_experts for row in layer for expert in row):
            raise ValueError("an expert that the model does not have")
    if len(ids) != header.num_layers or not num_tokens:
        raise ValueError("a pass of another shape")
    return TracedPass(Phase(fields["phase"]), ids)
