"""One chat in two windows: what one adds comes into the other as a branch, and is told."""

from __future__ import annotations

from pathlib import Path

from app_fakes import FakeCatalog, FakeEngineClient, FakeHistory
from app_scenes import STATS, Scene, until
from app_shell_fakes import make_paths
from fake_engine import PLAN
from mira_app.app_state import AppState, StateFile
from mira_app.controller import ChatController, Update
from mira_app.conversation import Conversation
from mira_app.history import HistoryStore, StoredChat
from mira_app.settings import Settings
from mira_app.tui.app import MiraApp
from mira_app.tui.widgets.composer import Composer
from mira_app.tui.widgets.messages import InfoMessage, ReplyMessage

SIZE = (80, 24)
START = Conversation().with_user("one").with_reply("first")


def make_app(folder: Path) -> MiraApp:
    """An app that opens the chat `c`, which has one question with its reply."""
    paths = make_paths(folder)
    paths.data_dir.mkdir(parents=True)
    StateFile(paths.state).save(AppState(is_tour_done=True, model="builtin"))
    with_store(paths.history, START)
    controller = ChatController(FakeEngineClient(), FakeCatalog(is_ready=True), Settings())
    return MiraApp(controller, paths=paths, store=HistoryStore(paths.history))


def with_store(path: Path, conversation: Conversation) -> None:
    """Saves the chat as another window does that goes on with it."""
    store = HistoryStore(path)
    store.open()
    store.save(StoredChat(chat_id="c", title="t", model="builtin", conversation=conversation))
    store.set_last_chat("c")
    store.close()


async def open_chat(pilot) -> None:
    app = pilot.app
    await until(pilot, lambda: app.controller._client.calls and app.controller.conversation.turns)
    app.controller._client.deliver_loaded(PLAN)
    await until(pilot, lambda: isinstance(app.focused, Composer) and app.controller.can_send)
    await until(pilot, lambda: len(app.chat_screen.messages.turns) == 2)


async def ask(pilot, text: str) -> None:
    num_requests = len(pilot.app.controller._client.requests)
    pilot.app.chat_screen.composer.insert(text)
    await pilot.press("enter")
    await until(pilot, lambda: len(pilot.app.controller._client.requests) == num_requests + 1)


def shown(app: MiraApp) -> list[tuple[int | None, str]]:
    """Number and text of each message."""
    return [
        (each.turn_id, each.answer.source if isinstance(each, ReplyMessage) else each._text)
        for each in app.chat_screen.messages.turns
    ]


def told(app: MiraApp) -> list[str]:
    return [str(info.content) for info in app.chat_screen.query(InfoMessage)]


async def test_question_after_another_window_asked_is_a_branch_and_is_told_once(tmp_path):
    app = make_app(tmp_path)
    async with app.run_test(size=SIZE) as pilot:
        await open_chat(pilot)
        with_store(app.paths.history, START.with_user("theirs").with_reply("other"))
        await ask(pilot, "mine")
        await until(pilot, lambda: len(told(app)) == 1)
        assert told(app)[0].startswith("This chat was changed by another window.")
        client = app.controller._client
        client.deliver_text("second", STATS)
        client.deliver_done("second", STATS)
        await until(pilot, lambda: app.controller.can_send)
        await until(pilot, lambda: shown(app)[2:] == [(4, "mine"), (5, "second")])
        assert [m.content for m in client.requests[-1].messages] == ["one", "first", "mine"]
        await pilot.press("tab", "up", "left_square_bracket")
        await until(pilot, lambda: [text for _, text in shown(app)][2:] == ["theirs", "other"])
        assert len(told(app)) <= 1
        kept = app._store.load("c").conversation
        assert [turn.content for turn in kept.turns[2:]] == ["theirs", "other", "mine", "second"]


async def test_change_while_a_reply_comes_is_shown_when_it_is_there(tmp_path):
    app = make_app(tmp_path)
    async with app.run_test(size=SIZE) as pilot:
        await open_chat(pilot)
        await ask(pilot, "mine")
        client = app.controller._client
        client.deliver_text("sec", STATS)
        await until(pilot, lambda: app.controller.partial == "sec")
        with_store(app.paths.history, START.with_user("theirs").with_reply("other"))
        client.deliver_done("second", STATS)
        await until(pilot, lambda: len(told(app)) == 1)
        # The other window's turns were there before the reply, and keep their numbers.
        await until(pilot, lambda: shown(app)[2:] == [(2, "mine"), (5, "second")])
        kept = app._store.load("c").conversation
        assert [turn.content for turn in kept.turns[2:]] == ["mine", "theirs", "other", "second"]


async def test_reply_under_way_stays_on_the_screen_when_the_chat_changes(tmp_path):
    app = make_app(tmp_path)
    async with app.run_test(size=SIZE) as pilot:
        await open_chat(pilot)
        await ask(pilot, "mine")
        client, controller = app.controller._client, app.controller
        client.deliver_text("sec", STATS)
        await until(pilot, lambda: controller.partial == "sec")
        other = START.with_user("theirs")
        # As if another window had been first with its question.
        controller.conversation = controller.conversation.grafted_on(other)
        controller._was_changed_elsewhere = True
        await until(pilot, lambda: len(told(app)) == 1)
        client.deliver_text("ond", STATS)
        await until(pilot, lambda: shown(app)[2:] == [(3, "mine"), (None, "second")])


async def test_question_that_is_being_edited_is_still_the_same_one():
    """Its number changes where it could not be saved before the other window's was."""
    scene, history = Scene(), FakeHistory()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        controller, composer = scene.controller, scene.app.chat_screen.composer
        controller.history = history
        await scene.asking(pilot, "mine")
        scene.client.deliver_done("second", STATS)
        await until(pilot, lambda: controller.can_send)
        await until(pilot, lambda: len(scene.app.chat_screen.messages.turns) == 2)
        await pilot.press("tab", "up", "e")
        await until(pilot, lambda: composer.edited_turn_id == 0)
        history.save = lambda chat: chat.conversation.grafted_on(START)
        controller.set_chat_settings("be kind", controller.sampling)
        await until(pilot, lambda: composer.edited_turn_id == 2)
        composer.text = "mine, better"
        await pilot.press("enter")
        await scene.requested(pilot, 3)
        siblings = controller.conversation.siblings(2)
        assert [turn.content for turn in siblings] == ["one", "mine", "mine, better"]


async def test_question_that_is_being_edited_stays_the_same_when_another_reply_is_asked_for():
    """The path on the screen is new already when the change is told."""
    scene, history = Scene(), FakeHistory()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        controller, screen = scene.controller, scene.app.chat_screen
        controller.history = history
        await scene.asking(pilot, "mine")
        scene.client.deliver_done("second", STATS)
        await until(pilot, lambda: controller.can_send)
        await until(pilot, lambda: len(screen.messages.turns) == 2)
        await pilot.press("tab", "up", "e")
        await until(pilot, lambda: screen.composer.edited_turn_id == 0)
        history.save = lambda chat: chat.conversation.grafted_on(START)
        scene.app._poll_timer.pause()
        await screen.action_regenerate()
        await scene.poll(pilot)
        edited_id = screen.composer.edited_turn_id
        assert controller.conversation.turns[edited_id].content == "mine"
        assert len(told(scene.app)) == 1


async def test_change_is_told_once_there_is_something_to_draw_on(monkeypatch):
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        screen = scene.app.chat_screen
        scene.app._poll_timer.pause()
        with monkeypatch.context() as patch:
            patch.setattr(type(screen), "_is_laid_out", False)
            await screen.take(Update(is_changed_elsewhere=True))
        assert told(scene.app) == []
        for _ in range(2):
            await scene.poll(pilot)
            assert len(told(scene.app)) == 1


async def test_change_before_the_chat_is_shown_is_told_with_it():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.picking(pilot)
        scene.controller._was_changed_elsewhere = True
        await scene.poll(pilot)
        assert not scene.controller._was_changed_elsewhere
        scene.client.deliver_loaded(PLAN)
        await until(pilot, lambda: isinstance(scene.app.focused, Composer))
        await until(pilot, lambda: len(told(scene.app)) == 1)
