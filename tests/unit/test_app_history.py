"""The history keeps what it said it kept: through kills, other apps, bad files and full disks."""

from __future__ import annotations

import dataclasses
import os
import sqlite3
import subprocess
import sys
import threading
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from mira_app import history_file
from mira_app.conversation import Conversation, Role, TurnStatus
from mira_app.history import KEPT_DELETED, HistoryError, HistoryStore, StoredChat, new_chat_id
from mira_engine.api import ReplyStats, SamplingConfig

CHILD = Path(__file__).parent.parent / "history_child.py"
STATS = ReplyStats(num_new_tokens=11, ttft_s=1.0, decode_s=2.0, num_hits=30, num_misses=10)


class FakeClock:
    """Moves on by a second at every look."""

    def __init__(self) -> None:
        self.now = datetime(2026, 1, 2, 3, 4, 5, tzinfo=UTC)

    def __call__(self) -> datetime:
        self.now += timedelta(seconds=1)
        return self.now


@contextmanager
def opened(path: Path, **arguments):
    store = HistoryStore(path, clock=FakeClock(), **arguments)
    store.open()
    try:
        yield store
    finally:
        store.close()


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "data" / "history.sqlite"


@pytest.fixture
def store(path):
    with opened(path) as store:
        yield store


def talk(*texts: str) -> Conversation:
    """A conversation of questions and replies in turn."""
    chat = Conversation()
    for number, text in enumerate(texts):
        chat = chat.with_reply(text, model="m") if number % 2 else chat.with_user(text)
    return chat


def chat_of(*texts: str, chat_id: str | None = None, **fields) -> StoredChat:
    return StoredChat(chat_id=chat_id or new_chat_id(), conversation=talk(*texts), **fields)


def contents(store: HistoryStore, chat_id: str) -> list[str]:
    return [turn.content for turn in store.load(chat_id).conversation.turns]


# -- what is kept --------------------------------------------------------------------------


def test_chat_with_siblings_and_figures_comes_back_as_it_was(path):
    conversation = (
        Conversation(system_prompt="be kind")
        .with_user("why?")
        .with_reply("hm", thinking="let me see", model="m", stats=STATS)
        .before_reply()
        .with_reply("", status=TurnStatus.ERROR, error="out of memory", model="n")
        .at(0)
        .with_user("and?")
        .with_reply("par", status=TurnStatus.STOPPED)
        .at(1)
    )
    sampling = SamplingConfig(temperature=0.5, seed=3)
    chat = StoredChat(
        chat_id="c", title="t", model="m", conversation=conversation, sampling=sampling
    )
    with opened(path) as store:
        store.save(chat)
    with opened(path) as store:
        kept = store.load("c")
        assert dataclasses.replace(kept, updated_at=None) == chat
        assert [s.num_turns for s in store.chats()] == [5]


def test_branch_looked_at_last_is_shown_again_by_the_next_app(path):
    chat = Conversation().with_user("q").with_reply("one").before_reply().with_reply("two")
    deep = chat.at_sibling(chat.head_id, -1).with_user("more").with_reply("a")
    looked_at = deep.before_reply().with_reply("b").at_sibling(5, -1)
    away = looked_at.at_sibling(1, 1)
    with opened(path) as store:
        store.save(StoredChat(chat_id="c", conversation=away))
    with opened(path) as store:
        kept = store.load("c").conversation
    assert [turn.content for turn in kept.path()] == ["q", "two"]
    back = kept.at_sibling(kept.head_id, -1)
    assert [turn.content for turn in back.path()] == ["q", "one", "more", "a"]


@settings(max_examples=30)  # each is a file
@given(texts=st.lists(st.text(st.characters(exclude_categories=())), min_size=1, max_size=4))
def test_any_text_comes_back_exactly(tmp_path_factory, texts):
    with opened(tmp_path_factory.mktemp("any") / "history.sqlite") as store:
        chat = chat_of(*texts)
        chat = dataclasses.replace(chat, title=texts[0] or "t", model=texts[-1])
        store.save(chat)
        kept = store.load(chat.chat_id)
        store.search(texts[0])
    assert dataclasses.replace(kept, updated_at=None) == chat


def test_save_writes_only_turns_that_are_new(store):
    first = chat_of("q", "a", chat_id="c")
    store.save(first)
    num_before = store._writer.total_changes
    store.save(dataclasses.replace(first, conversation=first.conversation.with_user("r")))
    # The chat's row, the turn and the three or so rows that the index makes of it.
    assert store._writer.total_changes - num_before < 10
    assert contents(store, "c") == ["q", "a", "r"]


def test_save_of_a_chat_without_turns_keeps_nothing(store):
    store.save(StoredChat(chat_id="c", conversation=Conversation(system_prompt="s")))
    assert store.chats() == []


def test_chats_come_newest_first_and_moving_the_head_does_not_count(store):
    old, new = chat_of("q", "a", chat_id="old"), chat_of("q", "a", chat_id="new")
    store.save(old)
    store.save(new)
    store.save(dataclasses.replace(old, conversation=old.conversation.at(0)))
    assert [c.chat_id for c in store.chats()] == ["new", "old"]
    assert store.load("old").conversation.head_id == 0
    store.save(dataclasses.replace(old, conversation=old.conversation.with_user("r")))
    assert [c.chat_id for c in store.chats()] == ["old", "new"]


def test_title_is_the_first_question_until_renamed_and_saves_leave_the_new_one(store):
    chat = chat_of("  Why is\nthe sky " + "very " * 20 + "blue?", chat_id="c")
    store.save(chat)
    assert store.chats()[0].title.startswith("Why is the sky very")
    assert len(store.chats()[0].title) <= 60
    store.rename("c", " Sky \n blue ")
    store.save(dataclasses.replace(chat, conversation=chat.conversation.with_reply("a")))
    assert store.chats()[0].title == "Sky blue"


def test_deleted_chat_is_hidden_until_restored_and_gone_once_purged(store):
    for chat_id in "ab":
        store.save(chat_of("needle", chat_id=chat_id))
    store.set_last_chat("a")
    store.delete("a")
    assert [c.chat_id for c in store.chats()] == ["b"]
    assert [hit.chat_id for hit in store.search("needle")] == ["b"]
    assert store.last_chat_id is None
    store.restore("a")
    assert {hit.chat_id for hit in store.search("needle")} == {"a", "b"}
    store.delete("a")
    store.purge(["a", "b"])  # b is not deleted
    with pytest.raises(HistoryError, match="not in the history"):
        store.load("a")
    assert contents(store, "b") == ["needle"]
    num_indexed = store._writer.execute(
        "SELECT count(*) FROM turn_text WHERE turn_text MATCH 'needle'"
    ).fetchone()[0]
    assert num_indexed == 1
    store._writer.execute("INSERT INTO turn_text (turn_text) VALUES ('integrity-check')")


def test_deleted_chat_that_goes_on_is_there_again(store):
    chat = chat_of("q", chat_id="c")
    store.save(chat)
    store.delete("c")
    store.purge(["c"])
    store.save(dataclasses.replace(chat, conversation=chat.conversation.with_reply("a")))
    assert contents(store, "c") == ["q", "a"]


def test_deleted_chats_of_a_killed_app_go_after_a_day(path):
    with opened(path) as store:
        store.save(chat_of("q", chat_id="c"))
        store.delete("c")
    with opened(path) as store:
        store.restore("c")
        store.delete("c")
    late = FakeClock()
    late.now += KEPT_DELETED + timedelta(hours=1)
    store = HistoryStore(path, clock=late)
    store.open()
    with pytest.raises(HistoryError):
        store.load("c")
    store.close()


def test_last_chat_is_known_after_a_restart(path):
    with opened(path) as store:
        store.save(chat_of("q", chat_id="c"))
        store.set_last_chat("c")
    with opened(path) as store:
        assert store.last_chat_id == "c"
        store.set_last_chat(None)
        assert store.last_chat_id is None


def test_usage_sums_replies_by_model(store):
    chat = Conversation()
    for model, stats in (("m", STATS), ("n", None), ("m", STATS)):
        chat = chat.with_user("q").with_reply("a", model=model, stats=stats)
    broken = dataclasses.replace(STATS, decode_s=float("nan"))
    chat = chat.with_user("q").with_reply("a", model="x", stats=broken)
    store.save(StoredChat(chat_id="c", conversation=chat))
    usage = {row.model: row for row in store.usage()}
    assert [row.model for row in store.usage()] == ["m", "n", "x"]
    assert (usage["m"].num_replies, usage["m"].num_tokens, usage["m"].seconds) == (2, 22, 6.0)
    assert usage["m"].tokens_per_s == pytest.approx(20 / 4)
    assert usage["m"].hit_rate == pytest.approx(0.75)
    assert (usage["n"].num_tokens, usage["n"].tokens_per_s, usage["n"].hit_rate) == (0, 0, 0)


def test_added_chats_are_all_or_none_and_known_ones_are_left_out(store):
    store.save(chat_of("q", "a", chat_id="same"))
    store.save(chat_of("q", "a", chat_id="other"))
    when = datetime(2020, 1, 1, tzinfo=UTC)
    fresh = chat_of("old question", chat_id="fresh", updated_at=when)
    added = store.add([chat_of("q", chat_id="same"), chat_of("r", chat_id="other"), fresh])
    assert len(added) == 2
    assert added[1] == "fresh"
    assert contents(store, "other") == ["q", "a"]
    assert contents(store, added[0]) == ["r"]
    assert store.chats()[-1].updated_at == when
    impossible = dataclasses.replace(fresh, chat_id="bad", conversation=talk("q").at(0))
    impossible = dataclasses.replace(
        impossible, conversation=dataclasses.replace(impossible.conversation, head_id=9)
    )
    num_before = len(store.chats())
    with pytest.raises(HistoryError, match="cannot be kept"):
        store.add([chat_of("good"), impossible])
    assert len(store.chats()) == num_before


# -- search --------------------------------------------------------------------------------


def test_search_finds_parts_of_words_in_any_language_and_short_ones(store):
    store.save(chat_of("Die Größe des Zwischenspeichers", "专家混合模型很快", chat_id="c"))
    store.save(chat_of("plain", "x = 50% of_y\\z", chat_id="d"))
    for text, expected in [
        ("zwischen", [("c", 0)]),
        ("SPEICHER größe", [("c", 0)]),
        ("混合模型", [("c", 1)]),
        ("混合", [("c", 1)]),
        ("0%", [("d", 1)]),
        ("f_", [("d", 1)]),
        ("x_", []),
        ("x%", []),
        ("y\\z 50", [("d", 1)]),
        ("plain des", []),
        ('" OR *', []),
        ("NEAR(", []),
        ("   ", []),
    ]:
        assert [(hit.chat_id, hit.turn_id) for hit in store.search(text)] == expected, text


def test_search_finds_thoughts_and_titles_newest_chat_first(store):
    chat = Conversation().with_user("q").with_reply("a", thinking="a hidden needle")
    store.save(StoredChat(chat_id="thought", conversation=chat))
    store.save(chat_of("q", chat_id="titled", title="Needle in a title"))
    store.save(chat_of("a needle", "another needle", chat_id="said"))
    hits = store.search("needle")
    assert [(hit.chat_id, hit.turn_id) for hit in hits] == [
        ("said", 0),
        ("said", 1),
        ("titled", None),
        ("thought", 1),
    ]
    assert hits[3].snippet == "a hidden needle"


def test_snippet_is_one_line_around_the_hit(store):
    store.save(chat_of("word " * 200 + "\nthe\tNeedle\n" + "word " * 200))
    snippet = store.search("needle")[0].snippet
    assert " the Needle word" in snippet
    assert snippet.startswith("…")
    assert snippet.endswith("…")
    assert "\n" not in snippet
    assert len(snippet) < 170


def test_search_runs_while_another_thread_saves(store):
    errors = []

    def search() -> None:
        try:
            for _ in range(30):
                store.search("word")
                store.chats()
        except HistoryError as error:
            errors.append(error)

    threads = [threading.Thread(target=search) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(30):
        store.save(chat_of("word", "w", chat_id=f"c{number}"))
    for thread in threads:
        thread.join()
    assert not errors
    assert len(store.search("word")) == 30


# -- several processes -----------------------------------------------------------------------


def start_child(path: Path, name: str, num_chats: int, num_turns: int) -> subprocess.Popen:
    return subprocess.Popen(
        [sys.executable, CHILD, str(path), name, str(num_chats), str(num_turns)],
        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join(sys.path)},
    )  # fmt: skip


def go(*children: subprocess.Popen) -> None:
    """Lets all begin once all are ready."""
    for child in children:
        assert child.stdout.readline() == "ready\n"
    for child in children:
        child.stdin.write("go\n")
        child.stdin.flush()


def check_file(path: Path) -> None:
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA integrity_check").fetchone() == ("ok",)
    assert connection.execute("PRAGMA foreign_key_check").fetchone() is None
    connection.execute("INSERT INTO turn_text (turn_text) VALUES ('integrity-check')")
    connection.close()


def test_two_apps_writing_at_once_keep_everything_of_both(path):
    children = [start_child(path, name, num_chats=12, num_turns=6) for name in ("one", "two")]
    go(*children)
    for child in children:
        child.communicate(timeout=300)
        assert child.returncode == 0
    check_file(path)
    with opened(path) as store:
        kept = {c.chat_id: c.num_turns for c in store.chats()}
        assert kept == {chat_id: 12 if chat_id == "shared" else 6 for chat_id in kept}
        assert len(kept) == 23  # eleven of each, and the shared one
        # On no branch are the words of one app among those of the other.
        shared = store.load("shared").conversation
        leaves = {turn.turn_id for turn in shared.turns} - {t.parent_id for t in shared.turns}
        branches = [[turn.content for turn in shared.at(leaf).path()] for leaf in leaves]
        assert sorted(map(len, branches)) == [6, 6]
        assert all(len({text.split()[0] for text in branch}) == 1 for branch in branches)


@pytest.mark.parametrize("num_lines", [1, 4, 9, 17])
def test_killed_process_loses_no_turn_whose_save_returned(path, num_lines):
    child = start_child(path, "one", num_chats=50, num_turns=8)
    go(child)
    lines = [child.stdout.readline() for _ in range(num_lines)]
    child.kill()
    lines += child.stdout.read().splitlines(keepends=True)
    child.wait()
    child.stdin.close()
    child.stdout.close()
    said = {}
    for line in lines:
        if line.endswith("\n"):
            _, chat_id, num_turns = line.split()
            said[chat_id] = int(num_turns)
    assert len(lines) >= num_lines
    with opened(path) as store:
        kept = {c.chat_id: c.num_turns for c in store.chats()}
        assert all(kept[chat_id] >= num_turns for chat_id, num_turns in said.items())
        for chat_id, num_turns in kept.items():
            roles = [turn.role for turn in store.load(chat_id).conversation.turns]
            assert roles == [Role.USER, Role.ASSISTANT] * (num_turns // 2)
    check_file(path)


def test_chat_that_another_app_went_on_with_goes_on_as_a_branch_of_it(path):
    start = chat_of("q", "a", chat_id="c")
    with opened(path) as mine, opened(path) as other:
        mine.save(start)
        theirs = other.load("c")
        other.save(
            dataclasses.replace(theirs, conversation=theirs.conversation.with_user("theirs"))
        )
        mine.load("c")  # to look at it in the history must not hide the difference
        went_on = dataclasses.replace(start, conversation=start.conversation.with_user("mine"))
        kept = mine.save(went_on)
        assert [turn.content for turn in kept.path()] == ["q", "a", "mine"]
        assert contents(mine, "c") == ["q", "a", "theirs", "mine"]
        assert mine.load("c").conversation == kept
        again = dataclasses.replace(went_on, conversation=kept.with_reply("b"))
        assert mine.save(again) is again.conversation, "nothing has changed since"
        assert contents(mine, "c") == ["q", "a", "theirs", "mine", "b"]
        assert len(mine.chats()) == 1


def test_version_without_what_the_other_app_added_adds_nothing_twice(path):
    start = chat_of("q", "a", chat_id="c")
    with opened(path) as mine, opened(path) as other:
        mine.save(start)
        other.save(dataclasses.replace(start, conversation=start.conversation.with_user("theirs")))
        stale = start.conversation.with_user("mine")
        for _ in range(2):
            mine.save(dataclasses.replace(start, conversation=stale))
        stale = stale.with_reply("b")
        mine.save(dataclasses.replace(start, conversation=stale))
        assert contents(mine, "c") == ["q", "a", "theirs", "mine", "b"]


def test_writer_that_is_busy_for_too_long_is_told_and_nothing_is_lost(path, monkeypatch):
    monkeypatch.setattr(history_file, "BUSY_S", 0.01)
    with opened(path) as store:
        other = sqlite3.connect(path, isolation_level=None)
        other.execute("BEGIN IMMEDIATE")
        with pytest.raises(HistoryError, match="busy"):
            store.save(chat_of("first", chat_id="c"))
        other.execute("ROLLBACK")
        other.close()
        assert not store.is_in_memory
        assert store.num_unsaved == 1
    with opened(path) as store:  # closing was the next chance
        assert contents(store, "c") == ["first"]


# -- files that cannot be used -----------------------------------------------------------------


def names(path: Path) -> list[str]:
    return sorted(p.name for p in path.parent.iterdir() if not p.name.endswith(".lock"))


def set_aside(path: Path, word: str, number: int = 0) -> Path:
    return sorted(path.parent.glob(f"history.sqlite.{word}-????????-??????*"))[number]


def test_file_that_is_no_database_is_set_aside_and_never_overwritten(path):
    path.parent.mkdir()
    for text in (b"not a database at all" * 100, b"another"):
        path.write_bytes(text)
        store = HistoryStore(path, clock=lambda: datetime(2026, 1, 2, tzinfo=UTC))
        notices = store.open()
        store.save(chat_of("q"))
        store.close()
        aside = [p for p in path.parent.glob("*.damaged-*") if p.read_bytes() == text]
        assert len(aside) == 1
        assert aside[0].name in notices[0]
        path.unlink()
    assert len(list(path.parent.glob("*.damaged-*"))) == 2


def test_file_damaged_in_the_middle_is_set_aside(path):
    with opened(path) as store:
        for number in range(40):
            store.save(chat_of("word " * 500, chat_id=f"c{number}"))
    damaged = bytearray(path.read_bytes())
    middle = len(damaged) // 4096 // 2 * 4096
    damaged[middle : middle + 4096] = b"\xff" * 4096
    path.write_bytes(damaged)
    with opened(path) as store:
        store.save(chat_of("q", chat_id="c"))
        assert [c.chat_id for c in store.chats()] == ["c"]
    assert set_aside(path, "damaged").read_bytes() == bytes(damaged)


def test_file_of_a_newer_version_is_set_aside_whole(path):
    with opened(path) as store:
        store.save(chat_of("precious", chat_id="c"))
    connection = sqlite3.connect(path)
    connection.execute("PRAGMA user_version = 99")
    connection.close()
    store = HistoryStore(path, clock=FakeClock())
    (notice,) = store.open()
    assert store.chats() == []
    store.close()
    aside = set_aside(path, "newer")
    assert "newer version" in notice
    assert aside.name in notice
    connection = sqlite3.connect(aside)
    assert connection.execute("SELECT content FROM turns").fetchone() == ("precious",)
    assert connection.execute("PRAGMA user_version").fetchone() == (99,)
    connection.close()


def test_database_of_another_program_is_set_aside(path):
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.execute("CREATE TABLE chats (something)")
    connection.commit()
    connection.close()
    with opened(path) as store:
        assert store.chats() == []
    assert set_aside(path, "foreign").exists()


def test_file_with_a_table_missing_is_set_aside(path):
    with opened(path):
        pass
    connection = sqlite3.connect(path)
    connection.execute("DROP TABLE state")
    connection.commit()
    connection.close()
    with opened(path) as store:
        assert store.last_chat_id is None
    assert set_aside(path, "damaged").exists()


def test_file_of_the_first_version_is_brought_up_and_can_be_searched(path):
    scripts = history_file.migrations()
    path.parent.mkdir()
    connection = sqlite3.connect(path)
    connection.executescript(scripts[0] + "PRAGMA user_version = 1;")
    connection.execute("INSERT INTO chats VALUES ('c', 't', 'm', '', NULL, 0, 5, NULL)")
    connection.execute(
        "INSERT INTO turns VALUES"
        " (1, 'c', 0, NULL, 'user', 'a needle', '', 'complete', '', '', NULL)"
    )
    connection.commit()
    connection.close()
    with opened(path) as store:
        assert [hit.turn_id for hit in store.search("needle")] == [0]
        assert store.load("c").conversation.visited == ()
        assert names(path) == ["history.sqlite", "history.sqlite-shm", "history.sqlite-wal"]
    connection = sqlite3.connect(path)
    assert connection.execute("PRAGMA user_version").fetchone() == (len(scripts),)
    connection.close()


def test_failed_migration_leaves_the_version_before_it(path, monkeypatch):
    with opened(path) as store:
        store.save(chat_of("q", chat_id="c"))
    scripts = history_file.migrations()
    broken = "CREATE TABLE fresh (a);\nCREATE TABLE chats (twice);\n"
    monkeypatch.setattr(history_file, "migrations", lambda: (*scripts, broken))
    connection = history_file.connect(path)
    with pytest.raises(sqlite3.OperationalError):
        history_file.migrate(connection)
    assert connection.execute("PRAGMA user_version").fetchone() == (len(scripts),)
    assert connection.execute(
        "SELECT count(*) FROM sqlite_master WHERE name='fresh'"
    ).fetchone() == (0,)
    connection.close()


# -- disks that refuse ---------------------------------------------------------------------------


def test_folder_that_cannot_be_made_leaves_a_history_in_memory(tmp_path):
    (tmp_path / "file").write_text("in the way")
    store = HistoryStore(tmp_path / "file" / "history.sqlite")
    (notice,) = store.open()
    assert "cannot be written" in notice
    assert "in memory" in notice
    assert store.is_in_memory
    store.save(chat_of("needle", chat_id="c"))
    store.rename("c", "kept")
    assert store.search("needle")[0].title == "kept"
    assert store.num_unsaved == 2
    store.close()


def test_full_disk_is_told_once_and_later_writes_bring_everything_back(path):
    with opened(path) as store:
        store.save(chat_of("before", chat_id="a"))
        num_pages = store._writer.execute("PRAGMA page_count").fetchone()[0]
        store._writer.execute(f"PRAGMA max_page_count = {num_pages}")
        full = chat_of("during " + "word " * 50_000, chat_id="b")
        block_disk(path)
        with pytest.raises(HistoryError, match="full") as raised:
            store.save(full)
        assert "in memory" in raised.value.hint
        assert {c.chat_id for c in store.chats()} == {"a", "b"}
        store.rename("a", "renamed")  # no second error
        store.save(chat_of("more", chat_id="c"))
        assert store.search("during")[0].chat_id == "b"
        assert store.num_unsaved == 3
        unblock_disk(path)
        store.save(chat_of("after", chat_id="d"))
        assert not store.is_in_memory
        assert store.num_unsaved == 0
        assert "again" in store.take_notices()[-1]
    check_file(path)
    with opened(path) as store:
        assert {c.chat_id: c.title for c in store.chats()}["a"] == "renamed"
        assert {c.chat_id for c in store.chats()} == set("abcd")


def block_disk(path: Path) -> None:
    """Makes every later opening for writing fail: a folder stands where the lock file should."""
    Path(f"{path}.lock").unlink(missing_ok=True)
    Path(f"{path}.lock").mkdir()


def unblock_disk(path: Path) -> None:
    Path(f"{path}.lock").rmdir()


def test_read_only_file_is_shown_and_goes_on_in_memory(path):
    with opened(path) as store:
        store.save(chat_of("before", chat_id="a"))
        store._writer.execute("PRAGMA query_only = ON")
        block_disk(path)
        with pytest.raises(HistoryError, match="readonly"):
            store.save(chat_of("after", chat_id="b"))
        assert {c.chat_id for c in store.chats()} == {"a", "b"}


def test_damage_met_while_saving_keeps_the_chat_and_begins_anew(path, monkeypatch):
    monkeypatch.setattr(history_file, "MAX_CHECKED_BYTES", 0)
    with opened(path) as store:
        for number in range(40):
            store.save(chat_of("word " * 500, chat_id=f"c{number}"))
    damaged = bytearray(path.read_bytes())
    damaged[4096 * 2 :] = b"\xff" * (len(damaged) - 4096 * 2)
    path.write_bytes(damaged)
    store = HistoryStore(path, clock=FakeClock())
    notices = store.open()
    try:
        store.save(chat_of("mine", "yours", chat_id="c"))
    except HistoryError as error:
        notices.append(str(error))
    assert notices
    assert contents(store, "c") == ["mine", "yours"]
    store.close()


def test_closed_store_says_so(path):
    with opened(path) as store:
        pass
    with pytest.raises(HistoryError, match="closed"):
        store.chats()
    with pytest.raises(HistoryError, match="closed"):
        store.save(chat_of("q"))
