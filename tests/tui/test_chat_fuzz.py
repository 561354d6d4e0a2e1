"""Whatever a model writes or a person pastes: nothing raw in the terminal, nothing lost.

The screen is read as the terminal would get it: every strip of text that is composed.
"""

from __future__ import annotations

import random
import re

import pytest
from app_scenes import STATS, Scene, settle, state_text, until
from mira_app.sanitise import sanitise
from rich.cells import cell_len
from textual.events import Paste

UNSAFE = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069\ud800-\udfff]")
EMOJI = "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 ❤️ 🇩🇪"
CJK = "日本語の文章と한국어 및 中文"
RTL = "שלום עולם مرحبا بالعالم"
NASTY = (
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "\x1b]52;c;aGk=\x1b\\",
    "\x9b2J",
    "\x1bP1$r\x1b\\",
    "\x07\x08\x0c\x7f",
    "\u202eevil\u2066",
    "&#x202e;decoded &#27;[2J &#x9b;",
    "[link \x1b[1m](http://x/\x1b[2J)",
    "`\x1b[2J`",
    "\ud83d",
    "| a \x1b[H| b |\n|---|---|\n| \u202e | 日本 |\n",
    "```py\x1b[2J\nx = '\x1b[31m'\n```\n",
    "<b>\x1b[2J</b>",
)
PIECES = (*NASTY, EMOJI, CJK, RTL, "word ", "\n\n", "# ", "- ", "**", "```\n", "> ", "\u2028", "\t")


def screen_text(scene: Scene) -> str:
    """What the terminal gets, without the sequences that Textual itself writes."""
    strips = scene.app.screen._compositor.render_strips()
    return "\n".join("".join(part.text for part in strip if not part.control) for strip in strips)


@pytest.mark.parametrize("seed", range(3))
async def test_no_piece_of_a_reply_reaches_the_terminal_raw(seed):
    rng = random.Random(seed)
    scene = Scene()
    async with scene.app.run_test(size=(80, 40)) as pilot:
        await scene.chatting(pilot)
        await scene.asking(pilot, "q")
        text = ""
        for _ in range(4):
            piece = "".join(rng.choice(PIECES) for _ in range(12))
            text += piece
            cut = rng.randrange(len(piece))  # anywhere, also inside of a sequence
            scene.client.deliver_text(piece[:cut], STATS)
            await scene.poll(pilot)
            scene.client.deliver_text(piece[cut:], STATS)
            await scene.poll(pilot)
            assert not UNSAFE.search(screen_text(scene))
        scene.client.deliver_done(text, STATS)
        await until(pilot, lambda: state_text(scene.app) == "ready")
        await settle(pilot)
        assert not UNSAFE.search(screen_text(scene))
        assert scene.controller.conversation.head.content == text
        assert scene.replies[-1].answer.source == sanitise(text)


async def test_every_nasty_piece_is_harmless_in_question_reply_and_composer():
    scene = Scene()
    async with scene.app.run_test(size=(80, 120)) as pilot:
        await scene.chatting(pilot)
        text = "\n\n".join(NASTY)
        scene.app.chat_screen.composer.post_message(Paste(text[:600]))
        await settle(pilot)
        assert not UNSAFE.search(screen_text(scene))
        scene.app.chat_screen.composer.clear()
        scene.controller.send(text)
        scene.client.deliver_done(text, STATS)
        await until(pilot, lambda: scene.controller.can_send)
        await scene.app.chat_screen.show_chat()
        await settle(pilot)
        shown = screen_text(scene)
        assert not UNSAFE.search(shown)
        assert "evil" in shown
        await pilot.press("tab", "up", "e")
        await settle(pilot)
        assert not UNSAFE.search(screen_text(scene))


@pytest.mark.parametrize("text", [EMOJI, CJK, RTL, "a" + CJK + EMOJI + RTL])
async def test_cursor_stands_after_wide_text_and_it_is_sent_as_it_is(text):
    scene = Scene()
    async with scene.app.run_test(size=(120, 30)) as pilot:
        await scene.chatting(pilot)
        composer = scene.app.chat_screen.composer
        composer.post_message(Paste(text))
        await until(pilot, lambda: composer.text == text)
        await settle(pilot)
        left = composer.content_region.x
        assert composer.cursor_screen_offset.x - left == cell_len(text)
        await pilot.press("enter")
        await scene.requested(pilot, 2)
        assert scene.client.requests[-1].messages[-1].content == text


async def test_paste_of_ten_thousand_lines_is_one_message():
    scene = Scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.chatting(pilot)
        pasted = "\n".join(f"line {index} {CJK}" for index in range(10_000))
        scene.app.chat_screen.composer.post_message(Paste(pasted))
        await until(pilot, lambda: "10,000 lines" in scene.app.chat_screen.composer.text)
        await pilot.press("enter")
        await scene.requested(pilot, 2)
        (message,) = scene.client.requests[-1].messages
        assert message.content == pasted
        scene.client.deliver_done("a", STATS)
        await until(pilot, lambda: state_text(scene.app) == "ready")
        assert len(scene.client.requests) == 2
        assert scene.app.chat_screen.messages.virtual_size.height < 40
        await pilot.press("tab", "up", "e")
        assert scene.app.chat_screen.composer.text == "[paste 1: 10,000 lines]"
        assert scene.app.chat_screen.composer.full_text == pasted


async def test_resize_storm_while_streaming_keeps_text_and_cursor():
    rng = random.Random(0)
    scene = Scene()
    async with scene.app.run_test(size=(120, 40)) as pilot:
        await scene.chatting(pilot)
        await scene.asking(pilot, "q")
        composer = scene.app.chat_screen.composer
        composer.insert(f"draft {CJK}")
        text = ""
        sizes = [(20, 5), (200, 60), (20, 5), (21, 5), (80, 24), (20, 5)]
        for width, height in sizes + [(rng.randint(20, 160), rng.randint(5, 50)) for _ in range(2)]:
            piece = f"{EMOJI} {CJK}\n\n```python\nx = '{RTL}'\n```\n\n| a |\n|---|\n| 1 |\n\n"
            text += piece
            scene.client.deliver_text(piece, STATS)
            await pilot.resize_terminal(width, height)
            await scene.poll(pilot)
        await pilot.resize_terminal(20, 5)
        await settle(pilot)
        assert scene.app.screen.size == (20, 5)
        assert scene.app.focused is composer
        assert scene.app.screen.region.contains(*composer.cursor_screen_offset)
        await pilot.resize_terminal(80, 24)
        scene.client.deliver_done(text, STATS)
        await until(pilot, lambda: state_text(scene.app) == "ready")
        assert scene.replies[-1].answer.source == text
        assert composer.text == f"draft {CJK}"
        assert len(scene.client.requests) == 2
