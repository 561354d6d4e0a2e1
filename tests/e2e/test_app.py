"""The whole program in a pseudo-terminal, from an empty data folder to a reply.

Waits on the screen only. What the screen says is found by a few words, kept here.
"""

from __future__ import annotations

import sys

import pytest
from e2e.terminal import Terminal

PROGRAM = [sys.executable, "-m", "mira_app.cli"]

MENU = "Built-in"
"""Stands in the menu where no model is installed."""

READY = "Ready"
"""Stands on the chat screen when the model can answer."""

STOPPED = "stopped"
"""Marks a reply that Esc ended."""

PREPARE_TIMEOUT_S = 400.0
REPLY_TIMEOUT_S = 120.0


@pytest.mark.builtin
@pytest.mark.slow
@pytest.mark.timeout(900)
def test_built_in_model_is_picked_prepared_asked_stopped_and_left(data_dir):
    with Terminal(PROGRAM, columns=110, lines=36) as terminal:
        terminal.wait_for(MENU)
        terminal.press("enter")
        terminal.wait_for(READY, timeout_s=PREPARE_TIMEOUT_S)

        terminal.type("Write a long story about a lighthouse.\r")
        terminal.wait_for("Write a long story about a lighthouse.", "tok/s")
        before = terminal.text
        terminal.wait_until(
            lambda screen: screen != before, what="streamed text", timeout_s=REPLY_TIMEOUT_S
        )
        terminal.press("escape")
        terminal.wait_for(STOPPED)

        terminal.type("What is 2 + 2?\r")
        terminal.wait_for("What is 2 + 2?")
        terminal.wait_for(READY, timeout_s=REPLY_TIMEOUT_S)
        terminal.press("ctrl+q")
        assert terminal.wait_exit() == 0
    assert (data_dir / "models" / "builtin").is_dir()
