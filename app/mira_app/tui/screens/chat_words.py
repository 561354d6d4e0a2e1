"""What the chat says in the program's own name. Pure; texts only."""

from __future__ import annotations

from mira_engine.api import ContextTrimmed, FinishReason

from mira_app.controller import Stage
from mira_app.figures import count
from mira_app.stored_chat import CHANGED_ELSEWHERE

BUSY = "One moment: the model is busy. Esc stops it."
CUT = {
    FinishReason.LENGTH: "The reply was cut at its limit of tokens; F5 changes that.",
    FinishReason.CONTEXT: "The reply was cut: the context is full.",
}
CHANGED = f"{CHANGED_ELSEWHERE} [ and ] on a message go from one to the other."

_ENGINE_STATES = {Stage.RECOVERING: "restarting the engine"}
_SERVER_STATES = {
    Stage.LOADING: "connecting",
    Stage.RECOVERING: "connecting again",
    Stage.FAILED: "not connected",
}


def state_word(stage: Stage, *, is_served: bool) -> str:
    """Returns what the header calls a stage.

    Args:
        stage: What is going on.
        is_served: Whether a server runs the model.
    """
    if stage is Stage.REPLYING:
        return "answering"
    return (_SERVER_STATES if is_served else _ENGINE_STATES).get(stage, stage.value)


def recovered_text(*, is_served: bool) -> str:
    """Returns what is said once a model that was lost answers again."""
    if is_served:
        return "The server can be reached again."
    return "The engine runs again; the model is loaded."


def trimmed_text(trimmed: ContextTrimmed) -> str:
    """Returns what is said where the oldest messages no longer fit."""
    return (
        f"The chat is longer than the context of {trimmed.limit:,} tokens: the model no "
        f"longer sees the oldest {count(trimmed.num_turns, 'message')}. The system prompt "
        "stays, and so does everything on the screen."
    )
