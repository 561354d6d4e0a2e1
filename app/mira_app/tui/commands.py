"""The command palette: every action in force, models, chats, themes and settings.

Imported when the palette is opened first.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from mira_engine.api import MiraError
from textual.command import DiscoveryHit, Hit, Hits, Provider

from mira_app.sanitise import sanitise

from .keymap import key_text

if TYPE_CHECKING:
    from .app import MiraApp

_MAX_CHATS = 50
_MAX_CHATS_AT_ONCE = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Command:
    """One line of the palette.

    Attributes:
        name: What is searched.
        about: A line of help.
        run: What it does.
        is_shown: Whether it is there before anything is typed.
    """

    name: str
    about: str
    run: Callable[[], object]
    is_shown: bool = True


class MiraCommands(Provider):
    """Finds commands; reads models and chats once, when the palette opens."""

    async def startup(self) -> None:
        """Gathers the commands."""
        self._commands = [command async for command in self._gathered()]

    async def discover(self) -> Hits:
        """Lists what is shown before anything is typed."""
        for command in self._commands:
            if command.is_shown:
                yield DiscoveryHit(command.name, command.run, help=command.about)

    async def search(self, query: str) -> Hits:
        """Lists what matches."""
        matcher = self.matcher(query)
        for command in self._commands:
            score = matcher.match(command.name)
            if score > 0:
                highlighted = matcher.highlight(command.name)
                yield Hit(score, highlighted, command.run, help=command.about)

    @property
    def _mira(self) -> MiraApp:
        return self.app  # type: ignore[return-value]

    async def _gathered(self) -> AsyncIterator[Command]:
        for command in (*self._actions(), *self._own(), *self._themes()):
            yield command
        try:
            entries = await asyncio.to_thread(self._mira.controller.models)
            for entry in entries:
                name = f"Model: {sanitise(entry.title)}"
                run = partial(self._mira.choose_model, entry.model)
                yield Command(name=name, about=sanitise(entry.about), run=run)
            for number, chat in enumerate(await self._mira.read_chats()):
                if number == _MAX_CHATS:
                    break
                yield Command(
                    name=f"Chat: {sanitise(chat.title)}",
                    about=f"{chat.num_turns} messages, {chat.updated_at:%Y-%m-%d}",
                    run=partial(self._mira.open_chat, chat.chat_id),
                    is_shown=number < _MAX_CHATS_AT_ONCE,
                )
        except MiraError as error:
            self._mira.tell_problem(error)

    def _actions(self) -> list[Command]:
        """The bindings of the screen under the palette and of the app, where they do something."""
        found: dict[str, Command] = {}
        left_out = {"app.palette"}
        if self._mira.controller.server is not None:
            left_out.add("app.controls")  # of an engine here
        for active in self.screen.active_bindings.values():
            binding = active.binding
            is_ours = binding.id is not None and binding.description
            if is_ours and active.enabled and binding.id not in left_out:
                run = partial(self.app.run_action, binding.action, active.node)
                keys = key_text(binding.key)
                about = " · ".join(part for part in (binding.tooltip, keys) if part)
                found.setdefault(
                    binding.description, Command(name=binding.description, about=about, run=run)
                )
        return [found[name] for name in sorted(found)]

    def _own(self) -> list[Command]:
        app = self._mira
        return [
            Command(
                name="Panels wider",
                about="Give the live panels four columns more",
                run=partial(app.widen_panels, 4),
            ),
            Command(
                name="Panels narrower",
                about="Give the live panels four columns less",
                run=partial(app.widen_panels, -4),
            ),
            Command(
                name="Keep these engine settings",
                about="Write budget, K, precision and prefetch as they are to the settings file",
                run=app.keep_engine_settings,
            ),
            Command(name="Tour", about="Show what the first start showed", run=app.show_tour),
        ]

    def _themes(self) -> list[Command]:
        return [
            Command(
                name=f"Theme: {name}",
                about="in force" if name == self.app.theme else "Change the colours",
                run=partial(self._mira.change_theme, name),
                is_shown=name in self._mira.own_theme_names,
            )
            for name in sorted(self.app.available_themes)
        ]
