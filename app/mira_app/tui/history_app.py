"""An app that keeps its chats in a history, and opens one again.

Knows the store, the controller's conversation and the chat screen that draws it; which
screen lies over which is `MiraApp`'s. The store is asked in threads.
"""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from mira_engine.api import MiraError

from mira_app.controller import ChatController
from mira_app.conversation import Role, TurnStatus
from mira_app.paths import AppPaths

from .personal_app import PersonalApp
from .screens.chat import ChatScreen

if TYPE_CHECKING:
    from mira_app.history import ChatSummary, HistoryStore, StoredChat

    from .screens.history import HistoryScreen


class HistoryApp(PersonalApp):
    """What `MiraApp` does with the history, where it has one.

    Args of the constructor: the controller; the history, not yet opened, `None` to keep no
    chats; where files are; what is wrong from the beginning.
    """

    def __init__(
        self,
        controller: ChatController,
        store: HistoryStore | None,
        paths: AppPaths | None,
        problems: Sequence[MiraError],
    ) -> None:
        super().__init__(controller.settings.interface, paths, problems)
        self.controller = controller
        self.chat_screen = ChatScreen(controller)
        self._store = store
        self._is_store_open = False
        self._is_restored = False
        self._is_chat_dressed = False
        self._is_drawing_due = False
        self._due_turn_id: int | None = None
        self._last_chat_id: str | None = None
        self._deleted_chat_id: str | None = None
        """The chat that was open when it was deleted."""
        self._unfinished = ("", "")
        """A chat, and its reply as far as it had come when the app ended."""

    def show_chat(self) -> None:
        """Brings the chat to the front."""
        raise NotImplementedError

    async def _open_store(self) -> None:
        """Opens the history, then the chat that was open last."""
        store = self._store
        assert store is not None
        try:
            notices = await asyncio.to_thread(store.open)
            self._is_store_open = True
            self.controller.history = store
            for notice in notices:
                self.tell_problem(MiraError(notice))
            await self._keep_left_reply(store)
            if self.interface.is_chat_restored:
                chat_id = await asyncio.to_thread(lambda: store.last_chat_id)
                self._last_chat_id = chat_id
                if chat_id is not None and not self.controller.conversation.turns:
                    chat = await asyncio.to_thread(store.load, chat_id)
                    await self._show_stored(await self._with_unfinished(chat), None)
            self._is_restored = True
        except MiraError as error:
            self.tell_problem(error)

    async def _keep_left_reply(self, store: HistoryStore) -> None:
        """Keeps what a reply of another chat than the last had come to in a killed app."""
        chat_id, partial = self._unfinished
        if not partial:
            return
        try:
            chat = await asyncio.to_thread(store.load, chat_id)
        except MiraError:
            return  # The chat was deleted meanwhile, and its reply with it.
        await self._with_unfinished(chat)

    async def _with_unfinished(self, chat: StoredChat) -> StoredChat:
        """Adds what a reply had come to when the app was killed in the middle of it."""
        chat_id, partial = self._unfinished
        head = chat.conversation.head
        if chat_id != chat.chat_id or not partial or head is None or head.role is not Role.USER:
            return chat
        conversation = chat.conversation.with_reply(
            partial,
            status=TurnStatus.ERROR,
            error="The program ended before the reply did.",
            model=chat.model,
        )
        chat = dataclasses.replace(chat, conversation=conversation)
        assert self._store is not None
        kept = await asyncio.to_thread(self._store.save, chat)
        return dataclasses.replace(chat, conversation=kept)

    async def read_chats(self) -> list[ChatSummary]:
        """Returns all chats, newest first; none where none are kept."""
        if self._store is None or not self._is_store_open:
            return []
        return await asyncio.to_thread(self._store.chats)

    async def open_chat(self, chat_id: str, turn_id: int | None = None) -> None:
        """Opens a chat of the history, at a turn where one is named."""
        store = self._store
        assert store is not None
        try:
            chat = await asyncio.to_thread(store.load, chat_id)
            await self._show_stored(chat, turn_id, bring=self.show_chat)
        except MiraError as error:
            self.tell_problem(error)

    async def _show_stored(
        self, chat: StoredChat, turn_id: int | None, bring: Callable[[], None] | None = None
    ) -> None:
        """Draws a chat, once `bring` has brought it to the front: covered, it has no layout."""
        try:
            self.controller.open_chat(chat)
        except ValueError:
            raise MiraError("A reply is under way.", hint="Esc stops it.") from None
        self._due_turn_id = turn_id
        self._is_drawing_due = True
        if bring is not None:
            bring()
        if self._is_chat_dressed:
            await self._draw_due_chat()

    async def _draw_due_chat(self) -> None:
        turn_id, self._due_turn_id, self._is_drawing_due = self._due_turn_id, None, False
        await self.chat_screen.show_chat()
        if turn_id is not None:
            await self.chat_screen.jump_to(turn_id)

    async def _remember_chat(self) -> None:
        """Has the history know which chat is open, none where it is still empty."""
        if self._store is None or not self._is_restored:
            return
        controller = self.controller
        chat_id = controller.chat_id if controller.conversation.turns else None
        if chat_id != self._last_chat_id:
            self._last_chat_id = chat_id
            try:
                await asyncio.to_thread(self._store.set_last_chat, chat_id)
            except MiraError as error:
                self.tell_problem(error)

    async def on_history_screen_chosen(self, event: HistoryScreen.Chosen) -> None:
        """Opens the chat."""
        await self.open_chat(event.chat_id, event.turn_id)

    async def _show_again(self, chat_id: str) -> None:
        """Shows the chat that was open until it was deleted, under whatever lies over it."""
        assert self._store is not None
        try:
            await self._show_stored(await asyncio.to_thread(self._store.load, chat_id), None)
        except MiraError as error:
            self.tell_problem(error)

    def on_history_screen_renamed(self, event: HistoryScreen.Renamed) -> None:
        """Gives the open chat its new name too, so that the next reply does not undo it."""
        if event.chat_id == self.controller.chat_id:
            self.controller.title = event.title

    async def on_history_screen_deleted(self, event: HistoryScreen.Deleted) -> None:
        """Begins a new chat where the open one was deleted."""
        if event.is_restored:
            if event.chat_id == self._deleted_chat_id and not self.controller.conversation.turns:
                await self._show_again(event.chat_id)
            return
        if event.chat_id != self.controller.chat_id:
            return
        try:
            self.controller.new_chat()
        except ValueError:
            return  # the reply under way will be kept, and the chat with it
        self._deleted_chat_id = event.chat_id
        if self._is_chat_dressed:
            await self.chat_screen.show_chat()
