"""The live panel: where the time and the memory of a reply go.

A column beside the chat where there is room, two lines under it where there is not. What
it says is made by pure functions from a `PanelState` (`panels.sections`).
"""

from __future__ import annotations

from rich.cells import cell_len
from textual.content import Content
from textual.events import Resize
from textual.widgets import Static

from mira_app.panel_history import PanelState

from .panels.sections import column, strip

COLUMN_WIDTH = 30
"""Fewest characters of a line of the column."""


class LivePanel(Static):
    """Shows a `PanelState`; draws only when it changed.

    Args:
        is_column: Whether to draw a column as wide as there is room, or two lines.
        id: For style sheets and queries.
    """

    def __init__(self, *, is_column: bool, id: str) -> None:
        super().__init__(id=id)
        self._is_column = is_column
        self._state: PanelState | None = None
        self._width = COLUMN_WIDTH
        self._shape: tuple[int, list[str]] | None = None

    def on_mount(self) -> None:
        """Shows an empty state first."""
        self.show(PanelState())

    def on_resize(self, event: Resize) -> None:
        """Draws the column to its new width."""
        del event
        width = max(COLUMN_WIDTH, self.content_size.width)
        if self._is_column and width != self._width:
            self._width = width
            self._draw()

    def show(self, state: PanelState) -> None:
        """Shows a state."""
        if state is self._state or state == self._state:
            return
        self._state = state
        self._draw()

    def _draw(self) -> None:
        if self._state is None:
            return
        drawn = column(self._state, self._width) if self._is_column else strip(self._state)
        shape = _shape(drawn, self._width)
        # A layout costs more than the drawing, and is wanted only for another height.
        self.update(drawn, layout=shape != self._shape)
        self._shape = shape


def _shape(drawn: Content, width: int) -> tuple[int, list[str]]:
    """What the height follows from: the number of lines, and those that wrap."""
    lines = drawn.plain.split("\n")
    return len(lines), [line for line in lines if cell_len(line) > width]
