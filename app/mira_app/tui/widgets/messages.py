"""The messages of a chat: questions, replies with their thinking, and the program's own lines."""

from __future__ import annotations

from dataclasses import dataclass

from textual import events
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Collapsible, Static

from mira_app.conversation import Turn, TurnStatus
from mira_app.figures import count
from mira_app.sanitise import sanitise

from .growing_text import GrowingText

_SHOWN_LINES = 12
_SHOWN_LINE_CHARS = 400
_OPEN_LINES = 2000
_OPEN_LINE_CHARS = 20_000
"""What is drawn of a long question at most; more would hold the screen up for seconds."""


class InfoMessage(Static):
    """A line of the program itself: a failure, a recovery or what did not fit."""

    def __init__(self, text: str, *, is_error: bool = False) -> None:
        super().__init__(Content(sanitise(text)), classes="-error" if is_error else "-info")


class ChatMessage(Vertical, can_focus=True):
    """A turn that can be focused and acted upon.

    Attributes:
        turn_id: The turn it shows, `None` while that is being written.
    """

    BINDINGS = [
        Binding("up", "neighbour(-1)", "Message above", show=False, id="message.above"),
        Binding("down", "neighbour(1)", "Message below", show=False, id="message.below"),
        Binding("escape,i", "leave", "Write", tooltip="go back to writing", id="message.leave"),
        Binding("r", "retry", "Retry", tooltip="another reply", id="message.retry"),
        Binding("y", "copy", "Copy", tooltip="copy the message", id="message.copy"),
        Binding(
            "left_square_bracket",
            "sibling(-1)",
            "Versions",
            key_display="[ ]",
            tooltip="version before",
            id="message.before",
        ),
        Binding(
            "right_square_bracket", "sibling(1)", "Version after", show=False, id="message.next"
        ),
    ]

    @dataclass
    class Wanted(Message):
        """What the person wants to do with a turn.

        Attributes:
            action: `edit`, `retry`, `copy`, `copy_code`, `sibling`, `neighbour` or `leave`.
            step: For siblings and neighbours: how far.
        """

        sender: ChatMessage
        action: str
        step: int = 0

    def __init__(self, turn_id: int | None, place: str = "") -> None:
        super().__init__()
        self.turn_id = turn_id
        self._place = place
        """Which of its versions it is, empty where it is the only one."""

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hides what a message that is still written cannot do yet, and versions without any."""
        del parameters
        if action == "sibling":
            return bool(self._place)
        return action not in ("edit", "retry") or self.turn_id is not None

    def _want(self, action: str, step: int = 0) -> None:
        self.post_message(self.Wanted(self, action, step))

    def action_neighbour(self, step: int) -> None:
        """Goes to the message above or below."""
        self._want("neighbour", step)

    def action_leave(self) -> None:
        """Goes back to where one writes."""
        self._want("leave")

    def action_retry(self) -> None:
        """Asks for another reply."""
        self._want("retry")

    def action_copy(self) -> None:
        """Copies the message."""
        self._want("copy")

    def action_sibling(self, step: int) -> None:
        """Shows another version."""
        self._want("sibling", step)


class Unfold(Static):
    """The line under a long question that says how to see all of it; a click does it."""


class UserMessage(ChatMessage):
    """What the person wrote, shown as it is; a very long one folded to its beginning."""

    BINDINGS = [
        Binding("e", "edit", "Edit", tooltip="ask it in other words", id="message.edit"),
        Binding(
            "enter,t",
            "fold",
            "Unfold",
            tooltip="unfold a question, or thinking",
            id="message.fold",
        ),
    ]

    def __init__(self, turn: Turn, place: str = "") -> None:
        super().__init__(turn.turn_id, place)
        self._text = turn.content
        self._folded = fold_question(turn.content)
        self._body = Static(Content(self._folded.text), classes="text")
        self._unfold = Unfold(self._way_on(self._folded), classes="caption")
        self.is_folded = self._folded.is_cut
        """Whether there is more of it than what is shown."""

    def compose(self) -> ComposeResult:
        """Lays out the text above its caption."""
        yield self._body
        if self._folded.is_cut:
            yield self._unfold
        if self._place:
            yield Static(Content(self._place), classes="caption")

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Hides the key of long questions on short ones."""
        if action == "fold":
            return self._folded.is_cut
        return super().check_action(action, parameters)

    def action_edit(self) -> None:
        """Writes another version."""
        self._want("edit")

    def action_fold(self) -> None:
        """Shows all of a long question, or its beginning again."""
        self.is_folded = not self.is_folded
        shown = self._folded
        if not self.is_folded:
            shown = fold_question(self._text, _OPEN_LINES, _OPEN_LINE_CHARS)
        self._body.update(Content(shown.text))
        self._unfold.update(self._way_on(shown))

    def _way_on(self, shown: FoldedQuestion) -> Content:
        """Says what is left out, and how to see more or less."""
        way = "Enter or a click shows all" if shown is self._folded else "Enter or a click folds it"
        return Content(" · ".join(filter(None, (shown.rest, way))))

    def on_click(self, event: events.Click) -> None:
        """Unfolds where the line is clicked that says so."""
        if event.widget is self._unfold:
            self.action_fold()


class Thinking(Collapsible):
    """What a model thinks before it answers: open while it streams, folded afterwards."""

    def __init__(self, text: str, *, is_folded: bool) -> None:
        self.text = GrowingText(text)
        title = "thought" if is_folded else "thinking ..."
        super().__init__(self.text, title=title, collapsed=is_folded)
        self._title.can_focus = False  # the message is what one goes to

    def scroll_visible(self, *args: object, **options: object) -> None:
        """Does nothing: folding never moves what the person reads."""

    def fold(self) -> None:
        """Folds it, now that the answer begins."""
        self.title = "thought"
        self.collapsed = True


class ReplyMessage(ChatMessage):
    """A reply: thinking, Markdown that grows, and a caption on how it goes or ended."""

    BINDINGS = [
        Binding("Y", "copy_code", "Code", tooltip="copy a code block", id="message.copy_code"),
        Binding("enter,t", "fold", "Fold its thinking", show=False, id="message.fold"),
    ]

    def __init__(self, turn: Turn | None = None, place: str = "") -> None:
        super().__init__(turn.turn_id if turn is not None else None, place)
        self.thinking: Thinking | None = None
        if turn is not None and turn.thinking:
            self.thinking = Thinking(turn.thinking, is_folded=True)
        self.answer = GrowingText(turn.content if turn is not None else "")
        caption = "reading the prompt ..." if turn is None else caption_text(turn, place)
        self._caption = Static(Content(caption), classes="caption")
        if turn is not None:
            self._mark(turn)

    def compose(self) -> ComposeResult:
        """Lays out the text above its caption."""
        if self.thinking is not None:
            yield self.thinking
        yield self.answer
        yield self._caption

    async def write(self, text: str) -> None:
        """Appends text of the answer; call it at most some ten times a second."""
        if self.thinking is not None and self.answer.is_empty and text.strip():
            self.thinking.fold()
        await self.answer.write(text)

    async def write_thinking(self, text: str) -> None:
        """Appends what the model thinks."""
        if self.thinking is None:
            self.thinking = Thinking("", is_folded=False)
            await self.mount(self.thinking, before=0)
        await self.thinking.text.write(text)

    def set_caption(self, text: str) -> None:
        """Says how the reply is going."""
        self._caption.update(Content(text))

    async def finish(self, turn: Turn, place: str = "") -> None:
        """Shows the whole text once more, in one piece, and how it ended."""
        self.turn_id, self._place = turn.turn_id, place
        if turn.thinking and self.thinking is None:
            await self.write_thinking(turn.thinking)
        if self.thinking is not None:
            await self.thinking.text.finish(turn.thinking)
            self.thinking.fold()
        await self.answer.finish(turn.content)
        self._caption.update(Content(caption_text(turn, place)))
        self._mark(turn)
        if self.is_attached:  # One may leave the app while a reply's end is drawn.
            self.refresh_bindings()

    def _mark(self, turn: Turn) -> None:
        self.set_class(turn.status is TurnStatus.STOPPED, "-stopped")
        self.set_class(turn.status is TurnStatus.ERROR, "-error")

    def action_copy_code(self) -> None:
        """Copies a block of code."""
        self._want("copy_code")

    def action_fold(self) -> None:
        """Folds the thinking, or opens it."""
        if self.thinking is not None:
            self.thinking.collapsed = not self.thinking.collapsed


@dataclass(frozen=True, slots=True, kw_only=True)
class FoldedQuestion:
    """A question as it is shown.

    Attributes:
        text: Its beginning, or all of it.
        rest: What of it is not in the text, empty for nothing.
    """

    text: str
    rest: str = ""

    @property
    def is_cut(self) -> bool:
        """Whether something is left out."""
        return bool(self.rest)


def fold_question(
    text: str, num_lines: int = _SHOWN_LINES, num_chars: int = _SHOWN_LINE_CHARS
) -> FoldedQuestion:
    """Returns a question, sanitised, and of a long one the beginning.

    Args:
        text: What the person wrote.
        num_lines: Most lines.
        num_chars: Most characters of a line.
    """
    lines = sanitise(text.replace("\r\n", "\n")).split("\n")
    shown = [
        line if len(line) <= num_chars else line[:num_chars] + " …" for line in lines[:num_lines]
    ]
    rest = ""
    if len(lines) > num_lines:
        num_more = len(lines) - num_lines
        rest = f"… {num_more:,} more {'line' if num_more == 1 else 'lines'}"
    elif shown != lines:
        rest = "… longer lines"
    return FoldedQuestion(text="\n".join(shown), rest=rest)


def caption_text(turn: Turn, place: str = "") -> str:
    """Returns the caption of a finished reply: its place, end, tokens and speed."""
    parts = [place] if place else []
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
