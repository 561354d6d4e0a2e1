"""Where the person writes: Enter sends, Ctrl+J or Shift+Enter begins a new line."""

from __future__ import annotations

from dataclasses import dataclass

from textual import events
from textual.message import Message
from textual.widgets import TextArea

_NEW_LINE_KEYS = ("ctrl+j", "shift+enter", "alt+enter")


class Composer(TextArea):
    """A text area that keeps its text until the screen took it (`clear`)."""

    @dataclass
    class Submitted(Message):
        """Enter was pressed on a text that is not blank."""

        text: str

    def __init__(self) -> None:
        super().__init__(
            soft_wrap=True,
            compact=True,
            highlight_cursor_line=False,
            placeholder="Ask something. Enter sends, Ctrl+J begins a new line.",
            id="composer",
        )

    async def _on_key(self, event: events.Key) -> None:
        # The base class handles every other key after this method.
        if event.key == "enter":
            event.stop()
            event.prevent_default()
            if self.text.strip():
                self.post_message(self.Submitted(self.text))
        elif event.key in _NEW_LINE_KEYS:
            event.stop()
            event.prevent_default()
            self.insert("\n")
