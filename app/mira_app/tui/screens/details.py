"""Everything about the engine at full size: the residency map and plots of the session.

It asks for the panels' snapshot itself, by a timer of its own, while it is shown.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable

from textual import getters
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Container, Grid, VerticalScroll
from textual.screen import Screen
from textual.widgets import Static

from mira_app.panel_history import PanelState
from mira_app.tui.footer_keys import KeyFooter
from mira_app.tui.widgets.live_panel import LivePanel
from mira_app.tui.widgets.panels.plots import PLOTS, HistoryPlot
from mira_app.tui.widgets.residency_map import ResidencyMap

MAP_INTERVAL_S = 0.5
PLOT_INTERVAL_S = 2.0
"""Time between two plots, which take turns: one costs some ten milliseconds."""

NO_REPLY = "The plots begin with the first reply: until then there is nothing to draw."
OF_A_SERVER = (
    "The model runs on a server: of experts, memory and link it reports nothing, so there is no "
    "map of them. How fast text came is measured here."
)


class DetailsScreen(Screen[None]):
    """Closed by Esc or F4.

    Args:
        state: Gives the present snapshot.
    """

    CSS_PATH = "details.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (100, "-wide")]
    BINDINGS = [
        Binding("escape,f4", "app.pop_screen", "Back", id="details.close"),
    ]

    figures = getters.query_one("#figures", LivePanel)
    map = getters.query_one(ResidencyMap)
    plots = getters.query_one("#plots", Grid)
    sentence = getters.query_one("#sentence", Static)

    def __init__(self, state: Callable[[], PanelState]) -> None:
        super().__init__()
        self._read_state = state
        self._figures_of: PanelState | None = None
        self._layout_of: tuple[bool, bool] | None = None

    def compose(self) -> ComposeResult:
        """Puts the map beside the plots, or above them where it is narrow."""
        yield LivePanel(is_column=False, id="figures")
        with VerticalScroll(id="body"), Container(id="both"):
            yield ResidencyMap()
            yield Static(id="sentence")
            with Grid(id="plots"):
                for title in PLOTS:
                    yield HistoryPlot(title)
        yield KeyFooter()

    def on_mount(self) -> None:
        """Begins to ask."""
        self._show_map()
        self._turns = itertools.cycle(self.query(HistoryPlot))
        self.set_interval(MAP_INTERVAL_S, self._show_map)
        self.set_interval(PLOT_INTERVAL_S, self._show_next_plot)

    def _show_map(self) -> None:
        state = self._read_state()
        if not self.is_current or state is self._figures_of:
            return
        self._figures_of = state
        self._lay_out(state)
        self.figures.show(state)
        self.map.show(state.residency)

    def _lay_out(self, state: PanelState) -> None:
        """Has only what there are figures for take room, and a sentence for the rest."""
        is_served, has_figures = layout = state.server is not None, bool(state.session)
        if layout == self._layout_of:
            return
        self._layout_of = layout
        self.map.display, self.plots.display = not is_served, has_figures
        sentences = [OF_A_SERVER] * is_served + [NO_REPLY] * (not has_figures)
        self.sentence.display = bool(sentences)
        self.sentence.update("\n\n".join(sentences))
        for number, plot in enumerate(self.query(HistoryPlot)):
            plot.display = not (is_served and number)  # The first is the one of the rate.
            if has_figures:
                plot.show(state.session)

    def _show_next_plot(self) -> None:
        if self.is_current:
            next(self._turns).show(self._read_state().session)
