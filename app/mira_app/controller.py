"""A chat and the engine that answers it, as one state machine without a screen.

Nothing here blocks or waits: the person's wishes are methods, and `poll`, called by a
timer, takes what the engine has said since and moves the state. One model operation or
reply is under way at a time.

    IDLE --choose--> PREPARING --> LOADING --> READY <--> REPLYING
    any of them, when the engine dies: --> RECOVERING --> READY, or FAILED

A dead engine is restarted and the model loaded again, once; a second death before the
model is loaded leaves FAILED, from which choosing a model or sending tries anew.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from mira_engine.api import (
    CancelledError,
    EngineProcessError,
    FinishReason,
    Generate,
    GenerationDone,
    LoadModel,
    MiraError,
    ModelLoaded,
    Notice,
    PrepareDone,
    PrepareModel,
    PrepareProgress,
    PromptProgress,
    ReplyStats,
    StatsSample,
    TokenDelta,
)

from .catalog import Catalog, CatalogEntry
from .conversation import Conversation, Role, TurnStatus
from .engine_call import EngineCall
from .engine_client import EngineClient
from .settings import Settings


class Stage(enum.StrEnum):
    """What is going on."""

    IDLE = "idle"
    PREPARING = "preparing"
    LOADING = "loading"
    READY = "ready"
    REPLYING = "replying"
    RECOVERING = "recovering"
    FAILED = "failed"


@dataclass(frozen=True, slots=True, kw_only=True)
class Update:
    """What one `poll` brought.

    Attributes:
        text: New text of the reply, not yet sanitised.
        error: What failed, for the person to see.
        is_stage_new: Whether `stage` is another than before.
    """

    text: str = ""
    error: MiraError | None = None
    is_stage_new: bool = False


class ChatController:
    """Owns the conversation and the engine's state; the screens show both.

    Attributes:
        stage: What is going on.
        entry: The model chosen last.
        loaded: What the engine said when it was loaded.
        conversation: The chat.
        stats: Figures of the running or the last reply.
        progress: The last report of a preparation.
        prompt_progress: How far the prompt is read, while it is.
    """

    def __init__(self, client: EngineClient, catalog: Catalog, settings: Settings) -> None:
        self._client = client
        self._catalog = catalog
        self.settings = settings
        self.stage = Stage.IDLE
        self.entry: CatalogEntry | None = None
        self.loaded: ModelLoaded | None = None
        self.conversation = Conversation(system_prompt=settings.system_prompt)
        self.stats = ReplyStats()
        self.progress: PrepareProgress | None = None
        self.prompt_progress: PromptProgress | None = None
        self._call: EngineCall | None = None
        self._stopped_call: EngineCall | None = None
        self._partial = ""
        self._polled_stage = Stage.IDLE

    # -- what the person wants

    def models(self) -> tuple[CatalogEntry, ...]:
        """Returns the models to choose from; reads folders."""
        return tuple(self._catalog.entries(self.settings.engine.precision))

    def choose(self, model: str) -> None:
        """Prepares (where needed) and loads a model; what was under way is stopped.

        Raises:
            MiraError: There is no such model, or the engine cannot be started.
        """
        entry = self._catalog.find(model, self.settings.engine.precision)
        if self.stop() and self.stage is Stage.REPLYING:
            self._add_reply(TurnStatus.STOPPED)
        if self._client.lost is not None:
            self._client.restart()
        self.entry, self.loaded, self.progress = entry, None, None
        if entry.is_ready:
            self._load(Stage.LOADING)
        else:
            self.stage = Stage.PREPARING
            self._call = self._client.submit(
                PrepareModel(
                    request_id=self._client.new_request_id(),
                    model=entry.model,
                    precision=self.settings.engine.precision,
                )
            )

    @property
    def can_send(self) -> bool:
        """Whether a message would be taken now."""
        return self.stage in (Stage.READY, Stage.FAILED) and self.entry is not None

    def send(self, text: str) -> None:
        """Asks; the reply comes through `poll`. After a failure reloads the model first.

        Raises:
            ValueError: Something else is going on.
            EngineProcessError: The engine cannot be started.
        """
        if not self.can_send:
            raise ValueError(f"cannot send while {self.stage}")
        self.conversation = self.conversation.with_user(text)
        self._ask()

    def regenerate(self) -> None:
        """Asks for another reply to the last question; the old one stays beside it.

        Raises:
            ValueError: Something else is going on, or there is no question.
        """
        if not self.can_send:
            raise ValueError(f"cannot regenerate while {self.stage}")
        self.conversation = self.conversation.before_reply()
        self._ask()

    def stop(self) -> bool:
        """Asks the engine to stop what it does; returns whether there was anything."""
        is_busy = self._call is not None and not self._call.is_done
        if is_busy and self._call is not None:
            self._stopped_call = self._call
            self._client.cancel(self._call)
        return is_busy

    @property
    def is_stopping(self) -> bool:
        """Whether the engine was asked to stop what it still does."""
        return self._call is not None and self._call is self._stopped_call

    def new_chat(self) -> None:
        """Begins an empty conversation.

        Raises:
            ValueError: A reply is under way.
        """
        if self.stage is Stage.REPLYING:
            raise ValueError("a reply is under way")
        self.conversation = Conversation(system_prompt=self.settings.system_prompt)
        self.stats = ReplyStats()

    def close(self) -> None:
        """Ends the engine process; blocks for a few seconds at most."""
        self._client.close()

    @property
    def notices(self) -> tuple[Notice, ...]:
        """Fallbacks and facts in force."""
        return self._client.notices

    @property
    def partial(self) -> str:
        """Text of the running reply so far."""
        return self._partial

    # -- what the engine says

    def poll(self) -> Update:
        """Takes what arrived, moves the state and returns what is new. Never blocks."""
        text, error = "", None
        call = self._call
        if call is not None:
            is_done = call.is_done  # read before draining: then nothing can arrive after it
            for event in call.drain():
                text += self._take(event)
            if is_done and self._call is call:
                error = self._finish(call)
        elif self._client.lost is not None and self.stage is not Stage.FAILED:
            error = self._recover(self._client.lost)
        is_stage_new = self.stage is not self._polled_stage
        self._polled_stage = self.stage
        return Update(text=text, error=error, is_stage_new=is_stage_new)

    @property
    def _is_reply_pending(self) -> bool:
        """Whether a question waits for the model to be loaded again."""
        head = self.conversation.head
        return self.stage is Stage.RECOVERING and head is not None and head.role is Role.USER

    def _ask(self) -> None:
        self._partial = ""
        self.stats = ReplyStats()
        self.prompt_progress = None
        if self.stage is Stage.FAILED or self._client.lost is not None:
            if self._client.lost is not None:
                self._client.restart()
            self._load(Stage.RECOVERING)
        else:
            self._generate()

    def _generate(self) -> None:
        self.stage = Stage.REPLYING
        self._call = self._client.submit(
            Generate(
                request_id=self._client.new_request_id(),
                messages=self.conversation.messages(),
                sampling=self.settings.sampling,
            )
        )

    def _load(self, stage: Stage) -> None:
        assert self.entry is not None
        self.stage = stage
        self._call = self._client.submit(
            LoadModel(
                request_id=self._client.new_request_id(),
                model=self.entry.model,
                config=self.settings.engine,
            )
        )

    def _take(self, event: object) -> str:
        if isinstance(event, TokenDelta):
            self.prompt_progress = None
            self._partial += event.text
            return event.text
        if isinstance(event, PrepareProgress):
            self.progress = event
        elif isinstance(event, PromptProgress):
            self.prompt_progress = event
        elif isinstance(event, StatsSample):
            self.stats = event.stats
        elif isinstance(event, PrepareDone):
            self._load(Stage.LOADING)
        elif isinstance(event, ModelLoaded):
            self.loaded, self._call = event, None
            if self._is_reply_pending:
                self._generate()
            else:
                self.stage = Stage.READY
        elif isinstance(event, GenerationDone):
            is_cancelled = event.reason is FinishReason.CANCELLED
            self._partial, self.stats = event.text, event.stats
            self._add_reply(TurnStatus.STOPPED if is_cancelled else TurnStatus.COMPLETE)
        return ""

    def _finish(self, call: EngineCall) -> MiraError | None:
        """Ends a call that was not followed by another one."""
        error, self._call = call.error, None
        if self.stage is Stage.REPLYING:
            if isinstance(error, CancelledError):
                self._add_reply(TurnStatus.STOPPED)
                error = None
            elif error is not None:
                self._add_reply(TurnStatus.ERROR, error.message)
            if isinstance(error, EngineProcessError):
                return self._recover(error)
            self.stage = Stage.READY
            return error
        is_cancelled = isinstance(error, CancelledError)
        is_from_menu = self.stage in (Stage.PREPARING, Stage.LOADING)
        if self._is_reply_pending and error is not None:
            self._add_reply(
                TurnStatus.STOPPED if is_cancelled else TurnStatus.ERROR,
                "" if is_cancelled else error.message,
            )
        # A process that dies while it loads or prepares would most likely do it again.
        self.stage = Stage.IDLE if is_cancelled and is_from_menu else Stage.FAILED
        return None if is_cancelled else error

    def _add_reply(self, status: TurnStatus, error: str = "") -> None:
        self.conversation = self.conversation.with_reply(
            self._partial, status=status, error=error, stats=self.stats
        )

    def _recover(self, lost: EngineProcessError) -> MiraError:
        """Starts a new engine with the model that was loaded; returns what to tell."""
        self.prompt_progress = None
        if self.loaded is None:
            self.stage = Stage.FAILED
            return lost
        self.loaded = None
        try:
            self._client.restart()
            self._load(Stage.RECOVERING)
        except EngineProcessError as error:
            self.stage = Stage.FAILED
            return error
        return EngineProcessError(lost.message, hint="It is being restarted.")
