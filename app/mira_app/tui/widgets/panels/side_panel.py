"""The column beside the chat: figures and the residency map, in three widths or folded away."""

from __future__ import annotations

from textual import getters
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.reactive import reactive

from mira_app.panel_history import PanelState
from mira_app.tui.widgets.live_panel import LivePanel
from mira_app.tui.widgets.residency_map import ResidencyMap

WIDTHS = (35, 48, 64)
"""Columns of the three widths, border, padding and scrollbar included."""

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
        width: {WIDTHS[0]};
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

    step: reactive[int] = reactive(0)
    """Which of `WIDTHS` is wanted."""

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
        self.set_timer(REST_S, self._draw)

    def action_resize(self, steps: int) -> None:
        """Takes a wider or a narrower width."""
        self.step += steps

    def validate_step(self, step: int) -> int:
        """Keeps to the widths there are."""
        return max(0, min(step, len(WIDTHS) - 1))

    def watch_step(self, step: int) -> None:
        """Takes the width."""
        self.styles.width = WIDTHS[step]

    def watch_is_open(self, is_open: bool) -> None:
        """Comes or goes."""
        self.set_class(not is_open, "-closed")
        if is_open and self.is_mounted:
            self._is_due = True
            if self._is_resting:
                self._draw()
