"""One chat in the history, as the commands without a screen use it.

Knows which chat is meant by what a person typed, and saves it after every turn. A store
that cannot be written is told once and keeps the chat in memory.
"""

from __future__ import annotations

import uuid
from collections.abc import Callable
from typing import Any

from mira_engine.api import ConfigError, MiraError

from .conversation import Conversation

_MAX_TITLE_CHARS = 60
_NUM_LISTED = 5


class KeptChat:
    """A chat under its id.

    Args:
        store: The history, opened; `None` keeps nothing.
        make: Makes what the store saves, from its fields.
        say: Told once where saving fails.
    """

    def __init__(
        self, store: Any | None, make: Callable[..., Any] | None, say: Callable[[str], None]
    ) -> None:
        self._store, self._make, self._say = store, make, say
        self._has_failed = False
        self._title = ""
        self.chat_id = uuid.uuid4().hex

    def begin(self) -> None:
        """Goes on with a new chat."""
        self.chat_id, self._title = uuid.uuid4().hex, ""

    def resume(self, stored: Any) -> Conversation:
        """Goes on with a stored chat. Returns its conversation."""
        self.chat_id, self._title = stored.chat_id, stored.title
        return stored.conversation

    def save(self, conversation: Conversation, **fields: object) -> None:
        """Saves the chat as it is now; `fields` are the model's name and the sampling."""
        if self._store is None or self._make is None or not conversation.turns:
            return
        self._title = self._title or title_of(conversation)
        chat = self._make(
            chat_id=self.chat_id, title=self._title, conversation=conversation, **fields
        )
        try:
            # The store may keep it under another id, where another program goes on with it.
            self.chat_id = self._store.save(chat) or self.chat_id
            self._store.set_last_chat(self.chat_id)
        except MiraError as error:
            if not self._has_failed:
                self._has_failed = True
                self._say(f"note: this chat is not being saved: {error.message}")


def title_of(conversation: Conversation) -> str:
    """Returns the beginning of the first question, on one line."""
    title = " ".join(conversation.turns[0].content.split()) if conversation.turns else ""
    return title if len(title) <= _MAX_TITLE_CHARS else f"{title[: _MAX_TITLE_CHARS - 1]}…"


def find_chat(store: Any, wanted: str | None) -> Any:
    """Loads a chat.

    Args:
        store: The history, opened.
        wanted: An id, the beginning of one, or `last`; `None` means `last`.

    Raises:
        ConfigError: There is none, or several begin like that.
    """
    chats = list(store.chats())
    if not chats:
        raise ConfigError("There is no chat yet.", hint="Begin one: mira-chat chat.")
    ids = [chat.chat_id for chat in chats]
    if wanted is None or wanted == "last":
        last = store.last_chat_id
        newest = max(chats, key=lambda chat: chat.updated_at).chat_id
        return store.load(last if last in ids else newest)
    found = [wanted] if wanted in ids else [each for each in ids if each.startswith(wanted)]
    if len(found) == 1:
        return store.load(found[0])
    shown = [chat for chat in chats if not found or chat.chat_id in found][:_NUM_LISTED]
    listed = "; ".join(f"{chat.chat_id[:8]} ({chat.title})" for chat in shown)
    problem = "Several chats begin" if found else "There is no chat that begins"
    raise ConfigError(f"{problem} with {wanted!r}.", hint=f"There are: {listed}.")
