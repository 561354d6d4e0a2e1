"""The three predictors that a head has to beat, and their common interface.

Popularity ranks by how often an expert was used; the count table by how often it followed
the experts that layer i has just used; the target router is the later layer's own router,
asked early, on layer i's experts' input. All give logits whose softmax is the expected
share of routed tokens.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

import torch

from .features import LayerFeatures, selection_counts

_PRIOR_TOKENS = 8.0
"""Weight, in tokens, of popularity in each row of a count table."""


class PredictorKind(enum.StrEnum):
    """What predicts for a layer."""

    HEAD = "head"
    ROUTER = "router"
    TABLE = "table"
    POPULARITY = "popularity"


class Predictor(Protocol):
    """Scores the experts of a later layer."""

    kind: PredictorKind

    def logits(self, features: LayerFeatures) -> torch.Tensor:
        """Scores N situations: `[N, E]` float32."""
        ...

    def token_logits(self, hidden: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
        """Scores for one token, `[E]`, from its `[1, C]` float32 input and `[1, k]` ids."""
        ...

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns what a file has to keep."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RouterWeights:
    """A layer's own router, as far as it is a linear map.

    Attributes:
        weight: `[E, C]` float32.
        bias: `[E]` float32.
        input_gain: `[C]` float32, weight of the norm in front of the layer's experts;
            `None` where none was found.
    """

    weight: torch.Tensor
    bias: torch.Tensor
    input_gain: torch.Tensor | None

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns the router's logits for `[N, C]` inputs."""
        return torch.addmm(self.bias, hidden, self.weight.T)

    def seen_from(self, source: RouterWeights) -> RouterWeights | None:
        """Returns this router for inputs that an earlier layer's norm has weighted.

        Both norms weight nearly the same residual stream, so their ratio is folded into
        the router. `None` where a gain is unknown or vanishes.
        """
        if self.input_gain is None or source.input_gain is None:
            return None
        if float(source.input_gain.abs().min()) < 1e-3 * float(source.input_gain.abs().mean()):
            return None
        ratio = self.input_gain / source.input_gain
        return RouterWeights(weight=self.weight * ratio, bias=self.bias, input_gain=None)


class Popularity:
    """Ranks experts by their share of the routed tokens in the traces."""

    kind = PredictorKind.POPULARITY

    def __init__(self, log_shares: torch.Tensor) -> None:
        self.log_shares = log_shares

    @classmethod
    def fit(cls, target_ids: torch.Tensor, num_experts: int) -> Popularity:
        """Counts `[N, k]` ids; every expert counts once more than it was seen."""
        counts = selection_counts(target_ids.reshape(1, -1), num_experts)[0] + 1
        return cls((counts / counts.sum()).log())

    def logits(self, features: LayerFeatures) -> torch.Tensor:
        """Returns the same row for every situation."""
        return self.log_shares.expand(len(features), -1)

    def token_logits(self, hidden: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
        """Returns the one row there is."""
        return self.log_shares

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the log shares."""
        return {"log_shares": self.log_shares}


class CountTable:
    """Adds up what followed each of the experts that the layer has used."""

    kind = PredictorKind.TABLE

    def __init__(self, shares: torch.Tensor) -> None:
        self.shares = shares

    @classmethod
    def fit(
        cls, source_ids: torch.Tensor, target_ids: torch.Tensor, num_experts: int
    ) -> CountTable:
        """Counts which experts follow which: `[N, k]` ids of both layers."""
        source = selection_counts(source_ids, num_experts)
        target = selection_counts(target_ids, num_experts)
        prior = Popularity.fit(target_ids, num_experts).log_shares.exp()
        counts = source.T @ target + _PRIOR_TOKENS * prior
        return cls(counts / counts.sum(dim=1, keepdim=True))

    def logits(self, features: LayerFeatures) -> torch.Tensor:
        """Mixes the rows of the used experts by their share of the selections."""
        return (features.histogram @ self.shares).log()

    def token_logits(self, hidden: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
        """Adds the rows of the token's experts."""
        return self.shares.index_select(0, top_k_index[0]).mean(dim=0).log_()

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the table, rows normalised: `[E, E]`."""
        return {"shares": self.shares}


class TargetRouter:
    """Asks the later layer's router early, on this layer's experts' input."""

    kind = PredictorKind.ROUTER

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor) -> None:
        self.weight = weight
        self.bias = bias

    def logits(self, features: LayerFeatures) -> torch.Tensor:
        """Returns the router's logits."""
        assert features.hidden is not None
        return torch.addmm(self.bias, features.hidden, self.weight.T)

    def token_logits(self, hidden: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
        """Returns the router's logits for the token."""
        return torch.addmv(self.bias, self.weight, hidden[0])

    def native_parts(self, top_k: int) -> tuple[torch.Tensor | None, ...]:
        """Returns weight, bias, table, table bias and outer of `mira::predict_experts`."""
        del top_k
        return (self.weight, self.bias, None, None, None)

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns weight `[E, C]` and bias `[E]`."""
        return {"weight": self.weight, "bias": self.bias}


def baseline_from(kind: PredictorKind, tensors: Mapping[str, torch.Tensor]) -> Predictor:
    """Rebuilds a baseline from what `tensors` returned."""
    if kind is PredictorKind.POPULARITY:
        return Popularity(tensors["log_shares"])
    if kind is PredictorKind.TABLE:
        return CountTable(tensors["shares"])
    return TargetRouter(tensors["weight"], tensors["bias"])
