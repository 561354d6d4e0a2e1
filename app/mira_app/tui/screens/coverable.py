"""A screen that draws nothing while another one hides it."""

from __future__ import annotations

from textual.app import ScreenStackError
from textual.screen import Screen


class CoverableScreen(Screen[None]):
    """A screen that other screens lie over while it goes on.

    Textual counts the screen below the top one as visible although that may be opaque, and
    has all of the top one drawn anew whenever something changes below: with the details over
    a chat that was half of what they cost (2026-11-30, counted).
    """

    @property
    def is_current(self) -> bool:
        """Whether anything of it is seen."""
        try:
            above = reversed(self.app.screen_stack)
        except ScreenStackError:
            return False
        for screen in above:
            if screen is self:
                return True
            if screen.styles.background.a == 1:
                return False
        return False
