"""The history keeps what it said it kept: through restarts, kills and other apps."""

from __future__ import annotations

import dataclasses
import os
import sqlite3
import subprocess
import sys
import threading
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest
from histories import FakeClock, chat_of, check_file, contents, opened, talk
from hypothesis import given, settings
from hypothesis import strategies as st
from mira_app import history_file
from mira_app.conversation import Conversation, Role, TurnStatus
from mira_app.history import KEPT_DELETED, HistoryError, HistoryStore, StoredChat
from mira_engine.api import ReplyStats, SamplingConfig

CHILD = Path(__file__).parent.parent / "history_child.py"
STATS = ReplyStats(num_new_tokens=11, ttft_s=1.0, decode_s=2.0, num_hits=30, num_misses=10)


@pytest.fixture
def path(tmp_path) -> Path:
    return tmp_path / "data" / "history.sqlite"


@pytest.fixture
def store(path):
    with opened(path) as store:
        yield store


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
