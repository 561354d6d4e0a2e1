"""Where the person writes: Enter sends, Ctrl+J or Shift+Enter begins a new line."""

from __future__ import annotations

import re
from dataclasses import dataclass

from textual import events
from textual.message import Message
from textual.reactive import reactive
from textual.widgets import TextArea

from mira_app.sanitise import sanitise

NEW_LINE_KEYS = ("ctrl+j", "shift+enter", "alt+enter")
_PILL_LINES = 8
"""A paste of more lines than this is shown as one pill."""

_PILL_CHARS = 4000
_EDITED_LINES = 200
"""A question of more lines than this is edited around its pill."""

_MAX_HISTORY = 200
_PLACEHOLDER = "Ask something. Enter sends, Ctrl+J begins a new line."


class Composer(TextArea):
    """A text area that keeps its text until the screen took it (`clear`).

    Attributes:
        edited_turn_id: The question that is written anew, `None` for a new one.
    """

    edited_turn_id: reactive[int | None] = reactive(None)

    @dataclass
    class Submitted(Message):
        """Enter was pressed on a text that is not blank; pills are written out in it."""

        text: str

    @dataclass
    class EditLeft(Message):
        """Esc was pressed while a question was edited."""

    @dataclass
    class MessagesWanted(Message):
        """The person wants to go to the messages."""

    @dataclass
    class TailWanted(Message):
        """End was pressed where the line ends already."""

    def __init__(self) -> None:
        super().__init__(
            soft_wrap=True,
            compact=True,
            highlight_cursor_line=False,
            placeholder=_PLACEHOLDER,
            id="composer",
        )
        self._pastes: dict[str, str] = {}
        self._history: list[str] = []
        self._history_index = 0
        self._draft = ""
        self._draft_before_edit = ""

    # -- what it holds

    @property
    def full_text(self) -> str:
        """The text with every pill written out."""
        if not self._pastes:
            return self.text
        pills = "|".join(re.escape(pill) for pill in self._pastes)
        return re.sub(pills, lambda found: self._pastes[found[0]], self.text)

    def take(self) -> None:
        """Empties it once its text was sent, and remembers the text."""
        text = self.text
        if text.strip() and (not self._history or self._history[-1] != text):
            self._history = [*self._history, text][-_MAX_HISTORY:]
        self._history_index, self._draft = len(self._history), ""
        kept, self._draft_before_edit = self._draft_before_edit, ""
        self.edited_turn_id = None
        self._set(kept)

    def edit_question(self, turn_id: int, text: str) -> None:
        """Takes a question to write it anew; what was being written comes back afterwards."""
        if self.edited_turn_id is None:
            self._draft_before_edit = self.text
        self.edited_turn_id = turn_id
        text = _cleaned(text)
        is_long = text.count("\n") >= _EDITED_LINES
        self._set(self._pill(text) if is_long else text)
        self.focus()

    def leave_edit(self) -> None:
        """Gives up writing a question anew."""
        self.edited_turn_id = None
        kept, self._draft_before_edit = self._draft_before_edit, ""
        self._set(kept)

    def watch_edited_turn_id(self, turn_id: int | None) -> None:
        """Says on its border that an old question is being written anew."""
        self.set_class(turn_id is not None, "-editing")
        self.border_title = None if turn_id is None else "editing: Enter sends, Esc leaves"

    def _set(self, text: str) -> None:
        self.load_text(text)
        self.move_cursor(self.document.end)

    def _pill(self, text: str) -> str:
        """Returns what stands for a long text until it is sent."""
        for pill, pasted in self._pastes.items():
            if pasted == text:
                return pill
        lines = text.count("\n") + 1
        what = f"{lines:,} lines" if lines > 1 else f"{len(text):,} characters"
        pill = f"[paste {len(self._pastes) + 1}: {what}]"
        self._pastes[pill] = text
        return pill

    # -- keys

    async def _on_paste(self, event: events.Paste) -> None:
        """Puts the pasted text in, a long one as a pill; nothing is ever sent by it."""
        event.prevent_default()
        event.stop()
        text = _cleaned(event.text)
        if text.count("\n") >= _PILL_LINES or len(text) > _PILL_CHARS:
            text = self._pill(text.rstrip("\n"))
        result = self.replace(text, *self.selection)
        self.move_cursor(result.end_location)
        self.focus()

    async def _on_key(self, event: events.Key) -> None:
        # The base class handles every other key after this method.
        if event.key == "enter":
            if self.text.strip():
                self.post_message(self.Submitted(self.full_text))
        elif event.key in NEW_LINE_KEYS:
            self.insert("\n")
        elif event.key == "escape":
            if self.edited_turn_id is not None:
                self.post_message(self.EditLeft())
        elif event.key in ("tab", "shift+tab"):
            self.post_message(self.MessagesWanted())
        elif event.key == "end" and self.cursor_at_end_of_line:
            self.post_message(self.TailWanted())
        elif event.key == "up" and self._is_at_edge(-1):
            self._browse(-1)
        elif event.key == "down" and self._is_at_edge(1):
            self._browse(1)
        elif event.key == "backspace" and (pill := self._pill_before_cursor()):
            row, column = self.cursor_location
            self.delete((row, column - len(pill)), (row, column))
        else:
            return
        event.stop()
        event.prevent_default()

    def _is_at_edge(self, step: int) -> bool:
        """Whether the cursor cannot move that way, and there is history there."""
        if self.selection.start != self.selection.end:
            return False
        if step < 0:
            return self.cursor_at_first_line and self._wrapped_row() == 0
        is_last = self._wrapped_row() == self.wrapped_document.height - 1
        return self.cursor_at_last_line and is_last and self._history_index < len(self._history)

    def _wrapped_row(self) -> int:
        return self.wrapped_document.location_to_offset(self.cursor_location).y

    def _browse(self, step: int) -> None:
        """Shows an older or newer text; the one being written is past the newest."""
        index = self._history_index + step
        if not 0 <= index <= len(self._history):
            return
        if self._history_index == len(self._history):
            self._draft = self.text
        self._history_index = index
        self._set(self._draft if index == len(self._history) else self._history[index])

    def _pill_before_cursor(self) -> str:
        """Returns the pill that ends at the cursor, which goes as a whole; else nothing."""
        row, column = self.cursor_location
        before = self.document.get_line(row)[:column]
        if self.selection.start != self.selection.end:
            return ""
        return next((pill for pill in self._pastes if before.endswith(pill)), "")


def _cleaned(text: str) -> str:
    """Returns a text with one kind of line end and without control characters."""
    return sanitise(text.replace("\r\n", "\n").replace("\r", "\n"))
