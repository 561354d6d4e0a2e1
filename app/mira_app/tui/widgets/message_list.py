"""The list of messages: follows its tail, and holds only so many turns at a time."""

from __future__ import annotations

from textual.app import ComposeResult
from textual.containers import VerticalScroll
from textual.geometry import Size
from textual.widget import Widget
from textual.widgets import Static

from mira_app.conversation import Conversation, Role, Turn

from .growing_text import rest_far_passages
from .messages import ChatMessage, InfoMessage, ReplyMessage, Thinking, UserMessage

WINDOW_TURNS = 20
"""Turns that are mounted when a chat is shown."""

_AIM_POLLS = 4
"""How long a place is held while what was mounted around it gets its height."""

STEP_TURNS = 10
"""Turns added at an end that the person scrolls to; as many go at the other end."""


class Fold(Static):
    """Stands for the turns that are not mounted at one end; a click brings some."""


class MessageList(VerticalScroll, can_focus=False):
    """The chat, newest at the bottom; follows its tail until the person scrolls up."""

    def __init__(self) -> None:
        super().__init__()
        self._conversation = Conversation()
        self._path: tuple[Turn, ...] = ()
        self._first = self._last = 0  # the window into the path
        self._above = Fold(classes="-hidden")
        self._below = Fold(classes="-hidden")
        self.welcome = Static(classes="welcome")
        """Shown while there is no message."""
        self._num_unseen = 0
        self._aim: ChatMessage | None = None
        self._num_aim_polls = 0
        self._rested_at: tuple[int, int, Size] | None = None
        """Place in the list, its height and size when far passages were last told to rest."""
        self._num_rests_due = 0

    def compose(self) -> ComposeResult:
        """Shows nothing but a welcome and the two ends, which are hidden."""
        yield self.welcome
        yield self._above
        yield self._below

    # -- what is shown

    @property
    def _fixed(self) -> tuple[Static, ...]:
        return self.welcome, self._above, self._below

    @property
    def turns(self) -> list[ChatMessage]:
        """The messages that are mounted, oldest first."""
        return list(self.query_children(ChatMessage))

    @property
    def is_at_tail(self) -> bool:
        """Whether the newest turn is mounted."""
        return self._last == len(self._path)

    @property
    def is_following(self) -> bool:
        """Whether new text moves the view."""
        return self.is_anchored and not self._anchor_released

    @property
    def has_unseen(self) -> bool:
        """Whether text came that the person has scrolled away from."""
        return self._num_unseen > 0

    async def show(self, conversation: Conversation) -> None:
        """Shows the tail of a conversation; what is mounted of it already stays."""
        self._take(conversation)
        first, last = self._first, len(self._path)
        if not first <= last <= first + WINDOW_TURNS + STEP_TURNS:
            first = max(0, last - WINDOW_TURNS)
        await self._mount_window(first, last)
        self.follow()

    async def show_anew(self, conversation: Conversation) -> None:
        """Shows another chat: nothing that is mounted may stay, the turns' numbers are its own."""
        self._first = self._last = 0
        await self.remove_children([child for child in self.children if child not in self._fixed])
        await self.show(conversation)

    async def jump_to(self, turn_id: int) -> bool:
        """Shows a turn of the path and focuses it; returns whether it is on the path."""
        index = self.index_of(turn_id)
        if index is None:
            return False
        if not self._first <= index < self._last:
            first = max(0, min(index - WINDOW_TURNS // 2, len(self._path) - WINDOW_TURNS))
            await self._mount_window(first, min(len(self._path), first + WINDOW_TURNS))
        self.anchor(False)
        for message in self.turns:
            if message.turn_id == turn_id:
                message.focus(scroll_visible=False)
                self._hold(message)
        return True

    def index_of(self, turn_id: int | None) -> int | None:
        """Returns which turn of the path that is, `None` where it is not on it."""
        return next((i for i, turn in enumerate(self._path) if turn.turn_id == turn_id), None)

    async def add_reply(self, conversation: Conversation) -> ReplyMessage:
        """Shows the question at the head and a reply that is to come, and follows it."""
        await self.show(conversation)
        return await self.begin_reply()

    async def begin_reply(self) -> ReplyMessage:
        """Shows a reply that is to come, under the newest turn."""
        reply = ReplyMessage()
        await self.mount(reply, before=self._below)
        self.follow()
        return reply

    async def finish_reply(self, reply: ReplyMessage, conversation: Conversation) -> None:
        """Makes the reply that was coming the newest turn."""
        is_at_tail = self.is_at_tail
        self._take(conversation)
        if reply.is_attached:
            await reply.finish(self._path[-1], self._place(self._path[-1]))
            if is_at_tail:
                self._last = len(self._path)
        await self._trim()

    async def add_info(self, text: str, *, is_error: bool = False) -> None:
        """Shows a line of the program itself."""
        await self.mount(InfoMessage(text, is_error=is_error), before=self._below)

    def follow(self) -> None:
        """Goes to the newest text and stays there while it grows."""
        self._num_unseen, self._aim = 0, None
        self.anchor()

    def note_text(self, num_chars: int) -> None:
        """Counts text that came while the person reads further up."""
        if not self.is_following and self.max_scroll_y > self.scroll_offset.y:
            self._num_unseen += num_chars

    def fold_all(self) -> None:
        """Folds all thinking, or opens it where all of it is folded."""
        folds = list(self.query(Thinking))
        is_any_open = any(not fold.collapsed for fold in folds)
        for fold in folds:
            fold.collapsed = is_any_open

    # -- going about

    def neighbour(self, message: ChatMessage, step: int) -> ChatMessage | None:
        """Returns the message above or below, `None` past the ends."""
        messages = self.turns
        index = messages.index(message) + step
        return messages[index] if 0 <= index < len(messages) else None

    def let_go(self) -> None:
        """Lets the person scroll away from a place that is held."""
        self._aim = None

    def _hold(self, message: ChatMessage) -> None:
        """Keeps a message at the top of what is seen until its surroundings are laid out."""
        self._aim, self._num_aim_polls = message, _AIM_POLLS
        self.call_after_refresh(self._scroll_to_aim)

    def _scroll_to_aim(self) -> None:
        if self._aim is None or not self._aim.is_attached:
            return
        if not self.max_scroll_y:
            self.anchor()  # all fits, or is not laid out yet: it cannot be scrolled into view
        else:
            self.anchor(False)
            self.scroll_to(y=max(1, self._aim.virtual_region.y - 1), animate=False, immediate=True)

    async def to_start(self) -> None:
        """Goes to the first turn."""
        self._aim = None
        await self._mount_window(0, min(len(self._path), WINDOW_TURNS))
        self.anchor(False)
        self.scroll_home(animate=False)

    async def to_tail(self) -> None:
        """Goes to the newest turn and follows it."""
        if not self.is_at_tail:
            await self.show(self._conversation)
        self.follow()

    async def keep_up(self) -> None:
        """Does what scrolling and growing made due; called some ten times a second."""
        if not self.is_attached:
            return
        if self.scroll_offset.y >= self.max_scroll_y:
            self._num_unseen = 0
        if self._aim is not None:
            self._scroll_to_aim()
            self._num_aim_polls -= 1
            if not self._num_aim_polls:
                self._aim = None
        elif self.max_scroll_y and not self.is_following:
            if self.scroll_offset.y == 0 and self._first:
                await self._show_earlier()
            elif self.scroll_offset.y >= self.max_scroll_y and not self.is_at_tail:
                await self._show_later()
        await self._rest_far()

    async def _rest_far(self) -> None:
        """Has far passages rest; only once the view has moved over enough to make a difference.

        To ask each time where all of them are has everything arranged anew that is not seen.
        """
        place = (self.scroll_offset.y, self.virtual_size.height, self.size)
        if self._has_moved(place):
            self._rested_at = place
            self._num_rests_due = 2  # At the first one the layout may still be the one before.
        if self._num_rests_due and await rest_far_passages(self):
            self._num_rests_due -= 1

    def _has_moved(self, place: tuple[int, int, Size]) -> bool:
        """Whether that is far from where far passages were last told to rest."""
        if self._rested_at is None:
            return True
        (y, height, size), step = self._rested_at, self.size.height // 3
        return abs(place[0] - y) >= step or abs(place[1] - height) >= step or place[2] != size

    # -- the window

    def _take(self, conversation: Conversation) -> None:
        self._conversation, self._path = conversation, conversation.path()
        self.welcome.display = not self._path

    def _place(self, turn: Turn) -> str:
        siblings = self._conversation.siblings(turn.turn_id)
        if len(siblings) == 1:
            return ""
        return f"{[t.turn_id for t in siblings].index(turn.turn_id) + 1}/{len(siblings)}"

    def _make(self, turn: Turn) -> ChatMessage:
        kind = UserMessage if turn.role is Role.USER else ReplyMessage
        return kind(turn, self._place(turn))

    async def _mount_window(self, first: int, last: int) -> None:
        """Mounts turns `first` to `last` of the path; equal ones at its front stay mounted.

        So does a reply under way behind them, where nothing of the path comes in between.
        """
        wanted = [turn.turn_id for turn in self._path[first:last]]
        children = [child for child in self.children if child not in self._fixed]
        num_kept, num_same = self._num_kept(children, wanted, is_tail=last == len(self._path))
        self._first, self._last, self._rested_at = first, last, None
        with self.app.batch_update():
            if children[num_kept:]:
                await self.remove_children(children[num_kept:])
            made = [self._make(turn) for turn in self._path[first + num_same : last]]
            if made:
                await self.mount_all(made, before=self._below)
            self._show_folds()

    @staticmethod
    def _num_kept(children: list[Widget], wanted: list[int], *, is_tail: bool) -> tuple[int, int]:
        """Returns how many widgets at the front can stay, and how many turns they show."""
        num_same = 0
        for num_kept, child in enumerate(children):
            if isinstance(child, ChatMessage):
                if child.turn_id is None and is_tail and num_same == len(wanted):
                    continue
                if num_same == len(wanted) or child.turn_id != wanted[num_same]:
                    return (num_kept, num_same) if num_same else (0, 0)
                num_same += 1
        return (len(children), num_same) if num_same else (0, 0)

    async def _show_earlier(self) -> None:
        first = max(0, self._first - STEP_TURNS)
        made = [self._make(turn) for turn in self._path[first : self._first]]
        self._hold(self.turns[0])
        with self.app.batch_update():
            await self.mount_all(made, after=self._above)
            self._first = first
            await self._drop(self._num_surplus, is_front=False)
            self._show_folds()

    async def _show_later(self) -> None:
        last = min(len(self._path), self._last + STEP_TURNS)
        made = [self._make(turn) for turn in self._path[self._last : last]]
        with self.app.batch_update():
            await self.mount_all(made, before=self._below)
            self._last = last
            await self._drop(self._num_surplus, is_front=True)
            self._show_folds()

    @property
    def _num_surplus(self) -> int:
        return max(0, len(self.turns) - WINDOW_TURNS - STEP_TURNS)

    async def _trim(self) -> None:
        """Gives up the oldest turns of a window that has grown at its tail."""
        if self.is_following and self._num_surplus:
            with self.app.batch_update():
                await self._drop(self._num_surplus + STEP_TURNS, is_front=True)
                self._show_folds()

    async def _drop(self, num_turns: int, *, is_front: bool) -> None:
        """Removes turns from an end of the window, and the lines between them."""
        messages = self.turns
        if not num_turns or (not is_front and messages[-1].turn_id is None):
            return  # a reply that is being written stays where it is
        children: list[Widget] = list(self.children)
        if is_front:
            self._first += num_turns
            doomed = children[1 : children.index(messages[num_turns])]
        else:
            self._last -= num_turns
            doomed = children[children.index(messages[-num_turns]) : -1]
        await self.remove_children(doomed)

    def _show_folds(self) -> None:
        num_above, num_below = self._first, len(self._path) - self._last
        self._above.update(f"▲ {num_above} earlier messages (Ctrl+Home: the first)")
        self._below.update(f"▼ {num_below} later messages (Ctrl+End: the newest)")
        self._above.set_class(not num_above, "-hidden")
        self._below.set_class(not num_below, "-hidden")
