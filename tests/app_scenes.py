"""The app brought into fixed states, for snapshots and for looking at them by eye."""

from __future__ import annotations

from app_fakes import FakeCatalog, FakeEngineClient
from fake_engine import PLAN
from mira_app.controller import ChatController
from mira_app.settings import Settings
from mira_app.tui.app import MiraApp
from mira_app.tui.widgets.composer import Composer
from mira_engine import api

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
    num_drafted=148,
    num_accepted=66,
    num_rounds=30,
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


class Scene:
    """An app without a process, and what a test says in the engine's name."""

    def __init__(self, *, is_ready: bool = True) -> None:
        self.client = FakeEngineClient()
        self.controller = ChatController(self.client, FakeCatalog(is_ready=is_ready), Settings())
        self.app = MiraApp(self.controller)

    async def poll(self, pilot) -> None:
        await self.app._poll()
        await pilot.pause()

    async def preparing(self, pilot) -> None:
        await pilot.pause()
        await pilot.press("enter")
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

    async def chatting(self, pilot) -> None:
        await pilot.pause()
        await pilot.press("enter")
        self.client.notices = NOTICES
        self.client.deliver_loaded(PLAN)
        await self.poll(pilot)
        await pilot.pause()
        self.app.screen.query_one(Composer).cursor_blink = False

    async def asking(self, pilot, text: str) -> None:
        num_requests = len(self.client.requests)
        self.app.screen.query_one(Composer).insert(text)
        await pilot.press("enter")
        while len(self.client.requests) == num_requests:
            await pilot.pause()

    async def answered(self, pilot) -> None:
        await self.chatting(pilot)
        await self.asking(pilot, "Explain what a cache is.")
        self.client.deliver_text(REPLY, STATS)
        self.client.deliver_done(REPLY, STATS)
        await self.poll(pilot)

    async def streaming(self, pilot) -> None:
        await self.answered(pilot)
        await self.asking(pilot, "And what is an expert in a Mixture-of-Experts model?")
        self.client.deliver_text("An *expert* is one of many small feed-forward", STATS)
        await self.poll(pilot)

    async def stopped(self, pilot) -> None:
        await self.streaming(pilot)
        await pilot.press("escape")
        self.client.deliver_done(
            "An *expert* is one of many small feed-forward", STATS, api.FinishReason.CANCELLED
        )
        await self.poll(pilot)

    async def broken(self, pilot) -> None:
        await self.streaming(pilot)
        self.client.die()
        await self.poll(pilot)

    async def help(self, pilot) -> None:
        await self.answered(pilot)
        await pilot.press("f1")
        await pilot.pause()
