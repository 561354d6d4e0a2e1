"""The messages of a chat, and the list that follows its tail."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import Vertical, VerticalScroll
from textual.content import Content
from textual.widgets import Markdown, Static
from textual.widgets.markdown import MarkdownStream

from mira_app.conversation import Turn, TurnStatus
from mira_app.figures import count
from mira_app.sanitise import Sanitiser, sanitise


class UserMessage(Static):
    """What the person wrote, shown as it is."""

    def __init__(self, text: str) -> None:
        super().__init__(Content(sanitise(text)))


class InfoMessage(Static):
    """A line of the program itself: a failure or a recovery."""

    def __init__(self, text: str, *, is_error: bool) -> None:
        super().__init__(Content(sanitise(text)), classes="-error" if is_error else "-info")


class ReplyMessage(Vertical):
    """A reply: Markdown that grows, and a caption on how it goes or ended."""

    def __init__(self) -> None:
        super().__init__()
        self._sanitiser = Sanitiser()
        self._stream: MarkdownStream | None = None
        self._markdown = Markdown()
        self._caption = Static("reading the prompt ...", classes="caption")

    def compose(self) -> ComposeResult:
        """Lays out the text above its caption."""
        yield self._markdown
        yield self._caption

    async def write(self, text: str) -> None:
        """Appends text of the model; call it at most some ten times a second."""
        if self._stream is None:
            self._stream = Markdown.get_stream(self._markdown)
        await self._stream.write(self._sanitiser.feed(text))

    def set_caption(self, text: str) -> None:
        """Says how the reply is going."""
        self._caption.update(Content(text))

    async def finish(self, turn: Turn) -> None:
        """Shows the whole text once more, in one piece, and how it ended."""
        if self._stream is not None:
            await self._stream.stop()
            self._stream = None
        await self._markdown.update(sanitise(turn.content))
        self._caption.update(Content(caption_text(turn)))
        self.set_class(turn.status is TurnStatus.STOPPED, "-stopped")
        self.set_class(turn.status is TurnStatus.ERROR, "-error")


def caption_text(turn: Turn) -> str:
    """Returns the caption of a finished reply: its end, tokens and speed."""
    parts = []
    if turn.status is TurnStatus.STOPPED:
        parts.append("stopped")
    elif turn.status is TurnStatus.ERROR:
        parts.append("broken off")
    elif not turn.content.strip():
        parts.append("the model ended the reply at once")
    if turn.stats is not None and turn.stats.num_new_tokens:
        parts.append(count(turn.stats.num_new_tokens, "token"))
        if turn.stats.tokens_per_s:
            parts.append(f"{turn.stats.tokens_per_s:.1f} tok/s")
    return " · ".join(parts)


class MessageList(VerticalScroll):
    """The chat, newest at the bottom; follows its tail until the person scrolls up."""

    can_focus = True

    async def clear(self) -> None:
        """Removes every message."""
        await self.remove_children()

    async def add_question(self, text: str) -> ReplyMessage:
        """Shows a question and the reply that is to come, and follows it."""
        reply = ReplyMessage()
        with self.app.batch_update():
            await self.mount(UserMessage(text), reply)
        self.anchor()
        return reply

    async def add_info(self, text: str, *, is_error: bool = False) -> None:
        """Shows a line of the program itself."""
        await self.mount(InfoMessage(text, is_error=is_error))
