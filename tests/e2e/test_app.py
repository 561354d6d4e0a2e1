"""The whole program in a pseudo-terminal: from an empty home folder to a reply, and back
from a killed engine, a killed app and a night's rest.

Waits on the screen only. Runs the built-in model, whose greedy answers do not change, from
one prepared folder; each test has a home of its own that links to it. A start costs most
of a test's time, so a test follows one person from a start on.
"""

from __future__ import annotations

import re
import signal
import sys
from pathlib import Path

import psutil
import pytest
from app_homes import make_home
from e2e.terminal import Terminal

pytestmark = [pytest.mark.builtin, pytest.mark.slow, pytest.mark.timeout(1200)]

PROGRAM = [sys.executable, "-m", "mira_app.cli"]
REPLY_TIMEOUT_S = 300.0
COLUMNS, LINES = 110, 36

SETTINGS = {"MIRA_CHAT_SYSTEM": "You are a helpful assistant.", "MIRA_CHAT_MAX_TOKENS": "160"}
"""So that the answers stay those below, and a wrong one ends soon."""

STORY = "Write a long story about a lighthouse."
CAPITAL = "The capital of France is"
"""Answered with Paris by a wide margin at each token (0.8 in logits) under that system
prompt, so rounding cannot flip it; asked as a question, the first token is a near-tie."""

_COUNT = re.compile(r"reply\s+(\d+) tokens")


@pytest.fixture
def home(builtin_data_dir, data_dir) -> Path:
    """The data folder of a home where the model is prepared and the app was never started."""
    make_home(builtin_data_dir, data_dir, is_known=False)
    return data_dir


@pytest.fixture
def known_home(builtin_data_dir, data_dir) -> Path:
    """The same where the app was used before, so that it opens the model by itself."""
    make_home(builtin_data_dir, data_dir, is_known=True)
    return data_dir


def open_program(data_dir: Path, **settings: str) -> Terminal:
    environment = {**SETTINGS, "HOME": str(data_dir.parent), **settings}
    return Terminal(
        PROGRAM, columns=COLUMNS, lines=LINES, environment=environment, timeout_s=REPLY_TIMEOUT_S
    )


def wait_for_chat(terminal: Terminal, timeout_s: float = REPLY_TIMEOUT_S) -> None:
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


def engines_of(terminal: Terminal) -> list[psutil.Process]:
    """The engine processes that the program has started: the chat's, jobs' and verdicts'."""
    children = psutil.Process(terminal.pid).children()
    return [child for child in children if "mira_engine.worker" in child.cmdline()]


def ask(terminal: Terminal, question: str) -> None:
    """Asks, and waits until the first token is there."""
    terminal.type(question + "\r")
    terminal.wait_for(question, "answering")
    wait_for_tokens(terminal, more_than=0)


def ask_for_capital(terminal: Terminal) -> None:
    terminal.type(CAPITAL + "\r")
    terminal.wait_for("Paris", timeout_s=REPLY_TIMEOUT_S)
    wait_for_chat(terminal)


def stop_reply(terminal: Terminal) -> None:
    terminal.press("escape")
    terminal.wait_for("stopped")
    wait_for_chat(terminal)


def quit_program(terminal: Terminal) -> None:
    engines = engines_of(terminal)
    terminal.press("ctrl+q")
    assert terminal.wait_exit() == 0
    _, alive = psutil.wait_procs(engines, timeout=REPLY_TIMEOUT_S)
    assert not alive


def test_first_start_leads_to_an_answer_and_the_next_one_goes_on_there(home):
    with open_program(home) as terminal:
        terminal.wait_for("Welcome to mira-chat", "Pick a model", "Enter begins.")
        terminal.press("enter")
        terminal.wait_for("built-in", "ready", "OLMoE", "Pick")
        terminal.press("enter")
        wait_for_chat(terminal)
        ask_for_capital(terminal)
        terminal.wait_until(
            lambda screen: re.search(r"hit rate\s+\d+\.\d%", screen) is not None,
            what="the hit rate",
        )
        terminal.type("And of Italy")
        terminal.wait_for("And of Italy")
        quit_program(terminal)

    with open_program(home) as terminal:
        terminal.wait_for(CAPITAL, "Paris", "And of Italy", "built-in", "ready")
        assert "Welcome" not in terminal.text
        terminal.type("?\r")
        terminal.wait_for("And of Italy?", "answering")
        wait_for_tokens(terminal, more_than=0)
        stop_reply(terminal)
        quit_program(terminal)


def test_stopped_edited_and_repeated_turns_stay_beside_each_other(known_home):
    with open_program(known_home, MIRA_CHAT_K="0") as terminal:
        wait_for_chat(terminal)
        ask_for_capital(terminal)
        for number in (2, 3):
            terminal.press("ctrl+r")
            terminal.wait_for(f"{number}/{number} ·", timeout_s=REPLY_TIMEOUT_S)
            wait_for_chat(terminal)
        terminal.press("tab")
        terminal.wait_for("Copy")
        terminal.type("[")
        terminal.wait_for("2/3 ·", "Paris")

        terminal.press("up")
        terminal.wait_for("Edit")
        terminal.type("e")
        terminal.wait_for("editing: Enter sends")
        terminal.type(", they say,\r")
        terminal.wait_for(f"{CAPITAL}, they say,", "answering")
        wait_for_tokens(terminal, more_than=0)
        terminal.press("escape")
        wait_for_chat(terminal)
        terminal.press("tab")
        terminal.wait_for("Copy")
        terminal.press("up")
        terminal.wait_for("Edit")
        terminal.type("[")
        terminal.wait_for("1/2", "2/3 ·", "Paris")
        terminal.wait_gone("they say")
        quit_program(terminal)


def test_engine_killed_during_a_reply_comes_back_and_the_chat_goes_on(known_home):
    with open_program(known_home) as terminal:
        wait_for_chat(terminal)
        ask_for_capital(terminal)

        (engine,) = engines_of(terminal)
        ask(terminal, STORY)
        wait_for_tokens(terminal, more_than=5)
        engine.kill()
        terminal.wait_for("broken off", "The engine runs again", timeout_s=REPLY_TIMEOUT_S)
        assert engine.pid not in [process.pid for process in engines_of(terminal)]
        assert "Paris" in terminal.text

        terminal.press("ctrl+n")
        terminal.wait_gone(STORY)
        terminal.wait_gone("Paris")
        ask_for_capital(terminal)
        quit_program(terminal)


def test_app_killed_during_a_reply_keeps_finished_turns_where_a_search_finds_them(known_home):
    with open_program(known_home) as terminal:
        wait_for_chat(terminal)
        ask_for_capital(terminal)
        (engine,) = engines_of(terminal)
        ask(terminal, STORY)
        terminal.send_signal(signal.SIGKILL)
        assert terminal.wait_exit() == 128 + signal.SIGKILL
        _, alive = psutil.wait_procs([engine], timeout=REPLY_TIMEOUT_S)
        assert not alive

    with open_program(known_home) as terminal:
        terminal.wait_for(CAPITAL, "Paris", STORY)
        wait_for_chat(terminal)
        terminal.press("ctrl+n")
        terminal.wait_gone("Paris")
        terminal.press("f3")
        terminal.wait_for("History", "1 chat")
        terminal.type("/")
        terminal.wait_for("To the list")
        terminal.type("paris")
        terminal.wait_for("is Paris.")
        terminal.press("enter")
        terminal.wait_for("Ask something.", CAPITAL, STORY, "is Paris.")
        terminal.wait_for("Retry", "Copy")
        quit_program(terminal)


def test_k_details_and_size_change_while_the_model_answers(known_home):
    with open_program(known_home, MIRA_CHAT_K="0") as terminal:
        wait_for_chat(terminal)
        ask(terminal, STORY)
        terminal.press("f2")
        terminal.wait_for("Live controls", "no drafting")
        terminal.press("down")
        terminal.wait_for_cursor_at("no drafting")
        terminal.press("backspace")
        terminal.wait_for("auto, 0 to 32")
        terminal.type("2")
        terminal.wait_for("fixed at 2", "At the next turn")
        terminal.press("enter")
        terminal.wait_gone("Live controls")
        assert "answering" in terminal.text

        terminal.press("f4")
        terminal.wait_for("Cache map", "tokens/s")
        terminal.press("f4")
        terminal.wait_gone("Cache map")

        so_far = wait_for_tokens(terminal, more_than=0)
        terminal.resize(20, 5)
        terminal.wait_until(
            lambda screen: max(map(len, screen.splitlines())) <= 20 and "lighthouse" not in screen,
            what="the small screen",
        )
        terminal.resize(COLUMNS, LINES)
        terminal.wait_for(STORY, "Served by")
        wait_for_tokens(terminal, more_than=so_far)
        stop_reply(terminal)

        terminal.wait_for("K 2")
        wait_for_chat(terminal)
        terminal.press("ctrl+r")
        terminal.wait_for("answering", "of 2")
        terminal.press("escape")
        terminal.wait_for("2/2 · stopped ·")
        quit_program(terminal)
