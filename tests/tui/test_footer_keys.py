"""Footers are built anew only where their keys change."""

from __future__ import annotations

from app_scenes import Scene, settle
from mira_app.tui.footer_keys import KeyFooter


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
