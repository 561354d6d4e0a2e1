"""What the menu does with jobs and verdicts: it asks, tells, and lets one pause and go on.

The screen that lists and draws is `ModelsScreen`, made of this one. Work that a chat with
the same model leaves no room for is put off, and goes on by itself when the chat is left.
"""

from __future__ import annotations

from textual import getters

from mira_app.catalog import CatalogEntry
from mira_app.controller import ChatController, Stage
from mira_app.job import Job, JobState
from mira_app.model_desk import ModelDesk
from mira_app.sanitise import sanitise
from mira_app.tui.keymap import key_text
from mira_app.tui.widgets.model_table import ModelList
from mira_app.tui.widgets.work_view import WorkView

from .coverable import CoverableScreen

DESK_INTERVAL_S = 0.25


class JobsScreen(CoverableScreen):
    """A screen with models, some of them being downloaded or prepared.

    Args of the constructor: the controller; the desk with jobs and verdicts, `None` where
    models are only picked.
    """

    model_list = getters.query_one("#models", ModelList)
    work = getters.query_one("#work", WorkView)

    def __init__(self, controller: ChatController, desk: ModelDesk | None) -> None:
        super().__init__()
        self._controller = controller
        self._desk = desk
        self._entries: tuple[CatalogEntry, ...] = ()
        self._wanted: str | None = None
        """The model that is to be loaded once its job is done."""
        self.is_chat_open = False
        """Whether the chat lies over the menu or is about to; whoever puts it there says so."""
        self._told_put_off: set[str] = set()

    def show_models(self) -> None:
        """Reads what is installed and draws it."""
        raise NotImplementedError

    def _draw(self) -> None:
        raise NotImplementedError

    def _open(self, model: str) -> None:
        """Has a model loaded, and the chat opened."""
        raise NotImplementedError

    @property
    def _is_busy(self) -> bool:
        return self._controller.stage in (Stage.PREPARING, Stage.LOADING)

    # -- jobs and verdicts

    def poll_desk(self) -> None:
        """Takes news of jobs and verdicts, also while another screen lies over this one."""
        if self._desk is None:
            return
        self.yield_to_chat()
        news = self._desk.jobs.poll()
        is_judged = self._desk.verdicts.poll()
        for job in news.failed:
            self.app.notify(f"{job.title}: {_message(job)}", severity="error", markup=False)
        for job in news.finished:
            self._desk.verdicts.forget(job.model)
            self._welcome(job)
        if news.finished:
            self.show_models()
        elif news.is_changed or is_judged:
            self._draw()
        if news.is_changed:
            self.refresh_bindings()
        self._open_wanted()

    def _welcome(self, job: Job) -> None:
        notes = "".join(f"\n{note}" for note in job.notes)
        self.app.notify(sanitise(f"{job.title} is ready.{notes}"), markup=False)

    def _open_wanted(self) -> None:
        """Loads the model whose job the person started here, as soon as it can be loaded.

        Unless another answers already; predictors are not waited for.
        """
        ready = [entry.model for entry in self._entries if entry.is_ready]
        if self._wanted not in ready or not self.is_active:
            return
        model, self._wanted = self._wanted, None
        if model is not None and self._controller.loaded is None and not self._is_busy:
            self._open(model)

    def yield_to_chat(self) -> None:
        """Puts off the rest of the job of the model that one chats with, which needs it too.

        Back in the menu, or in a chat with another model, the job goes on.
        """
        if self._desk is None:
            return
        entry, jobs = self._controller.entry, self._desk.jobs
        is_chatting = entry is not None and entry.is_ready and (self._is_busy or self.is_chat_open)
        for job in jobs.jobs:
            is_in_the_way = is_chatting and entry is not None and job.model == entry.model
            if is_in_the_way and job.is_active and not job.is_put_off:
                jobs.put_off(job.model)
                self._tell_put_off(job)
            elif job.is_put_off and not is_in_the_way:
                jobs.resume(job.model)

    def _tell_put_off(self, job: Job) -> None:
        if job.model not in self._told_put_off:  # the chat's first line goes on saying it
            self._told_put_off.add(job.model)
            self.app.notify(f"Its predictors are put off while you chat; {self._menu_key}.")

    @property
    def put_off_text(self) -> str:
        """Says in the chat that something of its model is put off, and how it goes on."""
        jobs = self._desk.jobs.jobs if self._desk is not None else ()
        is_any = any(job.is_put_off for job in jobs)
        return f"predictors put off, {self._menu_key}" if is_any else ""

    @property
    def _menu_key(self) -> str:
        key = self.app._keymap.get("chat.models", "ctrl+o")
        return f"{key_text(key)} goes on"

    def _draw_job(self) -> None:
        if self._desk is None or self._is_busy:
            return
        jobs = [job for job in self._desk.jobs.jobs if job.is_active]
        self.work.display = bool(jobs)
        if jobs:
            self.work.show_job(jobs[0], num_waiting=len(jobs) - 1)

    @property
    def _marked_job(self) -> Job | None:
        row = self.model_list.marked
        return row.job if row is not None else None

    def _ask_verdicts(self, desk: ModelDesk) -> None:
        """Asks for what is not known, while nothing else needs the machine.

        The first plan measures the machine, which work beside it would spoil.
        """
        known = any(desk.verdicts.of(entry.model) is not None for entry in self._entries)
        is_working = any(job.is_active for job in desk.jobs.jobs) and not known
        idle = (Stage.IDLE, Stage.READY, Stage.FAILED)
        is_asked = self.is_active and self._controller.stage in idle and not is_working
        marked = self.model_list.marked
        first = [e for e in self._entries if marked is not None and e == marked.entry]
        wanted = (*first, *(entry for entry in self._entries if entry not in first))
        desk.verdicts.want(
            wanted if is_asked else (), is_memory_free=self._controller.loaded is None
        )

    # -- what the person does with jobs

    def action_toggle_pause(self) -> None:
        """Pauses the marked model's job, or goes on with it."""
        job = self._marked_job
        if job is None or self._desk is None:
            return
        if job.state in (JobState.PAUSED, JobState.PAUSING, JobState.FAILED):
            self._desk.jobs.resume(job.model)
        else:
            self._desk.jobs.pause(job.model)
        self.poll_desk()

    def action_retry(self) -> None:
        """Goes on with a job that failed."""
        if self._marked_job is not None and self._desk is not None:
            self._desk.jobs.resume(self._marked_job.model)
            self.poll_desk()

    def action_cancel_job(self) -> None:
        """Gives the marked model's job up; its files stay until they are removed."""
        job = self._marked_job
        if job is not None and self._desk is not None:
            self._desk.jobs.cancel(job.model)
            self.app.notify("Given up; what was finished is kept. Del removes it.")
            self.show_models()
            self.poll_desk()

    def action_measure(self) -> None:
        """Measures which K is fastest for a model that is ready."""
        row = self.model_list.marked
        if row is not None and self._desk is not None:
            self._desk.jobs.start(row.entry.model, row.entry.title, is_profiling=True)
            self.poll_desk()


def _message(job: Job) -> str:
    return sanitise(job.error.message) if job.error is not None else "failed"
