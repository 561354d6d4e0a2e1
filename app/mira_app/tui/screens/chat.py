"""The chat: messages, the live panel and the composer."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

from mira_engine.api import MiraError
from textual import getters
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Horizontal, Vertical, VerticalScroll
from textual.content import Content
from textual.message import Message
from textual.screen import Screen
from textual.widgets import Footer, Static

from mira_app.controller import ChatController, Stage, Update
from mira_app.conversation import Role
from mira_app.sanitise import sanitise
from mira_app.tui.widgets.composer import Composer
from mira_app.tui.widgets.live_panel import LivePanel, PanelState
from mira_app.tui.widgets.messages import MessageList, ReplyMessage

_WIDE_COLUMNS = 100


class ChatScreen(Screen[None]):
    """One conversation with the loaded model."""

    CSS_PATH = "chat.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (_WIDE_COLUMNS, "-wide")]
    BINDINGS = [
        Binding("escape", "stop", "Stop", priority=True, id="chat.stop"),
        Binding("ctrl+r", "regenerate", "Again", id="chat.regenerate"),
        Binding("ctrl+n", "new_chat", "New", id="chat.new"),
        Binding("ctrl+o", "models", "Models", id="chat.models"),
    ]

    @dataclass
    class ModelsWanted(Message):
        """The person wants the menu of models."""

    messages = getters.query_one(MessageList)
    composer = getters.query_one(Composer)
    model_line = getters.query_one("#model", Static)
    state_line = getters.query_one("#state", Static)

    def __init__(self, controller: ChatController) -> None:
        super().__init__()
        self._controller = controller
        self._reply: ReplyMessage | None = None
        self._was_recovering = False
        self._footer_stage: Stage | None = None
        self._shown_stage: Stage | None = None
        # A reply may be over before the widget that shows it is mounted: one at a time.
        self._drawing = asyncio.Lock()

    def compose(self) -> ComposeResult:
        """Lays out the chat with the panel beside or under it."""
        with Horizontal(id="top"):
            yield Static(id="model")
            yield Static(id="state")
        with Horizontal(id="middle"):
            with Vertical(id="talk"):
                yield MessageList()
                yield LivePanel(is_column=False, id="strip")
                yield Composer()
            with VerticalScroll(id="side", can_focus=False):
                yield LivePanel(is_column=True, id="column")
        yield Footer(show_command_palette=False)

    def on_mount(self) -> None:
        """Begins with what the controller already knows."""
        self._show_state()

    def on_screen_resume(self) -> None:
        """Puts the cursor where one writes."""
        self._footer_stage = None  # it may not follow while another screen is shown
        self._show_state()
        self.composer.focus()

    # -- the person

    async def on_composer_submitted(self, event: Composer.Submitted) -> None:
        """Sends, unless something else is going on; then the text stays where it is."""
        if not self._controller.can_send:
            self.notify("One moment: the model is busy. Esc stops it.", severity="warning")
            return
        async with self._drawing:
            try:
                self._controller.send(event.text.strip())
            except MiraError as error:
                await self.show_problem(error)
                return
            self.composer.clear()
            self._reply = await self.messages.add_question(event.text.strip())
            self._show_state()

    async def action_stop(self) -> None:
        """Stops the reply; never touches what is being written."""
        if self._controller.stop():
            self._show_state()

    async def action_regenerate(self) -> None:
        """Asks for another reply to the last question."""
        if not self._controller.can_send:
            self.notify("One moment: the model is busy. Esc stops it.", severity="warning")
            return
        async with self._drawing:
            try:
                self._controller.regenerate()
            except ValueError:
                self.notify("There is no question to answer again.", severity="warning")
                return
            except MiraError as error:
                await self.show_problem(error)
                return
            head = self._controller.conversation.head
            assert head is not None
            self._reply = await self.messages.add_question(head.content)
            self._show_state()

    async def action_new_chat(self) -> None:
        """Begins an empty conversation."""
        try:
            self._controller.new_chat()
        except ValueError:
            self.notify("Esc stops the reply first.", severity="warning")
            return
        async with self._drawing:
            self._reply = None
            await self.messages.clear()
            self._show_state()

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Dims Stop while there is nothing to stop."""
        del parameters
        is_busy = self._controller.stage in (Stage.REPLYING, Stage.RECOVERING)
        return True if action != "stop" or is_busy else None

    def action_models(self) -> None:
        """Goes to the menu of models."""
        self.post_message(self.ModelsWanted())

    # -- the engine

    async def take(self, update: Update) -> None:
        """Shows what a poll brought."""
        async with self._drawing:
            await self._draw(update)

    async def _draw(self, update: Update) -> None:
        if update.text and self._reply is not None:
            await self._reply.write(update.text)
        await self._finish_reply()
        if update.error is not None:
            await self.show_problem(update.error)
        stage = self._controller.stage
        if self._was_recovering and stage in (Stage.READY, Stage.REPLYING):
            await self.messages.add_info("The engine runs again; the model is loaded.")
        self._was_recovering = stage is Stage.RECOVERING
        # Not `is_stage_new`: a reply can be over before the first poll after its question.
        if stage is not self._shown_stage or stage is Stage.REPLYING:
            self._show_state()

    async def _finish_reply(self) -> None:
        """Closes the reply on screen once the controller has it as a finished turn."""
        head, reply = self._controller.conversation.head, self._reply
        if reply is not None and head is not None and head.role is Role.ASSISTANT:
            self._reply = None
            await reply.finish(head)

    async def show_problem(self, error: MiraError) -> None:
        """Shows what went wrong, in the chat."""
        await self.messages.add_info(f"{error.message}\n{error.hint}".strip(), is_error=True)

    def _show_state(self) -> None:
        if not (self.is_mounted and self.app.is_running):
            return  # not laid out yet, or being taken down
        controller = self._controller
        loaded, stage = controller.loaded, controller.stage
        plan = loaded.plan if loaded is not None else None
        engine = controller.settings.engine
        known = loaded or controller.entry
        title = known.title if known is not None else "no model"
        facts = f"{engine.precision} · {engine.dtype}"
        if loaded is not None:
            facts += f" · context {loaded.context_length}"
        self.model_line.update(
            Content.assemble(("mira-chat  ", "bold $primary"), sanitise(title), f" · {facts}")
        )
        self._shown_stage = stage
        words = {Stage.REPLYING: "answering", Stage.RECOVERING: "restarting the engine"}
        self.state_line.update(words.get(stage, stage.value))
        if stage is not self._footer_stage:
            # Only then: it builds the footer anew, which is empty for a moment.
            self._footer_stage = stage
            self.refresh_bindings()
        prompt = controller.prompt_progress
        if self._reply is not None:
            if controller.is_stopping:
                self._reply.set_caption("stopping ...")
            elif prompt is not None and not controller.partial:
                self._reply.set_caption(f"reading the prompt: {prompt.done} of {prompt.total}")
            elif controller.partial:
                self._reply.set_caption("")
        state = PanelState(stats=controller.stats, plan=plan, notices=controller.notices)
        for panel in self.query(LivePanel):
            panel.show(state)
