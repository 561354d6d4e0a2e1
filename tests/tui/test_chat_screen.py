"""What one can do in the chat: read, edit, retry, copy, go about, write."""

from __future__ import annotations

import pytest
from app_fakes import FakeCatalog, fake_engine_command
from app_scenes import STATS, Scene, settle, state_text, until
from chat_looks import SIZE, answer, caption, composer_of, exchange, focused_id, messages_of, shown
from fake_engine import THOUGHTS
from mira_app.controller import ChatController
from mira_app.conversation import TurnStatus
from mira_app.engine_client import EngineClient
from mira_app.settings import Settings
from mira_app.tui.app import POLL_INTERVAL_S, MiraApp
from mira_app.tui.screens import message_screen
from mira_app.tui.screens.code_picker import CodePicker
from mira_app.tui.widgets.composer import Composer
from mira_app.tui.widgets.messages import InfoMessage, ReplyMessage, UserMessage
from mira_engine import api

LONG = "A paragraph of the reply that fills a line.\n\n" * 40


# -- streaming


async def test_long_reply_keeps_few_widgets_and_all_of_its_text():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await scene.asking(pilot, "q")
        text, counts = "", []
        for index in range(8):
            piece = f"## Part {index}\n\nwords and more\n\n```python\nx = {index}\n```\n\n- a\n\n"
            text += piece * 10
            scene.client.deliver_text(piece * 10, STATS)
            await scene.poll(pilot)
            counts.append(sum(1 for _ in scene.app.screen.walk_children()))
        reply = scene.replies[-1]
        assert reply.answer.source == text
        assert len(reply.answer.places) > 2
        assert any(place.is_resting for place in reply.answer.places)
        assert max(counts) < 600  # all of it would be some 800
        height = messages_of(scene).virtual_size.height
        scene.client.deliver_done(text, STATS)
        await until(pilot, lambda: state_text(scene.app) == "ready")
        await settle(pilot)
        assert abs(messages_of(scene).virtual_size.height - height) <= 2


async def test_resting_passage_wakes_when_it_is_scrolled_to():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await exchange(scene, pilot, "q", LONG * 8)
        first = scene.replies[-1].answer.places[0]
        await until(pilot, lambda: first.is_resting)
        await pilot.press("ctrl+home")
        await until(pilot, lambda: not first.is_resting)


async def test_new_text_below_is_told_and_end_goes_there():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await scene.asking(pilot, "q")
        scene.client.deliver_text(LONG, STATS)
        await scene.poll(pilot)
        await settle(pilot)
        messages, pill = messages_of(scene), scene.app.chat_screen.pill
        assert not pill.display
        await pilot.press("pageup")
        await settle(pilot)
        place = messages.scroll_offset.y
        scene.client.deliver_text(LONG, STATS)
        await until(pilot, lambda: pill.display)
        await settle(pilot)
        assert messages.scroll_offset.y == place
        await pilot.press("end")
        await until(pilot, lambda: not pill.display)
        await settle(pilot)
        assert messages.scroll_offset.y == messages.max_scroll_y
        scene.client.deliver_text(LONG, STATS)
        await scene.poll(pilot)
        await settle(pilot)
        assert messages.scroll_offset.y == messages.max_scroll_y
        assert not pill.display


async def test_thinking_is_open_while_it_streams_and_folded_by_the_answer():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await scene.asking(pilot, "q")
        scene.client.deliver_text("so they want", part=api.ReplyPart.THINKING)
        await scene.poll(pilot)
        reply = scene.replies[-1]
        await until(pilot, lambda: reply.thinking is not None)
        assert not reply.thinking.collapsed
        scene.client.deliver_text("this", STATS)
        await until(pilot, lambda: reply.thinking.collapsed)
        scene.client.deliver_done("this", STATS, thinking="so they want")
        await until(pilot, lambda: state_text(scene.app) == "ready")
        assert (reply.thinking.text.source, reply.answer.source) == ("so they want", "this")
        await pilot.press("ctrl+t")
        await until(pilot, lambda: not reply.thinking.collapsed)
        await pilot.press("ctrl+t")
        await until(pilot, lambda: reply.thinking.collapsed)


async def test_engine_with_thinking_and_trimmed_context_end_to_end(tmp_path):
    client = EngineClient(fake_engine_command("thinking", "trimmed", "residency"), log_dir=tmp_path)
    app = MiraApp(ChatController(client, FakeCatalog(is_ready=True), Settings()))
    try:
        async with app.run_test(size=SIZE) as pilot:
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(app.focused, Composer))
            app.chat_screen.composer.insert("q")
            await pilot.press("enter")
            await until(pilot, lambda: app.controller.conversation.head is not None)
            await until(pilot, lambda: app.controller.can_send)
            assert app.controller.conversation.head.thinking == "".join(THOUGHTS)
            assert app.controller.residency.regions == ("HS.s",)
            await until(pilot, lambda: len(app.chat_screen.query(InfoMessage)) == 1)
            (info,) = app.chat_screen.query(InfoMessage)
            assert "no longer sees the oldest 4 messages" in str(info.content)
    finally:
        client.close()


async def test_end_of_a_reply_can_be_drawn_while_the_app_is_left(tmp_path):
    client = EngineClient(fake_engine_command("thinking"), log_dir=tmp_path)
    app = MiraApp(ChatController(client, FakeCatalog(is_ready=True), Settings()))
    try:
        async with app.run_test(size=SIZE) as pilot:
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(app.focused, Composer))
            app.chat_screen.composer.insert("q")
            await pilot.press("enter")
            await until(pilot, lambda: app.controller.conversation.head is not None)
            await until(pilot, lambda: app.controller.can_send)
            reply = app.chat_screen.query(ReplyMessage).first()
            await reply.remove()
            await reply.finish(app.controller.conversation.head)
    finally:
        client.close()


async def test_escape_stops_at_the_next_poll_and_keeps_partial_and_draft(tmp_path):
    client = EngineClient(fake_engine_command("slow"), log_dir=tmp_path)
    app = MiraApp(ChatController(client, FakeCatalog(is_ready=True), Settings()))
    try:
        async with app.run_test(size=SIZE) as pilot:
            await pilot.press("enter")
            await until(pilot, lambda: isinstance(app.focused, Composer))
            app.chat_screen.composer.insert("q")
            await pilot.press("enter")
            await until(pilot, lambda: len(app.controller.partial) > 20)
            app.chat_screen.composer.insert("a draft")
            call = app.controller._call
            await pilot.press("escape")
            (reply,) = app.chat_screen.query(ReplyMessage)
            assert caption(reply) == "stopping ..." or reply.has_class("-stopped")
            await until(pilot, lambda: call.is_done)
            # Time is not measured: the poll after the engine's answer shows it, and these
            # come every 0.1 s.
            await app._poll()
            assert reply.has_class("-stopped")
            assert POLL_INTERVAL_S <= 0.1
            head = app.controller.conversation.head
            assert head.status is TurnStatus.STOPPED
            assert reply.answer.source == head.content
            assert app.chat_screen.composer.text == "a draft"
    finally:
        client.close()


async def test_context_meter_warns_near_the_limit():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.answered(pilot)
        meter = scene.app.chat_screen.context_meter
        assert str(meter.content) == "context 244 / 2,048"
        await scene.asking(pilot, "q")
        assert "244" in str(meter.content)
        stats = api.ReplyStats(num_prompt_tokens=1800, num_new_tokens=100)
        scene.client.deliver_done("a", stats)
        await until(pilot, lambda: meter.has_class("-near"))
        assert str(meter.content) == "context 1,900 / 2,048 nearly full"


# -- messages


async def test_edit_of_a_question_makes_a_sibling_and_the_draft_comes_back():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await exchange(scene, pilot, "one", "a")
        await exchange(scene, pilot, "two", "b")
        composer_of(scene).insert("a draft")
        await pilot.press("tab", "up", "up", "up", "e")
        assert composer_of(scene).text == "one"
        assert composer_of(scene).border_title
        await pilot.press("escape")
        await until(pilot, lambda: composer_of(scene).text == "a draft")
        await pilot.press("tab", "up", "up", "up", "e")
        composer_of(scene).text = "uno"
        await pilot.press("enter")
        await scene.requested(pilot, 4)
        assert [m.content for m in scene.client.requests[-1].messages] == ["uno"]
        await answer(scene, pilot, "c")
        assert composer_of(scene).text == "a draft"
        assert shown(scene) == ["uno", "c"]
        assert caption(messages_of(scene).turns[0]) == "2/2"
        await pilot.press("tab", "up", "left_square_bracket")
        await until(pilot, lambda: shown(scene) == ["one", "a", "two", "b"])
        await until(pilot, lambda: focused_id(scene) == 0)
        await pilot.press("right_square_bracket")
        await until(pilot, lambda: shown(scene) == ["uno", "c"])


async def test_retry_on_a_message_replaces_what_followed_it():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await exchange(scene, pilot, "one", "a")
        await exchange(scene, pilot, "two", "b")
        await pilot.press("tab", "up", "up", "r")
        await scene.requested(pilot, 4)
        await answer(scene, pilot, "again")
        assert shown(scene) == ["one", "again"]
        assert caption(scene.replies[-1]).startswith("2/2 · ")


async def test_keys_go_through_messages_and_back_to_the_composer():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.answered(pilot)
        await pilot.press("tab")
        assert isinstance(scene.app.focused, ReplyMessage)
        await pilot.press("up")
        assert isinstance(scene.app.focused, UserMessage)
        await pilot.press("up", "escape")
        assert scene.app.focused is composer_of(scene)
        await pilot.press("tab", "down")
        assert scene.app.focused is composer_of(scene)


@pytest.fixture
def copies(monkeypatch):
    """What was copied through the terminal; there is no other clipboard."""
    found: list[str] = []
    monkeypatch.setattr("mira_app.clipboard.has_native_clipboard", lambda environ: False)
    monkeypatch.setattr(MiraApp, "copy_to_clipboard", lambda self, text: found.append(text))
    monkeypatch.setenv("SSH_CONNECTION", "1")
    return found


def toasts(scene: Scene) -> str:
    return " ".join(toast.message for toast in scene.app._notifications)


async def test_message_is_copied_sanitised_and_the_way_is_told(copies):
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await exchange(scene, pilot, "q", "plain \x1b[31mred")
        await pilot.press("tab", "y")
        await until(pilot, lambda: copies == ["plain red"])
        await until(pilot, lambda: "OSC 52" in toasts(scene))


async def test_one_code_block_is_copied_and_of_several_one_is_picked(copies):
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await exchange(scene, pilot, "q", "no code")
        await pilot.press("tab", "Y")
        await until(pilot, lambda: "no code block" in toasts(scene))
        await pilot.press("escape")
        await exchange(scene, pilot, "q", "```sh\nls\n```")
        await pilot.press("tab", "Y")
        await until(pilot, lambda: copies == ["ls"])
        await pilot.press("escape")
        await exchange(scene, pilot, "q", "```sh\nls\n```\nor\n```python\nx = 1\n```")
        await pilot.press("tab", "Y")
        await until(pilot, lambda: isinstance(scene.app.screen, CodePicker))
        await pilot.press("down", "enter")
        await until(pilot, lambda: copies == ["ls", "x = 1"])


async def test_copy_that_fails_is_a_toast(monkeypatch):
    def fail(*args, **options):
        raise message_screen.ClipboardError("No clipboard.", hint="Use the mouse.")

    monkeypatch.setattr(message_screen, "copy_text", fail)
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.answered(pilot)
        await pilot.press("tab", "y")
        await until(pilot, lambda: "Use the mouse." in toasts(scene))
