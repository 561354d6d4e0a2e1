"""The chats of before: found, opened, renamed, deleted, written to files and read back.

The store waits for the disk, so every call to it is made in a worker's thread; changes
one after the other, searches so that a later one replaces those before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path

from mira_engine.api import MiraError
from textual import getters, work
from textual.app import ComposeResult
from textual.binding import Binding
from textual.containers import Vertical
from textual.content import Content
from textual.message import Message
from textual.screen import ActiveBinding, Screen
from textual.widgets import Input, OptionList, Static
from textual.widgets.option_list import Option

from mira_app.chat_files import export_chat, free_path, read_chats
from mira_app.figures import count
from mira_app.history import ChatSummary, HistoryError, HistoryStore, Hit, utc_now
from mira_app.history_search import search_words
from mira_app.paths import home_expanded
from mira_app.sanitise import sanitise
from mira_app.tui.footer_keys import KeyFooter, without

ROW_LINES = 2
MAX_ROWS = 200
"""More chats than that are found by searching."""

_SHORT_ROWS = 20

_LESS = frozenset({"app.controls", "app.history", "app.quit"})
_LESS_WITH_UNDO = _LESS | {"history.import"}
"""Keys that the footer has no room for."""


class ChatList(OptionList):
    """Chats, or what a search found; every row is `ROW_LINES` high."""

    BINDINGS = [
        Binding("enter", "screen.open", "Open", id="history.open"),
        Binding("slash", "screen.search", "Search", id="history.search"),
        Binding("r", "screen.rename", "Rename", id="history.rename"),
        Binding("d,delete", "screen.delete", "Delete", id="history.delete"),
        Binding("u", "screen.undo", "Undo", id="history.undo"),
        Binding("e", "screen.export", "Export", id="history.export"),
        Binding("i", "screen.import", "Import", id="history.import"),
    ]


class SearchInput(Input):
    """Where one types what to look for."""

    BINDINGS = [
        Binding("enter", "screen.open", "Open", id="history.open-hit"),
        Binding("down", "screen.list", "To the list", id="history.to-list"),
    ]


class AnswerInput(Input):
    """A title or a path that was asked for."""

    BINDINGS = [
        Binding("enter", "submit", "Done", id="history.done"),
        Binding("escape", "screen.back", "Cancel", id="history.cancel"),
    ]


class HistoryScreen(Screen[None]):
    """The list of chats. `dismiss`es itself on Esc; who pushed it acts on `Chosen`."""

    CSS_PATH = "history.tcss"
    VERTICAL_BREAKPOINTS = [(0, "-short"), (_SHORT_ROWS, "-tall")]
    AUTO_FOCUS = "#chats"
    BINDINGS = [Binding("escape", "back", "Back", id="history.back")]

    @dataclass
    class Chosen(Message):
        """The person wants this chat, at this turn where a search found it."""

        chat_id: str
        turn_id: int | None

    @dataclass
    class Renamed(Message):
        """A chat has another title."""

        chat_id: str
        title: str

    @dataclass
    class Deleted(Message):
        """A chat was deleted, or taken back."""

        chat_id: str
        is_restored: bool

    search_input = getters.query_one("#search", SearchInput)
    chat_list = getters.query_one("#chats", ChatList)
    rename_input = getters.query_one("#rename", AnswerInput)
    path_input = getters.query_one("#path", AnswerInput)
    empty = getters.query_one("#empty", Static)
    note = getters.query_one("#note", Static)

    def __init__(
        self,
        store: HistoryStore,
        *,
        current_chat_id: str | None = None,
        folder: Path | None = None,
        clock: Callable[[], datetime] = utc_now,
    ) -> None:
        """Args say which chat is open, where files go, and what time it is."""
        super().__init__()
        self._store = store
        self._current_chat_id = current_chat_id
        self._folder = folder or Path.cwd()
        self._clock = clock
        self._rows: Sequence[ChatSummary | Hit] = ()
        self._shown_search = ""
        self._deleted: list[tuple[str, str]] = []
        self._asked_chat_id = ""
        self._is_importing = False
        self._change_order = asyncio.Lock()

    def compose(self) -> ComposeResult:
        """Lays out the search, the list and the line for answers."""
        with Vertical(id="page"):
            yield SearchInput(placeholder="Press / to search in all chats", id="search")
            yield ChatList(id="chats", markup=False)
            yield Static(id="empty")
            yield Static(id="note")
            yield AnswerInput(id="path", select_on_focus=False)
        yield AnswerInput(id="rename", compact=True)
        yield KeyFooter()

    def on_mount(self) -> None:
        """Fills the list."""
        self.search_input.border_title = "History"
        self.rename_input.display = self.path_input.display = False
        self.empty.display = self.note.display = False
        self._show()

    async def on_unmount(self) -> None:
        """Ends the time in which a deletion can be undone."""
        if self._deleted:
            # Where it fails, the store forgets them itself a day later.
            with contextlib.suppress(HistoryError):
                await asyncio.to_thread(
                    self._store.purge, [chat_id for chat_id, _ in self._deleted]
                )

    # -- what is shown

    @work(exclusive=True, group="history.show", exit_on_error=False)
    async def _show(self) -> None:
        """Reads the list, or what is found, and draws it."""
        text = self.search_input.value
        try:
            if text.strip():
                rows: Sequence[ChatSummary | Hit] = await asyncio.to_thread(
                    self._store.search, text
                )
            else:
                rows = await asyncio.to_thread(self._store.chats)
        except HistoryError as error:
            self._say(str(error), is_error=True)
            return
        self._draw(rows, text)

    def _draw(self, rows: Sequence[ChatSummary | Hit], text: str) -> None:
        """Fills the list; the marked row stays marked, or its place."""
        index = self.chat_list.highlighted or 0
        marked = _key(self._rows[index]) if index < len(self._rows) else None
        is_new_search = text != self._shown_search
        self._rows, self._shown_search = rows[:MAX_ROWS], text
        words, now = search_words(text), self._clock()
        self.chat_list.set_options(Option(self._prompt(row, words, now)) for row in self._rows)
        keys = [_key(row) for row in self._rows]
        if keys:
            kept = keys.index(marked) if marked in keys else min(index, len(keys) - 1)
            self.chat_list.highlighted = 0 if is_new_search else kept
        # The list keeps the keys, also where there is nothing in it: one can still undo.
        self.set_class(not keys, "-empty")
        self.empty.display = not keys
        self.empty.update(Content(_empty_text(text)))
        self.search_input.border_subtitle = _count_text(rows, text)
        self.refresh_bindings()

    def _prompt(self, row: ChatSummary | Hit, words: Sequence[str], now: datetime) -> Content:
        title = _highlighted(" ".join(sanitise(row.title).split()) or "Untitled", words, "bold")
        if isinstance(row, Hit):
            below = _highlighted(sanitise(row.snippet).replace("\n", " "), words, "")
        else:
            is_open = row.chat_id == self._current_chat_id
            parts = ["open now"] if is_open else []
            parts += [ago(row.updated_at, now), count(row.num_turns, "turn")]
            parts += [sanitise(row.model)] if row.model else []
            below = Content(" · ".join(parts))
        return Content.assemble(title, "\n  ", below.stylize_before("$foreground 70%"))

    def _say(self, text: str, *, is_error: bool = False) -> None:
        self.note.display = bool(text)
        self.note.set_class(is_error, "-error")
        self.note.update(Content(sanitise(text)))

    # -- what the person does

    @property
    def _marked(self) -> ChatSummary | Hit | None:
        index = self.chat_list.highlighted
        return self._rows[index] if index is not None and index < len(self._rows) else None

    @property
    def active_bindings(self) -> dict[str, ActiveBinding]:
        """Leaves out of the footer what has no room beside the keys of the list."""
        less = _LESS_WITH_UNDO if self._deleted else _LESS
        return without(super().active_bindings, less)

    def check_action(self, action: str, parameters: tuple[object, ...]) -> bool | None:
        """Shows only the keys that do something now."""
        del parameters
        if action == "undo":
            return bool(self._deleted)
        if action in ("open", "rename", "delete", "export"):
            return bool(self._rows)
        return True

    def on_input_changed(self, event: Input.Changed) -> None:
        """Searches as one types."""
        if event.input is self.search_input:
            self._show()

    def on_option_list_option_selected(self, event: OptionList.OptionSelected) -> None:
        """Opens the chat that was clicked."""
        event.stop()
        self.action_open()

    def action_open(self) -> None:
        """Passes on what is marked."""
        row = self._marked
        if row is not None:
            turn_id = row.turn_id if isinstance(row, Hit) else None
            self.post_message(self.Chosen(row.chat_id, turn_id))

    def action_search(self) -> None:
        """Goes to the search."""
        self.search_input.focus()

    def action_list(self) -> None:
        """Goes to the list."""
        self.chat_list.focus()

    def action_back(self) -> None:
        """Leaves what is begun, then the search, then the screen."""
        if self.rename_input.display or self.path_input.display:
            self._close_inputs()
        elif self.search_input.value:
            self.search_input.value = ""
            self.chat_list.focus()
        else:
            self.dismiss()

    def action_delete(self) -> None:
        """Deletes the chat; `undo` takes that back while the screen is there."""
        row = self._marked
        if row is None:
            return
        title = " ".join(sanitise(row.title).split())
        self._deleted.append((row.chat_id, title))
        self.refresh_bindings()
        self._change(
            lambda: self._store.delete(row.chat_id),
            said=f"Deleted “{title}”. Press u to undo.",
            message=self.Deleted(row.chat_id, is_restored=False),
        )

    def action_undo(self) -> None:
        """Takes the last deletion back."""
        if not self._deleted:
            return
        chat_id, title = self._deleted.pop()
        self.refresh_bindings()
        self._change(
            lambda: self._store.restore(chat_id),
            said=f"“{title}” is back.",
            message=self.Deleted(chat_id, is_restored=True),
        )

    def action_rename(self) -> None:
        """Lets the title be edited where it stands."""
        row = self._marked
        if row is None or self.chat_list.highlighted is None:
            return
        self._asked_chat_id = row.chat_id
        self.chat_list.scroll_to_highlight()
        top = self.chat_list.highlighted * ROW_LINES - round(self.chat_list.scroll_y)
        place = self.chat_list.content_region
        self.rename_input.styles.offset = (place.x, place.y + top)
        self.rename_input.styles.width = place.width
        self.rename_input.value = " ".join(sanitise(row.title).split())
        self.rename_input.display = True
        self.rename_input.focus()

    def action_export(self) -> None:
        """Asks where to write the chat."""
        row = self._marked
        if row is not None:
            self._asked_chat_id = row.chat_id
            path = free_path(self._folder, sanitise(row.title))
            self._ask_path("Export to (.md or .jsonl)", str(path), is_importing=False)

    def action_import(self) -> None:
        """Asks what to read."""
        self._ask_path("Import from (.md or .jsonl)", f"{self._folder}/", is_importing=True)

    def _ask_path(self, title: str, value: str, *, is_importing: bool) -> None:
        self._is_importing = is_importing
        self._say("")
        self.path_input.border_title = title
        self.path_input.value = value
        self.path_input.display = True
        self.path_input.focus()
        self.path_input.cursor_position = len(value)

    def on_input_submitted(self, event: Input.Submitted) -> None:
        """Renames, exports or imports."""
        value = event.value.strip()
        chat_id = self._asked_chat_id
        if event.input is self.rename_input and value:
            self._rename(chat_id, value)
        elif event.input is self.path_input and value and self._is_importing:
            self._import(home_expanded(value))
        elif event.input is self.path_input and value:
            path = home_expanded(value)
            self._change(
                lambda: export_chat(self._store.load(chat_id), path), said=f"Written to {path}."
            )
        if event.input is not self.search_input:
            self._close_inputs()

    def on_descendant_blur(self) -> None:
        """Leaves a title where somebody clicks elsewhere."""
        if self.rename_input.display and self.focused is not self.rename_input:
            self.rename_input.display = False

    def on_resize(self) -> None:
        """Leaves a title, whose row is now elsewhere."""
        if self.rename_input.display:
            self._close_inputs()

    def _close_inputs(self) -> None:
        self.rename_input.display = self.path_input.display = False
        self.chat_list.focus()

    def _rename(self, chat_id: str, title: str) -> None:
        self._change(
            lambda: self._store.rename(chat_id, title), message=self.Renamed(chat_id, title)
        )

    def _import(self, path: Path) -> None:
        def add() -> str:
            num_added = len(self._store.add(read_chats(path)))
            return (
                f"Imported {count(num_added, 'chat')}." if num_added else "All was there already."
            )

        self._change(add)

    @work(group="history.change", exit_on_error=False)
    async def _change(
        self,
        operation: Callable[[], object],
        *,
        said: str = "",
        message: Message | None = None,
    ) -> None:
        """Changes the store in a thread, after the changes before; then tells and redraws."""

        def changed() -> tuple[object, list[str]]:
            return operation(), self._store.take_notices()

        async with self._change_order:
            try:
                result, notices = await asyncio.to_thread(changed)
            except MiraError as error:
                self._say(str(error), is_error=True)
            else:
                lines = [result if isinstance(result, str) else said, *notices]
                self._say("\n".join(lines).strip())
            if message is not None:
                self.post_message(message)
        self._show()


def ago(moment: datetime, now: datetime) -> str:
    """Says when something was, in words up to a week and as a date before."""
    seconds = (now - moment).total_seconds()
    if seconds < 60:
        return "just now"
    if seconds < 3600:
        return f"{int(seconds // 60)} min ago"
    if seconds < 86400:
        return f"{int(seconds // 3600)} h ago"
    if seconds < 7 * 86400:
        return f"{count(int(seconds // 86400), 'day')} ago"
    return f"{moment.astimezone():%Y-%m-%d}"


def _key(row: ChatSummary | Hit) -> tuple[str, int | None]:
    return (row.chat_id, row.turn_id if isinstance(row, Hit) else None)


def _count_text(rows: Sequence[ChatSummary | Hit], text: str) -> str:
    if text.strip():
        return count(len(rows), "hit")
    if len(rows) > MAX_ROWS:
        return f"the newest {MAX_ROWS} of {len(rows)} chats"
    return count(len(rows), "chat")


def _empty_text(text: str) -> str:
    if text.strip():
        return f"Nothing was found for “{sanitise(text.strip())}”."
    return "There are no chats yet.\n\nEvery chat is kept here from its first message on."


def _highlighted(text: str, words: Sequence[str], style: str) -> Content:
    """Marks the words that were searched for; underlined too, for screens without colour."""
    content = Content.styled(text, style) if style else Content(text)
    for word in words:
        found = re.compile(re.escape(word), re.IGNORECASE)
        content = content.highlight_regex(found, style="$text-accent bold underline")
    return content
