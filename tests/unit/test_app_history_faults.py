"""The history where its file cannot be used or its disk refuses: nothing that was said is lost."""

from __future__ import annotations

import sqlite3
from datetime import UTC, datetime
from pathlib import Path

import pytest
from histories import FakeClock, chat_of, check_file, contents, opened
from mira_app import history_file
from mira_app.history import HistoryError, HistoryStore


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "data" / "history.sqlite"


@pytest.fixture
def store(path):
    with opened(path) as store:
        yield store


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
