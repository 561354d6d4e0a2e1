"""The program connected to a server, in a terminal: a chat, a stop, and what it remembers."""

from __future__ import annotations

import sys

from e2e.terminal import Terminal
from fake_server import WAIT_S, FakeServer, stalls
from mira_app.app_state import AppState, StateFile
from mira_app.conversation import Conversation
from mira_app.history import HistoryStore, StoredChat

PROGRAM = [sys.executable, "-m", "mira_app.cli"]


def test_connected_app_chats_stops_and_leaves(data_dir):
    (data_dir / "state").mkdir()
    state = StateFile(data_dir / "state" / "state.json")
    state.save(AppState(is_tour_done=True, model="builtin"))
    with FakeServer() as server, Terminal([*PROGRAM, "--connect", server.root]) as terminal:
        terminal.wait_for("fake-moe", server.address, "Ask something.")
        terminal.type("What is a cache?\r")
        terminal.wait_for("things near.")
        terminal.wait_until(  # Enter sends nothing while a reply is under way.
            lambda screen: screen.splitlines()[0].endswith("ready"), what="the end of the reply"
        )
        server.scripts.append(stalls("A cache is small"))
        terminal.type("And briefly?\r")
        terminal.wait_for("A cache is small")
        terminal.press("escape")
        terminal.wait_for("stopped")
        assert server.has_left.wait(WAIT_S)
        terminal.press("ctrl+q")
        assert terminal.wait_exit() == 0
    assert state.load().model == "builtin"  # a server's model is none that opens here


def test_connected_app_sends_the_last_chat_only_where_it_was_named(data_dir):
    StateFile(data_dir / "state" / "state.json").save(AppState(is_tour_done=True))
    store = HistoryStore(data_dir / "history.sqlite3")
    store.open()
    last = Conversation().with_user("What did I say at home?").with_reply("A secret.")
    store.save(StoredChat(chat_id="c", model="builtin", conversation=last))
    store.set_last_chat("c")
    store.close()
    for command, sent_before in ((), 0), (("chat", "--continue"), 2):
        with (
            FakeServer() as server,
            Terminal([*PROGRAM, *command, "--connect", server.root]) as terminal,
        ):
            terminal.wait_for("fake-moe", "Ask something.")
            terminal.type("What is a cache?\r")
            terminal.wait_for("things near.")
            messages = [each["content"] for each in server.requests[-1]["messages"]]
            assert messages[-1] == "What is a cache?"
            assert len(messages) == 1 + sent_before
            assert ("A secret." in terminal.text) == bool(sent_before)
            terminal.press("ctrl+q")
            assert terminal.wait_exit() == 0
        store.open()
        store.set_last_chat("c")
        store.close()


def test_server_that_is_not_there_ends_the_command_before_a_screen(data_dir):
    with Terminal([*PROGRAM, "--connect", "http://127.0.0.1:1"]) as terminal:
        terminal.wait_for("error: Nothing can be reached at 127.0.0.1:1.")
        assert terminal.wait_exit() == 1
