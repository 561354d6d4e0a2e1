"""Footers: whole at 80 columns, and built anew only where their keys change."""

from __future__ import annotations

import pytest
from app_scenes import Scene, settle
from looks import LOOKS
from mira_app.tui.footer_keys import KeyFooter
from textual.widgets._footer import FooterKey

WITH_FOOTER = [
    "models", "preparing", "new-chat", "streaming", "messages", "details", "controls",
    "history", "history-search", "history-deleted", "history-empty",
]  # fmt: skip


@pytest.mark.parametrize("name", WITH_FOOTER)
async def test_footer_fits_80_columns_and_names_no_key_twice(tmp_path, name):
    app, reach = LOOKS[name](tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await reach(pilot)
        keys = list(app.screen.query(FooterKey))
        assert keys
        assert max(key.region.right for key in keys) <= 80
        names = [key.description for key in keys]
        assert len({*names}) == len(names)
        assert name == "controls" or "Help" in names


async def test_footer_stays_while_the_focus_moves_between_the_same_keys(monkeypatch):
    builds = []
    build = KeyFooter.recompose

    async def recompose(footer) -> None:
        builds.append(type(footer.screen).__name__)
        await build(footer)

    monkeypatch.setattr(KeyFooter, "recompose", recompose)
    scene = Scene()
    async with scene.app.run_test(size=(80, 24)) as pilot:
        await scene.answered(pilot)
        builds.clear()
        scene.app.screen.refresh_bindings()
        await settle(pilot)
        assert builds == []
        await pilot.press("tab")
        await settle(pilot)
        assert builds == ["ChatScreen"]
