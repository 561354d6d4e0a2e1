"""The program connected to a server, in a terminal: a chat, a stop, and what it remembers."""

from __future__ import annotations

import sys

from e2e.terminal import Terminal
from fake_server import WAIT_S, FakeServer, stalls
from mira_app.app_state import AppState, StateFile

PROGRAM = [sys.executable, "-m", "mira_app.cli"]


def test_connected_app_chats_stops_and_leaves(data_dir):
    (data_dir / "state").mkdir()
    state = StateFile(data_dir / "state" / "state.json")
    state.save(AppState(is_tour_done=True, model="builtin"))
    with FakeServer() as server, Terminal([*PROGRAM, "--connect", server.root]) as terminal:
        terminal.wait_for("fake-moe", server.address, "Ask something.", timeout_s=60)
        terminal.type("What is a cache?\r")
        terminal.wait_for("things near.")
        server.scripts.append(stalls("A cache is small"))
        terminal.type("And briefly?\r")
        terminal.wait_for("A cache is small")
        terminal.press("escape")
        terminal.wait_for("stopped")
        assert server.has_left.wait(WAIT_S)
        terminal.press("ctrl+q")
        assert terminal.wait_exit() == 0
    assert state.load().model == "builtin"  # a server's model is none that opens here


def test_server_that_is_not_there_ends_the_command_before_a_screen(data_dir):
    with Terminal([*PROGRAM, "--connect", "http://127.0.0.1:1"]) as terminal:
        terminal.wait_for("error: Nothing can be reached at 127.0.0.1:1.", timeout_s=60)
        assert terminal.wait_exit() == 1
