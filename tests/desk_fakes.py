"""A menu of models with a desk behind it, for which the test speaks in the engines' names."""

from __future__ import annotations

from pathlib import Path

from app_fakes import FakeEngineClient
from app_scenes import WAIT_S, until
from fake_engine import ALTERNATIVES, MACHINE, PLAN
from mira_app.catalog import BUILTIN, CatalogEntry, ModelState, model_name
from mira_app.controller import ChatController
from mira_app.jobs import JobRunner
from mira_app.model_desk import ModelDesk
from mira_app.model_sizes import expected_prepared_bytes
from mira_app.settings import Settings
from mira_app.tui.app import MiraApp
from mira_app.tui.screens.models import ModelsScreen
from mira_app.tui.widgets.composer import Composer
from mira_app.tui.widgets.model_table import ModelList
from mira_app.verdicts import VerdictBoard
from mira_assets.models import load_models
from mira_engine import api

GIB = 2**30
FOLDER = "/models/my-own-moe"
OLMOE = "allenai/OLMoE-1B-7B-0924-Instruct"
GRANITE = "ibm-granite/granite-3.1-1b-a400m-instruct"


class FakeShelf:
    """A catalog in memory: the built-in model, a folder, and all that ship with the program."""

    def __init__(self, *ready: str, free_bytes: int = 60 * GIB) -> None:
        self.ready = {*ready}
        self.added = [FOLDER]
        self.removed: list[str] = []
        self.refusal: api.MiraError | None = None
        self._free_bytes = free_bytes

    def entries(self, precision: api.Precision) -> tuple[CatalogEntry, ...]:
        del precision
        return tuple(map(self._entry, (BUILTIN, *self.added, *load_models())))

    def find(self, model: str, precision: api.Precision) -> CatalogEntry:
        return next(entry for entry in self.entries(precision) if entry.model == model)

    def add(self, name: str) -> str:
        self.added.append(model_name(name))
        return self.added[-1]

    def disk_bytes(self, model: str) -> int:
        return 4 * GIB if model in (*self.ready, FOLDER) else 0

    def remove(self, model: str) -> int:
        if self.refusal is not None:
            raise self.refusal
        freed = self.disk_bytes(model)
        self.removed.append(model)
        self.ready -= {model}
        return freed

    def free_bytes(self) -> int:
        return self._free_bytes

    def _entry(self, model: str) -> CatalogEntry:
        facts, is_ready = load_models().get(model), model in self.ready
        is_here = model.startswith("/")
        return CatalogEntry(
            model=model,
            title=facts.title if facts else model.rpartition("/")[2],
            about=facts.about if facts else model,
            is_ready=is_ready,
            state=ModelState.READY
            if is_ready
            else ModelState.DOWNLOADED
            if is_here
            else ModelState.AVAILABLE,
            facts=facts,
            prepared_bytes=expected_prepared_bytes(facts, api.Precision.NESTED) if facts else None,
            is_removable=is_ready or model in self.added,
        )


class DeskScene:
    """The app's menu with jobs and verdicts; three engines, none of them a process."""

    def __init__(self, folder: Path, *ready: str, free_bytes: int = 60 * GIB) -> None:
        self.shelf = FakeShelf(*ready, free_bytes=free_bytes)
        self.client, self.job_client, self.plan_client = (FakeEngineClient() for _ in range(3))
        self.now_s = 0.0
        self.desk = ModelDesk(
            shelf=self.shelf,
            jobs=JobRunner(
                lambda: self.job_client, api.EngineConfig(), folder, clock=lambda: self.now_s
            ),
            verdicts=VerdictBoard(
                lambda: self.plan_client, api.EngineConfig(), folder, free_memory=lambda: 8 * GIB
            ),
        )
        self.controller = ChatController(self.client, self.shelf, Settings())
        self.app = MiraApp(self.controller)
        self.app.models_screen = ModelsScreen(self.controller, self.desk)
        self.app.NOTIFICATION_TIMEOUT = 2 * WAIT_S

    @property
    def menu(self) -> ModelsScreen:
        return self.app.models_screen

    @property
    def job_call(self):
        return self.job_client.calls[-1]

    @property
    def toasts(self) -> list[str]:
        return [notification.message for notification in self.app._notifications]

    def close(self) -> None:
        self.desk.close()

    async def open(self, pilot) -> None:
        await until(pilot, lambda: isinstance(self.app.focused, ModelList))

    def listed(self) -> list[str]:
        return [row.entry.model for row in self.menu.model_list.shown]

    def marked(self) -> str:
        return self.menu.model_list.marked.entry.model

    def text_of(self, model: str) -> str:
        """What the table shows of a model, cell by cell."""
        table = self.menu.model_list
        return " | ".join(str(cell) for cell in table.get_row(model))

    def details_text(self) -> str:
        return str(self.menu.pane.content)

    async def mark(self, pilot, model: str) -> None:
        self.menu.model_list.mark(model)
        await until(pilot, lambda: self.marked() == model)
        await pilot.pause()

    async def start(self, pilot, model: str) -> None:
        await self.mark(pilot, model)
        num_requests = len(self.job_client.requests)
        await pilot.press("enter")
        await until(pilot, lambda: len(self.job_client.requests) > num_requests)

    async def progress(self, pilot, step: str, done: int, total: int, unit: str = "bytes") -> None:
        call = self.job_call
        call.deliver(
            api.PrepareProgress(
                request_id=call.request_id, step=step, done=done, total=total, unit=unit
            )
        )
        self.menu.poll_desk()
        await pilot.pause()

    async def done(self, pilot) -> None:
        model = self.job_client.requests[-1].model
        self.shelf.ready.add(model)
        call = self.job_call
        call.deliver(
            api.PrepareDone(request_id=call.request_id, model=model, precision=api.Precision.NESTED)
        )
        self.menu.poll_desk()
        await pilot.pause()

    async def fail(self, pilot, error: api.MiraError) -> None:
        self.job_call.fail(error)
        self.menu.poll_desk()
        await pilot.pause()

    async def judge(self, pilot, *, num: int = 1, refusal: str = "") -> None:
        """Answers that many plans as they are asked."""
        for _ in range(num):
            await until(
                pilot,
                lambda: self.plan_client.calls and not self.plan_client.calls[-1].is_done,
            )
            call = self.plan_client.calls[-1]
            call.deliver(
                api.PlanMade(
                    request_id=call.request_id, model="m", title="M", machine=MACHINE,
                    memory_bytes=7 * GIB, context_length=2048, num_prompt_tokens=512,
                    alternatives=ALTERNATIVES[1:] if refusal else ALTERNATIVES, refusal=refusal,
                )
            )  # fmt: skip
            self.menu.poll_desk()
            await pilot.pause()

    async def load(self, pilot) -> None:
        """Answers the chat's engine that the model is loaded."""
        await until(pilot, lambda: bool(self.client.calls))
        self.client.deliver_loaded(PLAN)
        await until(pilot, lambda: isinstance(self.app.focused, Composer))

    async def requested_load(self, pilot, model: str) -> None:
        """Waits until the chat's engine is asked to load a model."""
        await until(pilot, lambda: getattr(self.client.requests[-1], "model", "") == model)
