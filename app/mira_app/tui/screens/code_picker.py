"""Which of a message's code blocks to copy."""

from __future__ import annotations

from collections.abc import Sequence

from textual.app import ComposeResult
from textual.binding import Binding
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import OptionList
from textual.widgets.option_list import Option

from mira_app.figures import count
from mira_app.sanitise import sanitise

_FIRST_LINE_CHARS = 60


class CodePicker(ModalScreen[str | None]):
    """Ends with the code that was picked."""

    CSS_PATH = "code_picker.tcss"
    BINDINGS = [Binding("escape", "dismiss", "Cancel", id="code_picker.cancel")]

    def __init__(self, blocks: Sequence[tuple[str, str]]) -> None:
        super().__init__()
        self._blocks = tuple(blocks)

    def compose(self) -> ComposeResult:
        """Lays out a line for each block."""
        options = OptionList(*(Option(_label(*block)) for block in self._blocks))
        options.border_title = "Copy which block?"
        yield options

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Ends with that block's code."""
        self.dismiss(self._blocks[event.option_index][1])


def _label(language: str, code: str) -> Content:
    first = next((line for line in code.splitlines() if line.strip()), "")
    lines = count(code.count("\n") + 1, "line")
    about = f"{language} · {lines}" if language else lines
    return Content.assemble(
        (sanitise(first.strip())[:_FIRST_LINE_CHARS], "bold"), "\n", (sanitise(about), "dim")
    )
