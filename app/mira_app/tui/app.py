"""The Textual application: its screens over one controller, and the timer that polls it.

Runs in the app's process, on its event loop; the engine is another process and torch is
never loaded here. One timer, ten times a second, takes what the engine said and hands it
to the screens; nothing is drawn per token. What waits for a disk (the history, settings
and state files) runs in a thread, never on the loop.

The menu of models is the lowest screen; the chat lies over it once a model is there, and
everything else over these two. Screens post what the person wants; here is decided what
happens then. Screens that few need at once are imported when they are opened.
"""

from __future__ import annotations

import inspect
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from mira_engine.api import MiraError
from textual import events
from textual.binding import Binding
from textual.command import Provider
from textual.screen import Screen
from textual.widgets import Input

from mira_app.controller import ChatController, Stage, Update
from mira_app.paths import AppPaths
from mira_app.setting_fields import FIELDS

from .lasting_app import LastingApp
from .screens.models import ModelsScreen
from .widgets.composer import NEW_LINE_KEYS, Composer
from .widgets.panels.side_panel import SidePanel

if TYPE_CHECKING:
    from mira_app.history import HistoryStore
    from mira_app.model_desk import ModelDesk

    from .screens.controls import ControlsScreen

POLL_INTERVAL_S = 0.1
REMEMBER_INTERVAL_S = 2.0
"""Seconds of writing that a killed app may lose of a draft."""

_LOW_ROWS = 12
"""Below these, the chat gives up the panel's lines and the composer's frame."""

LIVE_SETTINGS = ("budget", "k", "precision", "prefetch")
"""What the live controls change, by the names of the settings."""


def _commands_provider() -> type[Provider]:
    from .commands import MiraCommands

    return MiraCommands


def _key(keys: str, action: str, name: str, about: str = "", *, is_shown: bool = True) -> Binding:
    return Binding(keys, action, name, show=is_shown, id=f"app.{action}", tooltip=about)


class MiraApp(LastingApp):
    """The program `mira-chat` opens.

    Args of the constructor: the controller; the history, not yet opened, `None` to keep no
    chats; where files are, `None` to remember nothing; who downloads and prepares models,
    `None` for the chat's own engine; what of the settings file cannot be used.
    """

    TITLE = "mira-chat"
    CSS_PATH = "app.tcss"
    COMMANDS = {_commands_provider}
    VERTICAL_BREAKPOINTS = [(0, "-low"), (_LOW_ROWS, "-high")]
    BINDINGS = [
        _key("f1", "help", "Help"),
        _key("f2", "controls", "Controls", "budget, K, precision, prefetch"),
        _key("f3", "history", "Chats", "all chats, and search in them"),
        _key("f4", "details", "Details", "plots of what the panels show", is_shown=False),
        _key("ctrl+b", "panels", "Panels", "live panels on or off", is_shown=False),
        Binding(
            "ctrl+p", "command_palette", "Commands", show=False, priority=True, id="app.palette",
            tooltip="all commands, themes",
        ),
        Binding("ctrl+q", "quit", "Quit", priority=True, id="app.quit"),
        Binding(
            "ctrl+c", "interrupt", "Stop, or quit", show=False, priority=True, id="app.interrupt",
            tooltip="stop the reply; twice: quit",
        ),
    ]  # fmt: skip

    def __init__(
        self,
        controller: ChatController,
        *,
        store: HistoryStore | None = None,
        paths: AppPaths | None = None,
        desk: ModelDesk | None = None,
        problems: Sequence[MiraError] = (),
    ) -> None:
        super().__init__(controller, store, paths, desk, problems)
        self.models_screen = ModelsScreen(controller, desk)
        self._engine = controller.settings.engine
        self._is_chat_due = False
        self._is_chat_opening = False
        self._is_hand_on_due = False

    # -- beginning and end

    async def on_mount(self) -> None:
        """Shows the menu, or at once the chat where it is known which model is to answer."""
        self.dress()
        self.install_screen(self.chat_screen, "chat")
        await self.push_screen(self.models_screen)
        self._recall()
        self._begin()
        self._poll_timer = self.set_interval(POLL_INTERVAL_S, self._poll)
        if self._state_file is not None:
            self.set_interval(REMEMBER_INTERVAL_S, self._remember)
            if not self._state.is_tour_done:
                self.show_tour()
        self.call_after_refresh(self.tell_problems)
        if self._store is not None:
            self.run_worker(self._open_store(), group="history")

    def _begin(self) -> None:
        """Opens the model that was named, or the one of the last time where it is ready."""
        settings = self.controller.settings
        if settings.is_model_given:
            self._choose(settings.model)
        elif self._state.model and self.interface.is_chat_restored:
            try:
                entries = self.controller.models()
            except MiraError:
                return  # the menu, which is shown, says why
            if any(entry.is_ready and entry.model == self._state.model for entry in entries):
                self._choose(self._state.model)
        if self.controller.stage is Stage.LOADING:
            self._is_chat_due = False
            self.show_chat()  # one can write while the model is loaded

    # -- polling

    async def _poll(self) -> None:
        if self._is_leaving or not self.is_running:
            return  # the engines end, and the screens are taken down
        update = self.controller.poll()
        self.chat_screen.show_remark(self.models_screen.put_off_text)
        self.models_screen.written = self.kept_text
        for screen in (self.models_screen, self.chat_screen, *self._screens_above()):
            take = getattr(screen, "take", None)
            if take is not None and screen.is_mounted:
                drawing = take(update)
                if inspect.isawaitable(drawing):
                    await drawing
            elif screen is self.chat_screen:
                # What fails with the menu in front is told there.
                is_told = not self._is_chat_opening
                screen.put_off(replace(update, error=None) if is_told else update)
        self._open_due_chat()
        self._hand_on_due()

    def _screens_above(self) -> list[Screen]:
        return [s for s in self.screen_stack if s not in (self.models_screen, self.chat_screen)]

    def _open_due_chat(self) -> None:
        """Goes from the menu to the chat once the model picked there is loaded.

        Where the help or the commands lie over the menu, once these are closed.
        """
        if self.controller.stage in (Stage.IDLE, Stage.FAILED):
            self._is_chat_due = False
            self._unsend_kept()
            self.models_screen.is_chat_open = self.chat_screen in self.screen_stack
        is_ready = self.controller.stage is Stage.READY
        if self._is_chat_due and is_ready and self.screen is self.models_screen:
            self._is_chat_due = False
            self.show_chat()

    # -- models and chats

    def _choose(self, model: str) -> None:
        loaded = self.controller.loaded
        if loaded is not None and loaded.model == model and self.controller.can_send:
            self.show_chat()
            return
        try:
            self.controller.choose(model)
        except MiraError as error:
            self.models_screen.show_problem(error)
        else:
            self._is_chat_due = self.models_screen.is_chat_open = True
            self.models_screen.take(Update(is_stage_new=True))

    def choose_model(self, model: str) -> None:
        """Goes to the menu and picks a model there."""
        self.show_models()
        self._choose(model)

    def show_models(self) -> None:
        """Closes whatever lies over the menu of models; a reply under way goes on."""
        self._close_down_to(self.models_screen)

    def show_chat(self) -> None:
        """Closes whatever lies over the chat, or opens it."""
        self.models_screen.is_chat_open = True
        if self.chat_screen in self.screen_stack:
            self._close_down_to(self.chat_screen)
            return
        self._close_down_to(self.models_screen)
        self._is_chat_opening = True
        self.run_worker(self._dress_chat(self.push_screen("chat")), group="chat")

    def _close_down_to(self, screen: Screen) -> None:
        while self.screen is not screen:
            self.pop_screen()

    async def _dress_chat(self, mounting: Awaitable[None]) -> None:
        """Gives a chat screen that is new what belongs to it from before, and what is kept."""
        await mounting
        self._is_chat_opening = False
        if not self.chat_screen.query(Composer):
            return  # the app is being taken down
        if not self._is_chat_dressed:  # It keeps what it has when one comes back to it.
            self.chat_screen.side_panel.columns = self.interface.panel_width
            self.show_panels(self.interface.are_panels_shown)
            self.chat_screen.composer.insert(self._composer_text, (0, 0))
            self._is_chat_dressed = True
        self._is_hand_on_due = True
        self._hand_on_due()
        if self._is_drawing_due:
            await self._draw_due_chat()

    # -- what is written before the chat is there

    def _hand_on_due(self) -> None:
        """Gives what was kept to the composer, once nothing lies over the chat any more."""
        if self._is_hand_on_due and self.screen is self.chat_screen:
            self._is_hand_on_due = False
            if self._kept:
                self.chat_screen.set_focus(self.chat_screen.composer)
                self.hand_on_kept()

    def _is_kept(self, event: events.Key | events.Paste) -> bool:
        """Keeps text for the chat that a model is loaded for, or that is about to be shown.

        Of other keys those that change what was kept; Enter only where nothing but that would
        be sent.
        """
        is_opening = self._is_chat_opening and self.screen in (
            self.models_screen, self.chat_screen,
        )  # fmt: skip
        is_awaited = self._is_chat_due and self.screen is self.models_screen
        is_late = self._is_hand_on_due and bool(self._kept) and self.screen is self.chat_screen
        if not (is_opening or is_awaited or is_late) or isinstance(self.focused, Input):
            return False
        if isinstance(event, events.Paste) or event.is_printable:
            return True
        if event.key == "enter":
            return bool(self._kept) and not self._composer_text
        return bool(self._kept) and event.key in ("backspace", *NEW_LINE_KEYS)

    def _unsend_kept(self) -> None:
        """Keeps what was written, but not that it is to be sent: its chat does not come."""
        self._kept = deque(
            event for event in self._kept if isinstance(event, events.Paste) or event.key != "enter"
        )

    # -- what screens want

    def on_models_screen_chosen(self, event: ModelsScreen.Chosen) -> None:
        """Begins to prepare or load."""
        self._choose(event.model)

    def on_models_screen_left(self) -> None:
        """Goes back to the chat."""
        self.show_chat()

    def on_chat_screen_models_wanted(self) -> None:
        """Goes to the menu."""
        self.show_models()

    def on_controls_screen_changed(self, event: ControlsScreen.Changed) -> None:
        """Has the engine changed before the next reply."""
        self._engine = event.config
        self.controller.reconfigure(event.config)

    async def on_composer_submitted(self) -> None:
        """Forgets at once, also on the disk, the draft of what the chat has just sent."""
        await self._remember()

    # -- actions

    def action_help(self) -> None:
        """Opens the help."""
        from .keymap import key_sections, known_bindings
        from .screens.help import HelpScreen

        sections = key_sections(known_bindings(), self._keymap)
        notes = [notice.text for notice in self.controller.notices]
        notes += [str(problem) for problem in self.problems]
        self._open(HelpScreen, lambda: HelpScreen(notes, sections, self.paths))

    def action_controls(self) -> None:
        """Opens the live controls."""
        from .screens.controls import ControlsScreen

        loaded, engine = self.controller.loaded, self._engine
        if self.controller.server is not None:
            self.notify("These are for models that run here; this one runs on a server.")
            return
        has_failed = self.controller.stage is Stage.FAILED and self.controller.entry is not None
        if loaded is None and not has_failed:
            self.notify("Pick a model first: these are its engine's.", severity="warning")
            return
        is_k_auto = engine.num_draft_tokens is None
        entry = self.controller.entry
        prepared = entry.ready_precisions if entry is not None else ()
        plan = loaded.plan if loaded is not None else None
        self._open(ControlsScreen, lambda: ControlsScreen(engine, plan, is_k_auto, prepared))

    def action_history(self) -> None:
        """Opens the history."""
        from .screens.history import HistoryScreen

        store = self._store
        if store is None or not self._is_store_open:
            self.notify("No chats are kept here; F1 says why.", severity="warning")
            return
        self._open(
            HistoryScreen, lambda: HistoryScreen(store, current_chat_id=self.controller.chat_id)
        )

    def action_details(self) -> None:
        """Opens the details."""
        from .screens.details import DetailsScreen

        self._open(DetailsScreen, lambda: DetailsScreen(lambda: self.chat_screen.panel_state))

    def action_panels(self) -> None:
        """Shows or hides the live panels."""
        self.show_panels(not self.chat_screen.side_panel.is_open)

    def _open(self, kind: type[Screen], make: Callable[[], Screen]) -> None:
        if not any(isinstance(screen, kind) for screen in self.screen_stack):
            self.push_screen(make())

    def show_panels(self, is_shown: bool) -> None:
        """Shows or hides the live panels."""
        self.chat_screen.set_class(not is_shown, "-no-panels")
        self.chat_screen.side_panel.is_open = is_shown

    def widen_panels(self, num_columns: int) -> None:
        """Gives the live panels more columns, or fewer."""
        side = self.chat_screen.side_panel
        side.columns += num_columns
        self.show_panels(True)
        self.keep_settings({"panel_width": side.columns})

    def on_side_panel_resized(self, event: SidePanel.Resized) -> None:
        """Keeps the width."""
        self.keep_settings({"panel_width": event.columns})

    def keep_engine_settings(self) -> None:
        """Writes what the live controls changed to the settings file."""
        changes = {
            field.name: getattr(self._engine, field.attribute)
            for field in FIELDS
            if field.name in LIVE_SETTINGS
        }
        self.keep_settings(changes, is_told=True)

    def show_tour(self) -> None:
        """Shows the tour, and remembers that it was seen once it is closed."""
        from .keymap import key_text, known_bindings
        from .screens.tour import TourScreen

        keys = {
            binding_id: key_text(self._keymap.get(binding_id, binding.key).partition(",")[0])
            for binding_id, binding in known_bindings().items()
        }
        self.push_screen(TourScreen(keys), self._finish_tour)

    def on_resize(self, event: events.Resize) -> None:
        """Says so where the terminal has no room for the layout, for as long as it has none."""
        from .screens.too_small import TooSmallScreen, is_too_small

        is_shown = isinstance(self.screen, TooSmallScreen)
        if is_too_small(event.size) and not is_shown:
            self.push_screen(TooSmallScreen())
        elif is_shown and not is_too_small(event.size):
            self.pop_screen()


def run_app(
    controller: ChatController,
    *,
    store: HistoryStore | None,
    paths: AppPaths,
    desk: ModelDesk | None = None,
    problems: Sequence[MiraError] = (),
) -> None:
    """Runs the app until it is left; the mouse is taken unless the settings say otherwise."""
    app = MiraApp(controller, store=store, paths=paths, desk=desk, problems=problems)
    app.run(mouse=controller.settings.interface.is_mouse_enabled)
    app.wait_for_engines()
