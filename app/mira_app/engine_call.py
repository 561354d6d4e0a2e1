"""One request to the engine and the events that answer it.

Thread-safe. The client's reader thread delivers; the caller either drains without
blocking (the TUI's timer) or iterates, blocking (the command line). Both read one queue.
Its length is bounded: neighbouring deltas are joined and a sample replaces the one
before it, so a slow reader holds no more than the text of its reply.
"""

from __future__ import annotations

import dataclasses
import threading
from collections import deque
from collections.abc import Iterator

from mira_engine.api import (
    EvaluationDone,
    EvaluationProgress,
    Event,
    GenerationDone,
    MachineDescribed,
    MiraError,
    ModelDescribed,
    ModelLoaded,
    PlanMade,
    PrepareDone,
    PrepareProgress,
    ProfileDone,
    ProfileProgress,
    PromptProgress,
    RequestFailed,
    ResidencySample,
    StatsSample,
    TokenDelta,
    error_from_fields,
)

FINAL_EVENTS = (
    PrepareDone,
    ProfileDone,
    ModelLoaded,
    GenerationDone,
    PlanMade,
    MachineDescribed,
    ModelDescribed,
    EvaluationDone,
)
_SAMPLES = (
    PrepareProgress,
    ProfileProgress,
    EvaluationProgress,
    PromptProgress,
    StatsSample,
    ResidencySample,
)
_MAX_JOINED_CHARS = 2048


class EngineCall:
    """A request under way: what arrived for it, and how it ended."""

    def __init__(self, request_id: str) -> None:
        self.request_id = request_id
        self._events: deque[Event] = deque()
        self._changed = threading.Condition()
        self._result: Event | None = None
        self._error: MiraError | None = None

    # -- the client's side

    def deliver(self, event: Event) -> None:
        """Adds an event; a final one ends the call. Later ones are dropped."""
        with self._changed:
            if self.is_done:
                return
            if isinstance(event, RequestFailed):
                self._error = error_from_fields(
                    {"code": event.code, "message": event.message, "hint": event.hint}
                )
            else:
                self._append(event)
                if isinstance(event, FINAL_EVENTS):
                    self._result = event
            self._changed.notify_all()

    def fail(self, error: MiraError) -> None:
        """Ends the call with an error, unless it has ended."""
        with self._changed:
            if not self.is_done:
                self._error = error
                self._changed.notify_all()

    def _append(self, event: Event) -> None:
        last = self._events[-1] if self._events else None
        if isinstance(event, TokenDelta) and isinstance(last, TokenDelta):
            if len(last.text) < _MAX_JOINED_CHARS and last.part is event.part:
                event = dataclasses.replace(
                    event,
                    text=last.text + event.text,
                    num_tokens=last.num_tokens + event.num_tokens,
                )
                self._events.pop()
        elif isinstance(event, _SAMPLES) and type(event) is type(last):
            self._events.pop()
        self._events.append(event)

    # -- the caller's side

    @property
    def is_done(self) -> bool:
        """Whether the call has ended, well or not."""
        return self._result is not None or self._error is not None

    @property
    def error(self) -> MiraError | None:
        """What the call ended with, if it failed."""
        return self._error

    def drain(self) -> list[Event]:
        """Returns the events that arrived since the last drain, without blocking."""
        with self._changed:
            events = list(self._events)
            self._events.clear()
        return events

    def __iter__(self) -> Iterator[Event]:
        """Yields events as they arrive, the final one last; blocks in between.

        An interrupted iteration can be taken up again by a new loop.

        Raises:
            MiraError: The request failed or the engine process died.
        """
        while True:
            with self._changed:
                while not self._events and not self.is_done:
                    # The client's watcher ends every call of a dead or silent engine. The
                    # time-out lets the main thread see a keyboard interrupt everywhere.
                    self._changed.wait(timeout=0.5)
                event = self._events.popleft() if self._events else None
            if event is None:
                break
            yield event
        if self._error is not None:
            raise self._error
