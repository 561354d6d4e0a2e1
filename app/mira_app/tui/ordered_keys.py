"""Keys in the order they were typed, each for whatever has the focus when its turn comes.

Textual gives a key to the widget that is focused when it arrives, although the key before
it may still be on its way through the widgets and about to move the focus: of `/caches`
typed at once, the letters would go to the list. Here a key waits until the one before it
was handled, and what that set going. Text for a field moves nothing, so nothing waits for
it: typing costs what it did. What is written for a field that is not there yet is kept until
it is (`_is_kept`, `hand_on_kept`).
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Iterable

from textual import events
from textual.app import App
from textual.dom import DOMNode
from textual.widgets import Input, TextArea

_FEWEST_ROUNDS = 3
"""The key itself, the message it made a widget post, and the one that this led to."""

_MOST_ROUNDS = 8
_HOP_TIMEOUT_S = 0.5
"""A widget that is busy for longer does not hold up what is typed."""


class OrderedKeysApp(App[None]):
    """An app in which what is typed at once arrives where it was meant to."""

    def __init__(self) -> None:
        super().__init__()
        # Unbounded: what a person types within some milliseconds.
        self._held: deque[events.Key | events.Paste] = deque()
        self._is_handing_on = False
        self._kept: deque[events.Key | events.Paste] = deque()

    async def on_event(self, event: events.Event) -> None:
        """Hands input on, unless it has to wait for the key before it."""
        if not isinstance(event, events.Key | events.Paste) or event.is_forwarded:
            await super().on_event(event)
        elif self._is_handing_on:
            self._held.append(event)
        elif await self._hand_on(event):
            self._is_handing_on = True
            self.run_worker(self._hand_on_held, group="keys")

    async def _hand_on(self, event: events.Key | events.Paste) -> bool:
        """Gives input to what has the focus; returns whether that may move the focus."""
        if self._is_kept(event):
            self._kept.append(event)
            return False
        is_field = isinstance(self.focused, Input | TextArea)
        is_text = is_field and (isinstance(event, events.Paste) or event.is_printable)
        await super().on_event(event)
        return not is_text

    def _is_kept(self, event: events.Key | events.Paste) -> bool:
        """Whether input is for a field that is not there yet."""
        del event
        return False

    @property
    def kept_text(self) -> str:
        """What was written for a field that is not there yet."""
        return _text_of(self._kept)

    @property
    def kept_draft(self) -> str:
        """The same, less that it is to be sent."""
        kept = list(self._kept)
        while kept and isinstance(kept[-1], events.Key) and kept[-1].key == "enter":
            kept.pop()
        return _text_of(kept)

    def hand_on_kept(self) -> None:
        """Gives on what was kept, before what is typed from now on."""
        self._held.extendleft(reversed(self._kept))
        self._kept.clear()
        if self._held and not self._is_handing_on:
            self._is_handing_on = True
            self.run_worker(self._hand_on_held, group="keys")

    async def _hand_on_held(self) -> None:
        """Waits for a key's effect, then gives on what was typed meanwhile, one by one."""
        try:
            await self._settle()
            while self._held:
                if await self._hand_on(self._held.popleft()):
                    await self._settle()
        finally:
            self._is_handing_on = False

    async def _settle(self) -> None:
        """Waits until a key and what followed from it have gone through the widgets."""
        for number in range(1, _MOST_ROUNDS + 1):
            before = self._place()
            if not before or not await self._go_up(before[-1]):
                return
            if number >= _FEWEST_ROUNDS and self._place() == before:
                return

    def _place(self) -> list[DOMNode]:
        """Where keys go now: the screen, and the focused widget of it; nowhere at the end."""
        if not self.screen_stack:
            return []
        return [self.screen, *([self.focused] if self.focused is not None else [])]

    async def _go_up(self, node: DOMNode) -> bool:
        """Waits until all from a widget up to the app have handled what they had to.

        Returns:
            Whether none of them took too long.
        """
        for pump in node.ancestors_with_self:
            passed = asyncio.Event()
            if not pump.call_later(passed.set):
                continue  # being taken down
            try:
                await asyncio.wait_for(passed.wait(), _HOP_TIMEOUT_S)
            except TimeoutError:
                return False
        return True


def _text_of(kept: Iterable[events.Key | events.Paste]) -> str:
    """Returns what keys and pastes write, in their order."""
    text = ""
    for event in kept:
        if isinstance(event, events.Paste):
            text += event.text
        elif event.key == "backspace":
            text = text[:-1]
        else:
            text += event.character if event.is_printable and event.character else "\n"
    return text
