"""The chat and the menu of models without a process: what is shown, sent and told."""

from __future__ import annotations

import dataclasses

import pytest
from app_scenes import NOTICES, STATS, Scene, settle, state_text, until
from fake_engine import PLAN
from mira_app.controller import Stage
from mira_app.tui.app import MiraApp
from mira_app.tui.screens.chat import ChatScreen
from mira_app.tui.screens.help import HelpScreen
from mira_app.tui.screens.models import ModelsScreen
from mira_app.tui.widgets.composer import Composer
from mira_app.tui.widgets.live_panel import COLUMN_WIDTH
from mira_app.tui.widgets.message_list import MessageList
from mira_app.tui.widgets.messages import ReplyMessage
from mira_engine import api
from textual.widgets._footer import FooterKey


def reply_texts(app: MiraApp) -> list[str]:
    return [reply.answer.source for reply in app.chat_screen.query(ReplyMessage)]


async def ask(pilot, text: str) -> None:
    pilot.app.screen.query_one(Composer).insert(text)
    await pilot.press("enter")


async def test_enter_while_answering_keeps_the_text():
    scene = Scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.streaming(pilot)
        await ask(pilot, "too early")
        await until(pilot, lambda: len(scene.app._notifications) == 1)
        assert scene.app.screen.query_one(Composer).text == "too early"
        assert len(scene.replies) == 2


def caption_text(scene: Scene) -> str:
    captions = list(scene.app.chat_screen.query("ReplyMessage .caption"))
    return str(captions[-1].content) if captions else ""


async def test_reply_that_is_over_at_once_is_shown_whole():
    scene = Scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.chatting(pilot)
        submit = scene.client.submit

        def submit_and_answer(request):
            call = submit(request)
            scene.client.deliver_text("short", STATS)
            scene.client.deliver_done("short", STATS)
            return call

        scene.client.submit = submit_and_answer
        await ask(pilot, "q")
        await scene.requested(pilot, 2)
        await until(pilot, lambda: "96 tokens" in caption_text(scene))
        assert scene.controller.stage is Stage.READY
        assert reply_texts(scene.app) == ["short"]


async def test_stopping_is_shown_until_the_engine_has_stopped():
    scene = Scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.streaming(pilot)
        await pilot.press("escape")
        await until(pilot, lambda: scene.client.cancelled == [scene.client.calls[-1]])
        for _ in range(2):
            await scene.poll(pilot)
        assert caption_text(scene) == "stopping ..."
        scene.client.deliver_done("An *expert*", STATS, api.FinishReason.CANCELLED)
        await until(pilot, lambda: scene.replies[-1].has_class("-stopped"))
        assert caption_text(scene).startswith("stopped · ")


async def test_stopping_is_shown_in_the_menu_until_the_engine_has_stopped():
    scene = Scene(is_ready=False)
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.preparing(pilot)
        await pilot.press("escape")
        await until(pilot, lambda: scene.client.cancelled == [scene.client.calls[-1]])
        for _ in range(2):
            await scene.poll(pilot)
        menu = scene.app.models_screen
        assert str(menu.work.step.content) == "stopping ..."
        scene.client.calls[-1].fail(api.CancelledError("Preparation was stopped."))
        await until(pilot, lambda: menu.note.display)
        assert not menu.work.display


async def test_header_is_ready_after_a_reply_that_no_poll_saw():
    scene = Scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.chatting(pilot)
        scene.app._poll_timer.pause()
        await scene.asking(pilot, "q")
        assert state_text(scene.app) == "answering"
        scene.client.deliver_done("short", STATS)
        scene.app._poll_timer.resume()
        await until(pilot, lambda: state_text(scene.app) == "ready")


async def test_ctrl_j_begins_new_line_and_enter_sends_both():
    scene = Scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.chatting(pilot)
        await pilot.press("a", "ctrl+j", "b", "enter")
        await scene.requested(pilot, 2)
        assert scene.client.requests[-1].messages[-1].content == "a\nb"


async def test_enter_on_blank_text_sends_nothing():
    scene = Scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.chatting(pilot)
        await pilot.press("space", "enter", "a", "enter")
        await scene.requested(pilot, 2)
        loading, asking = scene.client.requests
        assert isinstance(loading, api.LoadModel)
        assert [message.content for message in asking.messages] == ["a"]


async def test_escape_sequences_of_model_never_reach_the_screen():
    scene = Scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.chatting(pilot)
        await scene.asking(pilot, "hi")
        for piece in ("red \x1b", "[31mhot\x1b]0;ti", "tle\x07 end\u202e"):
            scene.client.deliver_text(piece)
            await scene.poll(pilot)
        await until(pilot, lambda: reply_texts(scene.app)[0].endswith("end"))
        assert reply_texts(scene.app) == ["red hot end"]
        scene.client.deliver_done("red \x1b[31mhot\u202e", STATS)
        await until(pilot, lambda: state_text(scene.app) == "ready")
        assert reply_texts(scene.app) == ["red hot"]
        assert "\x1b" in scene.controller.conversation.head.content


async def test_follows_tail_until_scrolled_up():
    scene = Scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.streaming(pilot)
        messages = scene.app.screen.query_one(MessageList)
        assert messages.scroll_offset.y == messages.max_scroll_y > 0
        messages.scroll_home(animate=False)
        await until(pilot, lambda: messages.scroll_offset.y == 0)
        before = messages.max_scroll_y
        scene.client.deliver_text("\n\nmore\n\nand more")
        await until(pilot, lambda: messages.max_scroll_y > before)
        await settle(pilot)
        assert messages.scroll_offset.y == 0


async def test_new_chat_clears_and_again_adds_sibling():
    scene = Scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.answered(pilot)
        num_requests = len(scene.client.requests)
        await pilot.press("ctrl+r")
        await scene.requested(pilot, num_requests + 1)
        scene.client.deliver_done("another", STATS)
        await until(pilot, lambda: reply_texts(scene.app)[-1] == "another")
        await until(pilot, lambda: state_text(scene.app) == "ready")
        head = scene.controller.conversation.head
        assert [t.content for t in scene.controller.conversation.siblings(head.turn_id)][1:] == [
            "another"
        ]
        await pilot.press("ctrl+n")
        await until(pilot, lambda: scene.replies == [])
        assert scene.controller.conversation.turns == ()


async def test_models_and_back_keeps_chat():
    scene = Scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.answered(pilot)
        await pilot.press("ctrl+o")
        await scene.menu(pilot)
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(scene.app.screen, ChatScreen))
        assert len(scene.replies) == 1
        assert len([r for r in scene.client.requests if isinstance(r, api.LoadModel)]) == 1


async def test_panel_shows_figures_and_notes():
    scene = Scene()
    async with scene.app.run_test(size=(120, 40)) as pilot:
        await scene.answered(pilot)
        column = scene.app.screen.query_one("#column")
        await until(pilot, lambda: "13.0" in str(column.content))  # it rests between pictures
        text = str(column.content)
        for figure in ("13.0", "90.5%", "5210 / 550", "6.5 ms/token", "0.89 of 2", "742 / 901"):
            assert figure in text
        for notice in NOTICES:
            assert notice.text in text
        strip = scene.app.screen.query_one("#strip")
        assert not strip.display
        assert max(len(line) for line in str(strip.content).splitlines()) <= 78
        assert PLAN.num_draft_tokens == 4


@pytest.mark.parametrize("size", [(110, 28), (120, 45)])
async def test_rows_of_the_panel_never_wrap_with_or_without_scrollbar(size):
    scene = Scene()
    async with scene.app.run_test(size=size) as pilot:
        await scene.answered(pilot)
        panel = scene.app.screen.query_one("#column")
        assert panel.content_size.width >= COLUMN_WIDTH
        for step in ((60, 15), size):
            await pilot.resize_terminal(*step)
            await until(pilot, lambda step=step: scene.app.screen.size == step)
            await settle(pilot)
        side = scene.app.screen.query_one("#side")
        assert side.show_vertical_scrollbar == (side.size.height < panel.size.height)
        assert panel.content_size.width >= COLUMN_WIDTH


async def test_chat_opens_when_help_over_the_menu_is_closed():
    scene = Scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.picking(pilot)
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(scene.app.screen, HelpScreen))
        scene.client.deliver_loaded(PLAN)
        await until(pilot, lambda: scene.controller.stage is Stage.READY)
        await scene.poll(pilot)
        assert isinstance(scene.app.screen, HelpScreen)
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(scene.app.screen, ChatScreen))


async def test_reply_that_ends_while_the_menu_is_open_leaves_the_menu_open():
    scene = Scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.streaming(pilot)
        await pilot.press("ctrl+o")
        await scene.menu(pilot)
        scene.client.deliver_done("done", STATS)
        await until(pilot, lambda: state_text(scene.app) == "ready")
        await scene.poll(pilot)
        assert isinstance(scene.app.screen, ModelsScreen)


async def test_menu_follows_what_another_app_prepares_and_keeps_the_marked_line():
    scene = Scene(is_ready=False)
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.menu(pilot)
        menu = scene.app.screen
        await pilot.press("down")
        await until(pilot, lambda: menu.model_list.cursor_row == 1)
        unchanged = menu.model_list.get_row_at(0)
        menu.reread()
        assert all(a is b for a, b in zip(menu.model_list.get_row_at(0), unchanged, strict=True))
        scene.controller._catalog.is_ready = True
        await until(pilot, lambda: "not prepared" not in menu_text(menu))
        assert menu.model_list.cursor_row == 1


async def test_menu_is_not_reread_while_it_is_busy():
    scene = Scene(is_ready=False)
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.preparing(pilot)
        scene.controller._catalog.is_ready = True
        scene.app.screen.reread()
        assert "not prepared" in menu_text(scene.app.screen)


def menu_text(menu: ModelsScreen) -> str:
    table = menu.model_list
    rows = (table.get_row_at(index) for index in range(table.row_count))
    return "\n".join(str(cell) for row in rows for cell in row)


async def test_footer_of_the_menu_tells_what_enter_does():
    scene = Scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.menu(pilot)
        shown = [
            b.binding.description
            for b in scene.app.screen.active_bindings.values()
            if b.binding.show and b.binding.key == "enter"
        ]
        assert shown == ["Pick"]


async def test_progress_bar_is_visible_in_a_small_terminal():
    scene = Scene(is_ready=False)
    async with scene.app.run_test(size=(60, 15)) as pilot:
        await scene.preparing(pilot)
        menu = scene.app.screen
        assert menu.work.bar.region.height == 1
        assert menu.work.bar.region.bottom <= 14
        text = str(menu.work.step.content)
        assert text.endswith("convert, 12 of 30 layers · layer 12")


async def test_header_keeps_a_gap_before_the_state():
    scene = Scene()
    async with scene.app.run_test(size=(40, 15)) as pilot:
        await scene.answered(pilot)
        scene.controller.loaded = dataclasses.replace(scene.controller.loaded, title="long " * 20)
        scene.app.screen._show_state()
        await settle(pilot)
        state = scene.app.screen.query_one("#state")
        assert state.content_region.x - scene.app.screen.query_one("#model").region.right >= 2


async def test_footer_is_built_anew_only_when_the_stage_changes():
    scene = Scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.streaming(pilot)
        before = list(scene.app.screen.query(FooterKey))
        assert before
        for text in ("more", " and more"):
            scene.client.deliver_text(text, STATS)
            await scene.poll(pilot)
        await settle(pilot)
        assert list(scene.app.screen.query(FooterKey)) == before
        scene.client.deliver_done("done", STATS)
        await until(pilot, lambda: state_text(scene.app) == "ready")
        await until(pilot, lambda: not {*before} & {*scene.app.screen.query(FooterKey)})


async def test_identical_toasts_do_not_pile_up():
    scene = Scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.streaming(pilot)
        shown = []
        notify = scene.app.notify
        scene.app.notify = lambda text, **options: (shown.append(text), notify(text, **options))
        await ask(pilot, "too early")
        await pilot.press("enter", "enter")
        await until(pilot, lambda: len(shown) == 3)
        await settle(pilot)
        assert len(scene.app._notifications) == 1


async def test_empty_reply_is_explained():
    scene = Scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.chatting(pilot)
        await scene.asking(pilot, "q")
        scene.client.deliver_done("", api.ReplyStats(num_new_tokens=1))
        await until(pilot, lambda: state_text(scene.app) == "ready")
        assert caption_text(scene) == "the model ended the reply at once · 1 token"
