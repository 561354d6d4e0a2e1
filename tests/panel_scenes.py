"""An app of the panels alone, and a made-up session that feeds them. Seeded."""

from __future__ import annotations

import random
from dataclasses import replace

from app_scenes import NOTICES
from fake_engine import PLAN
from mira_app.panel_history import PanelHistory, PanelState
from mira_app.tui.screens.coverable import CoverableScreen
from mira_app.tui.screens.details import DetailsScreen
from mira_app.tui.widgets.live_panel import LivePanel
from mira_app.tui.widgets.panels.side_panel import SidePanel
from mira_engine.api import ReplyStats, ResidencySample
from textual import getters
from textual.app import App, ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical
from textual.widgets import TextArea

NUM_LAYERS, NUM_EXPERTS = 30, 16
PLAN = replace(PLAN, num_hot_slots=110, num_stage_slots=120)


def picture(seed: int, num_layers: int = NUM_LAYERS, num_experts: int = NUM_EXPERTS):
    """A made-up picture of the cache."""
    rng = random.Random(seed)
    regions, heat = [], []
    for _ in range(num_layers):
        levels = [min(9, int(rng.expovariate(0.45))) for _ in range(num_experts)]
        regions.append(
            "".join(
                "H" if level > 3 else rng.choice("SS.s" if level > 1 else "S....")
                for level in levels
            )
        )
        heat.append("".join(map(str, levels)))
    return ResidencySample(request_id="r", regions=tuple(regions), heat=tuple(heat))


class Feed:
    """A reply's figures, a quarter of a second apart."""

    def __init__(self, *, num_layers: int = NUM_LAYERS, num_experts: int = NUM_EXPERTS) -> None:
        self.history = PanelHistory()
        self._rng = random.Random(0)
        self._shape = num_layers, num_experts
        self._stats = ReplyStats(
            num_prompt_tokens=148,
            num_cached_tokens=112,
            ttft_s=0.84,
            elapsed_s=0.84,
            prefill_bytes_moved=120 * 2**20,
            expert_peak_bytes=320 * 2**20,
            peak_memory_bytes=742 * 2**20,
            planned_memory_bytes=900 * 2**20,
            num_draft_tokens=2,
            governor_reason="K 2: 48 tok/s expected, K 3 47; 7 records a round.",
        )
        self._picture = picture(0, *self._shape)
        self._num_steps = 0

    def next(self) -> PanelState:
        """The snapshot a quarter of a second later."""
        rng, stats = self._rng, self._stats
        rounds, misses = 4, rng.randint(30, 90)
        self._num_steps += 1
        accepted = rng.randint(2, 7)
        self._stats = replace(
            stats,
            num_new_tokens=stats.num_new_tokens + rounds + accepted,
            elapsed_s=stats.elapsed_s + 0.25,
            decode_s=stats.decode_s + 0.25,
            num_hits=stats.num_hits + 600 - misses,
            num_stage_hits=stats.num_stage_hits + 200 - misses // 2,
            num_misses=stats.num_misses + misses,
            num_records_loaded=stats.num_records_loaded + misses,
            bytes_moved=stats.bytes_moved + misses * 444_416,
            stall_s=stats.stall_s + misses * 0.0012,
            prefetch_stall_s=stats.prefetch_stall_s + misses * 0.0004,
            sample_s=stats.sample_s + 0.004,
            draft_s=stats.draft_s + 0.06,
            verify_s=stats.verify_s + 0.17,
            num_drafted=stats.num_drafted + 2 * rounds,
            num_accepted=stats.num_accepted + accepted,
            num_rounds=stats.num_rounds + rounds,
        )
        if self._num_steps % 2 == 0:
            self._picture = picture(self._num_steps, *self._shape)
        return self.history.snapshot(
            self._stats,
            plan=PLAN,
            notices=NOTICES,
            link_bytes_per_s=500 * 2**20,
            residency=self._picture,
        )


class PanelScreen(CoverableScreen):
    """Something to write in, with the panels around it as the chat has them."""

    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
    BINDINGS = [Binding("ctrl+b", "toggle_panels", "Panels", id="chat.panels")]
    CSS = """
    PanelScreen {
        #talk { width: 1fr; }
        #strip { height: 2; padding: 0 1; }
        &.-narrow #side { display: none; }
        &.-wide #strip { display: none; }
    }
    """

    side = getters.query_one(SidePanel)
    strip = getters.query_one("#strip", LivePanel)

    def compose(self) -> ComposeResult:
        with Horizontal():
            with Vertical(id="talk"):
                yield TextArea()
                yield LivePanel(is_column=False, id="strip")
            yield SidePanel(id="side")

    def action_toggle_panels(self) -> None:
        self.side.is_open = not self.side.is_open


class PanelApp(App[None]):
    """The panels' own app."""

    BINDINGS = [Binding("f4", "details", "Details")]

    def __init__(self) -> None:
        super().__init__()
        self.state = PanelState()

    def on_mount(self) -> None:
        self.push_screen(PanelScreen())

    def show(self, state: PanelState) -> None:
        self.state = state
        for screen in self.screen_stack:
            for panel in screen.query("#strip, #side"):
                panel.show(state)

    def action_details(self) -> None:
        self.push_screen(DetailsScreen(lambda: self.state))
