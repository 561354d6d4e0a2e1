"""Mass-weighted Coverage@k: how much of a layer's routed tokens a ranking would have served.

Source: Mira VI-B (figure 9). Of the token mass that is routed at the target layer, the
share that falls on the first k experts of a predictor's ranking. Every routed token has
mass 1, or its gate weight where those are given.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch


def rank_of_experts(scores: torch.Tensor) -> torch.Tensor:
    """Returns each expert's place, 0 the best, ties by expert id: `[N, E]` int64."""
    order = torch.sort(scores, dim=1, descending=True, stable=True).indices
    places = torch.arange(scores.shape[1]).expand_as(order)
    return torch.empty_like(order).scatter_(1, order, places)


def coverage(
    scores: torch.Tensor,
    target_ids: torch.Tensor,
    ks: Sequence[int],
    mass: torch.Tensor | None = None,
) -> tuple[float, ...]:
    """Returns Coverage@k for each k.

    Args:
        scores: `[N, E]`, a predictor's scores.
        target_ids: `[N, k]`, the experts that the target layer then used.
        ks: Prefetch budgets in experts.
        mass: `[N, k]`, gate weights of those experts; `None` counts routed tokens.
    """
    places = rank_of_experts(scores).gather(1, target_ids.to(torch.int64))
    weight = torch.ones(places.shape) if mass is None else mass.float()
    total = float(weight.sum())
    if total == 0:
        return tuple(0.0 for _ in ks)
    return tuple(float(weight[places < k].sum()) / total for k in ks)
