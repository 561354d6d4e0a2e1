"""Markdown that grows by pieces, at a cost that does not grow with it.

Textual lays out and styles every mounted widget at each change, on the screen or not, and
a page of Markdown is dozens of them. So a long text is a column of passages, of which only
those near what is seen are widgets; for those above and below them stand two empty ones as
high as they were (`GrowingText.show_near`). How many widgets there are does not depend on
how long the text is, and nothing holds on to those that were given up: what the garbage
collector walks through grew with the text, and cost more than drawing (2026-11-30, counted).
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate

from markdown_it import MarkdownIt
from markdown_it.rules_core import StateCore
from textual.app import ComposeResult
from textual.containers import Vertical
from textual.widget import Widget
from textual.widgets import Markdown
from textual.widgets.markdown import MarkdownStream

from mira_app.passages import PassageSplitter, split_passages
from mira_app.sanitise import Sanitiser, sanitise


def _sanitise_tokens(state: StateCore) -> None:
    """Cleans what Markdown itself made: `&#x202e;` is harmless until it is decoded."""
    for token in state.tokens:
        for part in (token, *(token.children or ())):
            part.content = sanitise(part.content)


def make_parser() -> MarkdownIt:
    """Returns the parser of Textual's Markdown, its output sanitised."""
    parser = MarkdownIt("gfm-like")
    parser.core.ruler.push("sanitise", _sanitise_tokens)
    return parser


class Passage(Vertical):
    """A few kilobytes of Markdown on the screen."""

    def __init__(self, source: str = "") -> None:
        super().__init__()
        self.source = source
        self._markdown = Markdown(source or None, parser_factory=make_parser)
        self._stream: MarkdownStream | None = None
        self._is_in_pieces = False
        """Whether it was put together of what came; as a whole Markdown may read it otherwise."""

    def compose(self) -> ComposeResult:
        """Shows what there is already."""
        yield self._markdown

    async def append(self, text: str) -> None:
        """Adds text; call it at most some ten times a second."""
        self.source += text
        if self._stream is None:
            self._stream = Markdown.get_stream(self._markdown)
        self._is_in_pieces = True
        await self._stream.write(text)

    async def stop(self) -> None:
        """Expects no more text; text that comes all the same is taken."""
        stream, self._stream = self._stream, None
        if stream is not None:
            await stream.stop()

    async def finish(self, source: str) -> None:
        """Shows its whole text in one piece."""
        await self.stop()
        if self._is_in_pieces or source != self.source:
            self.source, self._is_in_pieces = source, False
            await self._markdown.update(source)


class Gap(Widget):
    """Stands for passages that are not shown."""

    DEFAULT_CSS = "Gap { height: 0; }"

    def __init__(self) -> None:
        super().__init__()
        self.num_rows = 0
        self.display = False

    def fill(self, num_rows: int) -> None:
        """Is as high as these were together."""
        if num_rows != self.num_rows:
            self.num_rows = num_rows
            self.styles.height = num_rows
            self.display = num_rows > 0


@dataclass(slots=True, eq=False)
class Place:
    """A passage of a text, shown or not.

    Attributes:
        source: Its Markdown, as it was when it was shown last.
        passage: What shows it, `None` where nothing does.
        num_rows: Its height when it was laid out last, 0 before.
    """

    source: str = ""
    passage: Passage | None = None
    num_rows: int = 0

    @property
    def is_resting(self) -> bool:
        """Whether only the height is left of it."""
        return self.passage is None

    @property
    def text(self) -> str:
        """Its Markdown."""
        return self.source if self.passage is None else self.passage.source

    def show(self) -> Passage:
        """Makes what shows it."""
        self.passage = Passage(self.source)
        return self.passage

    def rest(self) -> Passage:
        """Gives up what shows it."""
        passage, self.passage = self.passage, None
        assert passage is not None
        self.source = passage.source
        return passage

    async def finish(self, source: str) -> None:
        """Takes its whole text."""
        if self.passage is None:
            self.source = source
        else:
            await self.passage.finish(source)


class GrowingText(Vertical):
    """A text of the model: sanitised, cut into passages, the last one growing."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._sanitiser = Sanitiser()
        self._splitter = PassageSplitter()
        self.places = [Place(source) for source in split_passages(sanitise(text))]
        self._above, self._below = Gap(), Gap()
        self._is_growing = False
        """Whether the last passage is being written: then it is shown wherever it is."""
        self._num_columns = 0
        self._first_shown = 0
        """The first passage that is not above what is shown."""

    def compose(self) -> ComposeResult:
        """Shows what there is already."""
        yield self._above
        yield from (place.show() for place in self.places)
        yield self._below

    @property
    def source(self) -> str:
        """The text as it is shown: Markdown, sanitised."""
        return "".join(place.text for place in self.places)

    @property
    def is_empty(self) -> bool:
        """Whether there is no text yet."""
        return len(self.places) == 1 and not self.places[0].text

    async def write(self, text: str) -> None:
        """Appends text of the model."""
        self._is_growing = True
        first, *further = self._splitter.feed(self._sanitiser.feed(text))
        if first:
            await (await self._last()).append(first)
        for piece in further:
            await (await self._last()).stop()
            await self._add(Place())
            await (await self._last()).append(piece)

    async def finish(self, text: str) -> None:
        """Shows the whole text as it is in the end, which may differ from what was written."""
        self._is_growing = False
        sources = split_passages(sanitise(text))
        for place, source in zip(self.places, sources, strict=False):
            await place.finish(source)
        for source in sources[len(self.places) :]:
            await self._add(Place(source))
        surplus = self.places[len(sources) :]
        del self.places[len(sources) :]
        for place in surplus:
            if place.passage is not None:
                await place.passage.stop()
                await place.rest().remove()
        if surplus:
            self._first_shown = min(self._first_shown, len(self.places))
            self._fill_gaps()

    async def _last(self) -> Passage:
        place = self.places[-1]
        if place.passage is None:
            await self.mount(place.show())
        assert place.passage is not None
        return place.passage

    async def _add(self, place: Place) -> None:
        self.places.append(place)
        await self.mount(place.show())

    # -- near and far

    async def show_near(self, top: int, bottom: int, *, slack: int) -> bool:
        """Shows the passages in some rows, and gives up those far from them.

        A passage that is shown again above what is seen may come out higher than it was;
        heights are exact unless the width changed meanwhile.

        Args:
            top: First row, counted from this text's own first one.
            bottom: The row behind the last.
            slack: A passage that is shown stays up to so many rows further away, or it would
                come and go at every line.

        Returns:
            Whether all of it could be done; not while something is not laid out yet.
        """
        if not self._measure():
            return False
        ends = list(accumulate(place.num_rows for place in self.places))
        near = self._overlapping(ends, top, bottom)
        allowed = self._overlapping(ends, top - slack, bottom + slack)
        window = _widened(near, [i for i in allowed if self.places[i].passage is not None])
        last = len(self.places) - 1
        shown = [i for i, place in enumerate(self.places) if place.passage is not None]
        gone = [i for i in shown if i not in window and not (self._is_growing and i == last)]
        if gone or any(self.places[i].passage is None for i in window):
            await self._change(gone, window)
        return True

    def _measure(self) -> bool:
        """Notes how high each passage is that is shown; returns whether all are laid out."""
        for place in self.places:
            if place.passage is not None:
                num_rows = place.passage.size.height
                if not num_rows and place.text.strip():
                    return False
                place.num_rows = num_rows
        return True

    def _overlapping(self, ends: list[int], top: int, bottom: int) -> range:
        """Returns which passages have a row among these."""
        touched = [
            i
            for i, (end, place) in enumerate(zip(ends, self.places, strict=True))
            if end - place.num_rows < bottom and end > top
        ]
        return range(touched[0], touched[-1] + 1) if touched else range(0)

    async def _change(self, gone: list[int], window: range) -> None:
        """Shows a window of the passages, the gaps as high as what is not shown."""
        with self.app.batch_update():
            if gone:
                await self.remove_children([self.places[index].rest() for index in gone])
            behind: Widget = self._above
            for index in window:
                if not self._is_there:
                    return
                passage = self.places[index].passage
                if passage is None:
                    passage = self.places[index].show()
                    await self.mount(passage, after=behind)
                behind = passage
            if not self._is_there:
                return
            if self.children.index(self._below) != self.children.index(behind) + 1:
                self.move_child(self._below, after=behind)
            self._first_shown = window.start if window else len(self.places)
            self._fill_gaps()

    @property
    def _is_there(self) -> bool:
        """Whether its message was not taken away meanwhile, as by a jump to another one."""
        return self._below in self.children

    def _fill_gaps(self) -> None:
        """Has each gap stand for the resting passages on its side of what is shown."""
        resting = [(i, place.num_rows) for i, place in enumerate(self.places) if place.is_resting]
        self._above.fill(sum(rows for i, rows in resting if i < self._first_shown))
        self._below.fill(sum(rows for i, rows in resting if i >= self._first_shown))

    def on_resize(self) -> None:
        """Guesses at another width how high what is not shown would be."""
        width, before = self.size.width, self._num_columns
        self._num_columns = width
        if width and before and width != before:
            for place in self.places:
                if place.passage is None:
                    place.num_rows = max(1, round(place.num_rows * before / width))
            self._fill_gaps()


def _widened(near: range, shown: list[int]) -> range:
    """Returns the near passages and those shown ones that no gap parts from them.

    Where none is near, the shown ones if no gap parts them from each other.
    """
    if not near:
        is_whole = bool(shown) and shown[-1] - shown[0] == len(shown) - 1
        return range(shown[0], shown[-1] + 1) if is_whole else range(0)
    first, stop = near.start, near.stop
    while first - 1 in shown:
        first -= 1
    while stop in shown:
        stop += 1
    return range(first, stop)


async def rest_far_passages(view: Widget, *, margin_screens: int = 1) -> bool:
    """Shows the passages near what is seen of a scrolling view, and lets the others rest.

    Returns:
        Whether all of it could be done; not while something is not laid out yet.
    """
    seen = view.region
    margin = margin_screens * seen.height
    is_done = True
    for text in view.query(GrowingText):
        place = text.region
        if place.area:  # else folded away, or not laid out yet
            top, bottom = seen.y - place.y, seen.bottom - place.y
            is_done &= await text.show_near(top - margin, bottom + margin, slack=seen.height // 2)
    return is_done
