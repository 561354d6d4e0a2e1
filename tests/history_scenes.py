"""A history with chats in it, and its screen brought into fixed states. The clock stands still."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from pathlib import Path

from app_scenes import until
from mira_app.conversation import Conversation
from mira_app.history import HistoryStore, StoredChat
from mira_app.tui.screens.history import HistoryScreen
from textual.app import App
from textual.pilot import Pilot
from textual.widgets._footer import FooterKey

NOW = datetime(2026, 3, 4, 12, 0, tzinfo=UTC)
NASTY = "\x1b[31mred\x1b]0;title\x07 \u202eevil 👩‍👩‍👧‍👦 日本語 \x9b2J"
CHATS = [
    ("sky", "Why is the sky blue?", "Rayleigh scattering: blue light is scattered most."),
    ("cache", "Explain what a cache is.", "A cache keeps *copies* of what was used recently."),
    ("nasty", f"{NASTY} question", f"{NASTY} answer\nwith a needle"),
    ("long", "Summarise this: " + "word " * 300, "word " * 3000 + "needle " + "word " * 3000),
]


def make_screen(store: HistoryStore, folder: Path) -> HistoryScreen:
    """The screen, opened from the chat `sky`."""
    return HistoryScreen(store, current_chat_id="sky", folder=folder, clock=lambda: NOW)


class HistoryApp(App[None]):
    """Pushes the screen and remembers what it said."""

    def __init__(self, store: HistoryStore, folder: Path) -> None:
        super().__init__()
        self.store = store
        self.said: list = []
        self.history = make_screen(store, folder)

    def on_mount(self) -> None:
        self.push_screen(self.history)

    def on_history_screen_chosen(self, event: HistoryScreen.Chosen) -> None:
        self.said.append(event)

    on_history_screen_renamed = on_history_screen_deleted = on_history_screen_chosen


def open_store(path: Path) -> HistoryStore:
    """An empty store, in which every save is seven hours after the one before."""
    times = iter(range(10_000))
    store = HistoryStore(
        path, clock=lambda: NOW - timedelta(hours=30) + timedelta(hours=7) * next(times)
    )
    store.open()
    return store


def fill(store: HistoryStore) -> None:
    for chat_id, question, answer in reversed(CHATS):
        conversation = Conversation().with_user(question).with_reply(answer, model="builtin")
        store.save(StoredChat(chat_id=chat_id, model="builtin", conversation=conversation))


def footer(app: App) -> set[str]:
    return {key.description for key in app.screen.query(FooterKey)}


def screen_of(app: App) -> HistoryScreen:
    return next(screen for screen in app.screen_stack if isinstance(screen, HistoryScreen))


def note(app: App) -> str:
    shown = screen_of(app).note
    return str(shown.content) if shown.display else ""


async def listed(pilot: Pilot, num_rows: int = len(CHATS)) -> None:
    await until(pilot, lambda: isinstance(pilot.app.screen, HistoryScreen))
    await until(pilot, lambda: len(screen_of(pilot.app)._rows) == num_rows)
    await pilot.pause()


async def type_text(pilot: Pilot, text: str) -> None:
    await pilot.press(*("space" if char == " " else char for char in text))


async def search(pilot: Pilot, text: str) -> None:
    await pilot.press("slash")
    await type_text(pilot, text)
    await until(pilot, lambda: screen_of(pilot.app)._shown_search == text)
    await pilot.pause()
