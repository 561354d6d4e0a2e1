"""The app with a controller, a history and screens that only remember what was asked of them.

Screens that are no matter to a test are stand-ins, put where the app looks for them.
"""

from __future__ import annotations

import sys
import types
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

from app_fakes import FakeCatalog, FakeEngineClient
from app_scenes import until
from fake_engine import PLAN
from mira_app.app_state import AppState, StateFile
from mira_app.controller import ChatController, Stage
from mira_app.conversation import Conversation
from mira_app.paths import AppPaths, app_paths
from mira_app.settings import load_settings
from mira_app.tui.app import MiraApp
from mira_app.tui.screens.chat import ChatScreen
from mira_app.unsent import Unsent, read_unsent, take_place
from mira_engine import api
from textual.screen import ModalScreen


class ShellController(ChatController):
    """Remembers what the app asks of it."""

    chat_id = "now"
    title = ""
    history = None

    def __init__(self, *args) -> None:
        super().__init__(*args)
        self.opened: list = []
        self.changed: list = []

    def open_chat(self, chat) -> None:
        if self.stage is Stage.REPLYING:
            raise ValueError("a reply is under way")
        self.opened.append(chat)
        self.chat_id = chat.chat_id
        self.conversation = chat.conversation

    def new_chat(self) -> None:
        super().new_chat()
        self.chat_id = "new"

    def reconfigure(self, config) -> None:
        self.changed.append(config)


@dataclass(frozen=True, kw_only=True)
class FakeChat:
    chat_id: str
    title: str = "about caches"
    num_turns: int = 2
    updated_at: datetime = datetime(2026, 3, 4, tzinfo=UTC)
    conversation: Conversation = Conversation().with_user("q").with_reply("a")


class FakeStore:
    """Two chats, the second one open last."""

    def __init__(self, *, notices: tuple[str, ...] = (), error: api.MiraError | None = None):
        self.calls: list[str] = []
        self.last_chat_id = "two"
        self._notices, self._error = notices, error

    def open(self) -> list[str]:
        self.calls.append("open")
        if self._error is not None:
            raise self._error
        return list(self._notices)

    def chats(self) -> list[FakeChat]:
        return [FakeChat(chat_id="two"), FakeChat(chat_id="one", title="about routers")]

    def load(self, chat_id: str) -> FakeChat:
        self.calls.append(f"load {chat_id}")
        return FakeChat(chat_id=chat_id)

    def set_last_chat(self, chat_id: str | None) -> None:
        self.calls.append(f"last {chat_id}")

    def close(self) -> None:
        self.calls.append("close")


def make_paths(folder: Path) -> AppPaths:
    return app_paths({
        "MIRA_CHAT_DATA_DIR": str(folder / "data"),
        "MIRA_CHAT_CONFIG": str(folder / "config.toml"),
    })  # fmt: skip


def leave_unsent(paths: AppPaths, **unsent: str) -> None:
    """Leaves what an app before had not sent or finished; leaves nothing where none is given."""
    if unsent:
        place = take_place(paths.state.parent)
        place.save(Unsent(**unsent))
        place.close()


def unsent_of(app: MiraApp) -> Unsent:
    """What the app's own file holds now."""
    return read_unsent(app._unsent_place._path)


def record_drawing(monkeypatch) -> list:
    """Returns what is drawn from now on: `None` for a whole chat, a turn for a jump to it."""
    turns = []

    async def show_chat(screen) -> None:
        turns.append(None)

    async def jump_to(screen, turn_id) -> None:
        turns.append(turn_id)

    monkeypatch.setattr(ChatScreen, "show_chat", show_chat, raising=False)
    monkeypatch.setattr(ChatScreen, "jump_to", jump_to, raising=False)
    return turns


def make_app(paths=None, *, flags=None, store=None, is_ready=True, is_tour_done=True) -> MiraApp:
    if paths is not None and is_tour_done and not paths.state.exists():
        StateFile(paths.state).save(AppState(is_tour_done=True))
    settings = load_settings(flags or {}, {})
    controller = ShellController(FakeEngineClient(), FakeCatalog(is_ready=is_ready), settings)
    app = MiraApp(controller, paths=paths, store=store)
    app.animation_level = "none"
    return app


async def load(pilot) -> None:
    """Has the engine say that the model is loaded."""
    client = pilot.app.controller._client
    await until(pilot, lambda: client.calls)
    client.deliver_loaded(PLAN)
    await until(pilot, lambda: pilot.app.controller.stage is Stage.READY)


def told(app: MiraApp) -> str:
    return "\n".join(str(problem) for problem in app.problems)


def stand_in(monkeypatch, module: str, name: str) -> list:
    """Puts a screen in the place of one of the app's; returns what it was made with."""
    made: list = []

    def initialise(self, *args, **options) -> None:
        ModalScreen.__init__(self)
        made.append((*args, *options.values()))

    members = {"__init__": initialise}
    screen = type(name, (ModalScreen,), members)
    module_name = f"mira_app.tui.screens.{module}"
    stand_in = types.ModuleType(module_name)
    setattr(stand_in, name, screen)
    screen.__module__ = module_name
    monkeypatch.setitem(sys.modules, module_name, stand_in)
    return made
