"""Chats out of the history and into it, by `export` and `import`."""

from __future__ import annotations

import contextlib

import pytest
from app_fakes import FakeExport, FakeHistoryStore, FakeStoredChat
from mira_app import cli, wiring
from mira_app.conversation import Conversation
from typer.testing import CliRunner


@pytest.fixture
def invoke(monkeypatch):
    monkeypatch.setenv("TERMINAL_WIDTH", "100")

    def run(*args: str, stdin: str | bytes | None = None):
        return CliRunner().invoke(cli.app, list(args), input=stdin, prog_name="mira-chat")

    return run


@pytest.fixture
def store(tmp_path, monkeypatch):
    made = FakeHistoryStore(tmp_path / "chats")
    made.open()

    @contextlib.contextmanager
    def opened():
        yield made, FakeStoredChat

    monkeypatch.setattr(wiring, "opened_history", opened)
    monkeypatch.setattr(wiring, "export_module", lambda store: FakeExport)
    for chat_id, updated_at in (("aa11", 2), ("aa22", 1), ("bb33", 0)):
        made.save(
            FakeStoredChat(
                chat_id=chat_id,
                title=f"Chat {chat_id}",
                conversation=Conversation().with_user(f"from {chat_id}"),
                updated_at=updated_at,
            )
        )
    return made


@pytest.mark.parametrize("named", ["aa11", "last"])
def test_export_writes_markdown_to_standard_output(invoke, store, named):
    done = invoke("export", named)
    assert (done.exit_code, done.stdout) == (0, "# Chat aa11\n")


def test_export_last_is_the_one_the_store_says(invoke, store):
    store.last_chat_id = "bb33"
    assert invoke("export", "last").stdout == "# Chat bb33\n"


def test_export_takes_the_beginning_of_an_id(invoke, store):
    assert invoke("export", "bb").stdout == "# Chat bb33\n"
    done = invoke("export", "aa")
    assert done.exit_code == 2
    assert "aa11 (Chat aa11); aa22 (Chat aa22)." in done.stderr
    assert "bb33 (Chat bb33)" in invoke("export", "zz").stderr


def test_export_all_comes_back_by_import(invoke, store, tmp_path):
    path = tmp_path / "all.jsonl"
    assert invoke("export", "--all", "-o", str(path)).exit_code == 0
    assert len(path.read_text().splitlines()) == 3
    assert list(tmp_path.glob("*.part")) == []
    (store.folder / "aa11.chat").unlink()
    done = invoke("import", str(path))
    assert done.exit_code == 0
    assert done.stderr == "1 chat imported. 2 chats left out: here already.\n"
    assert store.load("aa11").conversation.turns[0].content == "from aa11"
    assert store.load("bb33").title == "Chat bb33"  # none was overwritten


def test_export_replaces_no_file_unasked(invoke, store, tmp_path):
    path = tmp_path / "chat.md"
    path.write_text("mine")
    done = invoke("export", "aa11", "-o", str(path))
    assert done.exit_code == 2
    assert "--force" in done.stderr
    assert path.read_text() == "mine"
    assert invoke("export", "aa11", "-o", str(path), "--force").exit_code == 0
    assert path.read_text() == "# Chat aa11\n"


def test_export_into_a_folder_that_is_not_there_exits_1(invoke, store, tmp_path):
    done = invoke("export", "aa11", "-o", str(tmp_path / "no" / "chat.md"))
    assert done.exit_code == 1
    assert "cannot be written" in done.stderr


def test_import_reads_markdown_from_standard_input(invoke, store):
    assert invoke("import", "-", stdin="# Read\n").exit_code == 0
    assert store.load("read").title == "Read\n"


@pytest.mark.parametrize(
    ("data", "said"),
    [(b"", "nothing to import"), (b"no title", "no export of chats"), (b"\xff\xfe#", "UTF-8")],
)
def test_import_of_something_else_is_wrong_usage(invoke, store, data, said):
    done = invoke("import", "-", stdin=data)
    assert done.exit_code == 2
    assert said in done.stderr


def test_export_without_a_history_says_so(invoke, monkeypatch):
    monkeypatch.setattr(wiring, "history_module", lambda: None)
    done = invoke("export", "--all")
    assert done.exit_code == 2
    assert "keeps no chats" in done.stderr
