"""What is typed at once goes to what each key's forerunners gave the focus to."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
from app_scenes import WAIT_S, Scene, until
from desk_fakes import BUILTIN, DeskScene
from fake_engine import PLAN
from mira_app.controller import Stage
from mira_app.tui import ordered_keys
from mira_app.tui.screens.help import HelpScreen
from mira_app.tui.widgets.composer import Composer
from mira_engine import api
from textual import events
from textual.widgets import Input

SIZE = (100, 30)
NAMES = {"/": "slash", " ": "space"}


@pytest.fixture(autouse=True)
def _busy_machine_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """No key overtakes the one before it because the machine, not a widget, is busy."""
    monkeypatch.setattr(ordered_keys, "_HOP_TIMEOUT_S", WAIT_S)


def type_at_once(app, *keys: str) -> None:
    """Sends keys as a terminal does that has them all in its buffer: nothing runs in between."""
    for key in keys:
        character = key if len(key) == 1 else None
        app.post_message(events.Key(NAMES.get(key, key), character))


async def test_letters_after_the_key_of_the_search_are_searched(tmp_path: Path) -> None:
    scene = DeskScene(tmp_path, BUILTIN)
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.open(pilot)
        type_at_once(scene.app, *"/granite", "enter")
        await until(pilot, lambda: scene.menu.focused is scene.menu.model_list)
        await until(pilot, lambda: scene.menu.search.value == "granite")
        assert all("granite" in model for model in scene.listed())
    scene.close()


@pytest.mark.parametrize("leave", ["i", "escape"])
async def test_letters_after_the_key_that_leaves_a_message_are_written(leave: str) -> None:
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.answered(pilot)
        composer = scene.app.chat_screen.composer
        type_at_once(scene.app, *"ab", "tab", leave, *"cy r")
        await until(pilot, lambda: composer.text == "abcy r")
        assert scene.app.focused is composer
        assert len(scene.client.requests) == 2, "neither y nor r was one of the message's keys"


async def test_text_between_the_menu_and_the_chat_is_for_the_chat():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.picking(pilot)
        # Of these, a, s, x and / are keys of the menu.
        type_at_once(scene.app, *"as x/y", "backspace", "down", "ctrl+j")
        scene.app.post_message(events.Paste("pasted"))
        work = scene.app.models_screen.work
        await until(pilot, lambda: "For the chat: as x/ pasted" in str(work.step.content))
        scene.client.deliver_loaded(PLAN)
        await until(pilot, lambda: scene.app._is_chat_opening or scene.app._is_chat_dressed)
        type_at_once(scene.app, *"!")
        await until(pilot, lambda: isinstance(scene.app.focused, Composer))
        await until(pilot, lambda: scene.app.focused.text == "as x/\npasted!")
        assert len(scene.client.requests) == 1, "nothing is sent that nobody sent"


async def test_question_sent_between_the_menu_and_the_chat_is_asked():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.picking(pilot)
        type_at_once(scene.app, "enter", *"why?", "enter")
        scene.client.deliver_loaded(PLAN)
        await scene.requested(pilot, 2)
        assert scene.client.requests[-1].messages[-1].content == "why?"


async def test_text_for_a_chat_that_does_not_come_waits_for_the_next_and_is_not_sent():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.picking(pilot)
        type_at_once(scene.app, *"why?", "enter")
        await until(pilot, lambda: scene.app.kept_text == "why?\n")
        scene.client.calls[-1].fail(api.BudgetError("The budget is too small."))
        await until(pilot, lambda: scene.controller.stage is Stage.FAILED)
        await until(pilot, lambda: scene.app.kept_text == "why?")
        line = scene.app.models_screen.written_line
        await until(pilot, lambda: line.display and "For the chat: why?" in str(line.content))
        await pilot.press("enter")
        await scene.requested(pilot, 2)
        scene.client.deliver_loaded(PLAN)
        await until(pilot, lambda: isinstance(scene.app.focused, Composer))
        await until(pilot, lambda: scene.app.focused.text == "why?")
        assert len(scene.client.requests) == 2
        await until(pilot, lambda: not line.display)


async def test_text_for_a_chat_that_is_covered_is_for_its_composer_all_the_same():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.picking(pilot)
        type_at_once(scene.app, *"qe")
        await until(pilot, lambda: scene.app.kept_text == "qe")
        scene.app._poll_timer.pause()
        scene.app.show_chat()
        scene.app.action_help()
        await until(pilot, lambda: scene.app._is_chat_dressed)
        await until(pilot, lambda: isinstance(scene.app.screen, HelpScreen))
        await pilot.pause()
        assert scene.app.kept_text == "qe"
        type_at_once(scene.app, "escape", *"ry")
        composer = scene.app.chat_screen.composer
        await until(pilot, lambda: scene.app.screen is scene.app.chat_screen)
        scene.app._poll_timer.resume()
        await until(pilot, lambda: composer.text == "qery")


async def test_letters_of_a_search_over_a_model_that_loads_are_searched(tmp_path: Path) -> None:
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.picking(pilot)
        await pilot.press("ctrl+p")
        await until(pilot, lambda: isinstance(scene.app.focused, Input))
        await pilot.press(*"help")
        assert scene.app.focused.value == "help"
        assert scene.app.kept_text == ""


async def test_paste_waits_for_the_key_before_it() -> None:
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.answered(pilot)
        await pilot.press("tab")
        type_at_once(scene.app, "i")
        scene.app.post_message(events.Paste("pasted"))
        type_at_once(scene.app, *"!")
        await until(pilot, lambda: scene.app.chat_screen.composer.text == "pasted!")


async def test_key_after_one_that_opens_a_screen_is_for_that_screen() -> None:
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.answered(pilot)
        type_at_once(scene.app, "f1", "escape", *"back")
        await until(pilot, lambda: scene.app.chat_screen.composer.text == "back")
        assert not any(isinstance(screen, HelpScreen) for screen in scene.app.screen_stack)
        assert isinstance(scene.app.focused, Composer)


async def test_text_for_a_field_waits_for_nothing() -> None:
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.answered(pilot)
        app, rounds = scene.app, []
        settle = app._settle

        async def counted() -> None:
            rounds.append(1)
            await settle()

        app._settle = counted
        type_at_once(app, *"a whole line of text")
        await until(pilot, lambda: app.chat_screen.composer.text == "a whole line of text")
        assert rounds == []
        await pilot.press("enter")
        await scene.requested(pilot, 3)
        assert rounds == [1]


async def test_widget_that_is_busy_does_not_hold_up_what_is_typed(monkeypatch) -> None:
    monkeypatch.setattr(ordered_keys, "_HOP_TIMEOUT_S", 0.01)
    scene = Scene()

    def node(*pumps) -> SimpleNamespace:
        return SimpleNamespace(ancestors_with_self=pumps)

    prompt = SimpleNamespace(call_later=lambda callback: callback() or True)
    busy = SimpleNamespace(call_later=lambda callback: True)
    going = SimpleNamespace(call_later=lambda callback: False)
    assert await scene.app._go_up(node(prompt, going, prompt))
    assert not await scene.app._go_up(node(prompt, busy, prompt))
