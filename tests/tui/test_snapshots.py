"""How the screens look: every look small and large in the dark, a few in other colours.

While an app is there, its footer is checked too: whole at 80 columns, no name twice.
"""

from __future__ import annotations

import pytest
from looks import LOOKS
from mira_app.tui.widgets.panels import side_panel
from textual.widgets._footer import FooterKey

SMALL, LARGE = (80, 24), (120, 40)
ONLY_SMALL = {
    "new-chat",
    "messages",
    "history-deleted",
    "history-empty",
    "chat-settings",
    "stopped",
    "editing",
}
"""Looks that a larger terminal gives nothing but room."""
COLOURED = ["models", "streaming", "details"]


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch):
    """Panels need not rest between two pictures: nobody reads them here."""
    monkeypatch.setattr(side_panel, "REST_S", 0.01)


def compare(snap_compare, tmp_path, name, size, theme=None) -> bool:
    app, reach = LOOKS[name](tmp_path)

    async def run(pilot) -> None:
        if theme is not None:
            app.theme = theme
        await reach(pilot)
        check_footer(app)

    return snap_compare(app, terminal_size=size, run_before=run)


def check_footer(app) -> None:
    keys = list(app.screen.query(FooterKey))
    names = [key.description for key in keys]
    assert all(key.region.right <= app.size.width for key in keys)
    assert len({*names}) == len(names)
    assert not keys or "Help" in names or "Apply" in names


def title(size) -> str:
    return f"{size[0]}x{size[1]}"


@pytest.mark.parametrize(
    ("name", "size"),
    [(name, SMALL) for name in LOOKS] + [(name, LARGE) for name in LOOKS if name not in ONLY_SMALL],
    ids=lambda value: title(value) if isinstance(value, tuple) else value,
)
def test_screen_looks_as_before(snap_compare, tmp_path, name, size):
    assert compare(snap_compare, tmp_path, name, size)


@pytest.mark.parametrize("name", COLOURED)
def test_screen_in_light_looks_as_before(snap_compare, tmp_path, name):
    assert compare(snap_compare, tmp_path, name, LARGE, "mira-light")


@pytest.mark.parametrize("name", COLOURED)
def test_screen_without_colours_looks_as_before(snap_compare, tmp_path, monkeypatch, name):
    monkeypatch.setenv("NO_COLOR", "1")
    assert compare(snap_compare, tmp_path, name, LARGE)
