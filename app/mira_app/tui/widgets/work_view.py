"""What is being downloaded, prepared or loaded: a line, a bar and the steps."""

from __future__ import annotations

from textual import getters
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.widgets import ProgressBar, Static

from mira_app.answer import progress_text
from mira_app.controller import ChatController, Stage
from mira_app.job import Job, job_text
from mira_app.model_rows import steps_line
from mira_app.remote.address import host_of
from mira_app.sanitise import sanitise

_SHOWN_CHARS = 40
"""Of what is written already."""


class WorkView(Vertical):
    """The work under way, a job's or the chat engine's own."""

    step = getters.query_one("#step", Static)
    bar = getters.query_one("#progress", ProgressBar)
    steps = getters.query_one("#steps", Static)

    def __init__(self, *, has_eta: bool, id: str | None = None) -> None:
        super().__init__(id=id)
        self._has_eta = has_eta

    def compose(self) -> ComposeResult:
        """Lays out the line, the bar and the steps."""
        yield Static(id="step")
        yield ProgressBar(id="progress", show_eta=self._has_eta)
        yield Static(id="steps")

    def show_job(self, job: Job, *, num_waiting: int) -> None:
        """Shows the job under way, and how many wait for it."""
        more = f" · {num_waiting} more waiting" if num_waiting else ""
        self.step.update(Content(sanitise(f"{job.title}: {job_text(job)}{more}")))
        self.steps.update(Content(steps_line(job.step)))
        if job.progress is not None and job.progress.total:
            self.bar.update(total=job.progress.total, progress=job.progress.done)
        else:
            self.bar.update(total=None)

    def show_controller(self, controller: ChatController, *, written: str = "") -> None:
        """Shows what the chat's engine prepares or loads.

        Args:
            controller: The chat's.
            written: What is written already for the chat; the end of it is shown.
        """
        self.steps.update("")
        shown = written_text(written)
        text = "stopping ..." if controller.is_stopping else _work_text(controller)
        self.step.update(Content(f"{text} {shown}".rstrip()))
        progress = controller.progress if controller.stage is Stage.PREPARING else None
        if progress is not None:
            self.bar.update(total=progress.total or None, progress=progress.done)
        else:
            self.bar.update(total=None)


def written_text(written: str) -> str:
    """Says what is written already for the chat, the end of it; empty for nothing."""
    shown = " ".join(sanitise(written[-_SHOWN_CHARS:]).split())
    return f"For the chat: {shown}" if shown else ""


def _work_text(controller: ChatController) -> str:
    """Says what the chat's engine does, or that a server is being reached."""
    if controller.server is not None:
        return sanitise(f"Connecting to {host_of(controller.server.address)} ...")
    title = controller.entry.title if controller.entry is not None else ""
    if controller.stage is Stage.LOADING:
        return f"Loading {title} ..."
    if controller.progress is None:
        return f"Preparing {title}: starting the engine ..."
    return f"Preparing {title}: {sanitise(progress_text(controller.progress))}"
