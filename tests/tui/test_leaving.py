"""Stopping and leaving: what Ctrl+C does, what quitting keeps, and what it waits for."""

from __future__ import annotations

import threading

import pytest
from app_scenes import WAIT_S, Scene, state_text, until
from app_shell_fakes import make_app
from mira_app.controller import Stage
from mira_app.conversation import TurnStatus
from mira_app.tui import lasting_app
from mira_app.tui.lasting_app import QUIT_GRACE_S
from textual.selection import SELECT_ALL

SIZE = (100, 30)


@pytest.fixture(autouse=True)
def _busy_machine_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """A second Ctrl+C is one however long the first took."""
    monkeypatch.setattr(lasting_app, "AGAIN_S", WAIT_S)


def toasts(app) -> list[str]:
    return [notification.message for notification in app._notifications]


async def test_ctrl_c_stops_the_reply_as_esc_does():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.streaming(pilot)
        scene.app.chat_screen.composer.insert("next")
        await pilot.press("ctrl+c")
        await until(pilot, lambda: scene.client.cancelled == [scene.client.calls[-1]])
        assert toasts(scene.app) == []
        assert scene.app.chat_screen.composer.text == "next"
        await pilot.press("ctrl+c")
        await until(pilot, lambda: toasts(scene.app) == ["It is being stopped. Ctrl+Q quits."])
        assert scene.app.is_running


async def test_ctrl_c_takes_back_a_question_that_waits_for_the_model():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        scene.controller.stage = Stage.LOADING
        scene.app.chat_screen._is_send_due = True
        await pilot.press("ctrl+c")
        assert not scene.app.chat_screen._is_send_due
        assert toasts(scene.app) == []


async def test_ctrl_c_with_nothing_to_stop_says_how_to_quit_in_our_words_and_then_quits():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await pilot.press("ctrl+c")
        (said,) = toasts(scene.app)
        assert said.startswith("Ctrl+C again quits; so does Ctrl+Q.")
        await pilot.press("ctrl+c")
        await until(pilot, lambda: scene.app._exit)


async def test_ctrl_c_a_second_time_much_later_says_it_again():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await pilot.press("ctrl+c")
        scene.app._interrupted_s -= 3600
        await pilot.press("ctrl+c")
        assert not scene.app._exit


async def test_ctrl_c_says_the_keys_that_are_in_force():
    app = make_app(flags={"keymap": {"app.quit": "f9"}})
    async with app.run_test(size=SIZE) as pilot:
        await pilot.press("ctrl+c")
        await until(pilot, lambda: any("so does F9" in each for each in toasts(app)))


async def test_ctrl_c_copies_what_is_selected_and_stops_the_reply_only_then(monkeypatch):
    copied = []
    monkeypatch.setattr(
        "mira_app.tui.screens.message_screen.copy_text",
        lambda text, **_: copied.append(text) or _Route(),
    )
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.streaming(pilot)
        question = scene.app.chat_screen.messages.turns[0].query("Static").first()
        scene.app.screen.selections = {question: SELECT_ALL}
        await pilot.press("ctrl+c")
        await until(pilot, lambda: copied == ["Explain what a cache is."])
        assert scene.client.cancelled == []
        await pilot.press("ctrl+c")
        await until(pilot, lambda: len(scene.client.cancelled) == 1)


async def test_ctrl_c_copies_what_is_selected_in_the_composer():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.streaming(pilot)
        composer = scene.app.chat_screen.composer
        composer.insert("some words")
        composer.select_all()
        await pilot.press("ctrl+c")
        await until(pilot, lambda: scene.app.clipboard == "some words")
        assert scene.client.cancelled == []


async def test_screen_goes_before_the_engine_has_ended():
    scene = Scene()
    may_end, graces = threading.Event(), []

    def close(grace_s: float) -> None:
        graces.append(grace_s)
        may_end.wait(60)

    scene.client.close = close
    try:
        async with scene.app.run_test(size=SIZE) as pilot:
            await scene.chatting(pilot)
            await pilot.press("ctrl+q")
        assert [end.is_alive() for end in scene.app._ends] == [True]
    finally:
        may_end.set()
    scene.app.wait_for_engines()
    assert graces == [QUIT_GRACE_S]


async def test_quitting_in_a_reply_keeps_it_as_stopped_and_starts_no_engine_again():
    scene = Scene()
    scene.client.close = lambda grace_s: scene.client.die()  # as polls would see it
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.streaming(pilot)
        assert state_text(scene.app) == "answering"
        await scene.app.action_quit()
        scene.app.wait_for_engines()
        await scene.app._poll()
    head = scene.controller.conversation.head
    assert head.status is TurnStatus.STOPPED
    assert head.content == "An *expert* is one of many small feed-forward"
    assert scene.client.num_restarts == 0


class _Route:
    value = "a clipboard"
