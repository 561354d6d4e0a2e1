"""The app brought into fixed states, for snapshots and for looking at them by eye.

Each step returns once the screen shows it, however long that takes.
"""

from __future__ import annotations

import asyncio

from app_fakes import FakeCatalog, FakeEngineClient
from fake_engine import PLAN
from mira_app.controller import ChatController
from mira_app.settings import Settings
from mira_app.tui.app import MiraApp
from mira_app.tui.screens.help import HelpScreen
from mira_app.tui.widgets.composer import Composer
from mira_app.tui.widgets.messages import InfoMessage, ReplyMessage
from mira_app.tui.widgets.model_table import ModelList
from mira_engine import api
from textual.widgets.markdown import MarkdownBlock

WAIT_S = 60
"""Only a failure takes so long."""

STATS = api.ReplyStats(
    num_prompt_tokens=148,
    num_cached_tokens=112,
    num_new_tokens=96,
    ttft_s=0.84,
    decode_s=7.31,
    num_hits=5210,
    num_misses=550,
    num_prefetch_hits=300,
    num_records_loaded=412,
    num_records_prefetched=300,
    bytes_moved=412 * 444_416,
    stall_s=0.62,
    num_draft_tokens=2,
    governor_reason="K 2: 48 tok/s expected, K 3 47; 7 records a round.",
    num_drafted=148,
    num_accepted=66,
    num_rounds=74,
    expert_peak_bytes=320 * 2**20,
    peak_memory_bytes=742 * 2**20,
    planned_memory_bytes=901 * 2**20,
)
NOTICES = (
    api.Notice(
        code="budget-default",
        text="The built-in model would fit; its budget is set to 75 % to show the engine work.",
    ),
    api.Notice(code="no-direct-io", text="O_DIRECT is refused here; reads go through the cache."),
)
REPLY = """\
A **cache** is a small, fast store that keeps copies of what was used recently.

- A *hit* is served from the cache.
- A *miss* has to be fetched from the slower place.

```python
def get(key):
    if key not in cache:        # a miss
        cache[key] = load(key)
    return cache[key]
```

The art is in choosing what to throw away.
"""


async def until(pilot, condition) -> None:
    """Lets the app run until the condition holds."""
    async with asyncio.timeout(WAIT_S):
        while not condition():
            await pilot.pause(0.02)


async def settle(pilot) -> None:
    """Lets the app run until nothing is left to handle, lay out or draw.

    Without its polls meanwhile: on a slow machine the next one is due before all that
    the last one set going is done.
    """
    num_quiet = 0
    pilot.app._poll_timer.pause()
    async with asyncio.timeout(WAIT_S):
        while num_quiet < 2:  # drawing posts messages of its own
            await pilot.pause()
            pumps = [pilot.app, *pilot.app.screen.walk_children(with_self=True)]
            is_quiet = not any(pump.message_queue_size for pump in pumps)
            num_quiet = num_quiet + 1 if is_quiet else 0
    pilot.app._poll_timer.resume()


def state_text(app: MiraApp) -> str:
    """What the chat's header says is going on."""
    return str(app.chat_screen.state_line.content)


class Scene:
    """An app without a process, and what a test says in the engine's name."""

    def __init__(self, *, is_ready: bool = True) -> None:
        self.client = FakeEngineClient()
        self.controller = ChatController(self.client, FakeCatalog(is_ready=is_ready), Settings())
        self.app = MiraApp(self.controller)
        self.app.NOTIFICATION_TIMEOUT = 2 * WAIT_S  # no toast goes while a test looks for it

    @property
    def replies(self) -> list[ReplyMessage]:
        """The replies in the chat, finished or not."""
        return list(self.app.chat_screen.query(ReplyMessage))

    async def poll(self, pilot) -> None:
        await self.app._poll()
        await pilot.pause()

    async def requested(self, pilot, num_requests: int) -> None:
        """Waits for that many requests in all; then the next event answers the last one."""
        await until(pilot, lambda: len(self.client.requests) >= num_requests)

    async def menu(self, pilot) -> None:
        await until(pilot, lambda: isinstance(self.app.focused, ModelList))

    async def picking(self, pilot) -> None:
        await self.menu(pilot)
        await pilot.press("enter")
        await self.requested(pilot, 1)

    async def preparing(self, pilot) -> None:
        await self.picking(pilot)
        call = self.client.calls[-1]
        call.deliver(
            api.PrepareProgress(
                request_id=call.request_id,
                step="convert",
                done=12,
                total=30,
                unit="layers",
                detail="layer 12",
            )
        )
        await self.poll(pilot)
        step = self.app.models_screen.work.step
        await until(pilot, lambda: "12 of 30" in str(step.content))
        await settle(pilot)

    async def chatting(self, pilot) -> None:
        await self.picking(pilot)
        self.client.notices = NOTICES
        self.client.deliver_loaded(PLAN)
        await self.poll(pilot)
        await until(pilot, lambda: isinstance(self.app.focused, Composer))
        await until(pilot, lambda: state_text(self.app) == "ready")
        self.app.screen.query_one(Composer).cursor_blink = False
        await settle(pilot)

    async def asking(self, pilot, text: str) -> None:
        num_requests, num_replies = len(self.client.requests), len(self.replies)
        self.app.screen.query_one(Composer).insert(text)
        await pilot.press("enter")
        await self.requested(pilot, num_requests + 1)
        await until(pilot, lambda: len(self.replies) == num_replies + 1)
        await until(pilot, lambda: state_text(self.app) == "answering")

    async def answered(self, pilot) -> None:
        await self.chatting(pilot)
        await self.asking(pilot, "Explain what a cache is.")
        self.client.deliver_text(REPLY, STATS)
        self.client.deliver_done(REPLY, STATS)
        await self.poll(pilot)
        await until(pilot, lambda: state_text(self.app) == "ready")
        await settle(pilot)

    async def streaming(self, pilot) -> None:
        await self.answered(pilot)
        await self.asking(pilot, "And what is an expert in a Mixture-of-Experts model?")
        self.client.deliver_text("An *expert* is one of many small feed-forward", STATS)
        await self.poll(pilot)
        await until(pilot, lambda: len(self.replies[-1].query(MarkdownBlock)) > 0)
        await until(pilot, lambda: self.controller.stats == STATS)
        await settle(pilot)

    async def stopped(self, pilot) -> None:
        await self.streaming(pilot)
        await pilot.press("escape")
        await until(pilot, lambda: self.client.cancelled == [self.client.calls[-1]])
        self.client.deliver_done(
            "An *expert* is one of many small feed-forward", STATS, api.FinishReason.CANCELLED
        )
        await self.poll(pilot)
        await until(pilot, lambda: self.replies[-1].has_class("-stopped"))
        await until(pilot, lambda: state_text(self.app) == "ready")
        await settle(pilot)

    async def broken(self, pilot) -> None:
        await self.streaming(pilot)
        self.client.die()
        await self.poll(pilot)
        await until(pilot, lambda: len(self.app.chat_screen.query(InfoMessage)) == 1)
        await until(pilot, lambda: state_text(self.app) == "restarting the engine")
        await settle(pilot)

    async def help(self, pilot) -> None:
        await self.answered(pilot)
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(self.app.screen, HelpScreen))
        await settle(pilot)
