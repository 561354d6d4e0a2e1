"""The table of models: rows by model, columns by what there is room for."""

from __future__ import annotations

from collections.abc import Sequence

from rich.style import Style
from rich.text import Text
from textual import events
from textual.binding import Binding
from textual.coordinate import Coordinate
from textual.theme import Theme
from textual.widgets import DataTable

from mira_app.model_rows import Column, ModelRow, Tone, cell, columns_for, tone
from mira_app.sanitise import sanitise

_SCROLLBAR_WIDTH = 1


class ModelList(DataTable[Text]):
    """The menu; says in the footer what Enter does."""

    BINDINGS = [Binding("enter", "select_cursor", "Pick", id="models.pick")]
    COMPONENT_CLASSES = {f"model-list--{each}" for each in Tone}

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id, cursor_type="row", cell_padding=0)
        self._shown_rows: list[ModelRow] = []
        self._heading: tuple[Column | None, bool] = (None, False)
        self._layout: tuple[tuple[str, str, int], ...] = ()
        self._cells: dict[tuple[str, str], Text] = {}

    def on_mount(self) -> None:
        """Draws anew in other colours."""
        self.app.theme_changed_signal.subscribe(self, self._recolour)

    def _recolour(self, theme: Theme) -> None:
        del theme
        self._layout = ()
        column, is_down = self._heading
        self.show(self._shown_rows, column, is_down=is_down)

    @property
    def shown(self) -> list[ModelRow]:
        """The rows as they stand, from the top."""
        return self._shown_rows

    @property
    def marked(self) -> ModelRow | None:
        """The row under the cursor."""
        row = self.cursor_row
        return self._shown_rows[row] if 0 <= row < len(self._shown_rows) else None

    def show(self, rows: Sequence[ModelRow], column: Column | None, *, is_down: bool) -> None:
        """Draws the rows; only cells that changed, where the models and columns are the same.

        Args:
            rows: In the order wanted.
            column: What they are sorted by, for its heading.
            is_down: Whether the largest is first.
        """
        before = self.marked
        models = [row.entry.model for row in rows]
        is_same = models == [row.entry.model for row in self._shown_rows]
        self._shown_rows, self._heading = list(rows), (column, is_down)
        widths = columns_for(self.outer_size.width - _SCROLLBAR_WIDTH)
        layout = tuple((each.name, self._label(each), width) for each, width in widths.items())
        if is_same and layout == self._layout:
            self._update(widths)
            return
        self._layout = layout
        with self.app.batch_update():
            self._rebuild(widths)
        if before is not None:
            self.mark(before.entry.model)

    def mark(self, model: str) -> None:
        """Puts the cursor on a model, where it is listed."""
        for index, row in enumerate(self._shown_rows):
            if row.entry.model == model:
                self.move_cursor(row=index)

    def on_resize(self, event: events.Resize) -> None:
        """Shows as many columns as there is room for now."""
        del event
        column, is_down = self._heading
        self.show(self._shown_rows, column, is_down=is_down)

    def _label(self, column: Column) -> str:
        sorted_by, is_down = self._heading
        mark = (" ▼" if is_down else " ▲") if column is sorted_by else ""
        return column.value + mark

    def _rebuild(self, widths: dict[Column, int]) -> None:
        self.clear(columns=True)
        self._cells = {}
        last = list(widths)[-1]
        for column, width in widths.items():
            gap = 0 if column is last else 2
            self.add_column(Text(self._label(column)), width=width + gap, key=column.name)
        for row in self._shown_rows:
            texts = [self._text(row, column, width) for column, width in widths.items()]
            self.add_row(*texts, key=row.entry.model)
            for column, text in zip(widths, texts, strict=True):
                self._cells[row.entry.model, column.name] = text

    def _update(self, widths: dict[Column, int]) -> None:
        for index, row in enumerate(self._shown_rows):
            for place, (column, width) in enumerate(widths.items()):
                text, key = self._text(row, column, width), (row.entry.model, column.name)
                if text != self._cells.get(key):
                    self._cells[key] = text
                    self.update_cell_at(Coordinate(index, place), text)

    def _text(self, row: ModelRow, column: Column, width: int) -> Text:
        shown = sanitise(cell(row, column, width))
        text = Text(shown, style=self._style(row, column), no_wrap=True)
        text.truncate(width, overflow="ellipsis")
        return text

    def _style(self, row: ModelRow, column: Column) -> Style:
        if column is Column.NAME:
            return Style(bold=True)
        if column is Column.STATE:
            return self.get_component_rich_style(f"model-list--{tone(row)}", partial=True)
        return Style()
