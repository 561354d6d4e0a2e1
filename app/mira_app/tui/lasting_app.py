"""An app that remembers from one time to the next, stops when it is told to, and ends in order.

Order of the end: what the reply under way had come to is kept as stopped; draft and state
are written; the engines begin to end, each in a thread of its own, and there are no more
polls, since one would take an engine that ends for one that died; the history is closed;
the screen goes.
The process outlives the screen by what the engines need, `QUIT_GRACE_S` and a second at most.
"""

from __future__ import annotations

import asyncio
import dataclasses
import threading
import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from mira_engine.api import MiraError
from textual.actions import SkipAction

from mira_app.app_state import AppState, StateFile
from mira_app.controller import ChatController
from mira_app.paths import AppPaths
from mira_app.unsent import Unsent, UnsentPlace, take_place

from .history_app import HistoryApp
from .keymap import key_text
from .widgets.composer import Composer

if TYPE_CHECKING:
    from mira_app.history import HistoryStore
    from mira_app.model_desk import ModelDesk

QUIT_GRACE_S = 1.0
"""Seconds that an engine has to end by itself when the app is left."""

AGAIN_S = 5.0
"""Seconds within which Ctrl+C a second time quits."""


class LastingApp(HistoryApp):
    """What `MiraApp` keeps over its end.

    Args of the constructor: the controller; the history; where files are, `None` to remember
    nothing; who downloads and prepares models; what is wrong from the beginning.
    """

    def __init__(
        self,
        controller: ChatController,
        store: HistoryStore | None,
        paths: AppPaths | None,
        desk: ModelDesk | None,
        problems: Sequence[MiraError],
    ) -> None:
        super().__init__(controller, store, paths, problems)
        self._desk = desk
        self._state_file = StateFile(paths.state) if paths is not None else None
        self._state = AppState()
        self._unsent_place: UnsentPlace | None = None
        self._left_draft = ""
        """What an app before this one had not sent."""
        self._interrupted_s: float | None = None
        self._ends: list[threading.Thread] = []

    # -- what is remembered

    def _recall(self) -> None:
        """Reads the state, and what an app before this one had not sent or finished."""
        if self._state_file is None or self.paths is None:
            return
        self._state = self._state_file.load()
        try:
            self._unsent_place = take_place(self.paths.state.parent)
        except MiraError as error:
            self.problems.append(error)
        else:
            unsent = self._unsent_place.unsent
            self._left_draft = unsent.draft
            self._unfinished = (unsent.chat_id, unsent.partial)

    async def _remember(self) -> None:
        """Writes draft and model where they changed; once refused, says so and gives up."""
        loaded, controller = self.controller.loaded, self.controller
        if loaded is not None and controller.server is None:  # a server's is not of this machine
            self._state = dataclasses.replace(self._state, model=loaded.model)
        await self._remember_chat()
        if self._state_file is None:
            return
        try:
            await asyncio.to_thread(self._state_file.save, self._state)
            if self._unsent_place is not None:
                unsent = Unsent(
                    draft=self._draft,
                    chat_id=controller.chat_id if controller.unfinished else "",
                    partial=controller.unfinished,
                )
                await asyncio.to_thread(self._unsent_place.save, unsent)
        except MiraError as error:
            self._state_file = None
            if self._unsent_place is not None:  # else it was told at the start
                self.tell_problem(error)

    @property
    def _draft(self) -> str:
        """What is being written, with what the composer is still to get."""
        return self._composer_text + self.kept_draft

    @property
    def _composer_text(self) -> str:
        """What is in the composer; what was left there before the chat is shown."""
        if self._is_chat_dressed and self.chat_screen.query(Composer):
            return self.chat_screen.composer.full_text
        return self._left_draft

    async def _finish_tour(self, _result: None) -> None:
        self._state = dataclasses.replace(self._state, is_tour_done=True)
        await self._remember()

    # -- stopping and leaving

    async def action_interrupt(self) -> None:
        """Stops what is under way, as Esc does; else says how to quit, and quits when told so.

        Raises:
            SkipAction: Text is selected: the key copies it.
        """
        if self._is_text_selected:
            raise SkipAction
        quit_key = key_text(self._keymap.get("app.quit", "ctrl+q"))
        is_stopping = self.controller.is_stopping
        if self.chat_screen.take_back() or self.controller.stop():
            if is_stopping:
                self.notify(f"It is being stopped. {quit_key} quits.")
            return
        now, before = time.monotonic(), self._interrupted_s
        self._interrupted_s = now
        if before is not None and now - before < AGAIN_S:
            await self.action_quit()
            return
        own_key = key_text(self._keymap.get("app.interrupt", "ctrl+c"))
        self.notify(f"{own_key} again quits; so does {quit_key}. Nothing is lost.")

    @property
    def _is_text_selected(self) -> bool:
        is_in_field = bool(getattr(self.focused, "selected_text", ""))
        return is_in_field or bool(self.screen.get_selected_text())

    @property
    def _is_leaving(self) -> bool:
        return bool(self._ends)

    async def action_quit(self) -> None:
        """Keeps what is to be remembered and leaves; the engines end behind the screen."""
        if self._is_leaving:
            return
        self.controller.keep_unfinished()
        await self._remember()
        self._begin_end()
        if self._store is not None and self._is_store_open:
            await asyncio.to_thread(self._store.close)
        self.exit()

    def _begin_end(self) -> None:
        closers = [self.controller.close]
        if self._desk is not None:
            closers += [self._desk.verdicts.close, self._desk.jobs.close]
        self._ends = [
            threading.Thread(target=close, args=(QUIT_GRACE_S,), name="engine-end")
            for close in closers
        ]
        for end in self._ends:
            end.start()

    def wait_for_engines(self) -> None:
        """Waits until what was begun to end has ended; for when the screen is gone."""
        for end in self._ends:
            end.join()

    def on_unmount(self) -> None:
        """Leaves what was not sent to the next app."""
        if self._unsent_place is not None:
            self._unsent_place.close()
