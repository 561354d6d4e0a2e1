"""What a predictor sees of a MoE layer: a few short vectors, whatever the number of tokens.

Source: Mira IV-E. The mean of the experts' inputs, the mean of the router's logits, the
histogram of the selected experts, and the k experts with the most tokens. Pure functions
on tensors; nothing here knows a model.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerFeatures:
    """Features of N situations; each is one token, or all tokens of one pass.

    Attributes:
        hidden: `[N, C]` float32, mean input of the experts; `None` where only routing is known.
        router_logits: `[N, E]` float32, mean logits; `None` where the router is not linear.
        histogram: `[N, E]` float32, share of the selections that each expert got.
        busiest: `[N, E]` float32, 1 at the k experts with most tokens.
    """

    hidden: torch.Tensor | None
    router_logits: torch.Tensor | None
    histogram: torch.Tensor
    busiest: torch.Tensor

    def __len__(self) -> int:
        return self.histogram.shape[0]

    def select(self, rows: torch.Tensor | slice) -> LayerFeatures:
        """Returns the situations at `rows`, an index, a mask or a slice."""
        return LayerFeatures(
            hidden=None if self.hidden is None else self.hidden[rows],
            router_logits=None if self.router_logits is None else self.router_logits[rows],
            histogram=self.histogram[rows],
            busiest=self.busiest[rows],
        )


def selection_counts(top_k_index: torch.Tensor, num_experts: int) -> torch.Tensor:
    """Counts selections by expert, row by row: `[N, k]` ids to `[N, E]` float32."""
    index = top_k_index.to(torch.int64)
    counts = torch.zeros(index.shape[0], num_experts)
    return counts.scatter_add_(1, index, torch.ones(index.shape))


def pieces_of(rows: torch.Tensor, rows_at_once: int | None) -> Iterator[tuple[torch.Tensor, float]]:
    """Divides a batch into what is computed at once.

    Args:
        rows: `[B]`, its situations.
        rows_at_once: Most of a piece, `None` for all of them.

    Yields:
        The situations of each piece, and their share of the batch.
    """
    num_rows = max(1, len(rows))
    for piece in rows.split(rows_at_once or num_rows):
        yield piece, len(piece) / num_rows


def token_features(
    hidden: torch.Tensor | None,
    router_logits: torch.Tensor | None,
    top_k_index: torch.Tensor,
    num_experts: int,
) -> LayerFeatures:
    """Returns the features of N single tokens, one situation each.

    Args:
        hidden: `[N, C]` or `None`.
        router_logits: `[N, E]` or `None`.
        top_k_index: `[N, k]`.
        num_experts: E.
    """
    counts = selection_counts(top_k_index, num_experts)
    return LayerFeatures(
        hidden=hidden,
        router_logits=router_logits,
        histogram=counts / top_k_index.shape[1],
        busiest=counts,
    )


def pass_features(
    hidden: torch.Tensor | None,
    router_logits: torch.Tensor | None,
    top_k_index: torch.Tensor,
    num_experts: int,
) -> LayerFeatures:
    """Returns the features of one pass over T tokens: one situation.

    Args:
        hidden: `[T, C]` or `None`.
        router_logits: `[T, E]` or `None`.
        top_k_index: `[T, k]`.
        num_experts: E.
    """
    top_k = top_k_index.shape[1]
    counts = selection_counts(top_k_index.reshape(1, -1), num_experts)
    order = torch.sort(counts[0], descending=True, stable=True).indices[:top_k]
    busiest = torch.zeros_like(counts)
    busiest[0, order] = 1.0
    return LayerFeatures(
        hidden=None if hidden is None else hidden.float().mean(dim=0, keepdim=True),
        router_logits=None if router_logits is None else router_logits.mean(dim=0, keepdim=True),
        histogram=counts / top_k_index.numel(),
        busiest=busiest,
    )
