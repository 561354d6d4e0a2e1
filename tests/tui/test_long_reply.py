"""What a long reply costs the screen, counted: as much as a short one, wherever one reads."""

from __future__ import annotations

import gc
from collections import Counter
from weakref import WeakSet

import pytest
from app_scenes import STATS, Scene, settle, state_text, until
from mira_app.passages import SOFT_CHARS
from mira_app.tui.widgets.growing_text import Gap, GrowingText, Passage
from textual._compositor import Compositor
from textual.app import App
from textual.widgets import Markdown

SIZE = (80, 24)
PARAGRAPH = "A *cache* keeps copies of what was used lately, which takes `memory` and saves time. "
PART = f"## One thing\n\n{PARAGRAPH * 3}\n\n- this\n- that\n\n```python\nx = 1\ny = 2\n```\n\n"
STEP = 150
LONG = PART * (SOFT_CHARS // len(PART) + 1)
"""A passage and a bit."""


@pytest.fixture
def counts(monkeypatch) -> Counter[str]:
    """How many widgets are put in their places and mounted, all rounds of a poll together."""
    found: Counter[str] = Counter()
    arrange, register = Compositor._arrange_root, App._register_child

    def counted_arrange(self, *args, **options):
        placed = arrange(self, *args, **options)
        found["placed"] += len(placed[0])
        return placed

    def counted_register(self, *args, **options):
        found["mounted"] += 1
        return register(self, *args, **options)

    monkeypatch.setattr(Compositor, "_arrange_root", counted_arrange)
    monkeypatch.setattr(App, "_register_child", counted_register)
    return found


async def stream(scene: Scene, pilot, text: str, step: int) -> None:
    for at in range(0, len(text), step):
        scene.client.deliver_text(text[at : at + step], STATS)
        await scene.poll(pilot)


async def check_order(scene: Scene, text: GrowingText) -> None:
    """What is shown stands in order, and the gaps are as high as what is not."""
    async with scene.app.chat_screen._drawing:  # not in the middle of a change
        _check_order(text)


def _check_order(text: GrowingText) -> None:
    shown = [place.passage for place in text.places if place.passage is not None]
    assert [child for child in text.children if isinstance(child, Passage)] == shown
    resting = sum(place.num_rows for place in text.places if place.is_resting)
    assert sum(gap.num_rows for gap in text.query(Gap)) == resting


async def test_poll_costs_the_same_in_a_short_reply_and_in_a_long_one(counts):
    earlier = WeakSet(each for each in gc.get_objects() if isinstance(each, Markdown))
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await scene.asking(pilot, "q")
        scene.app._poll_timer.pause()
        costs = []
        for num_filling in (2, 6):  # a whole number of passages, so that both begin alike
            await stream(scene, pilot, LONG * num_filling, len(LONG))
            counts.clear()
            await stream(scene, pilot, LONG, STEP)
            costs.append(dict(counts))
        short, long = costs
        answer = scene.replies[-1].answer
        assert len(answer.places) > 8
        assert long["placed"] <= 1.15 * short["placed"], costs
        assert long["mounted"] <= 1.15 * short["mounted"], costs
        assert len(answer.children) <= 6
        await check_order(scene, answer)
        # What a passage that rests has drawn would be walked through at each collection.
        gc.collect()
        alive = {each for each in gc.get_objects() if isinstance(each, Markdown)} - set(earlier)
        assert len(alive) == len(scene.app.chat_screen.query(Markdown))


async def test_reply_that_is_read_while_it_grows_is_whole_and_in_order():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await scene.asking(pilot, "q")
        await stream(scene, pilot, LONG * 3, len(LONG))
        answer, text = scene.replies[-1].answer, LONG * 3
        messages = scene.app.chat_screen.messages
        for keys in (["ctrl+home"], ["pagedown"] * 3, ["end"]):
            await pilot.press(*keys)
            await stream(scene, pilot, LONG, len(LONG))
            text += LONG
            await settle(pilot)
            await until(pilot, lambda: not messages._num_rests_due)
            await check_order(scene, answer)
            assert answer.source == text
            seen = scene.app.screen._compositor.visible_widgets
            assert any(place.passage in seen for place in answer.places), keys
        height = messages.virtual_size.height
        scene.client.deliver_done(text, STATS)
        await until(pilot, lambda: state_text(scene.app) == "ready")
        await settle(pilot)
        await check_order(scene, answer)
        assert answer.source == text
        assert abs(messages.virtual_size.height - height) <= 3


async def test_terminal_of_another_width_and_another_end_keep_the_passages_in_order():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await scene.asking(pilot, "q")
        await stream(scene, pilot, LONG * 4, len(LONG))
        answer = scene.replies[-1].answer
        await until(pilot, lambda: answer.places[0].is_resting)
        rows = answer.places[0].num_rows
        await pilot.resize_terminal(50, 24)
        await until(pilot, lambda: answer.places[0].num_rows > rows)
        await check_order(scene, answer)
        await pilot.press("ctrl+home")
        await until(pilot, lambda: not answer.places[0].is_resting)
        await check_order(scene, answer)
        scene.client.deliver_done(LONG * 2, STATS)
        await until(pilot, lambda: state_text(scene.app) == "ready")
        await settle(pilot)
        assert answer.source == LONG * 2
        await check_order(scene, answer)


async def test_text_that_is_taken_down_is_left_alone():
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await scene.asking(pilot, "q")
        await stream(scene, pilot, LONG * 2, len(LONG))
        answer = scene.replies[-1].answer
        async with scene.app.chat_screen._drawing:
            await answer.query("*").remove()
            await answer._change([], range(1))
