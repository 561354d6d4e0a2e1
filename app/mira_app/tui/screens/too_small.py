"""What is shown where a terminal has no room for the layout."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.geometry import Size
from textual.screen import ModalScreen
from textual.widgets import Static

MIN_SIZE = Size(20, 5)
"""Smallest terminal that the layout is made for, in columns and rows."""


def is_too_small(size: Size) -> bool:
    """Whether a terminal of this size has no room for the layout."""
    return size.width < MIN_SIZE.width or size.height < MIN_SIZE.height


class TooSmallScreen(ModalScreen[None]):
    """Lies over everything until the terminal is bigger; what goes on goes on."""

    CSS_PATH = "too_small.tcss"

    def compose(self) -> ComposeResult:
        """Says what is needed, in as few characters as it takes."""
        yield Static(f"Too small: {MIN_SIZE.width}x{MIN_SIZE.height}, please")
