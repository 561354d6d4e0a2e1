"""The chat line by line in a pseudo-terminal, against the scripted engine."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from e2e.terminal import Terminal
from mira_app.history import HistoryStore
from mira_app.paths import history_path
from mira_app.stored_chat import StoredChat

PROGRAM = Path(__file__).parents[1] / "app_fakes.py"
TIMEOUT_S = 300


def command(folder: Path, *args: str, modes: str = "") -> list[str]:
    return [sys.executable, str(PROGRAM), str(folder / "marker"), modes, *args]


@pytest.fixture(autouse=True)
def _own_files(data_dir: Path) -> None:
    """No test meets the chats or settings of whoever runs it."""


def stored_chats() -> list[StoredChat]:
    store = HistoryStore(history_path(os.environ))
    assert store.open() == []
    try:
        return [store.load(each.chat_id) for each in store.chats()]
    finally:
        store.close()


@pytest.fixture
def begin(tmp_path) -> Iterator:
    begun = []

    def start(*args: str, modes: str = "", term: str = "xterm-256color") -> Terminal:
        terminal = Terminal(
            command(tmp_path, *args, modes=modes), environment={"TERM": term}, timeout_s=TIMEOUT_S
        )
        begun.append(terminal)
        return terminal

    yield start
    for terminal in begun:
        terminal.close()


def test_first_question_is_stopped_and_the_next_one_goes_on(begin):
    terminal = begin("chat", "--plain", modes="slow")
    terminal.wait_for("Fake MoE is ready.", "you>")
    terminal.type("what is a cache?\r")
    terminal.wait_for("A cache keeps")
    terminal.press("ctrl+c")
    terminal.wait_for("Stopped; what was said is kept.")
    terminal.type("/stats\r")
    terminal.wait_for("8.0 tok/s")
    terminal.press("ctrl+d")
    assert terminal.wait_exit() == 0
    (stored,) = stored_chats()
    question, reply = stored.conversation.turns
    assert question.content == "what is a cache?"
    assert reply.content.startswith("A cache keeps")
    assert reply.status == "stopped"


def test_two_interrupts_at_the_prompt_end_with_130(begin):
    terminal = begin("--plain")
    terminal.wait_for("you>")
    terminal.press("ctrl+c")
    terminal.wait_for("Ctrl+C again, or Ctrl+D, ends the chat.")
    terminal.press("ctrl+c")
    assert terminal.wait_exit() == 130


def test_terminal_that_draws_nothing_gets_the_plain_chat_with_no_sequences(begin):
    terminal = begin(term="dumb")
    terminal.wait_for("you>")
    terminal.type("hi\r")
    terminal.wait_for("A cache keeps **hot** things near.")
    terminal.type("/quit\r")
    assert terminal.wait_exit() == 0


def test_chat_is_continued_by_itself_and_by_its_id(begin):
    terminal = begin("chat", "--plain", modes="echo")
    terminal.wait_for("you>")
    terminal.type("one\r")
    terminal.wait_for("user: one")
    terminal.press("ctrl+d")
    assert terminal.wait_exit() == 0
    (stored,) = stored_chats()
    for args in (("--continue",), (stored.chat_id[:6],)):
        again = begin("chat", "--plain", *args, modes="echo")
        again.wait_for("you: one", "you>")
        again.type("two\r")
        again.wait_for("assistant: user: one", "user: two")
        again.press("ctrl+d")
        assert again.wait_exit() == 0
    (stored,) = stored_chats()
    assert len(stored.conversation.turns) == 6


def test_rm_asks_and_obeys(begin, tmp_path):
    terminal = begin("rm", "owner/moe")
    terminal.wait_for("Remove owner/moe? This frees 3.0 MiB.")
    terminal.type("n\r")
    terminal.wait_for("Nothing was removed.")
    assert terminal.wait_exit() == 0
    assert not (tmp_path / "removed").exists()
    terminal = begin("rm", "owner/moe")
    terminal.wait_for("Remove owner/moe?")
    terminal.type("y\r")
    terminal.wait_for("Removed owner/moe: 3.0 MiB are free again.")
    assert terminal.wait_exit() == 0


@pytest.mark.parametrize(
    ("lines", "modes", "code", "out"),
    [
        ("one\ntwo\n", "", 0, 2 * "A cache keeps **hot** things near.\n"),
        ("one\n", "fail-reply", 1, "A cache keeps \n"),
        ("", "", 0, ""),
    ],
)
def test_pipe_gets_replies_alone_and_a_failure_its_exit_code(tmp_path, lines, modes, code, out):
    done = subprocess.run(
        command(tmp_path, "chat", modes=modes),
        input=lines, capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (code, out), done.stderr
    assert "you> " not in done.stderr


def test_engine_killed_mid_reply_is_replaced_and_the_chat_goes_on(tmp_path):
    (tmp_path / "once").touch()
    done = subprocess.run(
        command(tmp_path, "chat", "--plain", modes=f"die-once={tmp_path / 'once'}"),
        input="one\ntwo\n", capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout == "A cache keeps **hot** \nA cache keeps **hot** things near.\n"
    assert "SIGKILL" in done.stderr


def test_damaged_history_is_set_aside_and_told_and_the_chat_goes_on(tmp_path, data_dir):
    history_path(os.environ).write_text("no database" * 1000)
    done = subprocess.run(
        command(tmp_path, "chat", "--plain"),
        input="one\n", capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stderr.startswith("note: ")
    (aside,) = [path for path in data_dir.iterdir() if path.read_bytes().startswith(b"no data")]
    assert aside.name in done.stderr
    (stored,) = stored_chats()
    assert stored.conversation.turns[0].content == "one"


def test_chat_that_is_not_there_is_wrong_usage(tmp_path):
    done = subprocess.run(
        command(tmp_path, "chat", "--plain", "--continue"),
        input="", capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 2
    assert "There is no chat yet." in done.stderr
