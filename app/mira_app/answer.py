"""Questions and answers on plain streams: prepare, load, generate.

Blocking; used by the commands that work without a screen. The reply goes to one stream
and everything else to another.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TextIO

from mira_engine.api import (
    CancelledError,
    ChatMessage,
    ContextTrimmed,
    EngineProcessError,
    EvaluateModel,
    EvaluationDone,
    EvaluationProgress,
    EvaluationReport,
    FinishReason,
    Generate,
    GenerationDone,
    KProfile,
    LoadModel,
    MiraError,
    ModelBusyError,
    ModelLoaded,
    Notice,
    Precision,
    PrepareModel,
    PrepareProgress,
    ProfileDone,
    ProfileModel,
    ProfileProgress,
    ReplyPart,
    ReplyStats,
    Rounding,
    SamplingConfig,
    StatsSample,
    TokenDelta,
    to_plain,
)

from .catalog import Catalog
from .engine_call import EngineCall
from .engine_client import EngineClient
from .evaluation_report import EvaluationLines
from .figures import REPORTED, count, derived, stats_line
from .progress import ProgressDisplay
from .progress import amount_text as amount_text
from .progress import progress_text as progress_text
from .reply_streams import ReplyStreams as ReplyStreams
from .sanitise import sanitise
from .settings import Settings

OnEvent = Callable[[object], None]

BUSY_RETRY_S = 1.0
"""Time until the first look again whether another process has finished a model."""

BUSY_RETRY_MAX_S = 15.0
"""The longest time between two: each look may ask the hub, and a preparation takes minutes."""


@dataclass(slots=True, kw_only=True)
class Answer:
    """What came of a question."""

    text: str = ""
    thinking: str = ""
    reason: FinishReason = FinishReason.ERROR
    stats: ReplyStats = field(default_factory=ReplyStats)
    loaded: ModelLoaded | None = None
    notices: list[Notice] = field(default_factory=list)
    error: MiraError | None = None

    def to_json(self) -> str:
        """Returns all of it as one JSON object, ASCII only."""
        loaded = self.loaded
        stats: dict[str, object] = {**to_plain(self.stats), **derived(self.stats)}  # type: ignore[dict-item]
        if loaded is not None and loaded.plan is None:
            stats = {name: stats[name] for name in REPORTED}
        return json.dumps(
            {
                "text": self.text,
                "thinking": self.thinking,
                "reason": self.reason.value,
                "error": self.error.to_fields() if self.error is not None else None,
                "model": loaded.model if loaded else None,
                "title": loaded.title if loaded else None,
                "context_length": loaded.context_length if loaded else None,
                "load_s": loaded.load_s if loaded else None,
                "stats": stats,
                "plan": {**to_plain(loaded.plan), "total_bytes": loaded.plan.total_bytes}  # type: ignore[dict-item]
                if loaded and loaded.plan
                else None,
                "notices": [to_plain(notice) for notice in self.notices],
            }
        )


class Answerer:
    """Answers questions; an interrupt stops the engine's work, not this object.

    Args:
        client: The engine.
        catalog: Finds models by name.
        settings: What the person chose.
        err: Takes progress and notices.
        make_progress: Makes the display of a preparation.
        on_event: Told every event, before anything else is done with it.
        sleep: Waits so many seconds.
    """

    def __init__(
        self,
        client: EngineClient,
        catalog: Catalog,
        settings: Settings,
        *,
        err: TextIO,
        make_progress: Callable[[TextIO], ProgressDisplay],
        on_event: OnEvent = lambda event: None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._client = client
        self._catalog = catalog
        self._settings = settings
        self._err = err
        self._make_progress = make_progress
        self.on_event = on_event
        self._sleep = sleep

    def prepare(
        self,
        *,
        is_forced: bool = False,
        is_predicting: bool = False,
        calibration: str | None = None,
        is_download_deleted: bool | None = None,
        draft: Rounding | None = None,
        draft_from: str | None = None,
    ) -> None:
        """Makes the chosen model ready, unless it is and nothing else is asked for.

        Where another process does that already, waits for it.

        Args:
            is_forced: Whether the engine is asked also where the model looks ready.
            is_predicting: Whether predictors are made too.
            calibration: File of the prompts to make them from, `None` for those shipped.
            is_download_deleted: Whether downloaded files go once they are converted, `None`
                where the disk has no room for both.
            draft: How the draft's codes are chosen, `None` to leave them as they are.
            draft_from: Folder of a GPTQ checkpoint whose codes the draft takes.

        Raises:
            MiraError: Something failed.
            KeyboardInterrupt: The person interrupted; what was finished is kept.
        """
        engine = self._settings.engine
        entry = self._catalog.find(self._settings.model, engine.precision)
        is_draft_wanted = draft is not None or draft_from is not None
        if entry.is_ready and not (
            is_predicting or is_forced or is_download_deleted or is_draft_wanted
        ):
            return
        request = PrepareModel(
            request_id="",
            model=entry.model,
            precision=engine.precision,
            is_predicting=is_predicting,
            calibration=calibration,
            is_download_deleted=is_download_deleted,
            draft=draft,
            draft_from=draft_from,
        )
        wait_s = BUSY_RETRY_S
        # Outside of any `except`: an interrupt while it waits has no error behind it, by
        # which a second interrupt is told from the first.
        while (busy := self._prepare_unless_busy(request)) is not None:
            if wait_s == BUSY_RETRY_S:
                self._say(f"{busy.message} Waiting for it; Ctrl+C ends that.")
            self._sleep(wait_s)
            wait_s = min(2 * wait_s, BUSY_RETRY_MAX_S)

    def _prepare_unless_busy(self, request: PrepareModel) -> ModelBusyError | None:
        """Returns that another process prepares the model, `None` once it is prepared."""
        try:
            self._prepare(request)
        except ModelBusyError as error:
            return error
        return None

    def _prepare(self, request: PrepareModel) -> None:
        call = self._client.submit(
            dataclasses.replace(request, request_id=self._client.new_request_id())
        )
        display = self._make_progress(self._err)
        try:
            with self._cancelling(call):
                for event in self._events(call):
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
        call = self._client.submit(
            ProfileModel(
                request_id=self._client.new_request_id(),
                model=self._model,
                config=self._settings.engine,
                is_quick=is_quick,
            )
        )
        with self._cancelling(call):
            for event in self._events(call):
                if isinstance(event, ProfileProgress):
                    text = f"profile: {event.done} of {event.total} replies · {event.detail}"
                    print(sanitise(text), file=self._err, flush=True)
                elif isinstance(event, Notice):
                    self._note(event)
                elif isinstance(event, ProfileDone):
                    return event.profile
        raise EngineProcessError("The engine process ended the profile without a result.")

    def evaluate(
        self, *, precisions: Sequence[Precision], files: Sequence[str], max_tokens: int
    ) -> EvaluationReport:
        """Compares precisions of the chosen model; prepares none.

        Args:
            precisions: Which; empty for every one that is prepared.
            files: Text files to read instead of the shipped texts.
            max_tokens: Most tokens that are read in each precision.

        Raises:
            MiraError: Something failed.
            KeyboardInterrupt: The person interrupted.
        """
        call = self._client.submit(
            EvaluateModel(
                request_id=self._client.new_request_id(),
                model=self._model,
                config=self._settings.engine,
                precisions=tuple(precisions),
                files=tuple(files),
                max_tokens=max_tokens,
            )
        )
        lines = EvaluationLines(self._err)
        with self._cancelling(call):
            for event in self._events(call):
                if isinstance(event, EvaluationProgress):
                    lines.show(event)
                elif isinstance(event, Notice):
                    self._note(event)
                elif isinstance(event, EvaluationDone):
                    return event.report
        raise EngineProcessError("The engine process ended the evaluation without a result.")

    def load(self, answer: Answer) -> ModelLoaded:
        """Prepares and loads the chosen model; notices go into `answer`, too.

        Raises:
            MiraError: Something failed.
            KeyboardInterrupt: The person interrupted.
        """
        self.prepare()
        call = self._client.submit(
            LoadModel(
                request_id=self._client.new_request_id(),
                model=self._model,
                config=self._settings.engine,
            )
        )
        with self._cancelling(call):
            for event in self._events(call):
                if isinstance(event, ModelLoaded):
                    answer.loaded = event
                elif isinstance(event, Notice):
                    self._note(event, answer)
        if answer.loaded is None:
            raise EngineProcessError("The engine process loaded no model.")
        return answer.loaded

    def reply(
        self,
        messages: Sequence[ChatMessage],
        sampling: SamplingConfig,
        answer: Answer,
        streams: ReplyStreams,
    ) -> None:
        """Has the loaded model answer a chat. What has arrived is in `answer` also on a raise.

        Raises:
            MiraError: Something failed.
            KeyboardInterrupt: The person interrupted; the engine has stopped the reply.
        """
        call = self._client.submit(
            Generate(
                request_id=self._client.new_request_id(),
                messages=tuple(messages),
                sampling=sampling,
                is_residency_wanted=False,
            )
        )

        late: list[str] = []  # What is noticed while the reply is written stands behind it.

        def take(event: object) -> None:
            if isinstance(event, TokenDelta):
                if event.part is ReplyPart.THINKING:
                    answer.thinking += event.text
                else:
                    answer.text += event.text
                streams.write(event)
            elif isinstance(event, StatsSample):
                answer.stats = event.stats
            elif isinstance(event, Notice):
                answer.notices.append(event)
                late.append(event.text)
            elif isinstance(event, ContextTrimmed):
                self._say(
                    f"{count(event.num_turns, 'message')} of the chat left out to fit the context "
                    f"of {event.limit} tokens."
                )
            elif isinstance(event, GenerationDone):
                answer.text, answer.thinking = event.text, event.thinking
                answer.reason, answer.stats = event.reason, event.stats

        try:
            with self._cancelling(call, take):
                for event in self._events(call):
                    take(event)
            if answer.reason is FinishReason.STOP and not answer.text.strip():
                self._say("the model ended the reply at once.")
        finally:
            streams.close()
            for text in late:
                self._say(text)

    def ask(self, prompt: str, answer: Answer, streams: ReplyStreams) -> None:
        """Prepares, loads and answers one question.

        Raises:
            MiraError: Something failed.
            KeyboardInterrupt: The person interrupted; the engine has stopped the work.
        """
        self.load(answer)
        roles = (("system", self._settings.system_prompt), ("user", prompt))
        messages = [ChatMessage(role=role, content=text) for role, text in roles if text]
        self.reply(messages, self._settings.sampling, answer, streams)

    def stats_line(self, answer: Answer) -> str:
        """Returns the closing line of figures."""
        loaded = answer.loaded
        if loaded is None:
            return stats_line(answer.stats, budget_bytes=0)
        budget = loaded.plan.budget_bytes if loaded.plan is not None else None
        return stats_line(answer.stats, budget_bytes=budget)

    @property
    def _model(self) -> str:
        settings = self._settings
        return self._catalog.find(settings.model, settings.engine.precision).model

    def _events(self, call: EngineCall) -> Iterator[object]:
        for event in call:
            self.on_event(event)
            yield event

    @contextlib.contextmanager
    def _cancelling(self, call: EngineCall, take: OnEvent = lambda event: None) -> Iterator[None]:
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
                        self.on_event(event)
                        take(event)
            raise

    def _note(self, notice: Notice, answer: Answer | None = None) -> None:
        if answer is not None:
            answer.notices.append(notice)
        self._say(notice.text)

    def _say(self, text: str) -> None:
        print(f"note: {sanitise(text)}", file=self._err, flush=True)
