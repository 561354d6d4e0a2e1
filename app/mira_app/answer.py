"""One question, one answer, on plain streams: prepare, load, generate.

Blocking; used by `mira-chat run` and where there is no terminal. The reply goes to one
stream and everything else to another.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol, TextIO

from mira_engine.api import (
    CancelledError,
    ChatMessage,
    EngineProcessError,
    FinishReason,
    Generate,
    GenerationDone,
    KProfile,
    LoadModel,
    MiraError,
    ModelLoaded,
    Notice,
    PrepareModel,
    PrepareProgress,
    ProfileDone,
    ProfileModel,
    ProfileProgress,
    ReplyStats,
    StatsSample,
    TokenDelta,
    format_bytes,
    to_plain,
)

from .catalog import Catalog
from .engine_call import EngineCall
from .engine_client import EngineClient
from .figures import derived, stats_line
from .sanitise import Sanitiser, sanitise
from .settings import Settings


class ProgressDisplay(Protocol):
    """Shows preparation; ended by `close`."""

    def show(self, progress: PrepareProgress) -> None:
        """Shows one report."""
        ...

    def close(self) -> None:
        """Leaves the screen tidy."""
        ...


class LineProgress:
    """Progress as plain lines: each step once, and each tenth of it."""

    def __init__(self, out: TextIO) -> None:
        self._out = out
        self._last: tuple[str, int] | None = None

    def show(self, progress: PrepareProgress) -> None:
        """Prints a line when a new step or a new tenth of it begins."""
        tenth = 10 * progress.done // progress.total if progress.total else 0
        if (progress.step, tenth) != self._last:
            self._last = (progress.step, tenth)
            print(f"prepare: {progress_text(progress)}", file=self._out, flush=True)

    def close(self) -> None:
        """Does nothing: each line is complete."""


class BarProgress:
    """Progress as bars of rich, one per step."""

    def __init__(self, out: TextIO) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeRemainingColumn

        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TextColumn("{task.fields[amount]}"),
            TimeRemainingColumn(),
            console=Console(file=out),
        )
        self._tasks: dict[str, object] = {}
        self._progress.start()

    def show(self, progress: PrepareProgress) -> None:
        """Moves the step's bar."""
        if progress.step not in self._tasks:
            self._tasks[progress.step] = self._progress.add_task(progress.step, amount="")
        self._progress.update(
            self._tasks[progress.step],  # type: ignore[arg-type]
            completed=progress.done,
            total=progress.total or None,
            amount=amount_text(progress),
        )

    def close(self) -> None:
        """Stops drawing; the bars stay."""
        self._progress.stop()


def amount_text(progress: PrepareProgress) -> str:
    """Formats `done` of `total`: `3 of 30 layers`, `12.0 MiB of 93.8 MiB`."""
    if progress.unit == "bytes":
        done, total, unit = format_bytes(progress.done), format_bytes(progress.total), ""
    else:
        done, total, unit = str(progress.done), str(progress.total), f" {progress.unit}"
    return f"{done} of {total}{unit}" if progress.total else f"{done}{unit}"


def progress_text(progress: PrepareProgress) -> str:
    """Formats a whole report on one line."""
    detail = f" · {progress.detail}" if progress.detail else ""
    return f"{progress.step}, {amount_text(progress)}{detail}"


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came of a question."""

    text: str = ""
    reason: FinishReason = FinishReason.ERROR
    stats: ReplyStats = field(default_factory=ReplyStats)
    loaded: ModelLoaded | None = None
    notices: list[Notice] = field(default_factory=list)
    error: MiraError | None = None

    def to_json(self) -> str:
        """Returns all of it as one JSON object, ASCII only."""
        loaded = self.loaded
        return json.dumps(
            {
                "text": self.text,
                "reason": self.reason.value,
                "error": self.error.to_fields() if self.error is not None else None,
                "model": loaded.model if loaded else None,
                "title": loaded.title if loaded else None,
                "context_length": loaded.context_length if loaded else None,
                "load_s": loaded.load_s if loaded else None,
                "stats": {**to_plain(self.stats), **derived(self.stats)},  # type: ignore[dict-item]
                "plan": {**to_plain(loaded.plan), "total_bytes": loaded.plan.total_bytes}  # type: ignore[dict-item]
                if loaded
                else None,
                "notices": [to_plain(notice) for notice in self.notices],
            }
        )


class Answerer:
    """Answers one question; an interrupt stops the engine's work, not this object."""

    def __init__(
        self,
        client: EngineClient,
        catalog: Catalog,
        settings: Settings,
        *,
        err: TextIO,
        make_progress: Callable[[TextIO], ProgressDisplay] = LineProgress,
    ) -> None:
        self._client = client
        self._catalog = catalog
        self._settings = settings
        self._err = err
        self._make_progress = make_progress

    def prepare(self, *, is_predicting: bool = False, calibration: str | None = None) -> None:
        """Makes the model ready, unless it is.

        Args:
            is_predicting: Whether predictors are made too, unless they are there.
            calibration: Text file with the prompts to make them from.
        """
        settings = self._settings
        entry = self._catalog.find(settings.model, settings.engine.precision)
        if entry.is_ready and not is_predicting:
            return
        call = self._client.submit(
            PrepareModel(
                request_id=self._client.new_request_id(),
                model=entry.model,
                precision=settings.engine.precision,
                is_predicting=is_predicting,
                calibration=calibration,
            )
        )
        display = self._make_progress(self._err)
        try:
            with self._cancelling(call):
                for event in call:
                    if isinstance(event, PrepareProgress):
                        display.show(event)
                    elif isinstance(event, Notice):
                        self._note(event)
        finally:
            display.close()

    def profile(self, *, is_quick: bool) -> KProfile:
        """Prepares the model and measures which K is fastest; the engine saves the result.

        Raises:
            MiraError: Something failed.
            KeyboardInterrupt: The person interrupted; nothing is saved.
        """
        self.prepare()
        settings = self._settings
        call = self._client.submit(
            ProfileModel(
                request_id=self._client.new_request_id(),
                model=self._catalog.find(settings.model, settings.engine.precision).model,
                config=settings.engine,
                is_quick=is_quick,
            )
        )
        with self._cancelling(call):
            for event in call:
                if isinstance(event, ProfileProgress):
                    text = f"profile: {event.done} of {event.total} replies · {event.detail}"
                    print(sanitise(text), file=self._err, flush=True)
                elif isinstance(event, Notice):
                    self._note(event)
                elif isinstance(event, ProfileDone):
                    return event.profile
        raise EngineProcessError("The engine process ended the profile without a result.")

    def ask(self, prompt: str, answer: Answer, out: TextIO | None) -> None:
        """Prepares, loads and answers; streams to `out` unless it is `None`.

        What has arrived is in `answer` also when this raises.

        Raises:
            MiraError: Something failed.
            KeyboardInterrupt: The person interrupted; the engine has stopped the work.
        """
        self.prepare()
        settings = self._settings
        model = self._catalog.find(settings.model, settings.engine.precision).model
        loading = self._client.submit(
            LoadModel(request_id=self._client.new_request_id(), model=model, config=settings.engine)
        )
        with self._cancelling(loading):
            for event in loading:
                if isinstance(event, ModelLoaded):
                    answer.loaded = event
                elif isinstance(event, Notice):
                    self._note(event, answer)
        roles = (("system", settings.system_prompt), ("user", prompt))
        generating = self._client.submit(
            Generate(
                request_id=self._client.new_request_id(),
                messages=tuple(ChatMessage(role=r, content=c) for r, c in roles if c),
                sampling=settings.sampling,
                is_residency_wanted=False,
            )
        )
        sanitiser = Sanitiser()

        def take(event: object) -> None:
            if isinstance(event, TokenDelta):
                answer.text += event.text
                if out is not None:
                    out.write(sanitiser.feed(event.text))
                    out.flush()
            elif isinstance(event, StatsSample):
                answer.stats = event.stats
            elif isinstance(event, Notice):
                self._note(event, answer)
            elif isinstance(event, GenerationDone):
                answer.text, answer.reason, answer.stats = event.text, event.reason, event.stats

        try:
            with self._cancelling(generating, take):
                for event in generating:
                    take(event)
            if answer.reason is FinishReason.STOP and not answer.text.strip():
                print("note: the model ended the reply at once.", file=self._err, flush=True)
        finally:
            if out is not None and answer.text and not answer.text.endswith("\n"):
                out.write("\n")
                out.flush()

    def stats_line(self, answer: Answer) -> str:
        """Returns the closing line of figures."""
        budget = answer.loaded.plan.budget_bytes if answer.loaded else 0
        return stats_line(answer.stats, budget_bytes=budget)

    @contextlib.contextmanager
    def _cancelling(
        self, call: EngineCall, take: Callable[[object], None] = lambda event: None
    ) -> Iterator[None]:
        """On an interrupt cancels the call and takes what still comes, then goes on raising."""
        try:
            yield
        except (KeyboardInterrupt, OSError) as interrupt:
            if not self._client.is_ready:
                raise  # It would read the request only once it has started.
            self._client.cancel(call)
            with contextlib.suppress(CancelledError, EngineProcessError):
                for event in call:
                    # A stream nobody reads any more gets nothing more.
                    if isinstance(interrupt, KeyboardInterrupt):
                        take(event)
            raise

    def _note(self, notice: Notice, answer: Answer | None = None) -> None:
        if answer is not None:
            answer.notices.append(notice)
        print(f"note: {sanitise(notice.text)}", file=self._err, flush=True)
