"""The footer: drawn only when its keys change, and without those there is no room for.

Keys that it leaves out hold all the same.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Collection, Mapping

from textual.binding import Binding
from textual.screen import ActiveBinding, Screen
from textual.widgets import Footer


def without(
    bindings: Mapping[str, ActiveBinding], binding_ids: Collection[str]
) -> dict[str, ActiveBinding]:
    """Returns the bindings, those named not shown.

    Args:
        bindings: A screen's `active_bindings`.
        binding_ids: What matters less than the rest.
    """
    return {
        key: active._replace(binding=dataclasses.replace(active.binding, show=False))
        if active.binding.id in binding_ids
        else active
        for key, active in bindings.items()
    }


class KeyFooter(Footer):
    """A footer that stays as it is while its keys are the same.

    Textual builds one anew, a widget a key, whenever the focus moves: half of what opening
    the chat cost (2026-11-30, counted), and empty for a moment each time.
    """

    def __init__(self) -> None:
        super().__init__(show_command_palette=False)
        self._drawn: list[tuple[Binding, bool, str]] | None = None

    def bindings_changed(self, screen: Screen) -> None:
        """Builds it anew where a key came, went or was dimmed."""
        is_drawn = self.is_attached and screen is self.screen and screen.app.app_focus
        active = screen.active_bindings.values() if is_drawn else ()
        shown = [(each.binding, each.enabled, each.tooltip) for each in active if each.binding.show]
        if not is_drawn or shown != self._drawn:
            self._drawn = shown if is_drawn else None
            super().bindings_changed(screen)
