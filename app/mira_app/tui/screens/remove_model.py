"""Ask before a model's files are removed."""

from __future__ import annotations

from mira_engine.api import format_bytes
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

from mira_app.catalog import BUILTIN, CatalogEntry, is_repo_name
from mira_app.sanitise import sanitise
from mira_app.tui.footer_keys import KeyFooter


class RemoveModelScreen(ModalScreen[bool]):
    """Says what goes and what it frees; ends with whether the person is sure."""

    CSS_PATH = "remove_model.tcss"
    BINDINGS = [
        Binding("y", "end(True)", "Remove", id="models.remove_yes"),
        Binding("n,escape,enter", "end(False)", "Keep", id="models.remove_no"),
    ]

    def __init__(self, entry: CatalogEntry, freed_bytes: int) -> None:
        super().__init__()
        self._entry = entry
        self._freed_bytes = freed_bytes

    def compose(self) -> ComposeResult:
        """Lays out the question."""
        with Vertical(id="remove-box"):
            yield Static(Content(sanitise(f"Remove {self._entry.title}?")), id="remove-title")
            yield Static(Content(sanitise(self._consequence())), id="remove-text")
        yield KeyFooter()

    def _consequence(self) -> str:
        freed = f"This frees {format_bytes(self._freed_bytes)}."
        if self._entry.model == BUILTIN:
            return f"{freed} It can be prepared again, which fetches its file again."
        if is_repo_name(self._entry.model):
            return f"{freed} What was downloaded and prepared goes; chats with it stay."
        return (
            f"{freed} What was prepared goes; your folder {self._entry.model} stays as it is, "
            "and so do chats with the model."
        )

    def action_end(self, is_sure: bool) -> None:
        """Ends with the answer."""
        self.dismiss(is_sure)
