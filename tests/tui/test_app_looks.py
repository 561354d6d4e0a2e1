"""The app's themes, panels, keys and sizes, as the settings have them."""

from __future__ import annotations

import pytest
from app_scenes import settle, until
from app_shell_fakes import load, make_app, make_paths, record_drawing, told
from mira_app.settings_file import open_settings, read_settings_file
from mira_app.tui.app import MiraApp, run_app
from mira_app.tui.screens.models import ModelsScreen
from mira_app.tui.screens.too_small import TooSmallScreen
from mira_app.tui.widgets.composer import Composer
from mira_app.tui.widgets.panels.side_panel import USUAL_COLUMNS
from mira_assets.themes import PALETTES
from textual.color import Color


@pytest.fixture
def paths(tmp_path):
    return make_paths(tmp_path)


@pytest.fixture(autouse=True)
def drawn(monkeypatch) -> list:
    """Turns at which a stored chat was drawn."""
    return record_drawing(monkeypatch)


# -- looks


@pytest.mark.parametrize("palette", PALETTES, ids=lambda palette: palette.name)
async def test_theme_of_the_settings_is_in_force(palette):
    app = make_app(flags={"theme": palette.name})
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert app.theme == palette.name
        assert app.current_theme.ansi == palette.is_ansi


@pytest.mark.parametrize("palette", [p for p in PALETTES if not p.is_ansi], ids=lambda p: p.name)
def test_text_of_our_themes_stands_out_from_every_background(palette):
    def luminance(color: str) -> float:
        channels = [c / 255 for c in Color.parse(color).rgb]
        linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
        return 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]

    def contrast(one: str, other: str) -> float:
        low, high = sorted((luminance(one), luminance(other)))
        return (high + 0.05) / (low + 0.05)

    texts = ("foreground", "primary", "secondary", "accent", "warning", "error", "success")
    for text in texts:
        for background in ("background", "surface"):
            assert contrast(palette.colors[text], palette.colors[background]) >= 4.5, text
    cursor = (palette.variables[f"block-cursor-{part}"] for part in ("foreground", "background"))
    assert contrast(*cursor) >= 7


async def test_theme_that_is_none_is_told_with_the_nearest_one():
    app = make_app(flags={"theme": "mira-lihgt"})
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert app.theme == "mira-dark"
        assert "Did you mean mira-light?" in told(app)


async def test_theme_and_key_that_are_none_are_told_with_their_lines(paths):
    paths.config.write_text('[interface]\ntheme = "mira-lihgt"\n[keymap]\n"chat.nwe" = "f9"\n')
    app = make_app(paths, flags=read_settings_file(paths.config).values)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert f"{paths.config}, line 2: There is no theme" in told(app)
        assert f"{paths.config}, line 4: keymap: there is no binding 'chat.nwe'" in told(app)


async def test_theme_that_is_none_and_comes_from_elsewhere_names_no_line(paths):
    paths.config.write_text('[interface]\ntheme = "terminal"\n')
    app = make_app(paths, flags={"theme": "mira-lihgt"})
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert "line" not in told(app)


@pytest.mark.parametrize("is_tour_done", [True, False])
async def test_problem_of_the_settings_is_seen_at_start(paths, is_tour_done):
    app = make_app(paths, flags={"theme": "mira-lihgt"}, is_tour_done=is_tour_done)
    async with app.run_test(size=(80, 24), notifications=True) as pilot:
        await until(pilot, lambda: app.screen.query("Toast"))
        await until(pilot, lambda: app.screen.query_one("Toast").region.height > 1)
        assert isinstance(app.screen, ModelsScreen) == is_tour_done


async def test_theme_that_is_changed_is_kept_in_the_settings_file(paths):
    paths.config.write_text("# mine\n[interface]\nmouse = true\n")
    app = make_app(paths)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        app.change_theme("terminal")
        await until(pilot, lambda: read_settings_file(paths.config).values.get("theme"))
    assert paths.config.read_text().startswith("# mine\n")
    assert open_settings({}, {}, paths.config).settings.interface.theme == "terminal"


async def test_change_that_cannot_be_kept_is_told(paths):
    paths.config.write_text("[interface\n")
    app = make_app(paths)
    async with app.run_test(size=(80, 24)) as pilot:
        app.change_theme("terminal")
        await until(pilot, lambda: "line 1" in told(app))
        assert app.theme == "terminal"


async def test_panels_are_hidden_shown_and_widened(paths):
    app = make_app(paths, flags={"panels": False, "panel_width": 40})
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("enter")
        await load(pilot)
        await until(pilot, lambda: isinstance(app.focused, Composer))
        side = app.chat_screen.query_one("#side")
        await until(pilot, lambda: not side.display)
        await pilot.press("ctrl+b")
        await until(pilot, lambda: side.display and side.region.width == 40)
        app.widen_panels(4)
        await until(pilot, lambda: side.region.width == 44)
        await until(pilot, lambda: read_settings_file(paths.config).values == {"panel_width": 44})
        app.widen_panels(-400)
        assert side.columns == USUAL_COLUMNS


# -- keys


async def test_key_of_the_keymap_takes_the_place_of_the_old_one():
    app = make_app(flags={"keymap": {"app.help": "f10", "models.pick": "g"}})
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("f1")
        await settle(pilot)
        assert isinstance(app.screen, ModelsScreen)
        await pilot.press("f10")
        await until(pilot, lambda: type(app.screen).__name__ == "HelpScreen")
        assert app.problems == []


@pytest.mark.parametrize(
    ("entry", "said"),
    [
        ({"chat.nwe": "f9"}, "no binding 'chat.nwe'. Did you mean chat.new?"),
        ({"chat.new": "ctl+k"}, "chat.new cannot be on 'ctl+k'"),
        ({"chat.new": "esacpe"}, "Did you mean escape?"),
        ({"chat.new": "ctrl+r"}, "which is chat.regenerate"),
        ({"chat.new": "f1"}, "which is app.help"),
        ({"app.help": "ctrl+o"}, "Give"),
    ],
)
async def test_entry_of_the_keymap_that_cannot_be_is_told_and_left_out(entry, said):
    app = make_app(flags={"keymap": entry | {"app.details": "f9"}})
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert said in told(app)
        assert app._keymap == {"app.details": "f9"}


async def test_keys_that_are_swapped_are_both_in_force():
    app = make_app(flags={"keymap": {"chat.new": "ctrl+r", "chat.regenerate": "ctrl+n"}})
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert app.problems == []
        assert app._keymap == {"chat.new": "ctrl+r", "chat.regenerate": "ctrl+n"}


@pytest.mark.parametrize("is_enabled", [True, False])
def test_mouse_is_left_to_the_terminal_where_the_settings_say_so(paths, monkeypatch, is_enabled):
    ran = []
    monkeypatch.setattr(MiraApp, "run", lambda app, **options: ran.append(options))
    controller = make_app(flags={"mouse": is_enabled}).controller
    run_app(controller, store=None, paths=paths)
    assert ran == [{"mouse": is_enabled}]


# -- size


async def test_terminal_that_is_too_small_is_told_until_it_grows(paths):
    app = make_app(paths)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("enter")
        await load(pilot)
        await until(pilot, lambda: isinstance(app.focused, Composer))
        await pilot.press("x")
        for size in ((19, 5), (20, 4), (1, 1)):
            await pilot.resize_terminal(*size)
            await until(pilot, lambda: isinstance(app.screen, TooSmallScreen))
            await settle(pilot)
        await pilot.resize_terminal(20, 5)
        await until(pilot, lambda: app.screen is app.chat_screen)
        await settle(pilot)
        composer = app.chat_screen.composer
        assert composer.text == "x"
        assert composer.region.height == 1
        assert composer.region.bottom <= 5
        await pilot.resize_terminal(80, 24)
        await until(pilot, lambda: composer.region.height == 3)


async def test_resize_storm_leaves_nothing_over_the_menu():
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        for width in (80, 19, 60, 5, 120, 10, 80):
            await pilot.resize_terminal(width, 24)
        await until(pilot, lambda: app.screen is app.models_screen)
        assert app.screen_stack[1:] == [app.models_screen]
