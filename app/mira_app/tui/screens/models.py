"""Pick a model; watch it being downloaded, prepared and loaded."""

from __future__ import annotations

import functools
from dataclasses import dataclass

from mira_engine.api import MiraError, format_bytes
from textual import getters
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.screen import ActiveBinding
from textual.widgets import DataTable, Input, Static

from mira_app.catalog import CatalogEntry
from mira_app.controller import ChatController, Stage, Update
from mira_app.job import JobState
from mira_app.model_desk import ModelDesk
from mira_app.model_rows import Column, ModelRow, Tone, details, matching, ordered
from mira_app.sanitise import sanitise
from mira_app.tui.footer_keys import KeyFooter, without
from mira_app.tui.screens.add_model import AddModelScreen
from mira_app.tui.screens.jobs_screen import DESK_INTERVAL_S, JobsScreen
from mira_app.tui.screens.remove_model import RemoveModelScreen
from mira_app.tui.widgets.model_table import ModelList
from mira_app.tui.widgets.work_view import WorkView, written_text

_REREAD_INTERVAL_S = 2.0
_MIDDLE_ROWS = 20
_TALL_ROWS = 30
_SORTED_BY = (None, Column.NAME, Column.PARAMETERS, Column.DOWNLOAD, Column.VERDICT, Column.STATE)
_LARGEST_FIRST = (Column.VERDICT,)
_JOB_ACTIONS = ("toggle_pause", "cancel_job", "retry")
_LESS_WITH_JOBS = frozenset({"models.sort", "app.controls"})
"""Keys that the footer has no room for beside those of a job."""

_COLOURS = {Tone.PLAIN: "", Tone.GOOD: "$text-success", Tone.WORK: "", Tone.BAD: "$text-error"}


class FilterInput(Input):
    """What models are searched by; Escape gives the search up, Enter keeps it."""

    BINDINGS = [
        Binding("escape", "screen.end_filter(False)", "All models", id="models.unfilter"),
        Binding("down", "screen.end_filter(True)", "To the list", show=False, id="models.filtered"),
    ]


class ModelsScreen(JobsScreen):
    """The first screen.

    Args of the constructor: the controller, whose models are listed; the desk with jobs and
    verdicts, `None` where models are only picked, prepared by the chat's own engine.
    """

    CSS_PATH = "models.tcss"
    AUTO_FOCUS = "#models"
    VERTICAL_BREAKPOINTS = [(0, "-short"), (_MIDDLE_ROWS, "-middle"), (_TALL_ROWS, "-tall")]
    BINDINGS = [
        Binding("escape", "stop", "Stop", id="models.stop"),
        Binding("escape", "end_filter(False)", "All models", id="models.all"),
        Binding("p", "toggle_pause", "Pause/go on", id="models.pause"),
        Binding("r", "retry", "Try again", id="models.retry"),
        Binding("x", "cancel_job", "Give up", id="models.cancel"),
        Binding("delete", "remove", "Remove", id="models.remove"),
        Binding("a", "add", "Add", id="models.add"),
        Binding("slash", "filter", "Search", id="models.filter"),
        Binding("s", "sort", "Sort", id="models.sort"),
        Binding("m", "measure", "Measure K", id="models.measure"),
        Binding("ctrl+o", "chat", "Back to the chat", id="models.chat"),
    ]

    @dataclass
    class Chosen(Message):
        """The person wants this model."""

        model: str

    @dataclass
    class Left(Message):
        """The person wants to go back to the chat."""

    search = getters.query_one("#search", FilterInput)
    pane = getters.query_one("#details", Static)
    note = getters.query_one("#note", Static)
    problem = getters.query_one("#problem", Static)
    written_line = getters.query_one("#written", Static)

    def __init__(self, controller: ChatController, desk: ModelDesk | None = None) -> None:
        super().__init__(controller, desk)
        self._sorted_by: Column | None = None
        self._is_down = False
        self._free_bytes: int | None = None
        self.written = ""
        """What is written already for the chat that a model is loaded for."""

    def compose(self) -> ComposeResult:
        """Lays out the menu, the marked model, the work under way and what went wrong."""
        with Vertical(id="page"):
            yield Static("mira-chat", id="name")
            yield Static(
                "Chat with Mixture-of-Experts models bigger than the memory they run in.",
                id="claim",
            )
            yield FilterInput(placeholder="search by name, owner, family or state", id="search")
            yield ModelList(id="models")
            with VerticalScroll(id="pane", can_focus=False):
                yield Static(id="details")
            yield WorkView(has_eta=self._desk is None, id="work")
            yield Static("Stopped; what was finished is kept.", id="note")
            yield Static(id="problem")
            yield Static(id="written")
        yield KeyFooter()

    def on_mount(self) -> None:
        """Begins to look for what other apps prepare, and for news of the jobs."""
        self.work.display = self.note.display = self.problem.display = False
        self.written_line.display = False
        self.search.display = False
        self.set_interval(_REREAD_INTERVAL_S, self.reread)
        if self._desk is not None:
            self.set_interval(DESK_INTERVAL_S, self.poll_desk)

    def on_screen_resume(self) -> None:
        """Reads anew what is installed, and goes on with what the chat had put off."""
        self.is_chat_open = False
        self.yield_to_chat()
        self.show_models()
        if not self.search.display:
            self.model_list.focus()

    def on_screen_suspend(self) -> None:
        """Asks no more plans than the one under way, while nobody looks."""
        if self._desk is not None:
            self._desk.verdicts.want((), is_memory_free=self._controller.loaded is None)

    # -- what is listed

    def reread(self) -> None:
        """Reads anew what is installed, while one may pick; draws only what changed."""
        if self.is_current and not self._is_busy:
            self.show_models()

    def show_models(self) -> None:
        """Reads what is installed and fills the menu; the marked line stays."""
        try:
            self._entries = self._controller.models()
        except MiraError as error:
            self.show_problem(error)
            return
        if self._desk is not None:
            self._free_bytes = self._desk.shelf.free_bytes()
            self._ask_verdicts(self._desk)
        self._draw()

    def _rows(self) -> list[ModelRow]:
        loaded, desk = self._controller.loaded, self._desk
        jobs = {job.model: job for job in desk.jobs.jobs} if desk is not None else {}
        return [
            ModelRow(
                entry=entry,
                job=jobs.get(entry.model),
                verdict=desk.verdicts.of(entry.model) if desk is not None else None,
                is_judged=desk is not None and desk.verdicts.is_pending(entry.model),
                is_loaded=loaded is not None and loaded.model == entry.model,
            )
            for entry in self._entries
        ]

    def _draw(self) -> None:
        rows = matching(self._rows(), self.search.value if self.search.display else "")
        rows = ordered(rows, self._sorted_by, is_down=self._is_down)
        self.model_list.show(rows, self._sorted_by, is_down=self._is_down)
        self._draw_details()
        self._draw_job()

    def _draw_details(self) -> None:
        row = self.model_list.marked
        if row is None:
            self.pane.update("No model has that in its name. Esc shows all again.")
            return
        lines = details(row, free_bytes=self._free_bytes)
        self.pane.update(
            Content("\n").join(
                Content.styled(sanitise(text), "bold" if place == 0 else _COLOURS[tone])
                for place, (text, tone) in enumerate(lines)
            )
        )

    # -- what the person does

    def _open(self, model: str) -> None:
        self.post_message(self.Chosen(model))

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Tells of the marked model."""
        del event
        self._draw_details()
        self.refresh_bindings()

    def on_data_table_row_selected(self, event: DataTable.RowSelected) -> None:
        """Passes the choice on, or begins what has to come before."""
        del event
        row = self.model_list.marked
        if row is None:
            return
        if self._desk is None or row.entry.is_ready or row.is_loaded:
            self._open(row.entry.model)
            return
        self._wanted = row.entry.model
        if row.job is not None and row.job.is_active:
            self.app.notify("It will be opened when it is ready.")
        self._desk.jobs.start(row.entry.model, row.entry.title)
        self.poll_desk()

    def on_data_table_header_selected(self, event: DataTable.HeaderSelected) -> None:
        """Sorts by the column, the other way round the second time."""
        column = Column[str(event.column_key.value)]
        is_again = column is self._sorted_by
        self._is_down = not self._is_down if is_again else column in _LARGEST_FIRST
        self._sorted_by = column
        self._draw()

    def action_sort(self) -> None:
        """Sorts by the next column, at the end as the catalog is."""
        place = _SORTED_BY.index(self._sorted_by) if self._sorted_by in _SORTED_BY else -1
        self._sorted_by = _SORTED_BY[(place + 1) % len(_SORTED_BY)]
        self._is_down = self._sorted_by in _LARGEST_FIRST
        self._draw()

    def action_filter(self) -> None:
        """Opens the search."""
        self.search.display = True
        self.search.focus()

    def action_end_filter(self, is_kept: bool) -> None:
        """Goes back to the list, with all models or with those found."""
        if not is_kept or not self.search.value.strip():
            self.search.value = ""
            self.search.display = False
        self.model_list.focus()
        self._draw()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Lists what is found, while one types."""
        if event.input is self.search:
            self._draw()

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Goes to the list of what was found."""
        if event.input is self.search:
            self.action_end_filter(True)

    def action_add(self) -> None:
        """Asks for a repository or a folder."""
        if self._desk is not None:
            self.app.push_screen(AddModelScreen(self._desk.shelf), self._take_added)

    def _take_added(self, model: str | None) -> None:
        if model is None:
            return
        self.action_end_filter(False)
        self.show_models()
        folded = model.casefold()
        for entry in self._entries:
            if entry.model.casefold() == folded:
                self.model_list.mark(entry.model)

    def action_remove(self) -> None:
        """Asks before it removes what there is of the marked model."""
        row, desk = self.model_list.marked, self._desk
        if row is None or desk is None:
            return
        if row.is_loaded:
            self.app.notify("It is loaded: pick another model first.", severity="warning")
        elif row.job is not None and row.job.is_active:
            self.app.notify("Its job is under way: give it up first.", severity="warning")
        else:
            freed = desk.shelf.disk_bytes(row.entry.model)
            self.app.push_screen(
                RemoveModelScreen(row.entry, freed),
                lambda is_sure: self._begin_removal(row.entry, desk) if is_sure else None,
            )

    def _begin_removal(self, entry: CatalogEntry, desk: ModelDesk) -> None:
        """Removes files beside the event loop, because it may take a while."""
        remove = functools.partial(self._remove, entry, desk)
        self.run_worker(remove, thread=True, group="models.remove", exit_on_error=False)

    def _remove(self, entry: CatalogEntry, desk: ModelDesk) -> None:
        try:
            freed = desk.shelf.remove(entry.model)
        except MiraError as error:
            self.app.call_from_thread(self.show_problem, error)
        else:
            self.app.call_from_thread(self._tell_removed, entry, freed)

    def _tell_removed(self, entry: CatalogEntry, freed: int) -> None:
        assert self._desk is not None
        self._desk.jobs.cancel(entry.model)
        self.app.notify(
            sanitise(f"{entry.title} is removed: {format_bytes(freed)} freed."), markup=False
        )
        self.show_problem(None)
        self.show_models()

    def action_stop(self) -> None:
        """Stops a preparation or a load; what it finished is kept."""
        if self._controller.stop():
            self.work.show_controller(self._controller)

    def action_chat(self) -> None:
        """Goes back."""
        self.post_message(self.Left())

    @property
    def active_bindings(self) -> dict[str, ActiveBinding]:
        """Leaves out of the footer what does nothing now or has no room."""
        has_engine = self._controller.loaded is not None and self._controller.server is None
        less = set() if has_engine else {"app.controls"}
        if self._desk is not None and self._desk.jobs.jobs:
            less |= _LESS_WITH_JOBS
        return without(super().active_bindings, less)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Shows only the keys that do something now."""
        del parameters
        if action == "stop":
            return self._is_busy
        if action == "end_filter":
            return self.is_mounted and self.search.display
        if action == "chat":
            return self._controller.loaded is not None and not self._is_busy
        if action in (*_JOB_ACTIONS, "add", "remove", "measure", "filter", "sort"):
            return self.is_mounted and not self._is_busy and self._can(action)
        return True

    def _can(self, action: str) -> bool:
        row, job = self.model_list.marked, self._marked_job
        if action in ("filter", "sort"):
            return True
        if self._desk is None:
            return False
        if action in _JOB_ACTIONS:
            is_failed = job is not None and job.state is JobState.FAILED
            return is_failed if action == "retry" else job is not None
        if action == "remove":
            return row is not None and row.entry.is_removable
        if action == "measure":
            is_free = self._controller.loaded is None and job is None
            return row is not None and row.entry.is_ready and is_free
        return True

    # -- what the app says

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
            self.yield_to_chat()
            self.show_models()
            if not is_busy and self.is_current:
                self.model_list.focus()
            self.refresh_bindings()
        if is_busy:
            self.work.show_controller(self._controller, written=self.written)
        # Where the chat did not come, it waits for the next one.
        self.written_line.display = bool(self.written) and not is_busy
        self.written_line.update(Content(written_text(self.written)))
