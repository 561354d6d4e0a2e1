"""Long chats, long questions, the composer and a chat's settings."""

from __future__ import annotations

from app_scenes import STATS, Scene, settle, state_text, until
from chat_looks import SIZE, caption, composer_of, exchange, focused_id, messages_of, shown
from mira_app.conversation import Conversation
from mira_app.stored_chat import StoredChat
from mira_app.tui.screens.chat import ChatScreen
from mira_app.tui.screens.chat_settings import ChatSettingsScreen
from mira_app.tui.widgets.message_list import STEP_TURNS, WINDOW_TURNS
from mira_app.tui.widgets.messages import FoldedQuestion, UserMessage, fold_question
from mira_engine import api
from textual.events import Paste

# -- long chats


def chat_of(num_turns: int) -> StoredChat:
    conversation = Conversation(system_prompt="be kind")
    for index in range(num_turns // 2):
        conversation = conversation.with_user(f"question {index}").with_reply(f"reply {index}")
    return StoredChat(chat_id="long", title="long", model="builtin", conversation=conversation)


async def open_chat(scene: Scene, pilot, num_turns: int) -> None:
    await scene.chatting(pilot)
    scene.controller.open_chat(chat_of(num_turns))
    await scene.app.chat_screen.show_chat()
    await settle(pilot)


async def test_chat_of_500_turns_mounts_a_window_and_scrolls_to_its_start():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await open_chat(scene, pilot, 500)
        messages = messages_of(scene)
        assert [m.turn_id for m in messages.turns] == list(range(500 - WINDOW_TURNS, 500))
        for _ in range(3):
            first, anchor = messages.turns[0].turn_id, messages.turns[0]
            messages.scroll_home(animate=False)
            await until(pilot, lambda first=first: messages.turns[0].turn_id < first)
            await until(pilot, lambda: messages._aim is None)
            await settle(pilot)
            assert len(messages.turns) <= WINDOW_TURNS + STEP_TURNS
            assert messages.region.overlaps(anchor.region)  # what was read stays in sight
        assert not messages.is_at_tail
        await pilot.press("ctrl+end")
        await until(pilot, lambda: messages.is_at_tail and messages.turns[-1].turn_id == 499)
        await pilot.press("ctrl+home")
        await until(pilot, lambda: messages.turns[0].turn_id == 0)
        assert len(messages.turns) <= WINDOW_TURNS + STEP_TURNS


async def test_jump_mounts_the_turn_on_its_branch_and_focuses_it():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await open_chat(scene, pilot, 500)
        scene.controller.regenerate(498)
        scene.client.deliver_done("another", STATS)
        await until(pilot, lambda: scene.controller.can_send)
        await scene.app.chat_screen.jump_to(499)
        await until(pilot, lambda: focused_id(scene) == 499)
        await scene.app.chat_screen.jump_to(100)
        await until(pilot, lambda: focused_id(scene) == 100)
        messages = messages_of(scene)
        await until(pilot, lambda: messages._aim is None)
        await settle(pilot)
        assert messages.region.contains_region(scene.app.focused.region)
        assert len(messages.turns) == WINDOW_TURNS
        messages.scroll_end(animate=False)
        await until(pilot, lambda: messages.turns[-1].turn_id > 110)


async def test_reply_goes_on_while_the_start_is_read_and_is_whole_at_the_end():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await open_chat(scene, pilot, 100)
        await scene.asking(pilot, "more")
        scene.client.deliver_text("first part ", STATS)
        await scene.poll(pilot)
        await pilot.press("ctrl+home")
        await until(pilot, lambda: messages_of(scene).turns[0].turn_id == 0)
        scene.client.deliver_text("second part", STATS)
        await scene.poll(pilot)
        await pilot.press("ctrl+end")
        await until(pilot, lambda: shown(scene)[-1] == "first part second part")
        scene.client.deliver_done("first part second part", STATS)
        await until(pilot, lambda: state_text(scene.app) == "ready")
        await settle(pilot)
        assert messages_of(scene).turns[-1].turn_id == 101


# -- the composer


async def test_history_keeps_the_draft():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await exchange(scene, pilot, "one", "a")
        await exchange(scene, pilot, "two\nlines", "b")
        composer = composer_of(scene)
        composer.insert("a draft")
        await pilot.press("up")
        assert composer.text == "two\nlines"
        await pilot.press("up", "up")
        assert composer.text == "one"
        await pilot.press("down", "down")
        assert composer.text == "a draft"
        await pilot.press("down")
        assert composer.text == "a draft"


async def test_big_paste_is_a_pill_that_backspace_takes_whole():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        composer = composer_of(scene)
        composer.post_message(Paste("a\nb\nc"))
        await until(pilot, lambda: composer.text == "a\nb\nc")
        composer.clear()
        composer.post_message(Paste("line\r\n" * 20))
        await until(pilot, lambda: composer.text == "[paste 1: 20 lines]")
        await pilot.press("x", "backspace", "backspace")
        assert composer.text == ""
        composer.post_message(Paste("line\r" * 20))
        await until(pilot, lambda: composer.text == "[paste 1: 20 lines]")
        await pilot.press("x", "enter")
        await scene.requested(pilot, 2)
        sent = scene.client.requests[-1].messages[-1].content
        assert sent == "\n".join(["line"] * 20) + "x"


# -- settings of a chat


async def test_chat_settings_are_checked_in_place_and_used_from_the_next_question_on():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await pilot.press("f5")
        await until(pilot, lambda: isinstance(scene.app.screen, ChatSettingsScreen))
        screen = scene.app.screen
        screen.query_one("#system").text = "be brief"
        screen.query_one("#temperature").value = "hot"
        await until(pilot, lambda: screen.query_one("#about-temperature").has_class("-error"))
        assert str(screen.query_one("#about-temperature").content) == "Give a number."
        await pilot.press("ctrl+s")
        assert scene.app.screen is screen
        screen.query_one("#temperature").value = "0.7"
        screen.query_one("#seed").value = "7"
        screen.query_one("#max_new_tokens").value = ""
        await pilot.press("ctrl+s")
        await until(pilot, lambda: isinstance(scene.app.screen, ChatScreen))
        await scene.asking(pilot, "q")
        request = scene.client.requests[-1]
        assert request.messages[0].content == "be brief"
        assert request.sampling == api.SamplingConfig(temperature=0.7, seed=7)


# -- long questions


async def test_long_question_is_unfolded_and_folded_by_enter_and_by_a_click():
    scene = Scene()
    question = "\n".join(f"line {number}" for number in range(30))
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await exchange(scene, pilot, question, "short")
        message = messages_of(scene).query(UserMessage).first()
        assert "line 29" not in str(message._body.content)
        assert caption(message) == "… 18 more lines · Enter or a click shows all"
        await pilot.press("tab", "up")
        await until(pilot, lambda: scene.app.focused is message)
        height = message.size.height
        await pilot.press("enter")
        await until(pilot, lambda: message.size.height == height + 18)
        assert str(message._body.content) == question
        assert caption(message) == "Enter or a click folds it"
        await pilot.press("enter")
        await until(pilot, lambda: message.size.height == height)
        messages_of(scene).scroll_end(animate=False)
        await settle(pilot)
        await pilot.click(message._unfold)
        await until(pilot, lambda: message.size.height == height + 18)


async def test_key_that_unfolds_is_shown_on_long_questions_alone():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await exchange(scene, pilot, "short", "reply")
        await exchange(scene, pilot, "x" * 500, "reply")
        short, long = messages_of(scene).query(UserMessage)
        for message, is_shown in ((short, False), (long, True)):
            message.focus()
            await until(pilot, lambda message=message: scene.app.focused is message)
            shown = {each.binding.id for each in scene.app.screen.active_bindings.values()}
            assert ("message.fold" in shown) is is_shown
        await pilot.press("enter")
        await until(pilot, lambda: str(long._body.content) == "x" * 500)


def test_question_of_endless_lines_is_never_drawn_whole():
    folded = fold_question("y\n" * 100_000, 2000, 20_000)
    assert folded.text.count("\n") == 1999
    assert folded.rest == "… 98,001 more lines"
    assert fold_question("\x1b[31ma\r\nb") == FoldedQuestion(text="a\nb")
