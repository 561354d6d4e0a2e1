"""The first-start tour: one screen on what there is, shown once."""

from __future__ import annotations

from collections.abc import Mapping

from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Static

_STEPS = (
    (
        "Pick a model",
        "The built-in one is small, knows little and shows the engine at work. Bigger "
        "ones say beforehand whether and how fast they run here.",
    ),
    (
        "Chat",
        "Enter sends, Ctrl+J begins a new line. {chat.stop} stops a reply and keeps what "
        "has arrived; {chat.regenerate} asks for another one.",
    ),
    (
        "Watch the engine",
        "The live panel shows where the time goes: experts found in memory (hits) or "
        "waited for (stalls), draft tokens accepted. {app.details} shows more, {app.controls} "
        "changes budget and K.",
    ),
    (
        "Come back",
        "Chat and unsent text are there again next time; {app.history} searches all chats.",
    ),
)
_LAST = "{app.palette} finds every command, {app.help} shows all keys."


class TourScreen(ModalScreen[None]):
    """Closed by Enter or Esc.

    Args of the constructor: the keys in force, for people, by binding id.
    """

    CSS_PATH = "tour.tcss"
    BINDINGS = [
        Binding("enter,escape,space", "dismiss", "Begin", id="tour.close"),
    ]

    def __init__(self, keys: Mapping[str, str]) -> None:
        super().__init__()
        self._keys = keys

    def compose(self) -> ComposeResult:
        """Lays out the steps one below the other."""
        with VerticalScroll(id="tour"):
            yield Static(Content.styled("Welcome to mira-chat", "bold $primary"))
            for number, (title, text) in enumerate(_STEPS, start=1):
                yield Static(
                    Content.assemble(
                        (f"{number}  {title}\n", "bold"), self._with_keys(text)
                    ),
                    classes="step",
                )  # fmt: skip
            last = Content.assemble(self._with_keys(_LAST), ("  Enter begins.", "bold"))
            yield Static(last, classes="step")

    def _with_keys(self, text: str) -> str:
        for binding_id, keys in self._keys.items():
            text = text.replace(f"{{{binding_id}}}", keys)
        return text
