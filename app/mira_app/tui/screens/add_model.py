"""Put a repository of the hub or a folder into the menu."""

from __future__ import annotations

from mira_engine.api import MiraError
from textual import getters
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Input, Static

from mira_app.catalog import Shelf, is_repo_name, model_name
from mira_app.sanitise import sanitise
from mira_app.tui.footer_keys import KeyFooter

_HINT = (
    "owner/name or the address of a model's page on the hub, or a folder with config.json and "
    "safetensors files. Nothing is downloaded before you pick it in the menu."
)


class AddModelScreen(ModalScreen[str | None]):
    """Asks for a name; ends with what the engine calls the model, or with `None`."""

    CSS_PATH = "add_model.tcss"
    BINDINGS = [Binding("escape", "leave", "Back", id="models.leave_adding")]

    name_input = getters.query_one("#new-name", Input)
    verdict = getters.query_one("#new-verdict", Static)

    def __init__(self, shelf: Shelf) -> None:
        super().__init__()
        self._shelf = shelf

    def compose(self) -> ComposeResult:
        """Lays out the question."""
        with Vertical(id="add-box"):
            yield Static("Add a model", id="add-title")
            yield Input(placeholder="owner/name, an address, or a folder", id="new-name")
            yield Static(id="new-verdict")
            yield Static(_HINT, id="add-hint")
        yield KeyFooter()

    def on_input_changed(self, event: Input.Changed) -> None:
        """Says what the text is taken for, while one types; complains only at the end."""
        try:
            name = model_name(event.value)
        except MiraError:
            self.verdict.update("")
            return
        kind = "a repository of the hub" if is_repo_name(name) else "a folder"
        self._tell(f"{name}: {kind}. Enter adds it.", is_wrong=False)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Adds it, or says what is wrong; the text stays."""
        try:
            model = self._shelf.add(event.value)
        except MiraError as error:
            self._tell(f"{error.message} {error.hint}", is_wrong=True)
        else:
            self.dismiss(model)

    def action_leave(self) -> None:
        """Goes back without a model."""
        self.dismiss(None)

    def _tell(self, text: str, *, is_wrong: bool) -> None:
        self.verdict.set_class(is_wrong, "-wrong")
        self.verdict.update(Content(sanitise(text)))
