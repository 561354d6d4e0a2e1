"""The history's screen over a real store: every key."""

from __future__ import annotations

import threading
from datetime import timedelta
from pathlib import Path

import pytest
from app_scenes import until
from history_scenes import (
    CHATS,
    NOW,
    HistoryApp,
    fill,
    footer,
    listed,
    note,
    open_store,
    search,
    type_text,
)  # fmt: skip
from mira_app.conversation import Conversation
from mira_app.export import to_jsonl
from mira_app.history import HistoryError, StoredChat
from mira_app.tui.screens.history import ROW_LINES, ago
from textual.widgets._footer import FooterKey


@pytest.fixture
def store(tmp_path):
    store = open_store(tmp_path / "data" / "history.sqlite")
    yield store
    store.close()


@pytest.fixture
def app(store, tmp_path) -> HistoryApp:
    fill(store)
    return HistoryApp(store, tmp_path)


def titles(app: HistoryApp) -> list[str]:
    return [row.title for row in app.history._rows]


def ids(app: HistoryApp) -> list[str]:
    return [row.chat_id for row in app.history._rows]


def prompts(app: HistoryApp) -> str:
    return "\n".join(str(option.prompt) for option in app.history.chat_list.options)


# -- the list ------------------------------------------------------------------------------


async def test_list_shows_newest_first_with_age_turns_and_model(app):
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        assert ids(app) == ["sky", "cache", "nasty", "long"]
        assert "Why is the sky blue?\n  open now · 2 h ago · 2 turns · builtin" in prompts(app)
        assert app.history.chat_list.has_focus
        assert all(prompt.count("\n") == ROW_LINES - 1 for prompt in _each_prompt(app))


def _each_prompt(app: HistoryApp) -> list[str]:
    return [str(option.prompt) for option in app.history.chat_list.options]


async def test_enter_posts_the_chat(app):
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await pilot.press("down", "enter")
        await until(pilot, lambda: app.said)
        assert (app.said[0].chat_id, app.said[0].turn_id) == ("cache", None)


async def test_empty_history_says_how_it_fills(store, tmp_path):
    app = HistoryApp(store, tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await until(pilot, lambda: app.history.is_mounted and app.history.empty.display)
        assert "no chats yet" in str(app.history.empty.content)
        await pilot.press("enter", "r", "d", "e")  # nothing to open or to change
        assert app.said == []
        assert not app.history.path_input.display
        await until(pilot, lambda: footer(app) == {"Search", "Import", "Back"})


async def test_escape_leaves_the_search_then_the_screen(app):
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await search(pilot, "needle")
        await pilot.press("escape")
        await listed(pilot)
        assert app.history.chat_list.has_focus
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is not app.history)


async def test_nothing_of_the_models_text_reaches_the_screen_raw(app):
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await search(pilot, "evil")
        shown = prompts(app)
        assert "evil" in shown
        assert not set("\x1b\x07\x9b\u202e") & set(shown)
        await pilot.press("down", "r")
        assert not set("\x1b\x07\x9b\u202e") & set(app.history.rename_input.value)


async def test_footer_shows_the_keys_that_do_something(app):
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await until(pilot, lambda: "Delete" in footer(app))
        assert "Undo" not in footer(app)
        await pilot.press("d")
        await listed(pilot, 3)
        await until(pilot, lambda: "Undo" in footer(app))
        keys = list(app.screen.query(FooterKey))
        assert keys[-1].region.right <= 80


def test_every_binding_has_an_id():
    from mira_app.tui.screens import history

    for owner in (history.ChatList, history.SearchInput, history.HistoryScreen):
        assert all(binding.id for binding in owner.BINDINGS)


# -- search --------------------------------------------------------------------------------


async def test_search_as_one_types_finds_and_jumps_to_the_hit(app):
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await search(pilot, "needle")
        assert ids(app) == ["nasty", "long"]
        assert "word needle word" in prompts(app)
        await pilot.press("enter")  # from the search itself
        await until(pilot, lambda: app.said)
        await pilot.press("down", "down", "enter")
        await until(pilot, lambda: len(app.said) == 2)
        assert [(s.chat_id, s.turn_id) for s in app.said] == [("nasty", 1), ("long", 1)]


async def test_search_without_a_hit_says_so_and_typing_goes_on(app):
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await search(pilot, "needlf")
        await until(pilot, lambda: app.history.empty.display)
        assert "“needlf”" in str(app.history.empty.content)
        assert app.history.search_input.has_focus
        await pilot.press("backspace", "e")
        await listed(pilot, 2)


async def test_store_is_never_called_on_the_event_loop(app, monkeypatch):
    threads: dict[str, set[int]] = {}
    names = ("chats", "search", "load", "delete", "restore", "rename", "add", "purge")
    for name in names:
        real = getattr(app.store, name)

        def call(*args, name=name, real=real):
            threads.setdefault(name, set()).add(threading.get_ident())
            return real(*args)

        monkeypatch.setattr(app.store, name, call)
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await pilot.press("d", "u", "r", "x", "enter")
        await until(pilot, lambda: "rename" in threads)
        await pilot.press("e", "enter")
        await until(pilot, lambda: "load" in threads)
        await search(pilot, "needle")
        await pilot.press("down", "d")
        await until(pilot, lambda: "delete" in threads)
        await listed(pilot, 1)
        await pilot.press("i", "enter")
        await until(pilot, lambda: "cannot be read" in note(app))
        await pilot.press("escape", "escape")
        await until(pilot, lambda: "purge" in threads)
    assert set(threads) == set(names) - {"add"}
    assert all(threading.get_ident() not in seen for seen in threads.values())


# -- changes -------------------------------------------------------------------------------


async def test_rename_happens_in_the_row_itself(app):
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await pilot.press("down", "r")
        field = app.history.rename_input
        await until(pilot, lambda: field.has_focus)
        assert field.value == "Explain what a cache is."
        assert field.region.y == app.history.chat_list.content_region.y + ROW_LINES
        await pilot.press("end")
        await type_text(pilot, " ok")
        await pilot.press("enter")
        await until(pilot, lambda: "Explain what a cache is. ok" in titles(app))
        assert not field.display
        assert app.history.chat_list.has_focus
        assert (app.said[0].chat_id, app.said[0].title) == ("cache", "Explain what a cache is. ok")


async def test_rename_is_left_by_escape_and_an_empty_title_changes_nothing(app):
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        for keys in (["r", "x", "escape"], ["r", "end", "ctrl+u", "enter"]):
            await pilot.press(*keys)
            await until(pilot, lambda: not app.history.rename_input.display)
        assert [chat.title for chat in app.store.chats()] == titles(app)
        assert app.said == []


async def test_rename_of_a_scrolled_row_stands_on_that_row(app):
    for number in range(40):
        chat = Conversation().with_user(f"question {number}")
        app.store.save(StoredChat(chat_id=f"c{number}", conversation=chat))
    async with app.run_test(size=(60, 20)) as pilot:
        await listed(pilot, 44)
        await pilot.press("end", "r")
        field, chats = app.history.rename_input, app.history.chat_list
        await until(pilot, lambda: field.has_focus)
        await pilot.pause()
        assert chats.scroll_y > 0
        row = field.region.y - chats.content_region.y + round(chats.scroll_y)
        assert row == 43 * ROW_LINES
        assert chats.region.contains_region(field.region)


async def test_deletions_are_undone_last_first_and_final_once_the_screen_is_left(app):
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await pilot.press("d", "d", "d")
        await listed(pilot, 1)
        await until(pilot, lambda: "Press u to undo" in note(app))
        await pilot.press("u")
        await listed(pilot, 2)
        assert ids(app) == ["nasty", "long"]
        await pilot.press("u")
        await listed(pilot, 3)
        await pilot.press("escape")
        await until(pilot, lambda: app.screen is not app.history)
        await until(pilot, lambda: app.history._deleted and not app.history.is_running)
    assert [chat.chat_id for chat in app.store.chats()] == ["cache", "nasty", "long"]
    with pytest.raises(HistoryError):
        app.store.load("sky")
    assert [(s.chat_id, s.is_restored) for s in app.said] == [
        ("sky", False), ("cache", False), ("nasty", False), ("nasty", True), ("cache", True),
    ]  # fmt: skip


async def test_last_chat_that_was_deleted_can_be_undone(store, tmp_path):
    store.save(StoredChat(chat_id="c", conversation=Conversation().with_user("q")))
    app = HistoryApp(store, tmp_path)
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot, 1)
        await pilot.press("d")
        await until(pilot, lambda: app.history.empty.display)
        await pilot.press("u")
        await listed(pilot, 1)
        assert not app.history.empty.display
        assert app.history.search_input.value == ""


async def test_export_writes_markdown_by_default_and_never_over_a_file(app, tmp_path):
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await pilot.press("e", "enter")
        await until(pilot, lambda: "Written to" in note(app))
        assert "# Why is the sky blue?" in (tmp_path / "why-is-the-sky-blue.md").read_text()
        await pilot.press("e")
        assert app.history.path_input.value.endswith("why-is-the-sky-blue-2.md")
        app.history.path_input.value = str(tmp_path / "why-is-the-sky-blue.md")
        await pilot.press("enter")
        await until(pilot, lambda: "is there already" in note(app))
        for name, message in [
            ("chat.txt", "does not say how"),
            ("no/folder.md", "cannot be written"),
            ("all.jsonl", "Written to"),
        ]:
            await pilot.press("e")
            app.history.path_input.value = str(tmp_path / name)
            await pilot.press("enter")
            await until(pilot, lambda message=message: message in note(app))
        assert (tmp_path / "all.jsonl").read_text() == to_jsonl([app.store.load("sky")])


async def test_import_adds_chats_or_names_the_line_and_changes_nothing(app, tmp_path):
    chat = StoredChat(chat_id="new", title="New", conversation=Conversation().with_user("q"))
    good, bad = tmp_path / "good.jsonl", tmp_path / "bad.jsonl"
    good.write_text(to_jsonl([chat]))
    bad.write_text(to_jsonl([chat]) + "{oops\n")
    (tmp_path / "bytes.jsonl").write_bytes(b"{}\n\xff\xfe")
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        for name, message in [
            ("bad.jsonl", "Line 3: this is no JSON. Nothing was imported."),
            ("bytes.jsonl", "Line 2: this is no text in UTF-8"),
            ("missing.jsonl", "cannot be read"),
        ]:
            await pilot.press("i")
            app.history.path_input.value = str(tmp_path / name)
            await pilot.press("enter")
            await until(pilot, lambda message=message: message in note(app))
            assert len(app.store.chats()) == len(CHATS)
        for message in ("Imported 1 chat.", "All was there already."):
            await pilot.press("i")
            app.history.path_input.value = str(good)
            await pilot.press("enter")
            await until(pilot, lambda message=message: message in note(app))
        assert ids(app)[0] == "new"


async def test_refusing_disk_is_told_and_the_change_is_seen_all_the_same(app):
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        lock = Path(f"{app.store.path}.lock")
        lock.unlink(missing_ok=True)
        lock.mkdir()
        app.store._writer.execute("PRAGMA query_only = ON")
        await pilot.press("d")
        await until(pilot, lambda: "kept in memory" in note(app))
        assert app.history.note.has_class("-error")
        await listed(pilot, 3)
        lock.rmdir()


async def test_resizing_to_next_to_nothing_keeps_the_screen_alive(app):
    async with app.run_test(size=(80, 24)) as pilot:
        await listed(pilot)
        await pilot.press("r")
        for size in [(20, 5), (3, 2), (120, 40), (20, 5), (80, 24)]:
            await pilot.resize_terminal(*size)
            await pilot.pause()
        assert not app.history.rename_input.display
        assert app.history.chat_list.has_focus


@pytest.mark.parametrize(
    ("before", "text"),
    [
        (timedelta(seconds=-5), "just now"),
        (timedelta(seconds=59), "just now"),
        (timedelta(minutes=5), "5 min ago"),
        (timedelta(hours=23), "23 h ago"),
        (timedelta(days=1), "1 day ago"),
        (timedelta(days=6), "6 days ago"),
        (timedelta(days=60), "2026-01-03"),
    ],
)
def test_age_is_told_in_words_and_then_as_a_date(before, text):
    assert ago(NOW - before, NOW) == text
