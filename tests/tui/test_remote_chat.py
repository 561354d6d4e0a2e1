"""The whole application with a model that a scripted server runs."""

from __future__ import annotations

import threading

import pytest
from app_fakes import FakeHistory
from app_scenes import state_text, until
from fake_server import REPLY, WAIT_S, FakeServer, cuts, refuses, says, stalls
from mira_app.controller import ChatController
from mira_app.conversation import TurnStatus
from mira_app.remote.address import host_of
from mira_app.remote.catalog import RemoteCatalog, with_served_model
from mira_app.remote.client import RemoteClient
from mira_app.settings import load_settings
from mira_app.tui.app import MiraApp
from mira_app.tui.footer_keys import KeyFooter
from mira_app.tui.screens.controls import ControlsScreen
from mira_app.tui.screens.models import ModelsScreen
from mira_app.tui.widgets.composer import Composer
from mira_app.tui.widgets.messages import InfoMessage, ReplyMessage
from mira_engine import api
from textual.widgets._footer import FooterKey

METRICS = 'vllm:kv_cache_usage_perc{engine="0"} 0.25\nvllm:num_requests_waiting 3\n'


@pytest.fixture
def server():
    with FakeServer() as running:
        yield running


@pytest.fixture
def make_app(server):
    clients: list[RemoteClient] = []

    def make(history: FakeHistory | None = None) -> MiraApp:
        client = RemoteClient(server.address)
        clients.append(client)
        settings = load_settings({"connect": server.address}, {})
        settings = with_served_model(client, settings, is_needed=False)
        catalog = RemoteCatalog(client)
        return MiraApp(ChatController(client, catalog, settings, history=history))

    yield make
    for client in clients:
        client.close()


async def until_ready(pilot) -> None:
    app = pilot.app
    await until(pilot, lambda: isinstance(app.focused, Composer) and state_text(app) == "ready")


async def ask(pilot, text: str) -> None:
    pilot.app.screen.query_one(Composer).insert(text)
    await pilot.press("enter")


async def until_answered(pilot, num_turns: int) -> None:
    controller = pilot.app.controller
    await until(pilot, lambda: len(controller.conversation.turns) == num_turns)
    await until(pilot, lambda: state_text(pilot.app) == "ready")


def info_texts(app: MiraApp) -> list[str]:
    return [str(info.content) for info in app.chat_screen.query(InfoMessage)]


def panel_text(app: MiraApp) -> str:
    return str(app.chat_screen.side_panel.column.content)


async def test_only_model_is_opened_answers_and_is_kept(make_app, server):
    history = FakeHistory()
    app = make_app(history)
    async with app.run_test(size=(120, 40)) as pilot:
        await until_ready(pilot)
        assert server.address in str(app.chat_screen.model_line.content)
        await ask(pilot, "first")
        await until_answered(pilot, 2)
        (reply,) = app.chat_screen.query(ReplyMessage)
        assert reply.answer.source == REPLY
        await ask(pilot, "second")
        await until_answered(pilot, 4)
        asked = [m["content"] for m in server.requests[-1]["messages"]]
        assert asked == ["first", REPLY, "second"]
        saved = history.saved[-1]
        assert saved.model == "fake-moe"
        assert saved.conversation.head.content == REPLY
        assert saved.conversation.head.stats.num_prompt_tokens == 20


async def test_stop_keeps_what_was_said_and_retry_makes_a_sibling(make_app, server):
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        controller = app.controller
        await until_ready(pilot)
        server.scripts.append(stalls("A cache ", "keeps "))
        await ask(pilot, "first")
        await until(pilot, lambda: controller.partial == "A cache keeps ")
        await pilot.press("escape")
        await until_answered(pilot, 2)
        assert controller.conversation.head.status is TurnStatus.STOPPED
        assert controller.conversation.head.content == "A cache keeps "
        await until(pilot, server.has_left.is_set)
        await pilot.press("ctrl+r")
        await until_answered(pilot, 3)
        assert controller.conversation.head.content == REPLY
        controller.show_sibling(controller.conversation.head.turn_id, -1)
        assert controller.conversation.head.content == "A cache keeps "


async def test_failures_are_told_and_the_chat_goes_on(make_app, server):
    app = make_app()
    server.scripts += [cuts("A cache ", is_clean=True), refuses(429, "Slow down.")]
    async with app.run_test(size=(120, 40)) as pilot:
        await until_ready(pilot)
        for number, partial, said in (
            (1, "A cache ", "in the middle of the reply"),
            (2, "", "takes no more requests now"),
        ):
            await ask(pilot, f"question {number}")
            await until_answered(pilot, 2 * number)
            head = app.controller.conversation.head
            assert (head.status, head.content) == (TurnStatus.ERROR, partial)
            await until(pilot, lambda said=said: any(said in text for text in info_texts(app)))
        await ask(pilot, "question 3")
        await until_answered(pilot, 6)
        assert app.controller.conversation.head.content == REPLY


async def test_settings_reach_the_server_and_panels_show_what_it_reports(make_app, server):
    server.metrics.append(METRICS)
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        controller = app.controller
        await until_ready(pilot)
        sampling = api.SamplingConfig(temperature=0.5, top_p=0.9, seed=3, max_new_tokens=11)
        controller.set_chat_settings("be brief", sampling)
        server.scripts.append(says("Yes.", thinking=("hm ", "so"), thinking_field="reasoning"))
        await ask(pilot, "first")
        await until_answered(pilot, 2)
        head = controller.conversation.head
        assert (head.content, head.thinking) == ("Yes.", "hm so")
        body = server.requests[-1]
        assert body["messages"][0] == {"role": "system", "content": "be brief"}
        assert (body["temperature"], body["top_p"], body["seed"]) == (0.5, 0.9, 3)
        assert body["max_tokens"] == 11
        await until(pilot, lambda: "20 (8 cached)" in panel_text(app))
        lines = panel_text(app).splitlines()
        values = {line[:17].strip(): line[17:].strip() for line in lines}
        assert values["KV cache in use"] == "25.0%"
        assert values["requests waiting"] == "3"
        assert values["drafts accepted"] == "not reported"
        assert "not reported by this server" in panel_text(app)
        assert not app.chat_screen.side_panel.map.display
        assert "Served by" not in panel_text(app)
        await pilot.press("f2")
        assert not isinstance(app.screen, ControlsScreen)


@pytest.fixture
def make_named_app():
    """Makes an app with a named model of a server, which nobody has asked yet."""
    clients: list[RemoteClient] = []

    def make(address: str) -> MiraApp:
        clients.append(RemoteClient(address))
        settings = load_settings({"connect": address, "model": "fake-moe"}, {})
        return MiraApp(ChatController(clients[-1], RemoteCatalog(clients[-1]), settings))

    yield make
    for client in clients:
        client.close()


async def test_server_that_is_not_there_is_told_in_words_of_a_server(make_named_app):
    app = make_named_app("http://127.0.0.1:1/v1")
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: state_text(app) == "not connected")
        await until(pilot, lambda: any("Nothing can be reached" in t for t in info_texts(app)))
        footer = app.screen.query_one(KeyFooter)
        await until(pilot, lambda: footer.query(FooterKey))
        assert "Controls" not in [key.description for key in footer.query(FooterKey)]
        await until(pilot, lambda: "127.0.0.1:1" in panel_text(app))
        for word in ("Served by", "Drafting", "Memory"):
            assert word not in panel_text(app)
        assert "nested" not in str(app.chat_screen.model_line.content)
        await pilot.press("f2")
        assert not isinstance(app.screen, ControlsScreen)


async def test_question_to_a_server_that_came_back_says_so(server, make_named_app):
    app, server.models = make_named_app(server.address), refuses(503)
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: state_text(app) == "not connected")
        server.models = ("fake-moe",)
        await ask(pilot, "are you there?")
        await until_answered(pilot, 2)
        assert app.controller.conversation.head.content == REPLY
        await until(pilot, lambda: any("reached again" in text for text in info_texts(app)))
        assert not any("engine" in text for text in info_texts(app))


async def test_menu_of_a_server_connects_and_loads_nothing(make_app, server):
    server.models = ("one", "two")
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: app.models_screen.model_list.row_count == 2)
        has_asked = threading.Event()

        def waits(handler) -> None:
            has_asked.wait(WAIT_S)
            handler.answer(200, '{"data": [{"id": "one"}]}')

        server.models = waits
        await pilot.press("enter")
        step = app.models_screen.work.step
        host = host_of(server.address)
        await until(pilot, lambda: str(step.content) == f"Connecting to {host} ...")
        has_asked.set()
        await until_ready(pilot)


async def test_several_models_are_listed_to_pick_from(make_app, server):
    server.models = ("one", "two")
    app = make_app()
    async with app.run_test(size=(120, 40)) as pilot:
        await until(pilot, lambda: isinstance(app.screen, ModelsScreen))
        listed = app.models_screen.model_list
        await until(pilot, lambda: listed.row_count == 2)
        await pilot.press("down", "enter")
        await until_ready(pilot)
        await ask(pilot, "first")
        await until_answered(pilot, 2)
        assert server.requests[-1]["model"] == "two"
