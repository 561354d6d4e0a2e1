"""The keys of the chat, which of them its footer has room for, and what an empty chat says."""

from __future__ import annotations

from collections.abc import Iterable

from textual.binding import Binding
from textual.content import Content
from textual.screen import ActiveBinding

from mira_app.catalog import CatalogEntry
from mira_app.sanitise import sanitise
from mira_app.tui.keymap import key_text

LESS_ON_A_MESSAGE = frozenset({
    "chat.regenerate", "chat.new", "chat.models", "app.controls", "app.history", "app.quit",
})  # fmt: skip
"""Keys that the footer has no room for beside those of a message."""

_HINTS = {
    "chat.chat_settings": "system prompt, sampling",
    "app.details": "the engine in full",
    "app.palette": "all commands",
}
"""What an empty chat tells of, by binding."""

_SERVER_HINTS = {"app.details": "its rate in full"}
"""The same where a server runs the model."""


def _key(
    key: str,
    action: str,
    name: str,
    about: str,
    *,
    id: str = "",
    is_shown: bool = True,
    is_priority: bool = False,
) -> Binding:
    return Binding(
        key,
        action,
        name,
        show=is_shown,
        priority=is_priority,
        tooltip=about,
        id=id or f"chat.{action}",
    )


def _hidden(key: str, action: str, name: str, *, id: str) -> Binding:
    return Binding(key, action, name, show=False, priority=True, id=id)


BINDINGS = [
    _key("escape", "stop", "Stop", "stop the reply, keep its text", is_priority=True),
    _key("ctrl+r", "regenerate", "Retry", "another reply to the question"),
    _key("ctrl+n", "new_chat", "New", "a new chat", id="chat.new"),
    _key("ctrl+o", "models", "Models", "the menu of models"),
    _key("f5", "chat_settings", "Chat settings", "system prompt, sampling", is_shown=False),
    _key("ctrl+t", "fold", "Fold thinking", "fold all thinking, or open it", is_shown=False),
    _hidden("ctrl+end", "tail", "Newest text", id="chat.tail"),
    _hidden("ctrl+home", "start", "First message", id="chat.start"),
    _hidden("pageup", "page(-1)", "Page up", id="chat.page_up"),
    _hidden("pagedown", "page(1)", "Page down", id="chat.page_down"),
]


def welcome_text(
    title: str, entry: CatalogEntry | None, bindings: Iterable[ActiveBinding]
) -> Content:
    """Says in an empty chat who answers, and the keys that no footer names.

    Args:
        title: The model's name.
        entry: The model, where one is chosen.
        bindings: Those in force.
    """
    about = sanitise(entry.about) if entry is not None else ""
    keys = {active.binding.id: key_text(active.binding.key) for active in bindings}
    told = _HINTS | _SERVER_HINTS if entry is not None and entry.is_remote else _HINTS
    hints = (f"{keys[name]} {does}" for name, does in told.items() if name in keys)
    return Content.assemble(
        (f"A new chat with {sanitise(title)}.", "bold"),
        f"\n{about}\n\n" if about else "\n\n",
        " · ".join(hints),
    )
