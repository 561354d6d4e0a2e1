"""The column beside the chat: figures and the residency map, as wide as wanted or folded away."""

from __future__ import annotations

from dataclasses import dataclass

from textual import getters
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.message import Message
from textual.reactive import reactive

from mira_app.panel_history import PanelState
from mira_app.tui.widgets.live_panel import LivePanel
from mira_app.tui.widgets.residency_map import ResidencyMap

USUAL_COLUMNS = 35
"""Border, padding and scrollbar included."""

_MIN_COLUMNS, _MAX_COLUMNS, _STEP_COLUMNS = USUAL_COLUMNS, 80, 8
"""With fewer, figures would be cut."""

REST_S = 0.5
"""A picture stays so long: who reads needs no more, and each costs some milliseconds."""

_MAP_ROWS = 16


class SidePanel(VerticalScroll):
    """Shows a `PanelState` as a column."""

    BINDINGS = [
        Binding("ctrl+left,less_than_sign", "resize(1)", "Wider", id="panels.wider"),
        Binding("ctrl+right,greater_than_sign", "resize(-1)", "Narrower", id="panels.narrower"),
    ]
    DEFAULT_CSS = f"""
    SidePanel {{
        width: {USUAL_COLUMNS};
        max-width: 50%;
        padding: 1 1 0 2;
        scrollbar-gutter: stable;
        scrollbar-size-vertical: 1;
        border-left: solid $primary 30%;

        &.-closed {{
            display: none;
        }}

        &:focus {{
            border-left: solid $primary;
        }}

        ResidencyMap {{
            margin: 1 0 0 0;
        }}
    }}
    """

    is_open: reactive[bool] = reactive(True)
    """Whether it is wanted; a terminal that is too small hides it all the same."""

    columns: reactive[int] = reactive(USUAL_COLUMNS)
    """How wide it is wanted, where the screen has room for it."""

    @dataclass
    class Resized(Message):
        """The person gave it another width."""

        columns: int

    column = getters.query_one("#column", LivePanel)
    map = getters.query_one(ResidencyMap)

    def __init__(self, *, id: str | None = None) -> None:
        super().__init__(id=id)
        self._state = PanelState()
        self._is_resting = True
        self._is_due = False

    def compose(self) -> ComposeResult:
        """Puts the map below the figures."""
        yield LivePanel(is_column=True, id="column")
        yield ResidencyMap(max_rows=_MAP_ROWS)

    def show(self, state: PanelState) -> None:
        """Shows a state: at once, or when the last one has been there for `REST_S`.

        Nothing is drawn while the panel is away, or another screen over it.
        """
        self._state, self._is_due = state, True
        if self._is_resting:
            self._draw()

    def _draw(self) -> None:
        self._is_resting = not (self.is_open and self._is_due and self.screen.is_current)
        if self._is_resting:
            return
        self._is_due = False
        self.column.show(self._state)
        self.map.show(self._state.residency)
        self.map.display = self._state.server is None
        self.set_timer(REST_S, self._draw)

    def action_resize(self, steps: int) -> None:
        """Takes more columns, or fewer."""
        self.columns += steps * _STEP_COLUMNS
        self.post_message(self.Resized(self.columns))

    def validate_columns(self, columns: int) -> int:
        """Keeps to what can be read and leaves room for the chat."""
        return max(_MIN_COLUMNS, min(columns, _MAX_COLUMNS))

    def watch_columns(self, columns: int) -> None:
        """Takes the width."""
        self.styles.width = columns

    def watch_is_open(self, is_open: bool) -> None:
        """Comes or goes."""
        self.set_class(not is_open, "-closed")
        if is_open and self.is_mounted:
            self._is_due = True
            if self._is_resting:
                self._draw()
