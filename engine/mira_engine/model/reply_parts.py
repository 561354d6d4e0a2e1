"""Tells what a model thinks from what it answers, while the text arrives.

Pure: pieces of text in, parts of the reply out. A tag may be split over pieces at any
character; what could still become one is held back. Tags, the whitespace around them and a
channel's head are the frame of a reply: they belong to no part. All else comes out, once and
in order.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from ..types import ReplyPart

ReplyPiece = tuple[ReplyPart, str]

THINK_TAGS = (
    ("<think>", "</think>"),
    ("<thinking>", "</thinking>"),
    ("[THINK]", "[/THINK]"),
    ("<seed:think>", "</seed:think>"),
    ("<|START_THINKING|>", "<|END_THINKING|>"),
)
"""What opens and closes a model's thinking."""

_START, _CHANNEL, _MESSAGE = "<|start|>", "<|channel|>", "<|message|>"
_ENDS = ("<|end|>", "<|return|>", "<|call|>")
CHANNEL_MARKS = (_START, _CHANNEL, _MESSAGE, *_ENDS, "<|constrain|>")
"""Special tokens of templates with channels. Source: OpenAI, the harmony response format."""

_FINAL = "final"
_MAX_HEAD_CHARS = 256
"""A channel's head is a few words; what is longer is text that no head frames."""


class ReplyParts(Protocol):
    """Splits one reply into its parts."""

    @property
    def part(self) -> ReplyPart:
        """What the next text belongs to, as far as one can know."""

    def push(self, text: str) -> list[ReplyPiece]:
        """Takes the next piece of text. Returns what is certain now, often nothing."""

    def flush(self) -> list[ReplyPiece]:
        """Returns what was still held back; the reply is over."""


def split_reply(template: str, prompt: str) -> ReplyParts:
    """Returns what splits the reply to a prompt.

    Args:
        template: The model's chat template.
        prompt: The rendered chat.
    """
    return Channels() if uses_channels(template) else ThinkTags(opened=opened_tag(prompt))


def uses_channels(template: str) -> bool:
    """Whether a template's models say by channels what they think and answer."""
    return _CHANNEL in template and _MESSAGE in template


def opened_tag(prompt: str) -> str | None:
    """Returns the tag by which a prompt opens the reply's thinking, `None` where none does."""
    tail = prompt.rstrip()
    return next((opening for opening, _ in THINK_TAGS if tail.endswith(opening)), None)


class ThinkTags:
    """Thinking between tags at the head of a reply; the rest is the answer.

    Only there: an answer may write about the tags.

    Args:
        opened: The opening tag that the prompt ended with; then only the closing one arrives.
    """

    def __init__(self, opened: str | None = None) -> None:
        self._held = ""
        self._opening = opened or ""
        self._closing = dict(THINK_TAGS)[opened] if opened else ""
        self._is_open = opened is not None
        self._is_at_start = True
        """Whether the part has no text yet."""
        self._is_decided = opened is not None
        """Whether a tag can open the thinking no more."""

    @property
    def part(self) -> ReplyPart:
        """What the next text belongs to, as far as one can know."""
        return ReplyPart.THINKING if self._is_open else ReplyPart.ANSWER

    def push(self, text: str) -> list[ReplyPiece]:
        """Takes the next piece of text. Returns what is certain now, often nothing."""
        self._held += text
        if not self._is_decided and not self._decide():
            return []
        pieces: list[ReplyPiece] = []
        if self._is_open:
            thought = self._take_thought()
            if thought:
                pieces.append((ReplyPart.THINKING, thought))
        if not self._is_open:
            if self._is_at_start:
                self._held = self._held.lstrip()
            if self._held:
                pieces.append((ReplyPart.ANSWER, self._held))
                self._held, self._is_at_start = "", False
        return pieces

    def flush(self) -> list[ReplyPiece]:
        """Returns what was still held back; the reply is over."""
        rest, self._held = self._held, ""
        if self._is_open:
            rest = rest.rstrip()
        return [(self.part, rest)] if rest else []

    def _decide(self) -> bool:
        """Looks whether the reply begins with a tag. Returns whether that is certain."""
        body = self._held.lstrip()
        for opening, closing in THINK_TAGS:
            if body.startswith(opening):
                self._opening, self._closing = "", closing
                self._held = body[len(opening) :]
                self._is_open = self._is_decided = True
                return True
        if any(opening.startswith(body) for opening, _ in THINK_TAGS):
            return False
        self._is_at_start = False  # No tag, no frame: leading whitespace is the answer's.
        self._is_decided = True
        return True

    def _take_thought(self) -> str:
        """Takes what is thought for certain, and closes the thinking at its tag."""
        if self._is_at_start:
            self._held = self._held.lstrip()
            if self._opening and self._held:
                # Some models repeat the tag that the prompt has opened.
                if self._held.startswith(self._opening):
                    self._held = self._held[len(self._opening) :].lstrip()
                    self._opening = ""
                elif self._opening.startswith(self._held):
                    return ""
                else:
                    self._opening = ""
        thought, tag, rest = self._held.partition(self._closing)
        if tag:
            self._held, self._is_open, self._is_at_start = rest, False, True
            return thought.rstrip()
        num_open = _num_begun(self._held, (self._closing,))
        thought = self._held[: len(self._held) - num_open].rstrip()
        self._held = self._held[len(thought) :]
        self._is_at_start = self._is_at_start and not thought
        return thought


class Channels:
    """Messages with a head each, which names the channel; `final` is the answer.

    The prompt ends inside the first message's head. `analysis` and `commentary` are thinking.
    """

    def __init__(self) -> None:
        self._held = ""
        self._is_in_head = True
        self._part = ReplyPart.THINKING
        self._is_part_begun = dict.fromkeys(ReplyPart, False)
        self._is_gap_due = False

    @property
    def part(self) -> ReplyPart:
        """What the next text belongs to, as far as one can know."""
        return self._part

    def push(self, text: str) -> list[ReplyPiece]:
        """Takes the next piece of text. Returns what is certain now, often nothing."""
        self._held += text
        pieces: list[ReplyPiece] = []
        while self._held:
            if self._is_in_head:
                if not self._leave_head():
                    break
            elif not self._take_body(pieces):
                break
        return pieces

    def flush(self) -> list[ReplyPiece]:
        """Returns what was still held back; an unfinished head is no text."""
        rest, self._held = self._held, ""
        return [] if self._is_in_head else self._piece(rest)

    def _leave_head(self) -> bool:
        """Reads a message's head. Returns whether text follows now."""
        head, mark, rest = self._held.partition(_MESSAGE)
        if mark and self._begins_as_head(head + mark):
            _, channel_mark, channel = head.rpartition(_CHANNEL)
            words = channel.split()
            name = words[0].removesuffix("<|constrain|>") if words else ""
            is_answer = not channel_mark or name == _FINAL
            self._enter(ReplyPart.ANSWER if is_answer else ReplyPart.THINKING, rest)
            return True
        if not self._begins_as_head(self._held):
            self._enter(ReplyPart.ANSWER, self._held)
            return True
        if len(self._held) > _MAX_HEAD_CHARS:
            text = self._held
            for each in CHANNEL_MARKS:
                text = text.replace(each, "")
            self._enter(ReplyPart.ANSWER, text)
            return True
        return False

    @staticmethod
    def _begins_as_head(text: str) -> bool:
        """Whether text begins, or may yet begin, as a head does: by a mark or a recipient."""
        body = text.lstrip()
        starts = (*CHANNEL_MARKS, "to=")
        return any(body.startswith(s) or s.startswith(body) for s in starts)

    def _enter(self, part: ReplyPart, rest: str) -> None:
        self._part, self._held, self._is_in_head = part, rest, False
        self._is_gap_due = self._is_part_begun[part]

    def _take_body(self, pieces: list[ReplyPiece]) -> bool:
        """Takes a message's text. Returns whether the message has ended."""
        found = [(self._held.find(mark), mark) for mark in (*_ENDS, _START, _CHANNEL)]
        cut, mark = min(((at, m) for at, m in found if at >= 0), default=(-1, ""))
        if cut < 0:
            num_open = _num_begun(self._held, CHANNEL_MARKS)
            cut = len(self._held) - num_open
            pieces += self._piece(self._held[:cut])
            self._held = self._held[cut:]
            return False
        pieces += self._piece(self._held[:cut])
        self._held = self._held[cut + (len(mark) if mark in _ENDS else 0) :]
        self._is_in_head = True
        return True

    def _piece(self, text: str) -> list[ReplyPiece]:
        if not text:
            return []
        if self._is_gap_due:  # Another message of the same part is another paragraph.
            text, self._is_gap_due = "\n\n" + text, False
        self._is_part_begun[self._part] = True
        return [(self._part, text)]


def _num_begun(text: str, marks: Sequence[str]) -> int:
    """Returns how many characters at the end of `text` may be the beginning of a mark."""
    longest = max(map(len, marks)) - 1
    for size in range(min(longest, len(text)), 0, -1):
        if any(mark.startswith(text[-size:]) for mark in marks):
            return size
    return 0
