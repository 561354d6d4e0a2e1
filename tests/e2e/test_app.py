"""The whole program in a pseudo-terminal: from an empty data folder to a reply, and back
from a killed engine.

Waits on the screen only. Runs the built-in model, whose greedy answers do not change.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from pathlib import Path

import psutil
import pytest
from e2e.terminal import Terminal

pytestmark = [pytest.mark.builtin, pytest.mark.slow, pytest.mark.timeout(900)]

PROGRAM = [sys.executable, "-m", "mira_app.cli"]
PREPARE_TIMEOUT_S = 400.0
REPLY_TIMEOUT_S = 120.0

SETTINGS = {"MIRA_CHAT_SYSTEM": "You are a helpful assistant.", "MIRA_CHAT_MAX_TOKENS": "160"}
"""So that the answers stay those below, and a wrong one ends soon."""

STORY = "Write a long story about a lighthouse."
CAPITAL = "The capital of France is"
"""Answered with Paris by a wide margin at each token (0.8 in logits) under that system
prompt, so rounding cannot flip it; asked as a question, the first token is a near-tie."""

_LAYER = re.compile(r"layer (\d+) of 30")
_COUNT = re.compile(r"reply\s+(\d+) tokens")


def open_program() -> Terminal:
    return Terminal(PROGRAM, columns=110, lines=36, timeout_s=60, environment=SETTINGS)


def wait_for_chat(terminal: Terminal, timeout_s: float) -> None:
    terminal.wait_until(
        lambda screen: "Ask something." in screen and screen.splitlines()[0].endswith("ready"),
        what="a chat that is ready",
        timeout_s=timeout_s,
    )


def wait_for_tokens(terminal: Terminal, more_than: int) -> int:
    """Waits until the panel counts more tokens of the reply, and returns their number."""

    def count(screen: str) -> int:
        found = _COUNT.search(screen)
        return int(found.group(1)) if found else 0

    screen = terminal.wait_until(
        lambda screen: count(screen) > more_than,
        what=f"more than {more_than} tokens",
        timeout_s=REPLY_TIMEOUT_S,
    )
    return count(screen)


def wait_for_layer(terminal: Terminal, at_least: int) -> None:
    """Waits until the conversion has come that far; a fast one shows not every layer."""
    terminal.wait_until(
        lambda screen: any(int(n) >= at_least for n in _LAYER.findall(screen)),
        what=f"layer {at_least} or a later one",
        timeout_s=PREPARE_TIMEOUT_S,
    )


def engine_of(terminal: Terminal) -> psutil.Process:
    """The engine process that the program has started."""
    children = psutil.Process(terminal.pid).children()
    (engine,) = [child for child in children if "mira_engine.worker" in child.cmdline()]
    return engine


def ask_for_capital(terminal: Terminal) -> None:
    terminal.type(CAPITAL + "\r")
    terminal.wait_for("Paris", timeout_s=REPLY_TIMEOUT_S)
    wait_for_chat(terminal, REPLY_TIMEOUT_S)


def quit_program(terminal: Terminal) -> None:
    engine = engine_of(terminal)
    terminal.press("ctrl+q")
    assert terminal.wait_exit() == 0
    _, alive = psutil.wait_procs([engine], timeout=REPLY_TIMEOUT_S)
    assert not alive


def test_built_in_model_is_picked_prepared_asked_stopped_and_left(data_dir):
    with open_program() as terminal:
        terminal.wait_for("Pick a model", "built-in", "not prepared yet")
        terminal.press("enter")
        terminal.wait_for("Preparing")
        wait_for_chat(terminal, PREPARE_TIMEOUT_S)

        terminal.type(STORY + "\r")
        terminal.wait_for(STORY, "answering")
        so_far = wait_for_tokens(terminal, more_than=0)
        wait_for_tokens(terminal, more_than=so_far)
        terminal.press("escape")
        terminal.wait_for("stopped ·")
        wait_for_chat(terminal, REPLY_TIMEOUT_S)

        terminal.press("ctrl+n")
        terminal.wait_gone(STORY)
        ask_for_capital(terminal)
        terminal.wait_until(
            lambda screen: re.search(r"hit rate\s+\d+\.\d%", screen) is not None,
            what="the hit rate",
        )
        quit_program(terminal)


def test_engine_killed_during_a_reply_comes_back_and_the_chat_goes_on(
    builtin_data_dir, data_dir, monkeypatch
):
    monkeypatch.setenv("MIRA_CHAT_DATA_DIR", str(builtin_data_dir))
    with open_program() as terminal:
        terminal.wait_for("Pick a model")
        terminal.press("enter")
        wait_for_chat(terminal, REPLY_TIMEOUT_S)
        ask_for_capital(terminal)

        engine = engine_of(terminal)
        terminal.type(STORY + "\r")
        terminal.wait_for(STORY, "answering")
        wait_for_tokens(terminal, more_than=12)
        engine.kill()
        terminal.wait_for("broken off", "The engine runs again", timeout_s=REPLY_TIMEOUT_S)
        assert engine_of(terminal).pid != engine.pid
        assert "Paris" in terminal.text

        terminal.press("ctrl+n")
        terminal.wait_gone(STORY)
        terminal.wait_gone("Paris")
        ask_for_capital(terminal)
        quit_program(terminal)


def test_engine_killed_during_preparation_goes_on_from_the_finished_layers(
    builtin_data_dir, data_dir
):
    unprepared_copy(builtin_data_dir, data_dir)
    with open_program() as terminal:
        terminal.wait_for("Pick a model", "not prepared yet")
        terminal.press("enter")
        wait_for_layer(terminal, at_least=1)
        engine = engine_of(terminal)
        wait_for_layer(terminal, at_least=4)
        engine.kill()
        terminal.wait_for("killed by SIGKILL", timeout_s=REPLY_TIMEOUT_S)
        finished = layer_files(data_dir)
        assert finished

        terminal.press("enter")
        wait_for_chat(terminal, PREPARE_TIMEOUT_S)
        ask_for_capital(terminal)
        quit_program(terminal)
    assert finished.items() <= layer_files(data_dir).items(), "a finished layer was made again"


def unprepared_copy(source: Path, target: Path) -> None:
    """Links the source's files but those of expert stores, so that conversion is left to do."""
    shutil.copytree(
        source / "models", target / "models",
        copy_function=os.symlink, ignore=shutil.ignore_patterns("nested", "*.lock"),
    )  # fmt: skip


def layer_files(data_dir: Path) -> dict[Path, int]:
    """The finished layers of the expert store, with the time each was written in ns."""
    return {path: path.stat().st_mtime_ns for path in data_dir.rglob("layer-*.safetensors")}
