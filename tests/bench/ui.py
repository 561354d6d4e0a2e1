"""What does showing a reply cost the app, and does it grow with the reply or the chat?

Method: the app runs headless at 120x40 with a scripted engine in the same process. A reply
of 30,000 tokens (paragraphs, lists, code fences, one fence of 3,000 tokens) arrives at 10
polls a second of 40 tokens each; CPU seconds of the process per poll are taken over
windows of polls at 1k, 5k, 10k, 20k and 30k tokens, the text in between in the same steps.
Counted besides: widgets on the screen at each of these points, and in a chat of 500 turns
when it is opened, after scrolling to its start and after jumping to its middle.
CPU seconds are this process's own, so another program's load does not count, but its
pressure on the caches does: read the ratio. Left out: the terminal, and the engine.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from app_scenes import STATS, Scene, until
from mira_app.conversation import Conversation
from mira_app.stored_chat import StoredChat
from mira_app.tui.widgets.message_list import MessageList

CHARS_PER_TOKEN = 4
TOKENS_PER_POLL = 40
NUM_POLLS = 20
"""Polls of a window."""

MARKS = (1_000, 5_000, 10_000, 20_000, 30_000)
NUM_TURNS = 500
SIZE = (120, 40)

PARAGRAPH = (
    "A **cache** keeps copies of what was used lately; `get` looks there first, and whatever "
    "is missing has to come from the slower place, which takes its time. "
)
CODE = "```python\n{}```\n\n"
LINE = "def function_{0}(argument):\n    return argument + {0}  # a line of code\n"


def reply_text(num_chars: int) -> str:
    """Returns Markdown of that length, a long fence in its middle."""
    parts: list[str] = []
    num = index = 0
    has_long_fence = False
    while num < num_chars:
        num_lines = 8
        if num > num_chars // 2 and not has_long_fence:
            num_lines, has_long_fence = 180, True
        part = f"## Part {index}\n\n{PARAGRAPH * 3}\n\n- one thing\n- and another\n\n"
        part += CODE.format("".join(LINE.format(i) for i in range(num_lines)))
        parts.append(part)
        num += len(part)
        index += 1
    return "".join(parts)[:num_chars]


def num_widgets(scene: Scene) -> int:
    """Counts the widgets on the chat's screen."""
    return sum(1 for _ in scene.app.chat_screen.walk_children())


async def stream(marks: tuple[int, ...]) -> list[dict[str, float]]:
    """Streams one reply and returns cost and widgets at each mark of tokens."""
    scene, rows = Scene(), []
    text = reply_text(marks[-1] * CHARS_PER_TOKEN)
    step = TOKENS_PER_POLL * CHARS_PER_TOKEN
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        await scene.asking(pilot, "Explain caches at length.")
        scene.app._poll_timer.pause()
        at = 0
        for mark in marks:
            costs: list[float] = []
            while at < mark * CHARS_PER_TOKEN:
                began = time.process_time()
                scene.client.deliver_text(text[at : at + step], STATS)
                await scene.poll(pilot)
                costs.append(time.process_time() - began)
                at += step
            window = costs[-NUM_POLLS:]
            rows.append(
                {
                    "tokens": mark,
                    "ms_per_poll": 1e3 * statistics.median(window),
                    "mean_ms_per_poll": 1e3 * statistics.mean(window),
                    "widgets": num_widgets(scene),
                }
            )
            print(
                f"{mark:6d} tokens  median {rows[-1]['ms_per_poll']:6.1f} ms a poll"
                f"  mean {rows[-1]['mean_ms_per_poll']:6.1f}  {rows[-1]['widgets']} widgets",
                flush=True,
            )
    return rows


def long_chat(num_turns: int) -> StoredChat:
    """Returns a chat of that many turns."""
    conversation = Conversation()
    for index in range(num_turns // 2):
        conversation = conversation.with_user(f"Question {index}?")
        conversation = conversation.with_reply(reply_text(1500), stats=STATS)
    return StoredChat(chat_id="long", title="long", model="builtin", conversation=conversation)


async def chat_widgets(num_turns: int) -> dict[str, int]:
    """Opens a long chat and counts widgets at its end, its start and its middle."""
    scene = Scene()
    async with scene.app.run_test(size=SIZE) as pilot:
        await scene.chatting(pilot)
        scene.controller.open_chat(long_chat(num_turns))
        await scene.app.chat_screen.show_chat()
        counts = {"opened": num_widgets(scene)}
        messages = scene.app.chat_screen.query_one(MessageList)
        first = messages.turns[0].turn_id
        for _ in range(4):
            top = messages.turns[0].turn_id
            await until(pilot, lambda: messages._aim is None)
            messages.scroll_home(animate=False)
            await until(pilot, lambda top=top: messages.turns[0].turn_id < top)
        assert messages.turns[0].turn_id <= first - 40
        counts["scrolled_up"] = num_widgets(scene)
        await scene.app.chat_screen.jump_to(num_turns // 2)
        await scene.poll(pilot)
        counts["jumped"] = num_widgets(scene)
    return counts


def main() -> None:
    """Prints a table and, last, one JSON document."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--quick", action="store_true", help="stop at 5k tokens, 100 turns")
    quick = parser.parse_args().quick
    rows = asyncio.run(stream(MARKS[:2] if quick else MARKS))
    counts = asyncio.run(chat_widgets(100 if quick else NUM_TURNS))
    print("widgets in a long chat:", counts)
    print(
        json.dumps(
            {
                "stream": rows,
                "ratio_last_to_first": rows[-1]["mean_ms_per_poll"] / rows[0]["mean_ms_per_poll"],
                "chat_widgets": counts,
            }
        )
    )


if __name__ == "__main__":
    main()
