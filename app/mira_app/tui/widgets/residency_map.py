"""The residency map: every expert of the model, where it is and how busy, live.

Rows are layers, columns experts; a model that is larger than the room is folded. What a cell
shows is decided in `panels.cache_map`. Draws only the rows that changed.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import groupby

from mira_engine.api import ResidencySample
from rich.segment import Segment
from rich.style import Style
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.content import Content
from textual.geometry import Region, Size
from textual.message import Message
from textual.strip import Strip
from textual.widget import Widget
from textual.widgets import Static

from .panels.cache_map import NAMES, SHADES, CacheMap, counts, fold, marks
from .panels.drawing import LABEL, TITLE

_LABEL_WIDTH = 4
_STYLE_OF = {
    "█": "hot-busy", "▓": "hot", "▒": "stage-busy", "░": "stage", "+": "loading", "·": "away",
    "x": "away-busy",
}  # fmt: skip
"""Component style by mark."""

_FEWEST_ROWS = 4
_WIDEST_CELL = 3


class CacheGrid(Widget):
    """The cells alone.

    Args:
        max_rows: Most rows that it asks for where its height is `auto`.
    """

    COMPONENT_CLASSES = {
        "cache-grid--label",
        *(f"cache-grid--{name}" for name in _STYLE_OF.values()),
    }

    def __init__(self, *, max_rows: int) -> None:
        super().__init__()
        self._max_rows = max_rows
        self._sample: ResidencySample | None = None
        self._map: CacheMap | None = None
        self._rows: list[tuple[str, str]] = []
        self._cell_width = 1
        self._scale = ""
        self._blank: Style | None = None

    @dataclass
    class Folded(Message):
        """What a cell stands for has changed."""

        scale: str

    @property
    def map(self) -> CacheMap | None:
        """What is drawn."""
        return self._map

    def show(self, sample: ResidencySample | None) -> None:
        """Shows a picture."""
        before, self._sample = self._sample, sample
        if sample is None or before is None or len(before.regions) != len(sample.regions):
            self._fold()
            self.refresh(layout=True)
            return
        rows = self._rows
        self._fold()
        if len(rows) != len(self._rows):
            self.refresh()
            return
        changed = [
            y for y, (old, new) in enumerate(zip(rows, self._rows, strict=True)) if old != new
        ]
        if changed:
            width = self.size.width
            self.refresh(*(Region(0, y, width, 1) for y in changed))

    def notify_style_update(self) -> None:
        """Forgets what followed from the colours."""
        self._blank = None
        super().notify_style_update()

    def on_resize(self) -> None:
        """Folds to the new room."""
        self._fold()
        self.refresh()

    def get_content_height(self, container: Size, viewport: Size, width: int) -> int:
        """Asks for a row a layer, or as many rows as a fold leaves."""
        del container, viewport, width
        num_layers = len(self._sample.regions) if self._sample else 1
        return -(-num_layers // -(-num_layers // self._max_rows))

    def _fold(self) -> None:
        self._map, self._rows = None, []
        width, height = self.size
        if self._sample is None or not self._sample.regions or not (width and height):
            return
        num_experts = len(self._sample.regions[0])
        has_labels = width >= num_experts + _LABEL_WIDTH
        room = width - _LABEL_WIDTH * has_labels
        self._map = fold(self._sample, room, height)
        self._cell_width = min(_WIDEST_CELL, room // self._map.num_columns)
        if self._map.scale != self._scale:
            self._scale = self._map.scale
            self.post_message(self.Folded(self._scale))
        for y, (regions, heat) in enumerate(zip(self._map.regions, self._map.heat, strict=True)):
            label = f"{y * self._map.layers_per_row:>3} " if has_labels else ""
            self._rows.append((label, marks(regions, heat)))

    def render_line(self, y: int) -> Strip:
        """Draws a row."""
        if self._blank is None:
            self._blank = self.rich_style
        if y >= len(self._rows):
            return Strip.blank(self.size.width, self._blank)
        label, cells = self._rows[y]
        segments = [Segment(label, self._style("label"))] if label else []
        for mark, run in groupby(cells):
            text = _cell(mark, self._cell_width) * len(list(run))
            segments.append(Segment(text, self._style(_STYLE_OF[mark])))
        return Strip(segments).adjust_cell_length(self.size.width, self._blank)

    def _style(self, name: str) -> Style:
        return self.get_component_rich_style(f"cache-grid--{name}")


def _cell(mark: str, width: int) -> str:
    """Fills a cell: shades reach into the next one, signs do not."""
    return mark * width if mark in SHADES else mark.ljust(width)


class ResidencyMap(Vertical):
    """The map with a title, what a cell is, and what the marks mean.

    Args:
        max_rows: Most rows of the map where its height follows from it.
        id: For style sheets and queries.
    """

    DEFAULT_CSS = """
    ResidencyMap {
        height: auto;

        CacheGrid {
            height: auto;
        }

        Static {
            height: auto;
        }

        .head {
            height: 1;
            text-wrap: nowrap;
            text-overflow: ellipsis;
        }

        .cache-grid--label {
            color: $text-muted;
        }

        .cache-grid--hot {
            color: $warning 80%;
        }

        .cache-grid--hot-busy {
            color: $warning;
        }

        .cache-grid--stage {
            color: $primary;
        }

        .cache-grid--stage-busy {
            color: $primary;
        }

        .cache-grid--loading {
            color: $success;
        }

        .cache-grid--away {
            color: $foreground 30%;
        }

        .cache-grid--away-busy {
            color: $error;
        }
    }
    """

    def __init__(self, *, max_rows: int = 64, id: str | None = None) -> None:
        super().__init__(id=id)
        self._grid = CacheGrid(max_rows=max(_FEWEST_ROWS, max_rows))
        self._head = Static(_head(None), classes="head")
        self._legend = Static(_legend(), classes="legend")
        self._sample: ResidencySample | None = None

    def compose(self) -> ComposeResult:
        """Lays the three parts out one below the other."""
        yield self._head
        yield self._grid
        yield self._legend

    @property
    def map(self) -> CacheMap | None:
        """What is drawn."""
        return self._grid.map

    def show(self, sample: ResidencySample | None) -> None:
        """Shows a picture; `None` for none yet."""
        if sample is self._sample:
            return
        self._sample = sample
        self._grid.show(sample)
        self._head.update(_head(sample), layout=False)

    def on_cache_grid_folded(self, event: CacheGrid.Folded) -> None:
        """Says what a cell is."""
        event.stop()
        self._legend.update(_legend(event.scale))


def _head(sample: ResidencySample | None) -> Content:
    if sample is None:
        return Content.assemble(("Cache map", TITLE), ("  after the first reply", LABEL))
    hot, stage, loading, away = counts(sample)
    parts = [f"HOT {hot}", f"STAGE {stage}", f"away {away}"]
    if loading:
        parts.insert(2, f"loading {loading}")
    return Content.assemble(("Cache map  ", TITLE), (" · ".join(parts), LABEL))


def _legend(scale: str = "") -> Content:
    entries = Content("  ").join(
        Content.assemble((sign, "bold"), (f" {name}", LABEL)) for sign, name in NAMES.items()
    )
    return Content("\n").join([entries, Content.styled(scale, LABEL)]) if scale else entries
