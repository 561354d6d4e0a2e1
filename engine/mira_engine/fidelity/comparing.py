"""Reads texts with one who predicts them, and sets that against the reference."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TypeVar

from .kept_logits import KeptLogits
from .measures import MAX_ROWS, FidelitySums, agreeing_tokens, compare
from .scoring import OnTokens, Scorer
from .texts import Window

Tokens = tuple[int, ...]

_Key = TypeVar("_Key")


def read_texts(
    scorer: Scorer,
    windows: Sequence[Window],
    kept: KeptLogits,
    *,
    is_reference: bool,
    on_tokens: OnTokens,
) -> dict[str, FidelitySums]:
    """Predicts all windows.

    Args:
        scorer: Predicts.
        windows: What is read.
        kept: Takes the reference's predictions, or gives them.
        is_reference: Whether these are the reference's.
        on_tokens: Told the tokens read so far.

    Returns:
        Sums by kind of text, in the order of the windows.
    """
    sums = {window.kind: FidelitySums() for window in windows}
    for number, start, logits in scorer.score([one.tokens for one in windows], on_tokens):
        window = windows[number]
        if is_reference:
            kept.write(number, start, logits)
        for first in range(0, len(logits), MAX_ROWS):
            rows, place = logits[first : first + MAX_ROWS], start + first
            reference = rows if is_reference else kept.read(number, place, len(rows))
            targets = window.tokens[place + 1 : place + 1 + len(rows)]
            sums[window.kind] += compare(rows, reference, targets)
    return sums


def judge(
    scorer: Scorer,
    prompts: Sequence[Tokens],
    made: Mapping[_Key, Sequence[Tokens]],
    *,
    limit: int,
    on_tokens: OnTokens,
) -> dict[_Key, float]:
    """Asks the reference what it would have made behind each prefix of each continuation.

    Up to the first difference that is its own continuation, so that nothing has to be
    generated with experts that are read one at a time.

    Args:
        scorer: The reference.
        prompts: What was continued.
        made: Of each precision, a continuation of each prompt.
        limit: Tokens of a continuation that does not end by itself.
        on_tokens: Told the tokens read so far.

    Returns:
        For each precision the mean number of tokens up to the first difference.
    """
    keys = list(dict.fromkeys(key for several in made.values() for key in enumerate(several)))
    choices = [[0] * len(tokens) for _, tokens in keys]
    sequences = [(*prompts[number], *tokens) for number, tokens in keys]
    for place, start, logits in scorer.score(sequences, on_tokens):
        before = len(prompts[keys[place][0]])
        for row, choice in enumerate(logits.argmax(dim=-1).tolist()):
            position = start + row + 1 - before
            if position >= 0:
                choices[place][position] = choice
    agreeing = {
        key: agreeing_tokens(key[1], chosen, limit)
        for key, chosen in zip(keys, choices, strict=True)
    }
    return {
        precision: sum(agreeing[key] for key in enumerate(several)) / len(several)
        for precision, several in made.items()
    }
