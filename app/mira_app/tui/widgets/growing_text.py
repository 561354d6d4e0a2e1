"""Markdown that grows by pieces, at a cost that does not grow with it.

Textual lays out and styles every mounted widget at each change, on the screen or not, and
a page of Markdown is dozens of them. So a long text is a column of passages, and those far
from what is seen give their widgets up and keep their height (`Passage.rest`).
"""

from __future__ import annotations

import asyncio

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
    """A few kilobytes of Markdown."""

    def __init__(self, source: str = "") -> None:
        super().__init__()
        self.source = source
        self._markdown: Markdown | None = None
        self._stream: MarkdownStream | None = None
        self._resting_width = 0
        self._changing = asyncio.Lock()

    def compose(self) -> ComposeResult:
        """Begins awake."""
        self._markdown = Markdown(self.source or None, parser_factory=make_parser)
        yield self._markdown

    @property
    def is_resting(self) -> bool:
        """Whether only the height is left of it."""
        return self._markdown is None

    async def append(self, text: str) -> None:
        """Adds text; call it at most some ten times a second."""
        self.source += text
        await self.wake()
        async with self._changing:
            if self._stream is None and self._markdown is not None:
                self._stream = Markdown.get_stream(self._markdown)
            if self._stream is not None:
                await self._stream.write(text)

    async def close(self, source: str) -> None:
        """Shows the finished passage in one piece; text that is appended opens it again."""
        async with self._changing:
            if self._stream is not None:
                await self._stream.stop()
                self._stream = None
            elif source == self.source:
                return
            self.source = source
            if self._markdown is not None:
                await self._markdown.update(source)

    async def rest(self) -> None:
        """Gives its widgets up and keeps its place; not while it grows."""
        async with self._changing:
            height = self.size.height
            if self._markdown is None or self._stream is not None or not height:
                return
            self._resting_width = self.size.width
            markdown, self._markdown = self._markdown, None
            with self.app.batch_update():
                self.styles.height = height
                await markdown.remove()

    async def wake(self) -> None:
        """Shows its text again."""
        async with self._changing:
            if self._markdown is not None or not self.is_attached:
                return
            self._markdown = Markdown(self.source or None, parser_factory=make_parser)
            with self.app.batch_update():
                await self.mount(self._markdown)
                self.styles.height = "auto"

    def on_resize(self) -> None:
        """Guesses the height at another width, until it is awake and knows."""
        width = self.size.width
        if self.is_resting and width and width != self._resting_width:
            guess = self.size.height * self._resting_width / width
            self.styles.height = max(1, round(guess))
            self._resting_width = width


class GrowingText(Vertical):
    """A text of the model: sanitised, cut into passages, the last one growing."""

    def __init__(self, text: str = "") -> None:
        super().__init__()
        self._sanitiser = Sanitiser()
        self._splitter = PassageSplitter()
        self.passages = [Passage(source) for source in split_passages(sanitise(text))]

    def compose(self) -> ComposeResult:
        """Shows what there is already."""
        yield from self.passages

    @property
    def source(self) -> str:
        """The text as it is shown: Markdown, sanitised."""
        return "".join(passage.source for passage in self.passages)

    async def write(self, text: str) -> None:
        """Appends text of the model."""
        first, *further = self._splitter.feed(self._sanitiser.feed(text))
        if first:
            await self.passages[-1].append(first)
        for piece in further:
            await self.passages[-1].close(self.passages[-1].source)
            await self._add(Passage())
            await self.passages[-1].append(piece)

    async def finish(self, text: str) -> None:
        """Shows the whole text as it is in the end, which may differ from what was written."""
        sources = split_passages(sanitise(text))
        for passage, source in zip(self.passages, sources, strict=False):
            await passage.close(source)
        for source in sources[len(self.passages) :]:
            await self._add(Passage(source))
        surplus = self.passages[len(sources) :]
        del self.passages[len(sources) :]
        for passage in surplus:
            await passage.close("")
            await passage.remove()

    async def _add(self, passage: Passage) -> None:
        self.passages.append(passage)
        await self.mount(passage)


async def rest_far_passages(view: Widget, *, margin_screens: int = 2) -> None:
    """Wakes the passages near what is seen of a scrolling view, and lets the others rest.

    One that is woken above what is seen may come out higher than it was; the view's own
    rest heights are exact unless the width changed meanwhile.
    """
    seen = view.region
    margin = margin_screens * seen.height
    for passage in view.query(Passage):
        place = passage.region
        if not place.area:
            continue  # folded away, or not laid out yet
        is_near = seen.y - margin < place.bottom and place.y < seen.bottom + margin
        if is_near and passage.is_resting:
            await passage.wake()
        elif not is_near and not passage.is_resting:
            # Not at the very edge, or a passage there would wake and rest at every line.
            is_far = place.bottom < seen.y - margin - seen.height or (
                place.y > seen.bottom + margin + seen.height
            )
            if is_far:
                await passage.rest()
