"""Pick a model; watch it being prepared and loaded."""

from __future__ import annotations

from dataclasses import dataclass

from mira_engine.api import MiraError
from textual import getters
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, OptionList, ProgressBar, Static
from textual.widgets.option_list import Option

from mira_app.answer import progress_text
from mira_app.catalog import CatalogEntry
from mira_app.controller import ChatController, Stage, Update
from mira_app.sanitise import sanitise

_REREAD_INTERVAL_S = 2.0
_SHORT_ROWS = 20


class ModelList(OptionList):
    """The menu; says in the footer what Enter does."""

    BINDINGS = [Binding("enter", "select", "Pick", id="models.pick")]


class ModelsScreen(Screen[None]):
    """The first screen."""

    CSS_PATH = "models.tcss"
    VERTICAL_BREAKPOINTS = [(0, "-short"), (_SHORT_ROWS, "-tall")]
    BINDINGS = [
        Binding("escape", "stop", "Stop", id="models.stop"),
        Binding("ctrl+o", "chat", "Back to the chat", id="models.chat"),
    ]

    @dataclass
    class Chosen(Message):
        """The person wants this model."""

        model: str

    @dataclass
    class Left(Message):
        """The person wants to go back to the chat."""

    model_list = getters.query_one("#models", OptionList)
    work = getters.query_one("#work", Vertical)
    step = getters.query_one("#step", Static)
    bar = getters.query_one("#progress", ProgressBar)
    note = getters.query_one("#note", Static)
    problem = getters.query_one("#problem", Static)

    def __init__(self, controller: ChatController) -> None:
        super().__init__()
        self._controller = controller
        self._entries: tuple[CatalogEntry, ...] = ()

    def compose(self) -> ComposeResult:
        """Lays out the menu, the work under way and what went wrong."""
        with Vertical(id="page"):
            yield Static("mira-chat", id="name")
            yield Static(
                "Chat with Mixture-of-Experts models bigger than the memory they run in.",
                id="claim",
            )
            yield ModelList(id="models")
            with Vertical(id="work"):
                yield Static(id="step")
                yield ProgressBar(id="progress", show_eta=True)
            yield Static("Stopped; what was finished is kept.", id="note")
            yield Static(id="problem")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Names the menu, and begins to look for what other apps prepare."""
        self.model_list.border_title = "Pick a model"
        self.work.display = self.note.display = self.problem.display = False
        self.set_interval(_REREAD_INTERVAL_S, self.reread)

    def on_screen_resume(self) -> None:
        """Reads anew what is installed."""
        self.show_models()
        self.model_list.focus()

    def reread(self) -> None:
        """Reads anew what is installed, while one may pick; draws only what changed."""
        if self.is_current and not self._is_busy:
            before = self._entries
            if self._read_entries() and self._entries != before:
                self._draw_entries(before)

    def show_models(self) -> None:
        """Fills the menu; the marked line stays."""
        before = self._entries
        if self._read_entries():
            self._draw_entries(before)

    def _read_entries(self) -> bool:
        try:
            self._entries = self._controller.models()
        except MiraError as error:
            self.show_problem(error)
            return False
        return True

    def _draw_entries(self, before: tuple[CatalogEntry, ...]) -> None:
        index = self.model_list.highlighted or 0
        marked = before[index].model if index < len(before) else None
        loaded = self._controller.loaded
        self.model_list.clear_options()
        self.model_list.add_options(
            Option(_option_content(entry, loaded is not None and loaded.model == entry.model))
            for entry in self._entries
        )
        names = [entry.model for entry in self._entries]
        self.model_list.highlighted = names.index(marked) if marked in names else 0

    @property
    def _is_busy(self) -> bool:
        return self._controller.stage in (Stage.PREPARING, Stage.LOADING)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Passes the choice on."""
        self.post_message(self.Chosen(self._entries[event.option_index].model))

    def action_stop(self) -> None:
        """Stops a preparation; what it finished is kept."""
        if self._controller.stop():
            self._show_work(self._controller.stage)

    def action_chat(self) -> None:
        """Goes back."""
        self.post_message(self.Left())

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Shows only the keys that do something now."""
        del parameters
        if action == "stop":
            return self._is_busy
        if action == "chat":
            return self._controller.loaded is not None and not self._is_busy
        return True

    def show_problem(self, error: MiraError | None) -> None:
        """Shows what went wrong, or nothing."""
        self.problem.display = error is not None
        if error is not None:
            text = f"{error.message}\n{error.hint}".strip()
            self.problem.update(Content(sanitise(text)))

    def take(self, update: Update) -> None:
        """Shows what a poll brought."""
        stage = self._controller.stage
        is_busy = self._is_busy
        if update.error is not None:
            self.show_problem(update.error)
        elif update.is_stage_new and is_busy:
            self.show_problem(None)
        if update.is_stage_new:
            # Nothing but a stop leads back from the work to the beginning.
            self.note.display = stage is Stage.IDLE and self.work.display
            self.work.display = is_busy
            self.model_list.disabled = is_busy
            self.show_models()
            if not is_busy and self.is_current:
                self.model_list.focus()
            self.refresh_bindings()
        if is_busy:
            self._show_work(stage)

    def _show_work(self, stage: Stage) -> None:
        entry, progress = self._controller.entry, self._controller.progress
        title = entry.title if entry is not None else ""
        if self._controller.is_stopping:
            self.step.update("stopping ...")
        elif stage is Stage.LOADING:
            self.step.update(Content(f"Loading {title} ..."))
            self.bar.update(total=None)
        elif progress is None:
            self.step.update(Content(f"Preparing {title}: starting the engine ..."))
            self.bar.update(total=None)
        else:
            self.step.update(Content(f"Preparing {title}: {sanitise(progress_text(progress))}"))
            self.bar.update(total=progress.total or None, progress=progress.done)


def _option_content(entry: CatalogEntry, is_loaded: bool) -> Content:
    state = "loaded" if is_loaded else "ready" if entry.is_ready else "not prepared yet"
    return Content.assemble(
        (sanitise(entry.title), "bold"),
        (f"   {state}", "$text-success" if entry.is_ready else "$text-warning"),
        "\n",
        (sanitise(entry.about), "$foreground 60%"),
    )
