"""Plots over the whole session, drawn by plotext.

Lines are told apart by the letters they are drawn with, which the title explains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from itertools import accumulate

from textual_plotext import PlotextPlot

from mira_app.panel_history import Interval

Read = Callable[[Interval], float | None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Line:
    """One line of a plot.

    Attributes:
        label: Its name, empty where it is the only one.
        mark: What it is drawn with: a letter, or `braille` for a fine line.
        colour: One of plotext's.
        read: Its figure of an interval, `None` for none.
    """

    label: str = ""
    mark: str = "braille"
    colour: str = "blue+"
    read: Read


def _share(index: int) -> Read:
    return lambda interval: 100 * shares[index] if (shares := interval.served.shares) else None


def _cause(index: int) -> Read:
    return lambda interval: parts[index] if (parts := interval.ms_per_token) else None


def _link_mib(interval: Interval) -> float:
    return interval.link_bytes_per_s / 2**20


PLOTS: dict[str, tuple[Line, ...]] = {
    "tokens/s, over seconds of generating": (
        Line(read=lambda i: i.tokens_per_s if i.num_tokens else None),
    ),
    "ms/token": (
        Line(label="verify", mark="v", colour="blue+", read=_cause(3)),
        Line(label="draft", mark="d", colour="green", read=_cause(2)),
        Line(label="waits ahead", mark="w", colour="orange", read=_cause(0)),
        Line(label="missed", mark="m", colour="red", read=_cause(1)),
    ),
    "served by, %": (
        Line(label="HOT", mark="H", colour="orange", read=_share(0)),
        Line(label="STAGE", mark="S", colour="blue+", read=_share(1)),
        Line(label="MISS", mark="M", colour="red", read=_share(2)),
    ),
    "link, MiB/s": (Line(read=_link_mib, colour="green"),),
}
"""The plots by their titles."""


def points(session: tuple[Interval, ...], read: Read) -> tuple[list[float], list[float]]:
    """Returns seconds of generating at the end of each interval, and the figure there."""
    ends = accumulate(interval.seconds for interval in session)
    found = [(end, read(i)) for end, i in zip(ends, session, strict=True)]
    return (
        [end for end, value in found if value is not None],
        [value for _, value in found if value is not None],
    )


class HistoryPlot(PlotextPlot):
    """One plot.

    Args:
        title: One of `PLOTS`.
    """

    def __init__(self, title: str) -> None:
        super().__init__()
        self._title = title
        self._session: tuple[Interval, ...] | None = None

    @property
    def heading(self) -> str:
        """The title, and the letter of each line with its name: a legend hides the beginning."""
        names = [f"{line.mark} {line.label}" for line in PLOTS[self._title] if line.label]
        return ": ".join([self._title, " · ".join(names)] if names else [self._title])

    def show(self, session: tuple[Interval, ...]) -> None:
        """Shows the session so far; draws only where it went on."""
        if session is self._session:
            return
        self._session = session
        plot = self.plt
        plot.clear_data()
        plot.title(self.heading)
        plot.grid(False, False)
        # As grey, some colours are as dark as the background: letters differ all the same.
        is_grey = self.app.no_color
        top = 0.0
        for line in PLOTS[self._title]:
            seconds, values = points(session, line.read)
            if values:
                plot.plot(
                    seconds,
                    values,
                    marker=line.mark,
                    color="default" if is_grey else line.colour,
                )
                top = max(top, *values)
        plot.ylim(0, 1.05 * top if top else 1)
        self.refresh()
