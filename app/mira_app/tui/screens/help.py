"""Keys, the words of the live panel, and the notes in force."""

from __future__ import annotations

from collections.abc import Sequence

from mira_engine.api import Notice
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from mira_app.sanitise import sanitise

_KEYS = (
    ("Enter", "send; in the menu, pick the marked model"),
    ("Ctrl+J, Shift+Enter", "new line"),
    ("Esc", "stop; what has arrived is kept"),
    ("Ctrl+R", "answer the last question again"),
    ("Ctrl+N", "new chat"),
    ("Ctrl+O", "models"),
    ("Ctrl+P", "all commands, themes"),
    ("F1", "this help"),
    ("Ctrl+Q", "quit"),
)
_WORDS = (
    ("hit", "a token's expert was in device memory"),
    ("miss", "it was not, and had to be loaded"),
    ("stalls", "time that computing waited for experts"),
    ("accepted", "draft tokens per round that the model confirmed"),
    ("moved", "bytes of experts loaded for this reply"),
    ("peak / plan", "memory held, and what was planned"),
)


def _table(rows: Sequence[tuple[str, str]]) -> Content:
    return Content("\n").join(
        Content.assemble((f"  {left:<21}", "bold"), right) for left, right in rows
    )


class HelpScreen(ModalScreen[None]):
    """Closed by Esc, F1 or Enter."""

    CSS_PATH = "help.tcss"
    BINDINGS = [
        Binding("escape,f1,enter", "dismiss", "Close", id="help.close"),
    ]

    def __init__(self, notices: Sequence[Notice]) -> None:
        super().__init__()
        self._notices = tuple(notices)

    def compose(self) -> ComposeResult:
        """Lays out the three parts one below the other."""
        with VerticalScroll(id="help"):
            yield Static(Content.styled("Keys", "bold $primary"))
            yield Static(_table(_KEYS))
            yield Static(Content.styled("\nThe live panel", "bold $primary"))
            yield Static(_table(_WORDS))
            yield Static(Content.styled("\nNotes in force", "bold $primary"))
            texts = [sanitise(notice.text) for notice in self._notices] or ["none"]
            for text in texts:
                yield Static(Content(text), classes="note")
