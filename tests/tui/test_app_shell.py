"""The app around its screens: start, what is remembered, and who opens what."""

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
from mira_app.settings_file import read_settings_file
from mira_app.tui.screens.models import ModelsScreen
from mira_app.tui.widgets.composer import Composer
from mira_engine import api


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
        await settle(pilot)
        app._poll_timer.pause()  # A poll would look for what is gone.
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
