"""One chat in the history, as the commands without a screen use it.

Knows which chat is meant by what a person typed, and saves it after every turn. A store
that cannot be written is told once and keeps the chat in memory.
"""

from __future__ import annotations

from collections.abc import Callable

from mira_engine.api import ConfigError, MiraError, SamplingConfig

from .conversation import Conversation
from .history import HistoryStore
from .stored_chat import CHANGED_ELSEWHERE, StoredChat, new_chat_id

_NUM_LISTED = 5


class KeptChat:
    """A chat under its id.

    Args:
        store: The history, opened.
        say: Told where saving fails, once, and where another program changed the chat.

    Attributes:
        chat_id: Its name in the history.
        sampling: What was chosen for this chat alone, `None` for nothing.
    """

    def __init__(self, store: HistoryStore, say: Callable[[str], None]) -> None:
        self._store, self._say = store, say
        self._has_failed = False
        self._title = ""
        self.chat_id = new_chat_id()
        self.sampling: SamplingConfig | None = None

    def begin(self) -> None:
        """Goes on with a new chat."""
        self.chat_id, self._title, self.sampling = new_chat_id(), "", None

    def resume(self, stored: StoredChat) -> Conversation:
        """Goes on with a stored chat. Returns its conversation."""
        self.chat_id, self._title = stored.chat_id, stored.title
        self.sampling = stored.sampling
        return stored.conversation

    def save(self, conversation: Conversation, *, model: str) -> Conversation:
        """Saves the chat as it is now.

        Returns:
            What to go on with: it has another program's turns too, where there are any.
        """
        if not conversation.turns:
            return conversation
        chat = StoredChat(
            chat_id=self.chat_id,
            title=self._title,
            model=model,
            conversation=conversation,
            sampling=self.sampling,
        )
        try:
            kept = self._store.save(chat)
            if kept is not conversation:
                conversation = kept
                self._say(f"note: {CHANGED_ELSEWHERE}")
            self._store.set_last_chat(self.chat_id)
        except MiraError as error:
            if not self._has_failed:
                self._has_failed = True
                self._say(f"note: this chat is not being saved: {error.message}")
        return conversation


def find_chat(store: HistoryStore, wanted: str | None) -> StoredChat:
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
