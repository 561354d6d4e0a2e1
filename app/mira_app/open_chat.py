"""The chat that is open: its turns, its name, what it asks for, and where it is kept.

Knows nothing of the engine; `ChatController`, made of this, asks it for replies. A chat is
kept whenever something of it changes; where that fails the chat goes on all the same.
"""

from __future__ import annotations

import dataclasses
from typing import Protocol

from mira_engine.api import ContextTrimmed, MiraError, ReplyStats, SamplingConfig

from .catalog import CatalogEntry
from .conversation import Conversation, TurnStatus
from .settings import Settings
from .stored_chat import StoredChat, new_chat_id, title_of


class History(Protocol):
    """Where chats are kept."""

    def save(self, chat: StoredChat) -> Conversation:
        """Keeps a chat; raises `MiraError` where it cannot.

        Returns:
            The same conversation, or one with what another app has added to the chat.
        """


class OpenChat:
    """One chat, which may become another one.

    Attributes:
        settings: What the person chose.
        entry: The model chosen last.
        conversation: The chat.
        stats: Figures of the running or the last reply.
        trimmed: What of the chat did not fit the context of the running or the last reply.
        sampling: How tokens of this chat are chosen in this run.
        chat_id: The chat's name in the history.
        history: Where chats are kept, `None` for nowhere.
        title: Its name for people: how its first question begins, until it is renamed.
    """

    def __init__(self, settings: Settings, history: History | None) -> None:
        self.settings = settings
        self.entry: CatalogEntry | None = None
        self.conversation = Conversation(system_prompt=settings.system_prompt)
        self.stats = ReplyStats()
        self.trimmed: ContextTrimmed | None = None
        self.sampling = settings.sampling
        self._own_sampling: SamplingConfig | None = None
        """What was chosen for this chat alone, and is kept with it."""
        self.chat_id = new_chat_id()
        self.title = ""
        self.history = history
        self._save_error: MiraError | None = None
        self._was_changed_elsewhere = False
        """Whether another app's turns came into the chat, and nobody was told yet."""
        self._renumbered: dict[int, int] = {}
        """New numbers of turns since then, by those that were told last."""
        self._is_reply_due = False
        """Whether the question at the head is to be asked once the model is loaded."""
        self._partial = self._thinking = ""

    @property
    def is_replying(self) -> bool:
        """Whether a reply is under way, in the middle of which the chat cannot be left."""
        raise NotImplementedError

    @property
    def system_prompt(self) -> str:
        """First message of this chat; empty leaves it to the model's template."""
        return self.conversation.system_prompt

    @property
    def partial(self) -> str:
        """Text of the running reply so far."""
        return self._partial

    @property
    def unfinished(self) -> str:
        """Text of the reply that is under way; empty while none is."""
        return self._partial if self.is_replying else ""

    @property
    def thinking(self) -> str:
        """What the model thought before the running reply, so far."""
        return self._thinking

    # -- which chat, and where in it

    def new_chat(self) -> None:
        """Begins an empty conversation.

        Raises:
            ValueError: A reply is under way.
        """
        self._refuse_while_replying()
        self._show(Conversation(system_prompt=self.settings.system_prompt), None, "")
        self.chat_id = new_chat_id()

    def open_chat(self, chat: StoredChat) -> None:
        """Goes on with a chat of the history.

        Raises:
            ValueError: A reply is under way.
        """
        self._refuse_while_replying()
        self._show(chat.conversation, chat.sampling, chat.title)
        self.chat_id = chat.chat_id
        head = chat.conversation.head
        self.stats = (head.stats if head is not None else None) or ReplyStats()

    def show_sibling(self, turn_id: int, step: int) -> None:
        """Goes on from another version of a turn.

        Raises:
            ValueError: A reply is under way.
        """
        self._refuse_while_replying()
        self.conversation = self.conversation.at_sibling(turn_id, step)
        self._save()

    def reach(self, turn_id: int) -> None:
        """Moves to a branch that holds the turn, where the present one does not.

        Raises:
            ValueError: There is no such turn, or it is elsewhere while a reply is under way.
        """
        reached = self.conversation.reaching(turn_id)
        if reached is not self.conversation:
            self._refuse_while_replying()
            self.conversation = reached
            self._save()

    def set_chat_settings(self, system_prompt: str, sampling: SamplingConfig) -> None:
        """Changes what this chat asks for, from the next question on."""
        self.conversation = dataclasses.replace(self.conversation, system_prompt=system_prompt)
        if sampling != self.sampling:
            self._own_sampling = self.settings.changed_sampling(
                self._own_sampling, self.sampling, sampling
            )
            self.sampling = sampling
        if self.conversation.turns:
            self._save()

    # -- for whoever asks the engine

    def _show(self, conversation: Conversation, own: SamplingConfig | None, title: str) -> None:
        self.conversation, self.title = conversation, title
        self.sampling, self._own_sampling = self.settings.sampling_of(own), own
        self.stats = ReplyStats()
        self.trimmed, self._is_reply_due = None, False
        self._renumbered = {}
        self._partial = self._thinking = ""

    def _refuse_while_replying(self) -> None:
        if self.is_replying:
            raise ValueError("a reply is under way")

    def _begin_turn(self, conversation: Conversation) -> None:
        """Takes a conversation whose head is about to be answered."""
        self.conversation = conversation
        if not self.title:
            self.title = title_of(conversation)
        self._partial = self._thinking = ""
        self.stats, self.trimmed = ReplyStats(), None

    def _add_reply(self, status: TurnStatus, error: str = "") -> None:
        self.conversation = self.conversation.with_reply(
            self._partial,
            status=status,
            error=error,
            stats=self.stats,
            thinking=self._thinking,
            model=self.entry.model if self.entry is not None else "",
        )
        self._save()

    def _save(self) -> None:
        """Keeps the chat; where that fails it goes on, and the next poll says so."""
        if self.history is None:
            return
        try:
            kept = self.history.save(
                StoredChat(
                    chat_id=self.chat_id,
                    title=self.title,
                    model=self.entry.model if self.entry is not None else "",
                    conversation=self.conversation,
                    sampling=self._own_sampling,
                )
            )
        except MiraError as error:
            self._save_error = error
            return
        if kept is not self.conversation:
            numbers = self.conversation.numbers_in(kept)
            told = {old: numbers[new] for old, new in self._renumbered.items()}
            self._renumbered = {**numbers, **told}
            self.conversation, self._was_changed_elsewhere = kept, True
