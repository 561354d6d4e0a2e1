"""What an evaluation reads: texts as windows of tokens, and beginnings to continue.

Owns how a person's files are read and refused, and how much of each text is taken. Knows
tokens, no model. Runs in the engine process, in the thread that asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from transformers.tokenization_utils_base import PreTrainedTokenizerBase

from ..errors import ConfigError

WINDOW_TOKENS = 512
"""Most tokens that are read in one piece; what a text has besides begins a new one."""

MIN_TEXT_TOKENS = 16
"""Fewest tokens of a text: with less, most are predicted from next to nothing."""

MIN_SHARE_TOKENS = 64
"""Tokens of a text below which rather fewer texts are read."""

MAX_CONTINUATIONS = 10
"""Beginnings that are continued."""

PROMPT_TOKENS = 32
"""Most tokens of a beginning."""

_CHARS_PER_TOKEN = 32
"""Characters of a file that are read for each token that is wanted; hardly one is longer."""


class Text(NamedTuple):
    """A text, and what kind it is."""

    kind: str
    text: str


class Window(NamedTuple):
    """Tokens that are read in one piece; all but the first are predicted."""

    kind: str
    tokens: tuple[int, ...]

    @property
    def num_predicted(self) -> int:
        """Tokens that are predicted from those before them."""
        return len(self.tokens) - 1


def read_text(path: Path, max_tokens: int) -> Text:
    """Reads as much of a person's text file as may be needed.

    Raises:
        ConfigError: It cannot be read, is no UTF-8 text, or is empty.
    """
    try:
        with path.open(encoding="utf-8-sig") as file:
            text = file.read(max_tokens * _CHARS_PER_TOKEN)
    except UnicodeError:
        raise _unusable(path, "It is not UTF-8 text; convert it.") from None
    except OSError as error:
        raise _unusable(path, f"It cannot be read: {error.strerror or error}.") from error
    if "\x00" in text:
        raise _unusable(path, "It is no text: it holds zero bytes.")
    if not text.strip():
        raise _unusable(path, "It is empty.")
    return Text(path.name, text)


class TextTokens(NamedTuple):
    """Texts as tokens.

    Attributes:
        lead: What the tokenizer puts before every text, empty for most models.
        kinds: Of each text.
        tokens: Of each text, without what the tokenizer adds.
    """

    lead: tuple[int, ...]
    kinds: tuple[str, ...]
    tokens: tuple[tuple[int, ...], ...]


def tokenise(tokenizer: PreTrainedTokenizerBase, texts: Sequence[Text]) -> TextTokens:
    """Tokenises texts as they are: no chat template.

    Raises:
        ConfigError: A text has fewer than `MIN_TEXT_TOKENS` tokens.
    """
    kinds, tokens = [], []
    for kind, text in texts:
        found = tuple(tokenizer(text, add_special_tokens=False)["input_ids"])
        if len(found) < MIN_TEXT_TOKENS:
            raise ConfigError.for_field(
                "text",
                kind,
                f"It has {len(found)} tokens, at least {MIN_TEXT_TOKENS} are needed.",
            )
        kinds.append(kind)
        tokens.append(found)
    return TextTokens(lead_tokens(tokenizer), tuple(kinds), tuple(tokens))


def lead_tokens(tokenizer: PreTrainedTokenizerBase) -> tuple[int, ...]:
    """Returns what a tokenizer puts before every text, empty for most models."""
    plain = list(tokenizer("a", add_special_tokens=False)["input_ids"])
    whole = list(tokenizer("a")["input_ids"])
    for start in range(len(whole) - len(plain) + 1):
        if whole[start : start + len(plain)] == plain:
            return tuple(whole[:start])
    return ()


def make_windows(
    texts: TextTokens, *, max_tokens: int, window_tokens: int = WINDOW_TOKENS
) -> list[Window]:
    """Cuts texts into windows; each text gets an equal share of the tokens.

    Where a share would be below `MIN_SHARE_TOKENS`, only the first texts are taken. What a
    short text leaves of its share goes to the others.

    Args:
        texts: In the order in which they matter.
        max_tokens: Most tokens of all windows, `lead` left out.
        window_tokens: Most tokens of one, `lead` included.

    Raises:
        ConfigError: `max_tokens` is below `MIN_SHARE_TOKENS`.
    """
    if max_tokens < MIN_SHARE_TOKENS:
        raise ConfigError.for_field("tokens", max_tokens, f"Give at least {MIN_SHARE_TOKENS}.")
    taken = num_taken(len(texts.tokens), max_tokens)
    shares = _shares([len(tokens) for tokens in texts.tokens[:taken]], max_tokens)
    size = window_tokens - len(texts.lead)
    windows = []
    for kind, tokens, share in zip(texts.kinds[:taken], texts.tokens[:taken], shares, strict=True):
        for start in range(0, share, size):
            piece = texts.lead + tokens[start : min(start + size, share)]
            if len(piece) > 1:
                windows.append(Window(kind, piece))
    return windows


def num_taken(num_texts: int, max_tokens: int) -> int:
    """Returns how many of the texts are read, the first ones."""
    return min(num_texts, max_tokens // MIN_SHARE_TOKENS)


def _shares(lengths: Sequence[int], total: int) -> list[int]:
    """Divides `total` equally, none more than its length."""
    shares, left = [0] * len(lengths), total
    order = sorted(range(len(lengths)), key=lambda place: lengths[place])
    for rank, place in enumerate(order):
        shares[place] = min(lengths[place], left // (len(order) - rank))
        left -= shares[place]
    return shares


def beginnings(windows: Sequence[Window]) -> list[tuple[int, ...]]:
    """Returns what is to be continued: the first tokens of windows all over the texts."""
    count = min(len(windows), MAX_CONTINUATIONS)
    chosen = [windows[len(windows) * number // count] for number in range(count)]
    return [
        window.tokens[: max(1, min(PROMPT_TOKENS, len(window.tokens) // 2))] for window in chosen
    ]


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluated:
    """What is read: windows of texts, and beginnings that are continued.

    Attributes:
        windows: All that is read.
        prompts: What is continued.
        num_texts: Texts that are read.
        num_left_out: Texts for which there were too few tokens.
    """

    windows: tuple[Window, ...]
    prompts: tuple[tuple[int, ...], ...]
    num_texts: int
    num_left_out: int = 0

    @property
    def num_predicted(self) -> int:
        """Tokens that are predicted in each precision."""
        return sum(window.num_predicted for window in self.windows)


def make_evaluated(
    tokenizer: PreTrainedTokenizerBase,
    texts: Sequence[Text],
    *,
    max_tokens: int,
    window_tokens: int = WINDOW_TOKENS,
) -> Evaluated:
    """Turns texts into what is read, and what of it is continued.

    Raises:
        ConfigError: A text is too short, or `max_tokens` too small.
    """
    windows = make_windows(
        tokenise(tokenizer, texts), max_tokens=max_tokens, window_tokens=window_tokens
    )
    num_texts = num_taken(len(texts), max_tokens)
    return Evaluated(
        windows=tuple(windows),
        prompts=tuple(beginnings(windows)),
        num_texts=num_texts,
        num_left_out=len(texts) - num_texts,
    )


def _unusable(path: Path, why: str) -> ConfigError:
    return ConfigError.for_field("file", str(path), why)
