"""The chat: messages, the live panel and the composer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mira_engine.api import ContextTrimmed, MiraError
from textual import events, getters
from textual.app import ComposeResult
from textual.containers import Horizontal, Vertical
from textual.content import Content
from textual.message import Message
from textual.widgets import Static

from mira_app.controller import ChatController, Stage, Update
from mira_app.conversation import Role
from mira_app.panel_history import PanelHistory, PanelState
from mira_app.sanitise import sanitise
from mira_app.tui.footer_keys import KeyFooter
from mira_app.tui.widgets.composer import Composer
from mira_app.tui.widgets.context_meter import ContextMeter
from mira_app.tui.widgets.live_panel import LivePanel
from mira_app.tui.widgets.message_list import MessageList
from mira_app.tui.widgets.messages import ChatMessage, ReplyMessage
from mira_app.tui.widgets.panels.side_panel import SidePanel

from .chat_keys import BINDINGS, welcome_text
from .chat_settings import ChatSettings, ChatSettingsScreen
from .chat_words import BUSY, CHANGED, CUT, recovered_text, state_word, trimmed_text
from .message_screen import MessageScreen

_WIDE_COLUMNS = 100
_TALL_ROWS = 12
"""With fewer the writing and the reading take all of them."""


class ChatScreen(MessageScreen):
    """One conversation with the loaded model."""

    CSS_PATH = "chat.tcss"
    HORIZONTAL_BREAKPOINTS = [(0, "-narrow"), (_WIDE_COLUMNS, "-wide")]
    VERTICAL_BREAKPOINTS = [(0, "-short"), (_TALL_ROWS, "-tall")]
    BINDINGS = BINDINGS

    @dataclass
    class ModelsWanted(Message):
        """The person wants the menu of models."""

    model_line = getters.query_one("#model", Static)
    state_line = getters.query_one("#state", Static)
    context_meter = getters.query_one(ContextMeter)
    strip = getters.query_one("#strip", LivePanel)
    side_panel = getters.query_one(SidePanel)

    def __init__(self, controller: ChatController) -> None:
        super().__init__(controller)
        self._history = PanelHistory()
        self.panel_state = PanelState()
        """What the panels and the details show."""
        self.pill = Static("▼ new text below (End)", id="unseen")
        self._reply: ReplyMessage | None = None
        self._was_recovering = False
        self.due_error: MiraError | None = None
        """What failed before there was a screen to tell it on, as a server does at once."""
        self.is_change_due = False
        """Whether another app changed the chat before there was one."""
        self._is_send_due = False
        """Whether what is written is to be sent once the model is there."""
        self._footer_stage: Stage | None = None
        self._shown_stage: Stage | None = None
        self._told_trimmed: ContextTrimmed | None = None
        self._welcomed: str | None = None
        self._remark = ""

    def compose(self) -> ComposeResult:
        """Lays out the chat with the panel beside or under it."""
        with Horizontal(id="top"):
            yield Static(id="model")
            yield ContextMeter()
            yield Static(id="state")
        with Horizontal(id="middle"):
            with Vertical(id="talk"):
                yield MessageList()
                yield self.pill
                yield LivePanel(is_column=False, id="strip")
                yield Composer()
            yield SidePanel(id="side")
        yield KeyFooter()

    async def on_mount(self) -> None:
        """Begins with what the controller already knows."""
        if not self._is_laid_out:
            return
        await self.messages.show(self._controller.conversation)
        self._show_state()

    def on_screen_resume(self) -> None:
        """Puts the cursor where one writes, unless a message was gone to."""
        if not self._is_laid_out:
            return
        self._footer_stage = None  # it may not follow while another screen is shown
        self._show_state()
        if not isinstance(self.focused, ChatMessage):
            self.set_focus(self.composer)

    @property
    def _is_laid_out(self) -> bool:
        """Whether there is something to draw on: not before, and not while it is taken down."""
        return bool(self.query(Composer))

    @property
    def _is_served(self) -> bool:
        """Whether a server runs the model."""
        return self._controller.server is not None

    # -- asking

    async def on_composer_submitted(self, event: Composer.Submitted) -> None:
        """Sends, unless something else is going on; then the text stays where it is."""
        text, turn_id = event.text.strip(), self.composer.edited_turn_id
        controller = self._controller
        if controller.stage in (Stage.LOADING, Stage.RECOVERING) and not controller.can_send:
            self._is_send_due = True
            self.notify("It is sent as soon as the model is there. Esc takes that back.")
            return
        if await self._ask(
            lambda: controller.send(text) if turn_id is None else controller.edit(turn_id, text)
        ):
            self.composer.take()

    async def action_regenerate(self) -> None:
        """Asks for another reply to the last question."""
        await self._ask(self._controller.regenerate)

    async def _ask(self, ask: Callable[[], None]) -> bool:
        """Asks and shows the reply that is to come; returns whether it was asked."""
        if not self._controller.can_send:
            self.notify(BUSY, severity="warning")
            return False
        async with self._drawing:
            try:
                ask()
            except ValueError:
                self.notify("There is no question to answer again.", severity="warning")
                return False
            except MiraError as error:
                await self.show_problem(error)
                return False
            self._reply = await self.messages.add_reply(self._controller.conversation)
            # Not at the next poll: a server may be reached again before that.
            self._was_recovering = self._controller.stage is Stage.RECOVERING
            self._show_state()
        return True

    async def action_stop(self) -> None:
        """Stops the reply; never touches what is being written."""
        if not self.take_back() and self._controller.stop():
            self._show_state()

    def take_back(self) -> bool:
        """Takes back that what is written is to be sent; returns whether it was to be."""
        was_due, self._is_send_due = self._is_send_due, False
        return was_due

    def on_composer_edit_left(self) -> None:
        """Gives up writing a question anew."""
        self.composer.leave_edit()

    async def action_new_chat(self) -> None:
        """Begins an empty conversation."""
        try:
            self._controller.new_chat()
        except ValueError:
            self.notify("Esc stops the reply first.", severity="warning")
            return
        await self.show_chat()

    async def show_chat(self) -> None:
        """Shows the controller's conversation, whichever it is now."""
        async with self._drawing:
            self._reply = None
            self._told_trimmed = self._controller.trimmed
            if self.composer.edited_turn_id is not None:
                self.composer.leave_edit()
            await self.messages.show_anew(self._controller.conversation)
            self._show_state()

    def on_composer_messages_wanted(self) -> None:
        """Goes to the newest message."""
        if messages := self.messages.turns:
            messages[-1].focus()

    def action_fold(self) -> None:
        """Folds all thinking, or opens it."""
        self.messages.fold_all()

    async def action_tail(self) -> None:
        """Goes to the newest text."""
        async with self._drawing:
            await self.messages.to_tail()
            await self._restore_reply()
        self._show_pill()

    async def on_composer_tail_wanted(self) -> None:
        """Goes to the newest text."""
        await self.action_tail()

    async def action_start(self) -> None:
        """Goes to the first message."""
        async with self._drawing:
            await self.messages.to_start()

    def action_page(self, step: int) -> None:
        """Scrolls the messages by a page, wherever the cursor is."""
        height = max(1, self.messages.size.height - 2)
        self.messages.let_go()
        self.messages.scroll_relative(y=step * height, animate=False)

    async def on_click(self, event: events.Click) -> None:
        """Goes to the newest text where its pill is clicked."""
        if event.widget is self.pill:
            await self.action_tail()

    async def on_key(self, event: events.Key) -> None:
        """Takes End for the newest text where nothing else has a use for it."""
        if event.key == "end" and self.pill.display:
            event.stop()
            await self.action_tail()

    # -- other screens

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Dims Stop while there is nothing to stop."""
        del parameters
        is_busy = self._controller.stage in (Stage.REPLYING, Stage.RECOVERING)
        is_busy = is_busy or self._is_send_due
        return True if action != "stop" or is_busy else None

    def action_models(self) -> None:
        """Goes to the menu of models."""
        self.post_message(self.ModelsWanted())

    def action_chat_settings(self) -> None:
        """Asks for this chat's system prompt and sampling."""
        controller = self._controller
        now = ChatSettings(system_prompt=controller.system_prompt, sampling=controller.sampling)

        def change(chosen: ChatSettings | None) -> None:
            if chosen is not None and chosen != now:
                controller.set_chat_settings(chosen.system_prompt, chosen.sampling)
                self.notify("Used from the next question on.")

        self.app.push_screen(ChatSettingsScreen(now), change)

    # -- the engine

    async def take(self, update: Update) -> None:
        """Shows what a poll brought."""
        async with self._drawing:
            if self._is_laid_out:
                await self._draw(update)
            else:
                self.put_off(update)

    def put_off(self, update: Update) -> None:
        """Keeps what a poll brought to tell, until there is something to draw on."""
        self.due_error = update.error or self.due_error
        self.is_change_due |= update.is_changed_elsewhere

    async def _draw(self, update: Update) -> None:
        edited_id = self.composer.edited_turn_id
        if edited_id is not None:
            self.composer.edited_turn_id = update.renumbered.get(edited_id, edited_id)
        await self._write(update)
        await self._finish_reply()
        if update.is_changed_elsewhere or self.is_change_due:
            self.is_change_due = False
            await self._show_changed()
        error, self.due_error = update.error or self.due_error, None
        if error is not None:
            await self.show_problem(error)
        await self._tell_trimmed()
        stage = self._controller.stage
        if self._was_recovering and stage in (Stage.READY, Stage.REPLYING):
            await self.messages.add_info(recovered_text(is_served=self._is_served))
        self._was_recovering = stage is Stage.RECOVERING
        # Not `is_stage_new`: a reply can be over before the first poll after its question.
        if stage is not self._shown_stage or stage is Stage.REPLYING:
            self._show_state()
        await self.messages.keep_up()
        self._show_pill()
        if self._is_send_due and self._controller.can_send:
            self._is_send_due = False
            if self.composer.text.strip():
                self.composer.post_message(Composer.Submitted(self.composer.full_text))

    async def _write(self, update: Update) -> None:
        reply = self._reply
        if reply is None or not (update.text or update.thinking):
            return
        if reply.is_attached:
            if update.thinking:
                await reply.write_thinking(update.thinking)
            if update.text:
                await reply.write(update.text)
        self.messages.note_text(len(update.text) + len(update.thinking))

    async def _restore_reply(self) -> None:
        """Shows the reply under way again after its place was given up for another."""
        controller = self._controller
        if self._reply is None or self._reply.is_attached or not self.messages.is_at_tail:
            return
        self._reply = await self.messages.begin_reply()
        if controller.thinking:
            await self._reply.write_thinking(controller.thinking)
        if controller.partial:
            await self._reply.write(controller.partial)

    async def _finish_reply(self) -> None:
        """Closes the reply on screen once the controller has it as a finished turn."""
        head, reply = self._controller.conversation.head, self._reply
        if reply is not None and head is not None and head.role is Role.ASSISTANT:
            self._reply = None
            await self.messages.finish_reply(reply, self._controller.conversation)
            if self._controller.reason in CUT:
                await self.messages.add_info(CUT[self._controller.reason])

    async def _show_changed(self) -> None:
        """Shows the chat with what another app added, and says so."""
        await self.messages.show(self._controller.conversation)
        await self._restore_reply()
        await self.messages.add_info(CHANGED)

    async def _tell_trimmed(self) -> None:
        """Says once that the oldest turns no longer fit, and again when more do not."""
        trimmed, told = self._controller.trimmed, self._told_trimmed
        if trimmed is None or trimmed is told:
            return
        self._told_trimmed = trimmed
        if told is not None and told.num_turns == trimmed.num_turns:
            return
        await self.messages.add_info(trimmed_text(trimmed))

    def show_remark(self, text: str) -> None:
        """Shows beside the state what the menu has to say, nothing where it is empty."""
        if text != self._remark:
            self._remark = text
            self._show_state()

    async def show_problem(self, error: MiraError) -> None:
        """Shows what went wrong, in the chat."""
        await self.messages.add_info(f"{error.message}\n{error.hint}".strip(), is_error=True)

    def _show_pill(self) -> None:
        self.pill.display = self.messages.has_unseen

    def _show_state(self) -> None:
        if not (self.is_mounted and self.app.is_running):
            return  # not laid out yet, or being taken down
        controller = self._controller
        loaded, stage = controller.loaded, controller.stage
        plan = loaded.plan if loaded is not None else None
        engine = controller.settings.engine
        known = loaded or controller.entry
        title = known.title if known is not None else "no model"
        entry = controller.entry
        is_remote = entry is not None and entry.is_remote
        arithmetic = (loaded.dtype if loaded is not None else None) or engine.arithmetic
        facts = sanitise(entry.about) if is_remote else f"{engine.precision} · {arithmetic}"
        self.model_line.update(
            Content.assemble(("mira-chat  ", "bold $primary"), sanitise(title), f" · {facts}")
        )
        if title != self._welcomed:
            self._welcomed = title
            active = self.active_bindings.values()
            self.messages.welcome.update(welcome_text(title, controller.entry, active))
        limit = loaded.context_length if loaded is not None else 0
        if is_remote and not controller.stats.num_prompt_tokens:
            limit = 0  # A server tells at the end of a reply how long its prompt was.
        if controller.stats.num_prompt_tokens or stage is not Stage.REPLYING:
            self.context_meter.show(controller.stats, limit)
        self._shown_stage = stage
        state = state_word(stage, is_served=self._is_served)
        self.state_line.update(" · ".join(filter(None, (self._remark, state))))
        if stage is not self._footer_stage:
            # Only then: it builds the footer anew, which is empty for a moment.
            self._footer_stage = stage
            self.refresh_bindings()
        self._show_caption()
        self.panel_state = self._history.snapshot(
            controller.stats,
            plan=plan,
            notices=controller.notices,
            link_bytes_per_s=loaded.link_bytes_per_s if loaded is not None else 0.0,
            residency=controller.residency,
            server=controller.server,
        )
        self.strip.show(self.panel_state)
        self.side_panel.show(self.panel_state)

    def _show_caption(self) -> None:
        controller, prompt = self._controller, self._controller.prompt_progress
        if self._reply is None:
            return
        if controller.is_stopping:
            self._reply.set_caption("stopping ...")
        elif controller.partial or controller.thinking:
            self._reply.set_caption("")
        elif prompt is not None:
            self._reply.set_caption(f"reading the prompt: {prompt.done} of {prompt.total}")
