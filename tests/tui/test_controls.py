"""The dialog of live controls, in an app of its own."""

from __future__ import annotations

from dataclasses import replace

import pytest
from fake_engine import PLAN
from mira_app.tui.screens.controls import ControlsScreen
from mira_engine import api
from textual.app import App
from textual.widgets import Static

CONFIG = api.EngineConfig(budget=api.MemoryAmount(share=0.75))
PREPARED = (api.Precision.NESTED, api.Precision.INT8, api.Precision.INT4)


class HostApp(App[None]):
    """Opens the dialog and keeps what it posts."""

    def __init__(
        self,
        config: api.EngineConfig = CONFIG,
        plan: api.MemoryPlan | None = PLAN,
        prepared: tuple[api.Precision, ...] = PREPARED,
    ) -> None:
        super().__init__()
        is_k_auto = config.num_draft_tokens is None
        self.controls = ControlsScreen(config, plan, is_k_auto, prepared)
        self.changed: list[api.EngineConfig] = []

    def on_mount(self) -> None:
        self.push_screen(self.controls)

    def on_controls_screen_changed(self, event: ControlsScreen.Changed) -> None:
        self.changed.append(event.config)

    def text(self, name: str) -> str:
        return str(self.controls.query_one(name, Static).content)


async def test_what_is_in_force_is_shown():
    app = HostApp(replace(CONFIG, num_draft_tokens=3, is_prefetch_enabled=False))
    async with app.run_test(size=(80, 24)):
        controls = app.controls
        assert controls.budget_input.value == "75%"
        assert controls.k_input.value == "3"
        assert controls.precisions.pressed_index == 0
        assert not controls.prefetch.value
        assert str(controls.prefetch.label).startswith("off:")
        assert app.text("#precision-name") == "Precision\nnested"
        assert "360.0 MiB, 75% of the experts" in app.text("#budget-note")
        assert app.text("#outcome") == "Nothing is changed."
        assert app.focused is controls.budget_input


async def test_automatic_values_say_so():
    app = HostApp(api.EngineConfig())
    async with app.run_test(size=(80, 24)):
        assert app.controls.budget_input.value == app.controls.k_input.value == "auto"
        assert "now 360.0 MiB" in app.text("#budget-note")
        assert app.controls.wanted() == api.EngineConfig()


async def test_k_is_changed_by_keys_alone_and_stays_in_place():
    app = HostApp()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("down", "end", *["backspace"] * 4, "6")
        assert app.text("#outcome") == "At the next turn; the cached experts and the chat stay."
        assert "fixed at 6" in app.text("#k-note")
        await pilot.press("enter")
        await pilot.pause()
        assert app.changed == [replace(CONFIG, num_draft_tokens=6)]
        assert app.screen is not app.controls


async def test_all_fields_are_reached_and_changed_by_keys():
    app = HostApp()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("end", *["backspace"] * 3, "5", "0", "%")
        await pilot.press("tab", "end", *["backspace"] * 4, "0")
        await pilot.press("tab", "down", "space")
        await pilot.press("tab", "space")
        assert "loaded anew" in app.text("#outcome")
        await pilot.press("tab", "enter")
        await pilot.pause()
        assert app.changed == [
            replace(
                CONFIG,
                budget=api.MemoryAmount(share=0.5),
                num_draft_tokens=0,
                precision=api.Precision.INT8,
                is_prefetch_enabled=False,
            )
        ]


async def test_escape_changes_nothing():
    app = HostApp()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("end", "backspace", "escape")
        await pilot.pause()
        assert app.changed == []
        assert app.screen is not app.controls


async def test_apply_without_a_change_posts_nothing():
    app = HostApp()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("enter")
        await pilot.pause()
        assert app.changed == []
        assert app.screen is not app.controls


async def test_rounded_budget_that_is_not_touched_stays_exact():
    exact = replace(CONFIG, budget=api.MemoryAmount(num_bytes=123_456_789))
    app = HostApp(exact)
    async with app.run_test(size=(80, 24)):
        assert app.controls.wanted() == exact


@pytest.mark.parametrize(
    ("field", "text", "told"),
    [
        ("budget", "lots", "300MiB"),
        ("budget", "40", "300MiB"),
        ("budget", "0%", "300MiB"),
        ("budget", "99999%", "more than 0 %"),
        ("k", "many", "auto, or 0 to 32"),
        ("k", "-1", "auto, or 0 to 32"),
        ("k", "33", "0 to 32"),
        ("k", "²", "auto, or 0 to 32"),
    ],
)
async def test_wrong_value_is_told_beside_its_field_and_not_applied(field, text, told):
    app = HostApp()
    async with app.run_test(size=(80, 24)) as pilot:
        getattr(app.controls, f"{field}_input").value = text
        await pilot.pause()
        assert told in app.text(f"#{field}-note")
        assert app.controls.query_one(f"#{field}-note").has_class("-wrong")
        assert app.text("#outcome") == "A field is wrong, see beside it."
        assert app.controls.apply_button.disabled
        await pilot.press("enter")
        await pilot.pause()
        assert app.screen is app.controls
        assert app.changed == []


async def test_drafting_with_int4_is_told():
    app = HostApp()
    async with app.run_test(size=(80, 24)) as pilot:
        app.controls.k_input.value = "4"
        await pilot.press("tab", "tab", "up", "space")
        await pilot.pause()
        assert app.controls.precisions.pressed_index == 2
        assert "the target is the draft itself" in app.text("#outcome")
        assert app.controls.apply_button.disabled


async def test_draft_that_may_have_to_be_loaded_is_told():
    app = HostApp(
        replace(CONFIG, num_draft_tokens=0), replace(PLAN, num_draft_tokens=0, draft_bytes=0)
    )
    async with app.run_test(size=(80, 24)) as pilot:
        app.controls.k_input.value = "auto"
        await pilot.pause()
        assert "If a draft has to be loaded" in app.text("#outcome")


async def test_precision_in_force_is_offered_though_nobody_says_it_is_prepared():
    app = HostApp(plan=None, prepared=())
    async with app.run_test(size=(40, 12)) as pilot:
        await pilot.pause()
        assert app.controls.precisions.pressed_index == 0
        assert app.controls.wanted() == CONFIG
