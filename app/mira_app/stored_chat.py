"""What is kept of a chat. Plain values; who keeps it, and how, is not known here."""

from __future__ import annotations

from dataclasses import dataclass

from mira_engine.api import SamplingConfig

from .conversation import Conversation


@dataclass(frozen=True, slots=True, kw_only=True)
class StoredChat:
    """One chat as it goes into the history and comes out of it.

    Attributes:
        chat_id: Its name for ever.
        title: Its name for people.
        model: What `--model` calls the model it was last held with.
        sampling: Its own sampling, `None` for what the settings say.
    """

    chat_id: str
    title: str
    model: str
    conversation: Conversation
    sampling: SamplingConfig | None = None
