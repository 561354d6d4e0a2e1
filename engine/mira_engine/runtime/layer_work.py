"""One layer's routed experts as work that is done bit by bit, in the order they are there.

What the executor asks of all that computes experts, and the plain way of doing it: module by
module, one expert after the other. Outputs go to fixed positions and are summed over top-k
in the router's order, so the result does not depend on the order of the bits. Knows neither
slots nor links. Runs in the engine thread.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

from ..checkpoint.formats import BoundExpert
from ..types import ExpertId
from .host_experts import HostDemand
from .module_expert import expert_output


class LayerWork(Protocol):
    """One layer's routed experts, as they are computed bit by bit."""

    def demand(self) -> list[tuple[int, int]]:
        """Returns experts and how many tokens chose each, ascending by expert."""

    def compute(self, experts: Sequence[tuple[ExpertId, int]]) -> None:
        """Computes experts that are in these slots."""


class SharedWork(LayerWork, Protocol):
    """Work of which the processor may compute a part."""

    def host_demand(self, experts: Sequence[ExpertId]) -> HostDemand:
        """Describes what it computes of these experts."""


class LayerPlan:
    """Tokens of one layer sorted by expert: each expert's rows are one span.

    Args:
        module: transformers' experts module; supplies what lies between the matrices.
        hidden: `[T, C]`.
        top_k_index: `[T, k]` int64.
        bind: Gives the weights of an expert in a slot.
    """

    __slots__ = (
        "_bind",
        "_module",
        "_outputs",
        "_perm",
        "_rows",
        "experts",
        "flat_experts",
        "spans",
        "top_k",
    )

    def __init__(
        self,
        module: torch.nn.Module,
        hidden: torch.Tensor,
        top_k_index: torch.Tensor,
        bind: Callable[[ExpertId, int], BoundExpert],
    ) -> None:
        num_tokens, self.top_k = top_k_index.shape
        self._module = module
        self._bind = bind
        self._outputs: torch.Tensor | None = None
        self.spans: dict[int, tuple[int, int]] = {}
        if num_tokens == 1:
            self.flat_experts: list[int] = top_k_index[0].tolist()
            self._perm = None
            self._rows = hidden
            for row, expert in enumerate(self.flat_experts):
                self.spans[expert] = (row, row + 1)
            self.experts = sorted(self.spans)
            return
        flat = top_k_index.reshape(-1)
        ordered, self._perm = torch.sort(flat, stable=True)
        self._rows = hidden[self._perm // self.top_k]
        self.flat_experts = ordered.tolist()
        start = 0
        for row in range(1, len(self.flat_experts) + 1):
            if row == len(self.flat_experts) or self.flat_experts[row] != self.flat_experts[start]:
                self.spans[self.flat_experts[start]] = (start, row)
                start = row
        self.experts = sorted(self.spans)

    def demand(self) -> list[tuple[int, int]]:
        """Experts and how many tokens chose each, ascending by expert."""
        return [(e, self.spans[e][1] - self.spans[e][0]) for e in self.experts]

    def begin_with_zeros(self) -> None:
        """Lets experts that are not computed add nothing."""
        self._outputs = self._rows.new_zeros((len(self.flat_experts), self._rows.shape[-1]))

    def compute(self, experts: Sequence[tuple[ExpertId, int]]) -> None:
        """Runs experts that are in their slots and puts the results at their places."""
        for expert, slot in experts:
            self._compute_one(expert.expert, self._bind(expert, slot))

    def _compute_one(self, expert: int, weights: BoundExpert) -> None:
        start, stop = self.spans[expert]
        rows = self._rows if self._perm is None else self._rows[start:stop]
        result = expert_output(self._module, rows, weights)
        if self._outputs is None:
            num_rows = len(self.flat_experts)
            self._outputs = result.new_empty((num_rows, result.shape[-1]))
        self._outputs[start:stop] = result

    def combine(self, top_k_weights: torch.Tensor) -> torch.Tensor:
        """Weights the outputs, sums over top-k in the router's order. Returns `[T, C]`."""
        outputs = self._outputs
        assert outputs is not None
        if self._perm is not None:
            inverse = torch.empty_like(self._perm)
            inverse[self._perm] = torch.arange(len(self.flat_experts), device=inverse.device)
            outputs = outputs[inverse]
        weighted = outputs.view(-1, self.top_k, outputs.shape[-1]) * top_k_weights.unsqueeze(-1)
        return weighted.sum(dim=1)
