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

from mira_app.answer import amount_text
from mira_app.catalog import CatalogEntry
from mira_app.controller import ChatController, Stage, Update
from mira_app.sanitise import sanitise


class ModelsScreen(Screen[None]):
    """The first screen."""

    CSS_PATH = "models.tcss"
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
            yield OptionList(id="models")
            with Vertical(id="work"):
                yield Static(id="step")
                yield ProgressBar(id="progress", show_eta=True)
            yield Static(id="problem")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Names the menu."""
        self.model_list.border_title = "Pick a model"
        self.work.display = self.problem.display = False

    def on_screen_resume(self) -> None:
        """Reads anew what is installed."""
        self.show_models()
        self.model_list.focus()

    def show_models(self) -> None:
        """Fills the menu; the marked line stays."""
        try:
            self._entries = self._controller.models()
        except MiraError as error:
            self.show_problem(error)
            return
        marked = self.model_list.highlighted or 0
        loaded = self._controller.loaded
        self.model_list.clear_options()
        self.model_list.add_options(
            Option(_option_content(entry, loaded is not None and loaded.model == entry.model))
            for entry in self._entries
        )
        self.model_list.highlighted = min(marked, len(self._entries) - 1)

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Passes the choice on."""
        self.post_message(self.Chosen(self._entries[event.option_index].model))

    def action_stop(self) -> None:
        """Stops a preparation; what it finished is kept."""
        if self._controller.stop():
            self.step.update("stopping ...")

    def action_chat(self) -> None:
        """Goes back."""
        self.post_message(self.Left())

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Shows only the keys that do something now."""
        del parameters
        is_busy = self._controller.stage in (Stage.PREPARING, Stage.LOADING)
        if action == "stop":
            return is_busy
        if action == "chat":
            return self._controller.loaded is not None and not is_busy
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
        is_busy = stage in (Stage.PREPARING, Stage.LOADING)
        if update.error is not None:
            self.show_problem(update.error)
        elif update.is_stage_new and is_busy:
            self.show_problem(None)
        if update.is_stage_new:
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
        if stage is Stage.LOADING:
            self.step.update(Content(f"Loading {title} ..."))
            self.bar.update(total=None)
        elif progress is None:
            self.step.update(Content(f"Preparing {title}: starting the engine ..."))
            self.bar.update(total=None)
        else:
            amount = sanitise(f"{amount_text(progress)} {progress.detail}".rstrip())
            self.step.update(Content(f"Preparing {title}: {progress.step}, {amount}"))
            self.bar.update(total=progress.total or None, progress=progress.done)


def _option_content(entry: CatalogEntry, is_loaded: bool) -> Content:
    state = "loaded" if is_loaded else "ready" if entry.is_ready else "not prepared yet"
    return Content.assemble(
        (sanitise(entry.title), "bold"),
        (f"   {state}", "$text-success" if entry.is_ready else "$text-warning"),
        "\n",
        (sanitise(entry.about), "$foreground 60%"),
    )
