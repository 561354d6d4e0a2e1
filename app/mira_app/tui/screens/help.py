"""The keys in force, the words of the live panel, the notes in force, and where files are."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from mira_app.paths import AppPaths
from mira_app.sanitise import sanitise
from mira_app.tui.keymap import KeyRow

_KEYS_WIDTH, _ABOUT_WIDTH = 19, 31
_WRITING = (
    ("Enter", "send; in a list, pick the marked line"),
    ("Ctrl+J, Shift+Enter", "new line"),
    ("Tab, Shift+Tab", "go to the next part of the screen"),
)
_WORDS = (
    ("HOT", "a token's expert was in memory to stay (a hit)"),
    ("STAGE", "it was in memory for now, fetched before (a hit)"),
    ("MISS", "it was not, and had to be loaded"),
    ("stalls", "time that computing waited for experts"),
    ("ahead, missed", "waits for experts on their way, and for misses"),
    ("K, accepted", "draft tokens a round, and those the model confirmed"),
    ("moved", "bytes of experts loaded for this reply"),
    ("Memory", "the most that was held, and what was planned"),
)


def _table(rows: Sequence[tuple[str, str]]) -> Content:
    return Content("\n").join(
        Content.assemble((f"  {left:<21}", "bold"), right) for left, right in rows
    )


def _key_table(rows: Sequence[KeyRow]) -> Content:
    return Content("\n").join(
        Content.assemble(
            (f"  {row.keys:<{_KEYS_WIDTH}} ", "bold"),
            f" {_cut(row.about):<{_ABOUT_WIDTH}} ",
            (row.binding_id, "$foreground 60%"),
        )
        for row in rows
    )


def _cut(text: str) -> str:
    return text if len(text) <= _ABOUT_WIDTH else text[: _ABOUT_WIDTH - 1] + "…"


def _file_rows(paths: AppPaths) -> tuple[tuple[str, str], ...]:
    return (
        ("settings", str(paths.config)),
        ("chats", str(paths.history)),
        ("models", str(paths.data_dir)),
        ("engine log", str(paths.log_dir)),
        ("draft, last model", str(paths.state)),
    )


class HelpScreen(ModalScreen[None]):
    """Closed by Esc, F1 or Enter."""

    CSS_PATH = "help.tcss"
    BINDINGS = [
        Binding("escape,f1,enter", "dismiss", "Close", id="help.close"),
    ]

    def __init__(
        self,
        notes: Sequence[str],
        sections: Sequence[tuple[str, Sequence[KeyRow]]] = (),
        paths: AppPaths | None = None,
    ) -> None:
        super().__init__()
        self._notes = tuple(notes)
        self._sections = tuple(sections)
        self._paths = paths

    def compose(self) -> ComposeResult:
        """Lays out the parts one below the other."""
        with VerticalScroll(id="help"):
            yield _title("Writing and moving")
            yield Static(_table(_WRITING))
            for title, rows in self._sections:
                yield _title(f"\n{title}")
                yield Static(_key_table(rows))
            yield _title("\nThe live panel")
            yield Static(_table(_WORDS))
            yield _title("\nNotes in force")
            for text in self._notes or ("none",):
                yield Static(Content(sanitise(text)), classes="note")
            if self._paths is not None:
                yield _title("\nFiles")
                yield Static(_table(_file_rows(self._paths)))


def _title(text: str) -> Static:
    return Static(Content.styled(text, "bold $primary"))
