"""The whole application against a fake engine process, and what importing it loads."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys

import pytest
from app_fakes import FakeCatalog, fake_engine_command
from app_scenes import WAIT_S, state_text, until
from mira_app.controller import ChatController, Stage
from mira_app.conversation import TurnStatus
from mira_app.engine_client import EngineClient
from mira_app.settings import Settings, load_settings
from mira_app.tui.app import MiraApp
from mira_app.tui.screens.models import ModelsScreen
from mira_app.tui.widgets.composer import Composer
from mira_app.tui.widgets.messages import InfoMessage, ReplyMessage


async def until_chat(pilot) -> None:
    """Lets the app run until one can write in the chat."""
    await until(pilot, lambda: isinstance(pilot.app.focused, Composer))


@pytest.fixture
def make_app(tmp_path):
    clients = []

    def make(*modes: str, settings: Settings | None = None, is_ready: bool = False) -> MiraApp:
        client = EngineClient(fake_engine_command(*modes), log_dir=tmp_path)
        clients.append(client)
        catalog = FakeCatalog(is_ready=is_ready)
        return MiraApp(ChatController(client, catalog, settings or Settings()))

    yield make
    for client in clients:
        client.close()


def reply_texts(app: MiraApp) -> list[str]:
    return [reply.answer.source for reply in app.chat_screen.query(ReplyMessage)]


def info_texts(app: MiraApp) -> list[str]:
    return [str(info.content) for info in app.chat_screen.query(InfoMessage)]


async def ask(pilot, text: str) -> None:
    pilot.app.screen.query_one(Composer).insert(text)
    await pilot.press("enter")


async def test_pick_prepare_chat_stop_and_go_on(make_app):
    app = make_app("slow")
    async with app.run_test(size=(100, 30)) as pilot:
        controller = app.controller
        assert isinstance(app.screen, ModelsScreen)
        await pilot.press("enter")
        await until_chat(pilot)
        assert controller.progress is not None
        await ask(pilot, "first")
        await until(pilot, lambda: "hot" in controller.partial)
        app.screen.query_one(Composer).insert("a draft")
        await pilot.press("escape")
        await until(pilot, lambda: app.screen.query_one(ReplyMessage).has_class("-stopped"))
        await until(pilot, lambda: state_text(app) == "ready")
        assert controller.stage is Stage.READY
        head = controller.conversation.head
        assert head.status is TurnStatus.STOPPED
        assert head.content.startswith("A cache keeps **hot**")
        assert reply_texts(app) == [head.content]
        assert app.screen.query_one(Composer).text == "a draft"
        await pilot.press("enter")
        await until(pilot, lambda: controller.stage is Stage.REPLYING)
        await until(pilot, lambda: len(controller.partial) > 20)
        await pilot.press("escape")
        await until(pilot, lambda: controller.stage is Stage.READY)
        sent = controller.conversation.messages()
        assert [m.content for m in sent[0:4:2]] == ["first", "a draft"]


async def test_engine_killed_mid_reply_is_restarted_and_partial_kept(make_app, tmp_path):
    flag = tmp_path / "die"
    flag.touch()
    app = make_app(f"die-once={flag}", is_ready=True)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("enter")
        await until_chat(pilot)
        await ask(pilot, "first")
        await until(pilot, lambda: len(info_texts(app)) == 2)
        controller = app.controller
        assert controller.conversation.head.status is TurnStatus.ERROR
        assert controller.conversation.head.content == "A cache keeps **hot** "
        assert "SIGKILL" in controller.conversation.head.error
        await ask(pilot, "second")
        await until(pilot, lambda: len(controller.conversation.turns) == 4)
        await until(pilot, lambda: controller.stage is Stage.READY)
        assert controller.conversation.head.content == "A cache keeps **hot** things near."


async def test_engine_killed_while_idle_is_restarted(make_app):
    app = make_app(is_ready=True)
    async with app.run_test(size=(100, 30)) as pilot:
        await pilot.press("enter")
        await until_chat(pilot)
        pid = app.controller._client.pid
        os.kill(pid, signal.SIGKILL)
        await until(pilot, lambda: len(info_texts(app)) == 2)
        lost, again = info_texts(app)
        assert "SIGKILL" in lost
        assert again == "The engine runs again; the model is loaded."
        assert app.controller.stage is Stage.READY
        assert app.controller._client.pid != pid


async def test_model_named_on_command_line_is_loaded_at_once(make_app):
    settings = load_settings({"model": "builtin"}, {})
    app = make_app(settings=settings, is_ready=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await until_chat(pilot)


async def test_escape_stops_preparation_and_menu_stays(make_app):
    app = make_app("slow-prepare")
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("enter")
        await until(pilot, lambda: app.controller.progress is not None)
        await pilot.press("escape")
        await until(pilot, lambda: app.controller.stage is Stage.IDLE)
        assert isinstance(app.screen, ModelsScreen)
        assert not app.screen.work.display
        assert not app.screen.problem.display
        await until(pilot, lambda: app.screen.note.display)
        assert "what was finished is kept" in str(app.screen.note.content)


async def test_load_failure_is_shown_in_menu_with_hint(make_app):
    app = make_app("fail-load", is_ready=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("enter")
        await until(pilot, lambda: app.controller.stage is Stage.FAILED)
        await until(pilot, lambda: app.screen.problem.display)
        assert "20.0 MiB" in str(app.screen.problem.content)
        assert "More." in str(app.screen.problem.content)


async def test_quit_ends_engine(make_app):
    app = make_app(is_ready=True)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("enter")
        await until_chat(pilot)
        pid = app.controller._client.pid
        has_exited, exit_app = asyncio.Event(), app.exit
        app.exit = lambda: (exit_app(), has_exited.set())
        await pilot.press("ctrl+q")
        async with asyncio.timeout(WAIT_S):  # `until` needs a screen, which goes with the app
            await has_exited.wait()
    app.wait_for_engines()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


def test_importing_app_loads_no_torch():
    code = "import sys, mira_app.tui.app as a; print({'torch', 'transformers'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"


def test_importing_command_line_loads_no_textual():
    code = "import sys, mira_app.cli; print({'torch', 'textual', 'rich.progress'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "set()"
