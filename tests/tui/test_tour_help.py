"""Tour, help, command palette and footer: what the app says of itself."""

from __future__ import annotations

import pytest
from app_scenes import NOTICES, settle, until
from app_shell_fakes import FakeStore, load, make_app, make_paths, record_drawing, stand_in, told
from mira_app.app_state import AppState, StateFile
from mira_app.conversation import TurnStatus
from mira_app.tui.keymap import is_key, key_sections, key_text, known_bindings
from mira_app.tui.screens.help import HelpScreen
from mira_app.tui.screens.models import ModelsScreen
from mira_app.tui.screens.tour import TourScreen
from mira_app.tui.widgets.composer import Composer
from mira_engine import api
from textual.command import CommandPalette
from textual.widgets import Static
from textual.widgets._footer import FooterKey


@pytest.fixture
def paths(tmp_path, monkeypatch):
    record_drawing(monkeypatch)
    return make_paths(tmp_path)


def text_of(screen) -> str:
    return "\n".join(str(part.content) for part in screen.query(Static))


async def chatting(app, pilot) -> None:
    await pilot.press("enter")
    await load(pilot)
    await until(pilot, lambda: isinstance(app.focused, Composer))


# -- the tour


async def test_tour_is_shown_at_the_first_start_alone(paths):
    app = make_app(paths, is_tour_done=False)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: isinstance(app.screen, TourScreen))
        await pilot.press("enter")
        await until(pilot, lambda: isinstance(app.screen, ModelsScreen))
        await until(pilot, lambda: StateFile(paths.state).load().is_tour_done)
    app = make_app(paths)
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        assert isinstance(app.screen, ModelsScreen)


async def test_tour_is_one_screen_and_names_the_keys_in_force(paths):
    flags = {"keymap": {"app.help": "f10"}}
    app = make_app(paths, is_tour_done=False, flags=flags)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: isinstance(app.screen, TourScreen))
        await settle(pilot)
        text = text_of(app.screen)
        assert "F10 shows all keys" in text
        assert "{" not in text
        assert app.screen.query_one("#tour").max_scroll_y == 0


async def test_chat_opens_after_a_tour_over_a_model_that_was_loaded_meanwhile(paths):
    app = make_app(paths, is_tour_done=False, is_ready=False, flags={"model": "builtin"})
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: isinstance(app.screen, TourScreen))
        client = app.controller._client
        call = client.calls[-1]
        call.deliver(
            api.PrepareDone(
                request_id=call.request_id, model="builtin", precision=api.Precision.NESTED
            )
        )
        await until(pilot, lambda: len(client.calls) == 2)
        await load(pilot)
        await settle(pilot)
        assert isinstance(app.screen, TourScreen)
        await pilot.press("escape")
        await until(pilot, lambda: isinstance(app.focused, Composer))


# -- the help


async def test_help_lists_every_key_in_force_notes_and_files(paths):
    app = make_app(paths, flags={"keymap": {"chat.new": "f9", "nothing": "f8"}})
    async with app.run_test(size=(80, 24)) as pilot:
        await settle(pilot)
        app.controller._client.notices = NOTICES
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        await settle(pilot)
        text = text_of(app.screen)
        for binding_id, binding in known_bindings().items():
            if binding.description and not binding_id.startswith(("help.", "tour.")):
                (line,) = [ln for ln in text.splitlines() if ln.endswith(f" {binding_id}")]
                shown = {"chat.new": "F9"}.get(binding_id, key_text(binding.key))
                assert line.strip().startswith(shown)
        for notice in NOTICES:
            assert notice.text in text
        assert "no binding 'nothing'" in text
        for path in (paths.config, paths.history, paths.data_dir, paths.log_dir):
            assert str(path) in text
        widest = max(len(line) for part in app.screen.query(Static)
                     for line in str(part.content).splitlines() if ".note" not in line
                     and str(paths.data_dir.parent) not in line and " binding " not in line
                     and not part.has_class("note"))  # fmt: skip
        assert widest <= 75


async def test_help_without_notes_says_so():
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await pilot.press("f1")
        await until(pilot, lambda: isinstance(app.screen, HelpScreen))
        assert "none" in text_of(app.screen)


def test_every_binding_of_the_app_has_an_id_and_a_key_that_exists():
    known = known_bindings()
    assert {"app.help", "app.quit", "chat.stop", "models.pick"} <= set(known)
    for binding_id, binding in known.items():
        assert "." in binding_id
        assert all(is_key(key.strip()) for key in binding.key.split(",")), binding_id


def test_keys_of_the_chat_are_these_and_none_is_bound_twice():
    known = known_bindings()
    ids = [name for name in known if name.startswith(("app.", "chat."))]
    bound = [(key.strip(), name) for name in ids for key in known[name].key.split(",")]
    assert len({key for key, _ in bound}) == len(bound)
    wanted = {
        "f1": "app.help", "f2": "app.controls", "f3": "app.history", "f4": "app.details",
        "f5": "chat.chat_settings", "ctrl+b": "app.panels", "ctrl+t": "chat.fold",
        "escape": "chat.stop", "ctrl+r": "chat.regenerate", "ctrl+n": "chat.new",
        "ctrl+o": "chat.models", "ctrl+p": "app.palette", "ctrl+q": "app.quit",
    }  # fmt: skip
    assert {key: name for key, name in bound if key in wanted} == wanted


def test_what_a_key_does_is_told_in_words_that_fit_the_help():
    for binding_id, binding in known_bindings().items():
        assert len(binding.tooltip or binding.description) <= 31, binding_id


@pytest.mark.parametrize(
    ("key", "shown"),
    [
        ("ctrl+r", "Ctrl+R"),
        ("f1", "F1"),
        ("escape", "Esc"),
        ("left_square_bracket", "["),
        ("Y", "Y"),
        ("enter,ctrl+left", "Enter, Ctrl+Left"),
    ],
)
def test_keys_are_shown_as_people_write_them(key, shown):
    assert key_text(key) == shown


@pytest.mark.parametrize("key", ["", "ctrl+", "ctl+r", "f99", "return key", "ctrl++r"])
def test_name_that_is_no_key_is_none(key):
    assert not is_key(key)


def test_sections_begin_with_what_holds_everywhere():
    titles = [title for title, _ in key_sections(known_bindings(), {})]
    assert titles[:2] == ["Everywhere", "In the chat"]


# -- the palette


def found(palette: CommandPalette) -> list[str]:
    listed = palette.query_one("CommandList")
    return [str(option.prompt).splitlines()[0] for option in listed.options]


async def searched(pilot, text: str) -> list[str]:
    """Opens the palette, types, and returns what is found."""
    await pilot.press("ctrl+p")
    await until(pilot, lambda: isinstance(pilot.app.screen, CommandPalette))
    palette = pilot.app.screen
    await pilot.press(*text)
    await until(pilot, lambda: found(palette) and text in found(palette)[0])
    return found(palette)


async def test_palette_lists_actions_models_chats_and_our_themes(paths):
    app = make_app(paths, store=FakeStore())
    async with app.run_test(size=(120, 60)) as pilot:
        await until(pilot, lambda: app.controller.opened)
        await chatting(app, pilot)
        await searched(pilot, "")
        await until(pilot, lambda: len(found(app.screen)) >= 20)
        lines = found(app.screen)
        wanted = [
            "Retry", "Chats", "Controls", "Details", "Help", "Models", "New", "Panels", "Quit",
            "Panels wider", "Tour", "Theme: mira-light", "Theme: terminal",
            "Model: Built-in model", "Model: OLMoE-1B-7B", "Chat: about routers",
        ]  # fmt: skip
        assert set(wanted) <= set(lines)
        assert "Theme: nord" not in lines
        assert "Stop" not in lines


@pytest.mark.parametrize(
    ("text", "is_done"),
    [
        ("nord", lambda app: app.theme == "nord"),
        ("OLMoE", lambda app: app.controller._client.requests[-1].model == "/models/OLMoE-1B-7B"),
        ("routers", lambda app: app.controller.opened[-1].chat_id == "one"),
        ("Tour", lambda app: isinstance(app.screen, TourScreen)),
    ],
)
async def test_command_of_the_palette_does_what_it_says(paths, text, is_done):
    app = make_app(paths, store=FakeStore())
    async with app.run_test(size=(120, 60)) as pilot:
        await until(pilot, lambda: app.controller.opened)
        await chatting(app, pilot)
        await searched(pilot, text)
        await pilot.press("enter")
        await until(pilot, lambda: is_done(app))
        assert told(app) == ""


async def test_action_of_the_palette_acts_on_the_screen_below(paths):
    app = make_app(paths)
    async with app.run_test(size=(120, 60)) as pilot:
        await chatting(app, pilot)
        app.controller.conversation = app.controller.conversation.with_user("q").with_reply(
            "a", status=TurnStatus.COMPLETE
        )
        await searched(pilot, "New")
        await pilot.press("enter")
        await until(pilot, lambda: app.controller.conversation.turns == ())


async def test_palette_without_history_or_models_still_lists_the_rest(paths, monkeypatch):
    app = make_app(paths)

    def fail():
        raise api.MiraError("The folder of models cannot be read.")

    async with app.run_test(size=(120, 60)) as pilot:
        await chatting(app, pilot)
        monkeypatch.setattr(app.controller, "models", fail)
        assert "Help" in await searched(pilot, "Help")
        assert "cannot be read" in told(app)


# -- the footer


async def test_footer_shows_the_keys_that_matter_in_eighty_columns(monkeypatch):
    stand_in(monkeypatch, "details", "DetailsScreen")
    app = make_app()
    async with app.run_test(size=(80, 24)) as pilot:
        await chatting(app, pilot)
        await settle(pilot)
        keys = {key.description: key for key in app.screen.query(FooterKey)}
        wanted = {"Stop", "Retry", "New", "Models", "Help", "Controls", "Chats", "Quit"}
        assert wanted <= set(keys)
        assert all(keys[name].region.right <= 80 for name in wanted)
        assert "Details" not in keys


# -- what is remembered, as a file


def test_state_is_read_back_as_it_was(tmp_path):
    path = tmp_path / "deep" / "state.json"
    state = AppState(is_tour_done=True, model="née\n\x1b")
    StateFile(path).save(state)
    assert StateFile(path).load() == state


@pytest.mark.parametrize(
    "text", ["", "{", "[]", "null", '{"is_tour_done": 3, "model": null}', "[" * 100_000, "\udcff"]
)
def test_state_that_cannot_be_read_is_forgotten_and_written_anew(tmp_path, text):
    path = tmp_path / "state.json"
    path.write_bytes(text.encode("utf-8", "surrogateescape"))
    file = StateFile(path)
    assert file.load() == AppState()
    file.save(AppState())
    assert StateFile(path).load() == AppState()
    assert path.read_bytes().startswith(b"{")


def test_state_of_another_version_keeps_what_is_known(tmp_path):
    path = tmp_path / "state.json"
    path.write_text('{"model": "x", "colour": "red"}')
    assert StateFile(path).load() == AppState(model="x")


def test_state_that_did_not_change_is_not_written_again(tmp_path):
    path = tmp_path / "state.json"
    file = StateFile(path)
    file.save(AppState(model="x"))
    path.unlink()
    file.save(AppState(model="x"))
    assert not path.exists()
