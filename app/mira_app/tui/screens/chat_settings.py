"""What one chat asks for: its system prompt and how tokens are chosen."""

from __future__ import annotations

from dataclasses import dataclass

from mira_engine.api import ConfigError, SamplingConfig
from textual import events, on
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, VerticalScroll
from textual.content import Content
from textual.screen import ModalScreen
from textual.widgets import Button, Input, Label, Static, TextArea

_REAL, _WHOLE = "a number", "a whole number"
_FIELDS = (
    ("temperature", "temperature", float, "0 always takes the most likely token"),
    ("top_p", "top-p", float, "smallest set of this probability; 1 for all"),
    ("top_k", "top-k", int, "the k most likely tokens; 0 for all"),
    ("min_p", "min-p", float, "least share of the best one; 0 for none"),
    ("repetition_penalty", "repetition penalty", float, "above 1 makes repeats less likely"),
    ("seed", "seed", int, "empty for a new one each time"),
    ("max_new_tokens", "max tokens", int, "empty for what the context holds"),
)
_MAY_BE_EMPTY = ("seed", "max_new_tokens")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatSettings:
    """What a chat asks for."""

    system_prompt: str
    sampling: SamplingConfig


def parse_field(name: str, text: str) -> float | int | None:
    """Returns the value of one field of `SamplingConfig`.

    Raises:
        ConfigError: The text is no such value.
    """
    _, label, kind, _ = next(field for field in _FIELDS if field[0] == name)
    text = text.strip()
    if not text and name in _MAY_BE_EMPTY:
        return None
    try:
        value = kind(text)
    except ValueError:
        hint = f"Give {_WHOLE if kind is int else _REAL}."
        raise ConfigError.for_field(label, text, hint) from None
    SamplingConfig(**{name: value})
    return value


class ChatSettingsScreen(ModalScreen[ChatSettings | None]):
    """Asks for them; nothing changes until all of it can be used."""

    CSS_PATH = "chat_settings.tcss"
    BINDINGS = [
        Binding("escape", "dismiss", "Cancel", id="chat_settings.cancel"),
        Binding("ctrl+s", "save", "Save", priority=True, id="chat_settings.save"),
    ]

    def __init__(self, settings: ChatSettings) -> None:
        super().__init__()
        self._settings = settings

    def compose(self) -> ComposeResult:
        """Lays out the prompt above one line for each value."""
        with VerticalScroll(id="box", can_focus=False):
            yield Label("System prompt of this chat")
            yield TextArea(
                self._settings.system_prompt,
                id="system",
                soft_wrap=True,
                compact=True,
                placeholder="empty: what the model's template says",
            )
            for name, label, _, about in _FIELDS:
                value = getattr(self._settings.sampling, name)
                with Horizontal(classes="field"):
                    yield Label(label, classes="label")
                    yield Input(
                        "" if value is None else f"{value:g}" if name != "seed" else str(value),
                        id=name,
                        compact=True,
                        select_on_focus=False,
                    )
                    yield Static(about, id=f"about-{name}", classes="about")
            with Horizontal(id="buttons"):
                yield Button("Save (Ctrl+S)", id="save", compact=True, variant="primary")
                yield Button("Cancel (Esc)", id="cancel", compact=True)

    def on_mount(self) -> None:
        """Begins in the prompt."""
        self.query_one("#system", TextArea).focus()

    @on(Input.Changed)
    def check_field(self, event: Input.Changed) -> None:
        """Says at once what is wrong with a value."""
        assert event.input.id is not None
        self._problem_of(event.input.id)

    def _problem_of(self, name: str) -> bool:
        """Shows what is wrong with a field beside it; returns whether anything is."""
        line = self.query_one(f"#about-{name}", Static)
        try:
            parse_field(name, self.query_one(f"#{name}", Input).value)
        except ConfigError as error:
            line.update(Content(error.hint))
            line.add_class("-error")
            return True
        line.update(next(about for field, _, _, about in _FIELDS if field == name))
        line.remove_class("-error")
        return False

    def on_input_submitted(self) -> None:
        """Saves by Enter."""
        self.action_save()

    def on_button_pressed(self, event: Button.Pressed) -> None:
        """Saves or leaves."""
        if event.button.id == "save":
            self.action_save()
        else:
            self.dismiss(None)

    async def on_key(self, event: events.Key) -> None:
        """Leaves the prompt by Tab, which a text area would take for itself."""
        if event.key == "tab" and isinstance(self.focused, TextArea):
            event.stop()
            self.focus_next()

    def action_save(self) -> None:
        """Ends with the values, or goes to the first that cannot be used."""
        wrong = [name for name, *_ in _FIELDS if self._problem_of(name)]
        if wrong:
            self.query_one(f"#{wrong[0]}", Input).focus()
            return
        values = {
            name: parse_field(name, self.query_one(f"#{name}", Input).value) for name, *_ in _FIELDS
        }
        self.dismiss(
            ChatSettings(
                system_prompt=self.query_one("#system", TextArea).text.strip(),
                sampling=SamplingConfig(**values),  # type: ignore[arg-type]
            )
        )
