"""Chats out of the history and into it, by `export` and `import`."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from mira_app import cli, wiring
from mira_app.chat_files import export_chat, free_path, read_chats, replace_old, write_new
from mira_app.conversation import Conversation, TurnStatus
from mira_app.export import ImportFormatError, from_jsonl, from_markdown, to_jsonl, to_markdown
from mira_app.history import HistoryStore
from mira_app.paths import history_path
from mira_app.stored_chat import HistoryError, StoredChat
from typer.testing import CliRunner


@pytest.fixture
def invoke(monkeypatch, data_dir):
    monkeypatch.setenv("TERMINAL_WIDTH", "100")

    def run(*args: str, stdin: str | bytes | None = None):
        return CliRunner().invoke(cli.app, list(args), input=stdin, prog_name="mira-chat")

    return run


def stored_chat(chat_id: str) -> StoredChat:
    conversation = Conversation(system_prompt="Be brief.").with_user(f"from {chat_id}")
    return StoredChat(
        chat_id=chat_id,
        title=f"Chat {chat_id}",
        model="builtin",
        conversation=conversation.with_reply("Ye", status=TurnStatus.STOPPED),
    )


@pytest.fixture
def store(data_dir) -> Iterator[HistoryStore]:
    """The history that the commands open, too."""
    made = HistoryStore(history_path(os.environ))
    assert made.open() == []
    for chat_id in ("bb33", "aa22", "aa11"):
        made.save(stored_chat(chat_id))
    yield made
    made.close()


def markdown(chat_id: str) -> str:
    return to_markdown(stored_chat(chat_id))


# -- export


@pytest.mark.parametrize("named", ["aa11", "last"])
def test_export_writes_markdown_to_standard_output(invoke, store, named):
    done = invoke("export", named)
    assert (done.exit_code, done.stdout) == (0, markdown("aa11"))


def test_export_last_is_the_one_the_store_says(invoke, store):
    store.set_last_chat("bb33")
    assert invoke("export", "last").stdout == markdown("bb33")


def test_export_takes_the_beginning_of_an_id(invoke, store):
    assert invoke("export", "bb").stdout == markdown("bb33")
    done = invoke("export", "aa")
    assert done.exit_code == 2
    assert "aa11 (Chat aa11); aa22 (Chat aa22)." in done.stderr
    assert "bb33 (Chat bb33)" in invoke("export", "zz").stderr


def test_export_all_comes_back_by_import(invoke, store, tmp_path):
    path = tmp_path / "all.jsonl"
    assert invoke("export", "--all", "-o", str(path)).exit_code == 0
    assert {each.chat_id for each in from_jsonl(path.read_text())} == {"aa11", "aa22", "bb33"}
    before = store.load("aa11")
    store.delete("aa11")
    store.purge(["aa11"])
    store.rename("bb33", "Mine")
    done = invoke("import", str(path))
    assert done.exit_code == 0
    assert done.stderr == "1 chat imported. 2 chats left out: here already.\n"
    assert store.load("aa11") == before
    assert store.load("bb33").title == "Mine"  # none was overwritten


@pytest.mark.parametrize(
    ("name", "args", "is_lines"),
    [
        ("chat.md", (), False),
        ("chat.txt", (), False),
        ("chat.jsonl", (), True),
        ("chat.jsonl", ("--format", "md"), False),
        ("chat.md", ("--format", "jsonl"), True),
    ],
)
def test_format_wins_over_the_suffix_and_the_suffix_over_markdown(
    invoke, store, tmp_path, name, args, is_lines
):
    path = tmp_path / name
    assert invoke("export", "aa11", *args, "-o", str(path)).exit_code == 0
    text = path.read_text(encoding="utf-8")
    assert text == (to_jsonl([store.load("aa11")]) if is_lines else markdown("aa11"))


def test_export_replaces_no_file_unasked(invoke, store, tmp_path):
    path = tmp_path / "chat.md"
    path.write_text("mine")
    done = invoke("export", "aa11", "-o", str(path))
    assert done.exit_code == 2
    assert "--force" in done.stderr
    assert path.read_text() == "mine"
    assert invoke("export", "aa11", "-o", str(path), "--force").exit_code == 0
    assert path.read_text() == markdown("aa11")
    assert [each.name for each in tmp_path.iterdir() if "chat.md" in each.name] == ["chat.md"]


@pytest.mark.parametrize("force", [(), ("--force",)])
def test_export_into_a_folder_that_is_not_there_exits_1(invoke, store, tmp_path, force):
    done = invoke("export", "aa11", "-o", str(tmp_path / "no" / "chat.md"), *force)
    assert done.exit_code == 1
    assert "cannot be written" in done.stderr
    assert not (tmp_path / "no").exists()


def test_export_without_chats_says_so(invoke):
    done = invoke("export", "last")
    assert done.exit_code == 2
    assert "There is no chat yet." in done.stderr


def test_history_tells_at_its_end_what_happened_meanwhile(store, capsys):
    with wiring.opened_history() as ours:
        ours._notices.append("Something happened.")
        assert capsys.readouterr().err == ""
    assert capsys.readouterr().err == "note: Something happened.\n"


# -- import


def test_import_reads_markdown_from_standard_input_as_a_new_chat(invoke, store):
    assert invoke("import", "-", stdin=markdown("aa11")).exit_code == 0
    (added,) = {each.chat_id for each in store.chats()} - {"aa11", "aa22", "bb33"}
    assert store.load(added).title == "Chat aa11"
    assert store.load(added).conversation == store.load("aa11").conversation


def test_import_reads_what_an_editor_saved_with_a_mark_and_windows_line_ends(invoke, store):
    text = "\ufeff" + markdown("aa11").replace("\n", "\r\n")
    assert invoke("import", "-", stdin=text.encode()).exit_code == 0
    assert len(store.chats()) == 4


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"", "nothing to import"),
        (to_jsonl([StoredChat(chat_id="empty")]).encode(), "nothing to import"),
        (b"no title", "no export of chats: standard input: Line 1"),
        (b"{}", "standard input: Line 1: type is no text"),
        (to_jsonl([stored_chat("cc")]).encode() + b"{", "Line 4: this is no JSON"),
        (b"<!-- mira-chat:\n\xff\xfe#", "Line 2: this is no text in UTF-8"),
    ],
)
def test_import_of_something_else_is_wrong_usage_and_takes_in_nothing(invoke, store, data, said):
    done = invoke("import", "-", stdin=data)
    assert done.exit_code == 2
    assert said in done.stderr
    assert len(store.chats()) == 3


def test_import_of_a_file_that_is_not_there_names_it(invoke, tmp_path):
    done = invoke("import", str(tmp_path / "no.jsonl"))
    assert done.exit_code == 2
    assert f"{tmp_path / 'no.jsonl'} cannot be read" in done.stderr


# -- files


@pytest.mark.parametrize("name", ["chat.md", "chat.MARKDOWN", "chat.jsonl"])
def test_exported_file_is_read_back_by_what_is_in_it(tmp_path, name):
    chat = stored_chat("aa11")
    export_chat(chat, tmp_path / name)
    (read,) = read_chats((tmp_path / name).rename(tmp_path / "other"))
    assert dataclasses.replace(read, chat_id="aa11") == chat


def test_export_to_an_unknown_suffix_is_refused_and_makes_no_file(tmp_path):
    with pytest.raises(HistoryError, match="how to export") as caught:
        export_chat(stored_chat("aa11"), tmp_path / "chat.doc")
    assert ".jsonl" in caught.value.hint
    assert not (tmp_path / "chat.doc").exists()


def test_new_file_never_takes_the_place_of_one_that_is_there(tmp_path):
    (tmp_path / "a.md").write_text("mine")
    with pytest.raises(HistoryError, match="there already"):
        write_new(tmp_path / "a.md", "other")
    with pytest.raises(HistoryError, match="there already"):
        export_chat(stored_chat("aa11"), tmp_path / "a.md")
    assert (tmp_path / "a.md").read_text() == "mine"


def test_file_that_cannot_be_replaced_stays_and_is_named(tmp_path):
    folder = tmp_path / "folder.md"
    folder.mkdir()
    with pytest.raises(HistoryError, match=r"folder\.md cannot be written") as caught:
        replace_old(folder, "text")
    assert caught.value.hint == "Choose another folder."
    assert list(tmp_path.iterdir()) == [folder]


def test_file_is_named_after_the_title_and_takes_no_name_twice(tmp_path):
    assert free_path(tmp_path, "What is a: cache?/..").name == "what-is-a-cache.md"
    (tmp_path / "chat.md").touch()
    assert free_path(tmp_path, "?!").name == "chat-2.md"
    assert free_path(Path("/no/such"), "a " * 100).name.startswith("a-a-a")


def test_text_that_is_no_export_names_its_line():
    with pytest.raises(ImportFormatError, match="Line 1"):
        from_markdown("# A title")
