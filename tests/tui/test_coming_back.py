"""Nothing is lost or stuck: drafts, replies that were broken off, models that do not load."""

from __future__ import annotations

from app_fakes import FakeCatalog, FakeEngineClient
from app_scenes import Scene, settle, until
from app_shell_fakes import leave_unsent, make_paths, unsent_of
from fake_engine import PLAN
from mira_app.app_state import AppState, StateFile
from mira_app.controller import ChatController, Stage
from mira_app.conversation import Conversation, TurnStatus
from mira_app.history import HistoryStore, StoredChat
from mira_app.settings import Settings
from mira_app.tui.app import MiraApp
from mira_app.tui.screens.chat import ChatScreen
from mira_app.tui.screens.controls import ControlsScreen
from mira_app.tui.screens.history import HistoryScreen
from mira_app.tui.widgets.composer import Composer
from mira_app.tui.widgets.messages import InfoMessage, ReplyMessage
from mira_app.unsent import Unsent, read_unsent, take_place
from mira_engine import api

SIZE = (100, 30)


def app_with_history(tmp_path, **unsent: str) -> MiraApp:
    """An app that finds a chat with one question, and what an app before left unsent."""
    paths = make_paths(tmp_path)
    paths.data_dir.mkdir(parents=True, exist_ok=True)
    store = HistoryStore(paths.history)
    store.open()
    conversation = Conversation().with_user("Tell me a story.")
    store.save(StoredChat(chat_id="c1", model="builtin", conversation=conversation))
    store.set_last_chat("c1")
    store.close()
    StateFile(paths.state).save(AppState(is_tour_done=True, model="builtin"))
    leave_unsent(paths, **unsent)
    controller = ChatController(FakeEngineClient(), FakeCatalog(is_ready=True), Settings())
    return MiraApp(controller, paths=paths, store=HistoryStore(paths.history))


async def test_visit_to_the_menu_leaves_the_draft_and_the_panels_as_they_are():
    scene = Scene()
    async with scene.app.run_test(size=(120, 40)) as pilot:
        await scene.chatting(pilot)
        scene.app.chat_screen.composer.insert("draft text")
        await pilot.press("ctrl+b")
        for _ in range(2):
            await pilot.press("ctrl+o")
            await until(pilot, lambda: scene.app.screen is scene.app.models_screen)
            await pilot.press("ctrl+o")
            await until(pilot, lambda: isinstance(scene.app.focused, Composer))
        await settle(pilot)
        assert scene.app.chat_screen.composer.text == "draft text"
        assert not scene.app.chat_screen.side_panel.display


async def test_reply_of_an_app_that_was_killed_is_there_and_marked(tmp_path):
    app = app_with_history(tmp_path, chat_id="c1", partial="Once upon a time")
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: app.controller.conversation.head is not None)
        head = app.controller.conversation.head
        assert (head.content, head.status) == ("Once upon a time", TurnStatus.ERROR)
        await until(pilot, lambda: isinstance(app.screen, ChatScreen))
    store = HistoryStore(app.paths.history)
    store.open()
    assert store.load("c1").conversation.head.content == "Once upon a time"
    store.close()


async def test_partial_reply_of_another_chat_is_added_to_none(tmp_path):
    app = app_with_history(tmp_path, chat_id="other", partial="Once")
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: app.controller.conversation.head is not None)
        assert len(app.controller.conversation.turns) == 1


async def test_reply_of_a_killed_app_is_kept_though_another_chat_is_opened(tmp_path):
    app = app_with_history(tmp_path, chat_id="c2", partial="Once upon a time")
    before = HistoryStore(app.paths.history)
    before.open()
    other = Conversation().with_user("And another.")
    before.save(StoredChat(chat_id="c2", model="builtin", conversation=other))
    before.set_last_chat("c1")
    before.close()
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: app.controller.conversation.head is not None)
        assert app.controller.chat_id == "c1"
        kept = app._store.load("c2").conversation.head
    assert kept.content == "Once upon a time"
    assert kept.status is TurnStatus.ERROR


async def test_reply_under_way_is_remembered_and_forgotten_when_it_is_finished(tmp_path):
    app = app_with_history(tmp_path)
    controller, client = app.controller, app.controller._client
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: client.calls and controller.conversation.turns)
        client.deliver_loaded(PLAN)
        await until(pilot, lambda: controller.can_send)
        controller.regenerate()
        client.deliver_text("Once upon")
        await until(pilot, lambda: controller.unfinished == "Once upon")
        await app._remember()
        kept = unsent_of(app)
        assert (kept.chat_id, kept.partial) == (controller.chat_id, "Once upon")
        client.deliver_done("Once upon", api.ReplyStats())
        await until(pilot, lambda: not controller.unfinished)
        await app._remember()
        assert unsent_of(app).partial == ""


async def test_controls_change_what_a_model_failed_to_load_with():
    scene = Scene()
    controller, client = scene.controller, scene.client
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.picking(pilot)
        call = client.calls[-1]
        call.fail(api.BudgetError("The budget is too small.", hint="Give 2MiB."))
        await until(pilot, lambda: controller.stage is Stage.FAILED)
        await pilot.press("f2")
        await until(pilot, lambda: isinstance(scene.app.screen, ControlsScreen))
        scene.app.screen.post_message(
            ControlsScreen.Changed(api.EngineConfig(budget=api.MemoryAmount(share=0.5)))
        )
        await until(pilot, lambda: len(client.requests) == 2)
        assert client.requests[-1].config.budget.share == 0.5
        assert controller.stage is Stage.LOADING


async def test_undone_deletion_shows_the_open_chat_again(tmp_path):
    app = app_with_history(tmp_path)
    client = app.controller._client
    async with app.run_test(size=SIZE) as pilot:
        await until(pilot, lambda: client.calls and app.controller.conversation.turns)
        client.deliver_loaded(PLAN)
        await until(pilot, lambda: isinstance(app.focused, Composer))
        await pilot.press("f3")
        await until(pilot, lambda: isinstance(app.screen, HistoryScreen))
        app.post_message(HistoryScreen.Deleted("c1", False))
        await until(pilot, lambda: not app.controller.conversation.turns)
        app.post_message(HistoryScreen.Deleted("c1", True))
        await until(pilot, lambda: len(app.controller.conversation.turns) == 1)
        assert app.controller.chat_id == "c1"


async def test_question_written_while_the_model_loads_is_sent_when_it_is_there():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        scene.controller.stage = Stage.LOADING
        scene.app.chat_screen.composer.insert("already here")
        await pilot.press("enter")
        await until(pilot, lambda: scene.app.chat_screen._is_send_due)
        assert len(scene.client.requests) == 1
        scene.controller.stage = Stage.READY
        await scene.requested(pilot, 2)
        assert scene.client.requests[-1].messages[-1].content == "already here"
        await until(pilot, lambda: len(scene.app.chat_screen.query(ReplyMessage)) == 1)


async def test_reply_that_was_cut_says_so():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await scene.asking(pilot, "q")
        scene.client.deliver_text("long")
        scene.client.deliver_done("long", api.ReplyStats(), api.FinishReason.LENGTH)
        await until(pilot, lambda: len(scene.app.chat_screen.query(InfoMessage)) == 1)
        (info,) = scene.app.chat_screen.query(InfoMessage)
        assert "cut at its limit" in str(info.content)


async def test_apps_that_run_at_once_keep_their_own_drafts(tmp_path):
    app = app_with_history(tmp_path)
    other = take_place(app.paths.state.parent)  # as another app that runs holds it
    other.save(Unsent(draft="yours"))
    drafts = []
    for app_number, text in enumerate(("mine", "", "")):
        async with app.run_test(size=SIZE) as pilot:
            await until(pilot, lambda app=app: app._is_chat_dressed)
            drafts.append(app.chat_screen.composer.text)
            app.chat_screen.composer.text = text
            await app._remember()
            assert unsent_of(app).draft == text
        if not app_number:
            assert read_unsent(other._path).draft == "yours"
            other.close()
        app = app_with_history(tmp_path)
    assert drafts[0] == ""
    assert sorted(drafts[1:]) == ["mine", "yours"]
