"""What a card did when: spans in its lanes, drawn as text, and how far copies were hidden.

A recorder puts marks into the lanes that the engine uses; they are read when all is done.
Without a card a mark is a number in the order of the calls, and nothing is a time.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from gpu.card import HAS_CARD, synchronize
from mira_engine.runtime.cuda_transfer import CudaTransfer
from mira_engine.runtime.streams import CudaEvent, Event, Lane, Queues
from torch import Tensor

WIDTH = 72
"""Columns of a drawing."""

MAX_KEPT_SPANS = 1500
"""Spans that are written down; a drawing and its shares are of all."""

_NUM_KEPT_DIGITS = 3

Intervals = list[tuple[float, float]]


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a lane did, from when to when."""

    lane: str
    what: str
    start: float
    end: float


class Recorder:
    """Marks lanes while it is on.

    Args:
        queues: The lanes.
    """

    def __init__(self, queues: Queues) -> None:
        self._queues = queues
        self._open: list[tuple[Lane, str, Any, Any]] = []
        self._num_marks = 0
        self._origin: Any = None
        self.is_on = False

    def start(self) -> None:
        """Records from here on, the card being idle."""
        synchronize()
        self._open.clear()
        self._num_marks = 0
        self._origin = self.mark(Lane.COMPUTE)
        self.is_on = True

    def mark(self, lane: Lane) -> Any:
        """Marks all that is in a lane by now."""
        if not HAS_CARD:
            self._num_marks += 1
            return self._num_marks
        event = torch.cuda.Event(enable_timing=True)
        self._queues.record(CudaEvent(event), lane)
        return event

    def add(self, lane: Lane, what: str, begun: Any) -> Any:
        """A span that began at a mark ends here. Returns the mark of its end."""
        end = self.mark(lane)
        self._open.append((lane, what, begun, end))
        return end

    def stop(self) -> list[Span]:
        """Waits for the card. Returns the spans in the order in which they began."""
        self.is_on = False
        synchronize()
        spans = [
            Span(lane.value, what, self._at(begun), self._at(end))
            for lane, what, begun, end in self._open
        ]
        return sorted(spans, key=lambda span: (span.start, span.end))

    def _at(self, mark: Any) -> float:
        return self._origin.elapsed_time(mark) if HAS_CARD else float(mark - self._origin)


class RecordedQueues:
    """Lanes whose copies are recorded.

    Args:
        queues: The lanes.
        recorder: Told of every copy.
    """

    def __init__(self, queues: Queues, recorder: Recorder) -> None:
        self._queues = queues
        self._recorder = recorder

    def make_event(self) -> Event:
        """Makes an event that marks nothing yet."""
        return self._queues.make_event()

    def record(self, event: Event, lane: Lane) -> None:
        """Makes the event mark all that was put into the lane so far."""
        self._queues.record(event, lane)

    def wait_for(self, event: Event, lane: Lane) -> None:
        """Lets what is put into the lane from now on begin after the event."""
        self._queues.wait_for(event, lane)

    def copy(self, target: Tensor, source: Tensor, lane: Lane) -> None:
        """Copies, between two marks."""
        begun = self._recorder.mark(lane) if self._recorder.is_on else None
        self._queues.copy(target, source, lane)
        if begun is not None:
            self._recorder.add(lane, "copy", begun)


class RecordedTransfer(CudaTransfer):
    """A link that records the launches of a target's experts.

    Args:
        recorder: Told of them.
        queues: The lanes; copies are recorded there.
        source: As `CudaTransfer` takes it.
        slots: Likewise.
        bytes_per_s: Likewise.
    """

    def __init__(
        self, recorder: Recorder, queues: Queues, source: Any, slots: Any, *, bytes_per_s: Any
    ) -> None:
        super().__init__(RecordedQueues(queues, recorder), source, slots, bytes_per_s=bytes_per_s)
        self._recorder = recorder
        self._begun: Any = None

    def acquire(self, slots: Iterable[int]) -> None:
        """Kernels that are launched from now on may read these slots."""
        super().acquire(slots)
        self._begun = self._recorder.mark(Lane.COMPUTE) if self._recorder.is_on else None

    def release(self, slots: Iterable[int]) -> None:
        """The kernels that read these slots have been launched."""
        if self._begun is not None:
            self._recorder.add(Lane.COMPUTE, "experts", self._begun)
        super().release(slots)


# -- what it shows -------------------------------------------------------------------------


def merged(spans: Iterable[Span]) -> Intervals:
    """Returns when any of the spans goes on: intervals that do not touch, in order."""
    found: Intervals = []
    for start, end in sorted((span.start, span.end) for span in spans):
        if found and start <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((start, end))
    return found


def length(intervals: Intervals) -> float:
    """Returns the length of all intervals."""
    return sum(end - start for start, end in intervals)


def common(first: Intervals, second: Intervals) -> Intervals:
    """Returns where both are."""
    return [(max(a, c), min(b, d)) for a, b in first for c, d in second if max(a, c) < min(b, d)]


def hidden_share(spans: Sequence[Span]) -> float | None:
    """Returns the share of the copies' time in which something was computed."""
    copies = merged(span for span in spans if span.lane != Lane.COMPUTE.value)
    computing = merged(span for span in spans if span.lane == Lane.COMPUTE.value)
    return length(common(copies, computing)) / length(copies) if length(copies) else None


def draw(spans: Sequence[Span], width: int = WIDTH) -> list[str]:
    """Draws a line for each lane: `#` where it is busy for most of a column, `+` for a part."""
    if not spans:
        return []
    end = max(span.end for span in spans)
    step = end / width or 1.0
    lines = []
    for lane in Lane:
        busy = merged(span for span in spans if span.lane == lane.value)
        cells = []
        for column in range(width):
            share = length(common(busy, [(column * step, (column + 1) * step)])) / step
            cells.append("#" if share > 0.5 else "+" if share > 0 else ".")
        lines.append(f"{lane.value:8}|{''.join(cells)}| {length(busy) / end:4.0%}")
    unit = f"{end:.1f} ms" if HAS_CARD else f"{end:.0f} calls, no times"
    return [f"{'':8} 0{unit:>{width}}", *lines]


def summary(spans: Sequence[Span]) -> dict[str, Any]:
    """Returns what is written down of a timeline."""
    share = hidden_share(spans)
    return {
        "unit": "ms" if HAS_CARD else "calls",
        "hidden_share_of_copies": share if HAS_CARD else None,
        "num_spans": len(spans),
        "num_copies": sum(span.lane != Lane.COMPUTE.value for span in spans),
        "drawing": draw(spans),
        "spans": [
            [s.lane, s.what, round(s.start, _NUM_KEPT_DIGITS), round(s.end, _NUM_KEPT_DIGITS)]
            for s in spans[:MAX_KEPT_SPANS]
        ],
    }
