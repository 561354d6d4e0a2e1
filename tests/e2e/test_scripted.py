"""The whole program in a pseudo-terminal over a scripted engine: what has to hold when keys
come at once, an engine dies or will not end, and the person leaves in the middle.
"""

from __future__ import annotations

import sys
from pathlib import Path

import psutil
from e2e.terminal import Terminal

APP = Path(__file__).parents[1] / "app_fakes.py"
QUIT_S = 60.0
"""An engine that will not end is given two, and its app would wait ten minutes for it."""


def open_program(folder: Path, *modes: str) -> Terminal:
    """The program with a home of its own, past its tour."""
    (folder / "config.toml").touch()
    terminal = Terminal(
        [sys.executable, APP, folder / "ready", ",".join(modes)],
        columns=100,
        lines=32,
        environment={"HOME": str(folder), "MIRA_CHAT_CONFIG": str(folder / "config.toml")},
    )
    terminal.wait_for("Welcome to mira-chat", "Enter begins.")
    terminal.press("enter")
    terminal.wait_for("Built-in model", "OLMoE-1B-7B", "Pick")
    return terminal


def open_chat(terminal: Terminal) -> None:
    terminal.type("/olmoe\r")  # at once: the letters are for the search that the / opens
    terminal.wait_until(
        lambda screen: "OLMoE-1B-7B" in screen and "Built-in model" not in screen,
        what="what was searched",
    )
    terminal.press("enter")
    terminal.wait_until(
        lambda screen: "Ask something." in screen and screen.splitlines()[0].endswith("ready"),
        what="a chat that is ready",
    )


def engines_of(terminal: Terminal) -> list[psutil.Process]:
    children = psutil.Process(terminal.pid).children(recursive=True)
    return [child for child in children if any("fake_engine" in each for each in child.cmdline())]


def wait_for_end(
    terminal: Terminal, engines: list[psutil.Process], timeout_s: float | None = None
) -> None:
    assert terminal.wait_exit(timeout_s) == 0
    _, alive = psutil.wait_procs(engines, timeout=0.0)
    assert not alive, "the program has left an engine behind"


def test_engine_that_will_not_end_holds_up_neither_the_screen_nor_the_end_for_long(tmp_path):
    with open_program(tmp_path, "stubborn") as terminal:
        open_chat(terminal)
        engines = engines_of(terminal)
        assert engines
        terminal.press("ctrl+q")
        wait_for_end(terminal, engines, timeout_s=QUIT_S)
        assert terminal.is_given_back


def test_ctrl_c_stops_the_reply_then_tells_how_to_quit_then_quits(tmp_path):
    with open_program(tmp_path, "slow") as terminal:
        open_chat(terminal)
        terminal.type("Tell me.\r")
        terminal.wait_for("answering", "A cache keeps")
        terminal.press("ctrl+c")
        terminal.wait_for("stopped")
        terminal.wait_until(
            lambda screen: screen.splitlines()[0].endswith("ready"), what="an idle chat"
        )
        engines = engines_of(terminal)
        terminal.press("ctrl+c")
        terminal.wait_for("Ctrl+C again quits", "Ctrl+Q")
        assert "Do you want to quit?" not in terminal.text
        terminal.type("\x03\x03")  # Twice: after five seconds one would only tell it again.
        wait_for_end(terminal, engines)


def test_reply_that_is_left_in_the_middle_is_kept_as_stopped(tmp_path):
    with open_program(tmp_path, "slow") as terminal:
        open_chat(terminal)
        terminal.type("Tell me.\r")
        terminal.wait_for("answering", "A cache keeps")
        engines = engines_of(terminal)
        terminal.press("ctrl+q")
        wait_for_end(terminal, engines)
    with Terminal(
        [sys.executable, APP, tmp_path / "ready", "slow"], columns=100, lines=32,
        environment={"HOME": str(tmp_path)},
    ) as terminal:  # fmt: skip
        terminal.wait_for("Tell me.", "A cache keeps", "stopped")
        assert "broken off" not in terminal.text
        terminal.press("ctrl+q")
        assert terminal.wait_exit() == 0


def test_preparation_whose_engine_is_killed_goes_on_from_where_it_was(tmp_path):
    layers = tmp_path / "layers"
    with open_program(tmp_path, f"die-mid-prepare={layers}") as terminal:
        terminal.press("enter")
        terminal.wait_for("failed", "killed by SIGKILL", "r tries again")
        assert layers.read_text().split() == [str(layer) for layer in range(5)]
        terminal.type("r")
        terminal.wait_for("Ask something.")
        terminal.wait_until(
            lambda screen: screen.splitlines()[0].endswith("ready"), what="the loaded model"
        )
        assert layers.read_text().split() == [str(layer) for layer in range(10)]
        terminal.type("What is a cache?\r")
        terminal.wait_for("What is a cache?", "things near.", "tok/s")
        engines = engines_of(terminal)
        terminal.press("ctrl+q")
        wait_for_end(terminal, engines)
