"""The live panel: where the time and the memory of a reply go.

A column beside the chat where there is room, two lines under it where there is not. What
it says is made by pure functions from a `PanelState` (`panels.sections`).
"""

from __future__ import annotations

from rich.segment import Segment
from rich.style import Style as RichStyle
from textual.content import Content
from textual.events import Resize
from textual.geometry import Region, Size
from textual.strip import Strip
from textual.style import Style
from textual.visual import Visual
from textual.widget import Widget

from mira_app.panel_history import PanelState

from .panels.sections import column, strip
from .panels.server import server_column, server_strip

COLUMN_WIDTH = 30
"""Fewest characters of a line of the column."""


class LivePanel(Widget):
    """Shows a `PanelState`; draws only the lines that changed.

    Figures change four times a second, most lines less often: drawn as one text, the panel
    would cost the app twice as much.

    Args:
        is_column: Whether to draw a column as wide as there is room, or two lines.
        id: For style sheets and queries.
    """

    DEFAULT_CSS = "LivePanel { height: auto; }"

    def __init__(self, *, is_column: bool, id: str) -> None:
        super().__init__(id=id)
        self._is_column = is_column
        self._state = PanelState()
        self._width = COLUMN_WIDTH
        self._lines: list[Content] = []
        self._drawn: list[list[Strip]] = []
        """The rows of each line; several where it wraps."""
        self._rows: list[Strip] = []
        self._styles: dict[str, Style] = {}
        self._blank = RichStyle.null()
        """Of the widget; to ask for it at every line costs more than to draw one."""

    @property
    def content(self) -> Content:
        """What it says."""
        return Content("\n").join(self._lines)

    def on_mount(self) -> None:
        """Shows an empty state first."""
        self._draw_anew()

    def on_resize(self, event: Resize) -> None:
        """Draws the column to its new width."""
        del event
        width = self.content_size.width
        if self._is_column:
            width = max(COLUMN_WIDTH, width)
        if width and width != self._width:
            self._width = width
            self._draw_anew()

    def notify_style_update(self) -> None:
        """Draws anew in other colours."""
        super().notify_style_update()
        if self.is_mounted:
            self._draw_anew()

    def show(self, state: PanelState) -> None:
        """Shows a state."""
        if state is self._state or state == self._state:
            return
        self._state = state
        self._draw()

    def _draw_anew(self) -> None:
        self._lines, self._drawn, self._rows = [], [], []
        self._styles.clear()
        self._blank = self.rich_style
        self._draw()

    def _draw(self) -> None:
        if self._state.server is not None:
            draw = server_column if self._is_column else server_strip
        else:
            draw = column if self._is_column else strip
        lines = draw(self._state, self._width)
        known = list(zip(self._lines, self._drawn, strict=True))
        known += [(Content("\0"), [])] * (len(lines) - len(known))
        self._drawn = [
            drawn if line.is_same(before) else self._rows_of(line)
            for line, (before, drawn) in zip(lines, known, strict=False)
        ]
        self._lines = lines
        rows, self._rows = self._rows, [row for drawn in self._drawn for row in drawn]
        if len(rows) != len(self._rows):
            self.refresh(layout=True)
            return
        # What did not change was taken over, and is the same object.
        changed = [y for y, row in enumerate(rows) if row is not self._rows[y]]
        if changed:
            self.refresh(*(Region(0, y, self.size.width, 1) for y in changed))

    def _rows_of(self, line: Content) -> list[Strip]:
        style, blank = self.visual_style, self._blank
        if line.cell_length > self._width:
            rows = Visual.to_strips(self, line, self._width, None, style)
        else:  # No need to wrap, which costs most of it.
            pieces = line.render(style, "", self._style_of)
            rows = [Strip(Segment(text, piece.rich_style) for text, piece in pieces)]
        return [row.adjust_cell_length(self._width, blank) for row in rows]

    def _style_of(self, style: Style | str) -> Style:
        if isinstance(style, Style):
            return style
        if style not in self._styles:
            self._styles[style] = Style.parse(style)
        return self._styles[style]

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Asks for a row a line, and more for those that wrap."""
        del container, viewport, width
        return len(self._rows)

    def render_line(self, y: int) -> Strip:
        """Gives a row as it was drawn."""
        width = self.size.width
        if y >= len(self._rows):
            return Strip.blank(width, self._blank)
        row = self._rows[y]
        return row if row.cell_length == width else row.adjust_cell_length(width, self._blank)
