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

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from mira_engine.api import (
    CancelledError,
    ContextTrimmed,
    EngineConfig,
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
    Reconfigure,
    ReplyPart,
    ResidencySample,
    StatsSample,
    TokenDelta,
)

from .catalog import Catalog, CatalogEntry
from .conversation import Conversation, TurnStatus
from .engine_call import EngineCall
from .engine_client import EngineClient
from .open_chat import History, OpenChat
from .remote.figures import ServerFigures
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
        thinking: New text of what the model thinks before it, not sanitised either.
        error: What failed, for the person to see.
        is_stage_new: Whether `stage` is another than before.
        is_changed_elsewhere: Whether another app's turns came into the chat, as a branch.
        renumbered: New numbers of turns where that changed them, by those of before.
    """

    text: str = ""
    thinking: str = ""
    error: MiraError | None = None
    is_stage_new: bool = False
    is_changed_elsewhere: bool = False
    renumbered: Mapping[int, int] = field(default_factory=dict)


class ChatController(OpenChat):
    """Owns the conversation and the engine's state; the screens show both.

    Attributes, beside those of the chat:
        stage: What is going on.
        loaded: What the engine said when it was loaded.
        progress: The last report of a preparation.
        prompt_progress: How far the prompt is read, while it is.
        residency: Where the experts were last seen.
        server: What the server that runs the models reports, nothing yet before it was reached;
            `None` where the engine here runs them.
    """

    def __init__(
        self,
        client: EngineClient,
        catalog: Catalog,
        settings: Settings,
        *,
        history: History | None = None,
    ) -> None:
        super().__init__(settings, history)
        self._client = client
        self._catalog = catalog
        self.stage = Stage.IDLE
        self.loaded: ModelLoaded | None = None
        self.progress: PrepareProgress | None = None
        self.prompt_progress: PromptProgress | None = None
        self.residency: ResidencySample | None = None
        self.server = self._unreached_server()
        self.reason: FinishReason | None = None
        """Why the last reply ended, where it did so by itself."""
        self._wanted_engine: EngineConfig | None = None
        self._engine_before: EngineConfig | None = None
        self._call: EngineCall | None = None
        self._stopped_call: EngineCall | None = None
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
        self._engine_before, self._is_reply_due = None, False
        if self._client.lost is not None:
            self._client.restart()
        self.entry, self.loaded, self.progress = entry, None, None
        self.residency, self.server = None, self._unreached_server()
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

    def _unreached_server(self) -> ServerFigures | None:
        address = self.settings.connect
        return None if address is None else ServerFigures(address=address)

    @property
    def is_replying(self) -> bool:
        """Whether a reply is under way, which the chat cannot be left in the middle of."""
        return self.stage is Stage.REPLYING

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
        self._ask(self.conversation.with_user(text))

    def edit(self, turn_id: int, text: str) -> None:
        """Asks another version of a question; the old one stays beside it.

        Raises:
            ValueError: Something else is going on, or the turn is no question.
            EngineProcessError: The engine cannot be started.
        """
        if not self.can_send:
            raise ValueError(f"cannot edit while {self.stage}")
        self._ask(self.conversation.before_edit(turn_id).with_user(text))

    def regenerate(self, turn_id: int | None = None) -> None:
        """Asks for another reply to a question; the old one stays beside it.

        Args:
            turn_id: The question, or a reply to it; `None` for the last one.

        Raises:
            ValueError: Something else is going on, or there is no question.
            EngineProcessError: The engine cannot be started.
        """
        if not self.can_send:
            raise ValueError(f"cannot regenerate while {self.stage}")
        self._ask(self.conversation.before_reply(turn_id))

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

    def reconfigure(self, engine: EngineConfig) -> None:
        """Uses another configuration from the next idle moment on, and for later loads.

        A model that could not be loaded is tried again with it.
        """
        self._wanted_engine = engine

    def keep_unfinished(self) -> None:
        """Keeps what the reply under way had come to as one that was stopped."""
        if self.stage is Stage.REPLYING:
            self.poll()  # What has come since may be the end of it.
        if self.stage is Stage.REPLYING:
            self._add_reply(TurnStatus.STOPPED)
            self.stage, self._call = Stage.IDLE, None

    def close(self, grace_s: float = 3.0) -> None:
        """Ends the engine process; blocks for about `grace_s` and a second at most."""
        self._client.close(grace_s)

    @property
    def notices(self) -> tuple[Notice, ...]:
        """Fallbacks and facts in force."""
        return self._client.notices

    # -- what the engine says

    def poll(self) -> Update:
        """Takes what arrived, moves the state and returns what is new. Never blocks."""
        text = thinking = ""
        error: MiraError | None = None
        call = self._call
        if call is not None:
            is_done = call.is_done  # read before draining: then nothing can arrive after it
            for event in call.drain():
                if not isinstance(event, TokenDelta):
                    self._take(event)
                elif event.part is ReplyPart.THINKING:
                    thinking += event.text
                    self._thinking += event.text
                else:
                    text += event.text
                    self._partial += event.text
            if text or thinking:
                self.prompt_progress = None
            if is_done and self._call is call:
                error = self._finish(call)
        elif self._client.lost is not None and self.stage is not Stage.FAILED:
            error = self._recover(self._client.lost)
        elif self.stage is Stage.READY and self._wanted_engine is not None:
            self._reconfigure()
        elif self._is_load_due:
            error = self._load_again()
        if error is None:
            error, self._save_error = self._save_error, None
        is_stage_new = self.stage is not self._polled_stage
        self._polled_stage = self.stage
        was_changed, self._was_changed_elsewhere = self._was_changed_elsewhere, False
        renumbered, self._renumbered = self._renumbered, {}
        return Update(
            text=text,
            thinking=thinking,
            error=error,
            is_stage_new=is_stage_new,
            is_changed_elsewhere=was_changed,
            renumbered=renumbered,
        )

    def _ask(self, conversation: Conversation) -> None:
        is_lost = self._client.lost is not None
        if is_lost:
            self._client.restart()
        self._begin_turn(conversation)
        self.reason = self.prompt_progress = None
        self._save()
        if is_lost or self.stage is Stage.FAILED:
            self._is_reply_due = True
            self._load(Stage.RECOVERING)
        else:
            self._generate()

    def _generate(self) -> None:
        self.stage = Stage.REPLYING
        self._is_reply_due = False
        self._call = self._client.submit(
            Generate(
                request_id=self._client.new_request_id(),
                messages=self.conversation.messages(),
                sampling=self.sampling,
            )
        )

    def _load(self, stage: Stage) -> None:
        assert self.entry is not None
        if self._wanted_engine is not None:
            self._use_engine(self._wanted_engine)
        self.stage = stage
        self._call = self._client.submit(
            LoadModel(
                request_id=self._client.new_request_id(),
                model=self.entry.model,
                config=self.settings.engine,
            )
        )

    @property
    def _is_load_due(self) -> bool:
        """Whether a model that could not be loaded has another configuration now."""
        has_failed = self.stage is Stage.FAILED and self.entry is not None
        return has_failed and self._wanted_engine is not None

    def _load_again(self) -> MiraError | None:
        try:
            if self._client.lost is not None:
                self._client.restart()
            self._load(Stage.LOADING)
        except EngineProcessError as error:
            self._wanted_engine = None
            return error
        return None

    def _reconfigure(self) -> None:
        assert self._wanted_engine is not None
        self._engine_before = self.settings.engine
        self._use_engine(self._wanted_engine)
        self.stage = Stage.LOADING
        self._call = self._client.submit(
            Reconfigure(request_id=self._client.new_request_id(), config=self.settings.engine)
        )

    def _use_engine(self, engine: EngineConfig) -> None:
        self.settings = dataclasses.replace(self.settings, engine=engine)
        self._wanted_engine = None

    def _take(self, event: object) -> None:
        if isinstance(event, PrepareProgress):
            self.progress = event
        elif isinstance(event, PromptProgress):
            self.prompt_progress = event
        elif isinstance(event, StatsSample):
            self.stats = event.stats
        elif isinstance(event, ResidencySample):
            self.residency = event
        elif isinstance(event, ServerFigures):
            self.server = event
        elif isinstance(event, ContextTrimmed):
            self.trimmed = event
        elif isinstance(event, PrepareDone):
            self._load(Stage.LOADING)
        elif isinstance(event, ModelLoaded):
            self.loaded, self._call, self._engine_before = event, None, None
            # Until the next reply the plan says which K holds, not the governor before.
            self.stats = dataclasses.replace(self.stats, governor_reason="")
            if self._is_reply_due:
                self._generate()
            else:
                self.stage = Stage.READY
        elif isinstance(event, GenerationDone):
            is_cancelled = event.reason is FinishReason.CANCELLED
            self._partial, self.stats = event.text, event.stats
            self._thinking = event.thinking or self._thinking
            self.reason = event.reason
            self._add_reply(TurnStatus.STOPPED if is_cancelled else TurnStatus.COMPLETE)

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
        if self._engine_before is not None:
            return self._give_up_change(error)
        is_cancelled = isinstance(error, CancelledError)
        is_from_menu = self.stage in (Stage.PREPARING, Stage.LOADING)
        if self._is_reply_due and error is not None:
            self._is_reply_due = False
            self._add_reply(
                TurnStatus.STOPPED if is_cancelled else TurnStatus.ERROR,
                "" if is_cancelled else error.message,
            )
        # A process that dies while it loads or prepares would most likely do it again.
        self.stage = Stage.IDLE if is_cancelled and is_from_menu else Stage.FAILED
        return None if is_cancelled else error

    def _give_up_change(self, error: MiraError | None) -> MiraError | None:
        """Goes back to the configuration in force before a change that was refused."""
        assert self._engine_before is not None
        self._use_engine(self._engine_before)
        self._engine_before = None
        if isinstance(error, EngineProcessError):
            return self._recover(error)
        self.stage = Stage.READY
        return None if isinstance(error, CancelledError) else error

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
