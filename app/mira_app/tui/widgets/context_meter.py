"""How full the model's context is: used and limit, and a warning near it."""

from __future__ import annotations

from mira_engine.api import ReplyStats
from textual.content import Content
from textual.widgets import Static

_WARNING_SHARE = 0.85


def meter(stats: ReplyStats, limit: int) -> tuple[Content, bool]:
    """Returns what the meter says, and whether the limit is near.

    Args:
        limit: Tokens of the context, 0 where no model is loaded.
    """
    if not limit:
        return Content(""), False
    used = stats.num_prompt_tokens + stats.num_new_tokens
    is_near = used >= _WARNING_SHARE * limit
    text = f"context {used:,} / {limit:,}"
    return Content(f"{text} nearly full" if is_near else text), is_near


class ContextMeter(Static):
    """Shows the meter; draws only when it changed."""

    def __init__(self) -> None:
        super().__init__(id="context")
        self._shown: tuple[Content, bool] | None = None

    def show(self, stats: ReplyStats, limit: int) -> None:
        """Shows how much of the context the last prompt and reply take."""
        state = meter(stats, limit)
        if state != self._shown:
            self._shown = state
            self.update(state[0])
            self.set_class(state[1], "-near")
