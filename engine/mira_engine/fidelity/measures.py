"""Perplexity, divergence and agreement of predictions. Pure; any thread."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

MAX_ROWS = 16
"""Positions to compare at a time: some five copies of their logits in float32 are held."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FidelitySums:
    """Sums over predicted tokens; those of several texts add up.

    Attributes:
        num_tokens: Tokens that were predicted.
        nll: Negative log-probability of the tokens that came, nats.
        kl: Divergence of the reference's distributions from these, nats.
        num_agreeing: Tokens where both find the same one likeliest.
    """

    num_tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    num_agreeing: int = 0

    def __add__(self, other: FidelitySums) -> FidelitySums:
        return FidelitySums(
            num_tokens=self.num_tokens + other.num_tokens,
            nll=self.nll + other.nll,
            kl=self.kl + other.kl,
            num_agreeing=self.num_agreeing + other.num_agreeing,
        )

    @property
    def perplexity(self) -> float:
        """exp of the mean negative log-probability; infinite where that is too large."""
        mean = self.nll / self.num_tokens
        return math.exp(mean) if mean < 700 else math.inf

    @property
    def mean_kl(self) -> float:
        """Mean divergence, nats a token."""
        return self.kl / self.num_tokens

    @property
    def top1_agreement(self) -> float:
        """Share of tokens where both find the same one likeliest."""
        return self.num_agreeing / self.num_tokens


def compare(logits: Tensor, reference: Tensor, targets: Sequence[int]) -> FidelitySums:
    """Compares predictions of the next token at `T` positions.

    Args:
        logits: `[T, V]`, any float type.
        reference: `[T, V]`, the same positions.
        targets: The tokens that came, `T`.

    Returns:
        Sums over the positions. A word that the reference rules out (minus infinity) adds
        nothing to the divergence.
    """
    ours, theirs = (one.to(torch.float32).log_softmax(dim=-1) for one in (logits, reference))
    chosen = ours.gather(1, torch.tensor(targets, dtype=torch.int64)[:, None])
    weights = theirs.exp()
    terms = torch.where(weights > 0, weights * (theirs - ours), 0.0)
    return FidelitySums(
        num_tokens=len(targets),
        nll=-chosen.sum(dtype=torch.float64).item(),
        # Rounding alone can make a divergence of nearly nothing negative.
        kl=terms.sum(dim=-1, dtype=torch.float64).clamp_min(0).sum().item(),
        num_agreeing=int((ours.argmax(dim=-1) == theirs.argmax(dim=-1)).sum()),
    )


def log_likelihood(logits: Tensor, targets: Sequence[int]) -> tuple[float, bool]:
    """Returns the log-probability of tokens, nats, and whether each is the likeliest.

    Args:
        logits: `[T, V]`, any float type; behind the token before each target.
        targets: The tokens that came, `T`.
    """
    total, is_greedy = 0.0, True
    for first in range(0, len(targets), MAX_ROWS):
        chosen = torch.tensor(targets[first : first + MAX_ROWS], dtype=torch.int64)
        rows = logits[first : first + MAX_ROWS].to(torch.float32).log_softmax(dim=-1)
        total += rows.gather(1, chosen[:, None]).sum(dtype=torch.float64).item()
        is_greedy = is_greedy and torch.equal(rows.argmax(dim=-1), chosen)
    return total, is_greedy


def agreeing_tokens(made: Sequence[int], choices: Sequence[int], limit: int) -> int:
    """Counts tokens of a greedy continuation up to the first that the reference would not make.

    Up to that token both have read the same, so what the reference chooses behind each prefix
    of the continuation is its own continuation.

    Args:
        made: The continuation.
        choices: The reference's likeliest token at each place of it.
        limit: Tokens of a continuation that does not end by itself. One that ends in the same
            way has no difference, and counts so many.
    """
    for place, (token, choice) in enumerate(zip(made, choices, strict=True)):
        if token != choice:
            return place
    return limit
