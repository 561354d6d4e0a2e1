"""The Textual application: two screens over one controller, and the timer that polls it.

Runs in the app's process, on its event loop; the engine is another process and torch is
never loaded here. One timer, ten times a second, takes what the engine said and hands it
to the screens; nothing is drawn per token.
"""

from __future__ import annotations

import asyncio
import time

from mira_engine.api import MiraError
from textual.app import App
from textual.binding import Binding
from textual.notifications import SeverityLevel
from textual.theme import Theme

from mira_app.controller import ChatController, Stage, Update

from .screens.chat import ChatScreen
from .screens.help import HelpScreen
from .screens.models import ModelsScreen

POLL_INTERVAL_S = 0.1

_DARK = Theme(
    name="mira-dark",
    primary="#7aa2c8",
    secondary="#8fb39a",
    accent="#c8a878",
    warning="#d0a860",
    error="#d07878",
    success="#86b08a",
    foreground="#d4d7dc",
    background="#16181c",
    surface="#1d2025",
    panel="#262a31",
    dark=True,
)


class MiraApp(App[None]):
    """The program `mira-chat` opens."""

    TITLE = "mira-chat"
    CSS_PATH = "app.tcss"
    BINDINGS = [
        Binding("f1", "help", "Help", id="app.help"),
        Binding("ctrl+q", "quit", "Quit", priority=True, id="app.quit"),
    ]

    def __init__(self, controller: ChatController) -> None:
        super().__init__()
        self.controller = controller
        self.models_screen = ModelsScreen(controller)
        self.chat_screen = ChatScreen(controller)
        self._is_chat_due = False
        self._toasts: dict[str, float] = {}

    async def on_mount(self) -> None:
        """Shows the menu, and goes on at once where a model was named."""
        self.register_theme(_DARK)
        self.theme = _DARK.name
        self.install_screen(self.chat_screen, "chat")
        await self.push_screen(self.models_screen)
        if self.controller.settings.is_model_given:
            self._choose(self.controller.settings.model)
        self._poll_timer = self.set_interval(POLL_INTERVAL_S, self._poll)

    async def _poll(self) -> None:
        if not self.is_running:
            return  # the screens are being taken down
        update = self.controller.poll()
        if self.models_screen.is_mounted:
            self.models_screen.take(update)
        if self.chat_screen.is_mounted:
            await self.chat_screen.take(update)
        await self._open_due_chat()

    async def _open_due_chat(self) -> None:
        """Goes from the menu to the chat once the model picked there is loaded.

        Where the help or the commands lie over the menu, once these are closed.
        """
        if self.controller.stage in (Stage.IDLE, Stage.FAILED):
            self._is_chat_due = False
        is_ready = self.controller.stage is Stage.READY
        if self._is_chat_due and is_ready and self.screen is self.models_screen:
            self._is_chat_due = False
            await self.push_screen("chat")

    def _choose(self, model: str) -> None:
        loaded = self.controller.loaded
        if loaded is not None and loaded.model == model and self.controller.can_send:
            self.push_screen("chat")
            return
        try:
            self.controller.choose(model)
        except MiraError as error:
            self.models_screen.show_problem(error)
        else:
            self._is_chat_due = True
            self.models_screen.take(Update(is_stage_new=True))

    def on_models_screen_chosen(self, event: ModelsScreen.Chosen) -> None:
        """Begins to prepare or load."""
        self._choose(event.model)

    def on_models_screen_left(self) -> None:
        """Goes back to the chat."""
        self.push_screen("chat")

    async def on_chat_screen_models_wanted(self) -> None:
        """Goes to the menu; a reply under way goes on."""
        await self.pop_screen()

    def notify(
        self,
        message: str,
        *,
        title: str = "",
        severity: SeverityLevel = "information",
        timeout: float | None = None,
        markup: bool = True,
    ) -> None:
        """Shows a toast, unless it is still there from before."""
        now = time.monotonic()
        shown_s = self.NOTIFICATION_TIMEOUT if timeout is None else timeout
        self._toasts = {text: end for text, end in self._toasts.items() if end > now}
        if message not in self._toasts:
            self._toasts[message] = now + shown_s
            super().notify(message, title=title, severity=severity, timeout=timeout, markup=markup)

    def action_help(self) -> None:
        """Opens the help."""
        if not isinstance(self.screen, HelpScreen):
            self.push_screen(HelpScreen(self.controller.notices))

    async def action_quit(self) -> None:
        """Ends the engine, then the app."""
        await asyncio.to_thread(self.controller.close)
        self.exit()
