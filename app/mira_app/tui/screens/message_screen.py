"""What one can do with the messages of a chat: go to them, copy, edit, retry, see versions.

The screen that asks and draws is `ChatScreen`, made of this one. Copying runs in a thread.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from textual import getters, work
from textual.actions import SkipAction
from textual.screen import ActiveBinding

from mira_app.clipboard import ClipboardError, ClipboardRoute, copy_text
from mira_app.controller import ChatController
from mira_app.conversation import Turn
from mira_app.passages import code_blocks
from mira_app.sanitise import sanitise
from mira_app.tui.footer_keys import without
from mira_app.tui.widgets.composer import Composer
from mira_app.tui.widgets.message_list import MessageList
from mira_app.tui.widgets.messages import ChatMessage

from .chat_keys import LESS_ON_A_MESSAGE
from .code_picker import CodePicker
from .coverable import CoverableScreen


class MessageScreen(CoverableScreen):
    """A screen with messages and a composer.

    Args of the constructor: the controller, whose conversation the messages are.
    """

    messages = getters.query_one(MessageList)
    composer = getters.query_one(Composer)

    def __init__(self, controller: ChatController) -> None:
        super().__init__()
        self._controller = controller
        # A reply may be over before the widget that shows it is mounted: one at a time.
        self._drawing = asyncio.Lock()

    async def _ask(self, ask: Callable[[], None]) -> bool:
        """Asks and shows the reply that is to come; returns whether it was asked."""
        raise NotImplementedError

    @property
    def active_bindings(self) -> dict[str, ActiveBinding]:
        """Leaves out of the footer what has no room there now, or is of an engine here."""
        less = LESS_ON_A_MESSAGE if isinstance(self.focused, ChatMessage) else frozenset()
        if self._controller.server is not None:
            less |= {"app.controls"}
        bindings = super().active_bindings
        return without(bindings, less) if less else bindings

    async def on_chat_message_wanted(self, event: ChatMessage.Wanted) -> None:
        """Does what the person wants with a message."""
        message, turn = event.sender, self._turn_of(event.sender)
        if event.action == "leave":
            self.composer.focus()
        elif event.action == "neighbour":
            (self.messages.neighbour(message, event.step) or self.composer).focus()
        elif event.action == "copy":
            text = self._controller.partial if turn is None else turn.content
            self._copy(sanitise(text), "message")
        elif event.action == "copy_code":
            self._copy_code(self._controller.partial if turn is None else turn.content)
        elif turn is not None and event.action == "edit":
            self.composer.edit_question(turn.turn_id, turn.content)
        elif turn is not None and event.action == "retry":
            if await self._ask(lambda: self._controller.regenerate(turn.turn_id)):
                self.composer.focus()
        elif turn is not None and event.action == "sibling":
            await self._show_sibling(turn, event.step)

    def _turn_of(self, message: ChatMessage) -> Turn | None:
        turn_id = message.turn_id
        return None if turn_id is None else self._controller.conversation.turns[turn_id]

    async def _show_sibling(self, turn: Turn, step: int) -> None:
        siblings = self._controller.conversation.siblings(turn.turn_id)
        index = [sibling.turn_id for sibling in siblings].index(turn.turn_id) + step
        if not 0 <= index < len(siblings):
            self.notify("There is no other version that way.")
            return
        try:
            self._controller.show_sibling(turn.turn_id, step)
        except ValueError:
            self.notify("Esc stops the reply first.", severity="warning")
            return
        async with self._drawing:
            await self.messages.show(self._controller.conversation)
            await self.messages.jump_to(siblings[index].turn_id)

    async def jump_to(self, turn_id: int) -> None:
        """Shows one turn of the conversation, on whichever branch it is, and focuses it."""
        try:
            self._controller.reach(turn_id)
        except ValueError:
            self.notify("Esc stops the reply first.", severity="warning")
            return
        async with self._drawing:
            await self.messages.show(self._controller.conversation)
            await self.messages.jump_to(turn_id)

    def action_copy_text(self) -> None:
        """Copies what the mouse has selected in the messages.

        Raises:
            SkipAction: Nothing is.
        """
        selected = self.get_selected_text()
        if not selected:
            raise SkipAction
        self.clear_selection()  # or the key could not stop a reply any more
        self._copy(sanitise(selected), "selection")

    def _copy_code(self, text: str) -> None:
        blocks = code_blocks(sanitise(text))
        if not blocks:
            self.notify("There is no code block in this message.", severity="warning")
        elif len(blocks) == 1:
            self._copy(blocks[0][1], "code")
        else:
            self.app.push_screen(CodePicker(blocks), lambda code: code and self._copy(code, "code"))

    @work(group="copy")
    async def _copy(self, text: str, what: str) -> None:
        """Copies in a thread: a clipboard's program may take its time."""
        terminal_text: list[str] = []
        try:
            route = await asyncio.to_thread(
                copy_text, text, environ=os.environ, ask_terminal=terminal_text.append
            )
        except ClipboardError as error:
            self.notify(f"{error.message} {error.hint}", severity="error", markup=False)
            return
        if route is ClipboardRoute.TERMINAL:
            self.app.copy_to_clipboard(text)
        self.notify(f"Copied the {what} to {route.value}.", markup=False)
