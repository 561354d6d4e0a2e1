"""What a token trace is like, in the figures that decide what a cache can do."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from .hits import expert_counts
from .workload import TokenTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class RoutingStatistics:
    """Figures of a trace, means over layers.

    Attributes:
        top_shares: Share of choices that the top 10, 25 and 50 % of experts take.
        reuse: Chance that a token's expert is one of the token before.
        distinct: Distinct experts of 1, 3, 5 and 8 tokens in a row.
        table_recall: Share of a layer's experts that a count table two layers before names,
            with k experts, counted on the first half and asked on the second.
    """

    top_shares: tuple[float, float, float]
    reuse: float
    distinct: tuple[float, ...]
    table_recall: float


def describe(trace: TokenTrace) -> RoutingStatistics:
    """Measures a trace of at least two texts or some hundred tokens."""
    counts = -np.sort(-expert_counts(trace), axis=1)
    shares = counts.cumsum(axis=1) / counts.sum(axis=1, keepdims=True)
    places = [max(1, round(trace.num_experts * part)) - 1 for part in (0.1, 0.25, 0.5)]
    is_chosen = _one_hot(trace)
    reuse = (is_chosen[1:] & is_chosen[:-1]).sum() / is_chosen[1:].sum()
    return RoutingStatistics(
        top_shares=tuple(float(shares[:, place].mean()) for place in places),  # type: ignore[arg-type]
        reuse=float(reuse),
        distinct=tuple(_distinct(is_chosen, window) for window in (1, 3, 5, 8)),
        table_recall=_table_recall(trace),
    )


def _one_hot(trace: TokenTrace) -> np.ndarray:
    num_tokens, num_layers, _ = trace.ids.shape
    is_chosen = np.zeros((num_tokens, num_layers, trace.num_experts), dtype=bool)
    np.put_along_axis(is_chosen, trace.ids.astype(np.int64), True, axis=2)
    return is_chosen


def _distinct(is_chosen: np.ndarray, window: int) -> float:
    num_whole = len(is_chosen) // window
    grouped = is_chosen[: num_whole * window].reshape(num_whole, window, *is_chosen.shape[1:])
    return float(grouped.any(axis=1).sum(axis=-1).mean())


def _table_recall(trace: TokenTrace) -> float:
    half = len(trace.ids) // 2
    is_chosen = _one_hot(trace).astype(np.float32)
    top_k = trace.ids.shape[2]
    recalls = []
    for layer in range(trace.ids.shape[1] - 2):
        now, later = is_chosen[:, layer], is_chosen[:, layer + 2]
        scores = now[half:] @ (now[:half].T @ later[:half])
        named = np.argsort(-scores, axis=1, kind="stable")[:, :top_k]
        recalls.append(np.take_along_axis(later[half:], named, axis=1).mean())
    return float(np.mean(recalls)) if recalls else 0.0
