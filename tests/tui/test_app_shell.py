"""The app around its screens: start, what is remembered, looks, keys, and who opens what."""

from __future__ import annotations

import subprocess
import sys
import types

import pytest
from app_scenes import settle, until
from app_shell_fakes import (
    FakeStore,
    leave_unsent,
    load,
    make_app,
    make_paths,
    record_drawing,
    stand_in,
    told,
    unsent_of,
)
from mira_app.app_state import AppState, StateFile
from mira_app.controller import Stage
from mira_app.settings_file import open_settings, read_settings_file
from mira_app.tui.app import MiraApp, run_app
from mira_app.tui.screens.models import ModelsScreen
from mira_app.tui.screens.too_small import TooSmallScreen
from mira_app.tui.widgets.composer import Composer
from mira_app.tui.widgets.panels.side_panel import USUAL_COLUMNS
from mira_assets.themes import PALETTES
from mira_engine import api
from textual.color import Color


@pytest.fixture
def paths(tmp_path):
    return make_paths(tmp_path)


@pytest.fixture(autouse=True)
def drawn(monkeypatch) -> list:
    """Turns at which a stored chat was drawn."""
    return record_drawing(monkeypatch)


# -- start, and what is remembered


async def test_start_with_the_last_model_is_a_chat_that_takes_text_before_it_is_loaded(paths):
    StateFile(paths.state).save(AppState(is_tour_done=True, model="builtin"))
    app = make_app(paths)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: isinstance(app.focused, Composer))
        assert app.controller.stage is Stage.LOADING
        await pilot.press("h", "i")
        await load(pilot)
        assert app.screen is app.chat_screen
        assert app.chat_screen.composer.text == "hi"


async def test_draft_is_kept_by_a_timer_that_ends_while_the_chat_is_taken_down(paths):
    StateFile(paths.state).save(AppState(is_tour_done=True, model="builtin"))
    leave_unsent(paths, draft="kept")
    app = make_app(paths)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app._is_chat_dressed)
        await app.chat_screen.query("*").remove()
        await app._remember()
        assert unsent_of(app).draft == "kept"


@pytest.mark.parametrize(
    ("state", "flags", "is_ready"),
    [
        (AppState(is_tour_done=True, model="builtin"), {}, False),
        (AppState(is_tour_done=True, model="/models/gone"), {}, True),
        (AppState(is_tour_done=True, model="builtin"), {"restore_chat": False}, True),
        (AppState(is_tour_done=True), {}, True),
    ],
)
async def test_start_without_a_last_model_that_is_ready_is_the_menu(paths, state, flags, is_ready):
    StateFile(paths.state).save(state)
    app = make_app(paths, flags=flags, is_ready=is_ready)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert isinstance(app.screen, ModelsScreen)
        assert app.controller.stage is Stage.IDLE


async def test_draft_and_model_are_there_again(paths):
    app = make_app(paths)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("enter")
        await load(pilot)
        await until(pilot, lambda: isinstance(app.focused, Composer))
        await pilot.press("a", "ctrl+j", "b")
        await pilot.press("ctrl+q")
    assert StateFile(paths.state).load() == AppState(is_tour_done=True, model="builtin")
    assert unsent_of(app).draft == "a\nb"
    app = make_app(paths)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.chat_screen.is_mounted)
        await until(pilot, lambda: app.chat_screen.composer.text == "a\nb")


async def test_draft_of_a_chat_that_was_never_opened_is_kept(paths):
    leave_unsent(paths, draft="unsent")
    app = make_app(paths)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        await pilot.press("ctrl+q")
    assert unsent_of(app).draft == "unsent"


async def test_text_for_a_chat_that_is_not_there_yet_is_kept_with_the_draft(paths):
    leave_unsent(paths, draft="left ")
    app = make_app(paths)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("enter")
        await until(pilot, lambda: app._is_chat_due)
        await pilot.press(*"why?")
        for _ in range(2):  # the second time upon what the first one wrote
            await app._remember()
            assert unsent_of(app).draft == "left why?"
        await load(pilot)
        await until(pilot, lambda: isinstance(app.focused, Composer))
        await until(pilot, lambda: app.focused.text == "left why?")


async def test_question_that_waits_for_its_chat_is_kept_with_the_draft(paths):
    app = make_app(paths)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("enter")
        await until(pilot, lambda: app._is_chat_due)
        await pilot.press(*"why?", "enter")
        await until(pilot, lambda: app.kept_text == "why?\n")
        await pilot.press("ctrl+q")
    assert unsent_of(app).draft == "why?"


async def test_state_that_cannot_be_written_is_told_once_and_the_app_goes_on(paths):
    paths.state.parent.parent.mkdir(parents=True)
    paths.state.parent.write_text("a file where a folder should be")
    app = make_app(paths, is_tour_done=False)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("enter")
        await until(pilot, lambda: "cannot be written" in told(app))
        await app._remember()
        assert told(app).count("cannot be written") == 1
        assert isinstance(app.screen, ModelsScreen)


async def test_app_without_paths_writes_nothing(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        app.change_theme("mira-light")
        await pilot.press("ctrl+q")
    assert list(tmp_path.iterdir()) == []


# -- the history


async def test_chat_of_the_last_time_is_opened(paths, drawn):
    StateFile(paths.state).save(AppState(is_tour_done=True, model="builtin"))
    store = FakeStore(notices=("The old file was set aside.",))
    app = make_app(paths, store=store)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: drawn)
        assert [chat.chat_id for chat in app.controller.opened] == ["two"]
        assert app.controller.history is store
        assert "set aside" in told(app)
        await pilot.press("ctrl+q")
    assert store.calls == ["open", "load two", "close"]


async def test_chat_of_the_last_time_waits_for_the_chat_screen(paths, drawn):
    app = make_app(paths, store=FakeStore())
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.controller.opened)
        assert drawn == []
        await pilot.press("enter")
        await load(pilot)
        await until(pilot, lambda: drawn == [None])


async def test_no_chat_is_opened_where_the_settings_say_so(paths):
    store = FakeStore()
    app = make_app(paths, store=store, flags={"restore_chat": False})
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app._is_restored)
        assert app.controller.history is store
        assert store.calls == ["open"]


async def test_history_that_cannot_be_opened_is_told_and_the_app_goes_on(paths):
    app = make_app(paths, store=FakeStore(error=api.MiraError("No history here.")))
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: "No history here." in told(app))
        await pilot.press("enter")
        await load(pilot)
        await until(pilot, lambda: app.screen is app.chat_screen)
        assert await app.read_chats() == []


# -- who opens what


async def test_history_is_opened_and_a_hit_goes_to_its_turn(paths, monkeypatch, drawn):
    made = stand_in(monkeypatch, "history", "HistoryScreen")
    store = FakeStore()
    app = make_app(paths, store=store)
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("enter")
        await load(pilot)
        await until(pilot, lambda: app.screen is app.chat_screen and app.controller.history)
        await until(pilot, lambda: drawn == [None])
        await pilot.press("f3")
        await until(pilot, lambda: made == [(store, "two")])
        await app.on_history_screen_chosen(types.SimpleNamespace(chat_id="one", turn_id=1))
        assert drawn == [None, None, 1]
        assert app.screen is app.chat_screen
        await app._remember()
        assert store.calls[-2:] == ["load one", "last one"]


async def test_hit_in_a_chat_is_shown_before_a_model_is_picked(paths, drawn):
    app = make_app(paths, store=FakeStore(), flags={"restore_chat": False})
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app._is_restored)
        await app.open_chat("one", 1)
        await until(pilot, lambda: drawn == [None, 1])
        assert app.screen is app.chat_screen


async def test_open_chat_that_is_renamed_or_deleted_follows_the_history(paths):
    store = FakeStore()
    app = make_app(paths, store=store)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app._is_restored)
        app.on_history_screen_renamed(types.SimpleNamespace(chat_id="one", title="other"))
        assert app.controller.title == ""
        app.on_history_screen_renamed(types.SimpleNamespace(chat_id="two", title="caches"))
        assert app.controller.title == "caches"
        gone = types.SimpleNamespace(chat_id="one", is_restored=False)
        await app.on_history_screen_deleted(gone)
        assert app.controller.chat_id == "two"
        gone.chat_id = "two"
        await app.on_history_screen_deleted(gone)
        assert app.controller.conversation.turns == ()
        await app._remember()
        assert store.calls[-1] == "last None"


async def test_history_keeps_a_chat_with_a_reply_under_way(paths):
    app = make_app(paths, store=FakeStore())
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.controller.opened)
        app.controller.stage = Stage.REPLYING
        await app.open_chat("one")
        assert "A reply is under way. Esc stops it." in told(app)
        assert len(app.controller.opened) == 1
        app.controller.stage = Stage.IDLE


async def test_controls_are_opened_for_a_loaded_model_and_change_its_engine(paths, monkeypatch):
    made = stand_in(monkeypatch, "controls", "ControlsScreen")
    app = make_app(paths, flags={"k": 3})
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("f2")
        await settle(pilot)
        assert made == []
        await pilot.press("enter")
        await load(pilot)
        await until(pilot, lambda: app.screen is app.chat_screen)
        await pilot.press("f2")
        await until(pilot, lambda: len(made) == 1)
        changed = api.EngineConfig(num_draft_tokens=5)
        app.on_controls_screen_changed(types.SimpleNamespace(config=changed))
        assert app.controller.changed == [changed]
        app.keep_engine_settings()
        await until(pilot, paths.config.exists)
        await until(pilot, lambda: read_settings_file(paths.config).values.get("k") == 5)


async def test_details_are_opened_once(monkeypatch):
    made = stand_in(monkeypatch, "details", "DetailsScreen")
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("f4")
        await until(pilot, lambda: len(made) == 1)
        app.action_details()
        await settle(pilot)
        assert len(made) == 1


async def test_menu_is_reached_from_whatever_lies_over_it(monkeypatch):
    stand_in(monkeypatch, "details", "DetailsScreen")
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("enter")
        await load(pilot)
        await until(pilot, lambda: isinstance(app.focused, Composer))
        await pilot.press("f4")
        await until(pilot, lambda: len(app.screen_stack) == 4)
        app.choose_model("/models/OLMoE-1B-7B")
        await until(pilot, lambda: app.screen is app.models_screen)
        await load(pilot)
        await until(pilot, lambda: app.screen is app.chat_screen)
        assert app.controller.loaded.model == "/models/OLMoE-1B-7B"


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


# -- cold start


def test_importing_the_app_loads_no_engine_history_or_writer_of_settings():
    heavy = {"torch", "transformers", "numpy", "sqlite3", "tomlkit", "plotext", "huggingface_hub"}
    late = {f"mira_app.tui.screens.{name}" for name in ("help", "tour", "history", "details")}
    code = (
        "import sys, mira_app.tui.app, mira_app.settings_file\n"
        f"print(sorted({heavy | late} & {{*sys.modules}}))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"
