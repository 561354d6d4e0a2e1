"""MixtureHead: two small branches and the gate that mixes them, and its folded form.

In training a head is three modules; to run, all that is linear in the experts' input is
one matrix, and all that is linear in the selected experts is one row per expert. The
layer's router is linear in that input too, so its logits need not be handed over.

Source: Mira IV-E, except that the activation branch starts as the target layer's own
router, and that what it learns is a correction to that.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from .baselines import PredictorKind, RouterWeights
from .features import LayerFeatures

HIST_WIDTH = 32
"""Units between the two matrices of the history branch."""

_ROUTER_TRUST = 1.0
"""First logit of the gate where the activation branch starts as a router: 0.73 of the mixture."""


class ActHead(nn.Module):
    """Activation branch: semantic context and router logits to logits of the target layer.

    Args:
        mean: `[C]`, mean of the experts' input over the traces.
        scale: `[C]`, its standard deviation.
        num_experts: E.
        start: Router that the branch begins as; `None` begins at zero.
    """

    def __init__(
        self,
        mean: torch.Tensor,
        scale: torch.Tensor,
        num_experts: int,
        start: RouterWeights | None,
    ) -> None:
        super().__init__()
        width = mean.shape[0]
        zeros = torch.zeros(num_experts, width)
        self.register_buffer("mean", mean)
        self.register_buffer("scale", scale)
        self.register_buffer("start", zeros if start is None else start.weight)
        self.start_scale = nn.Parameter(torch.ones(()))
        self.delta = nn.Parameter(torch.zeros(num_experts, width))
        self.router_weight = nn.Parameter(torch.zeros(num_experts, num_experts))
        self.bias = nn.Parameter(torch.zeros(num_experts) if start is None else start.bias.clone())

    def forward(self, hidden: torch.Tensor, router_logits: torch.Tensor | None) -> torch.Tensor:
        """Returns `[N, E]` logits."""
        logits = self.start_scale * (hidden @ self.start.T) + self.bias
        logits = logits + ((hidden - self.mean) / self.scale) @ self.delta.T
        if router_logits is not None:
            logits = logits + router_logits @ self.router_weight.T
        return logits


class HistHead(nn.Module):
    """History branch: which experts were selected to logits of the target layer."""

    def __init__(self, num_experts: int, width: int = HIST_WIDTH) -> None:
        super().__init__()
        self.direct = nn.Linear(2 * num_experts, num_experts)
        self.inner = nn.Linear(2 * num_experts, width)
        self.outer = nn.Linear(width, num_experts, bias=False)
        nn.init.zeros_(self.direct.weight)
        nn.init.zeros_(self.direct.bias)
        nn.init.zeros_(self.outer.weight)

    def forward(self, histogram: torch.Tensor, busiest: torch.Tensor) -> torch.Tensor:
        """Returns `[N, E]` logits."""
        selected = torch.cat((histogram, busiest), dim=1)
        return self.direct(selected) + self.outer(torch.relu(self.inner(selected)))


class MixtureHead(nn.Module):
    """`alpha * ActHead + (1 - alpha) * HistHead`, alpha from a contextual gate.

    Args:
        mean: `[C]`, mean of the experts' input; `None` leaves only the history branch.
        scale: `[C]`, its standard deviation.
        num_experts: E.
        start: Router that the activation branch begins as.
    """

    def __init__(
        self,
        mean: torch.Tensor | None,
        scale: torch.Tensor | None,
        num_experts: int,
        start: RouterWeights | None = None,
    ) -> None:
        super().__init__()
        self.num_experts = num_experts
        self.hist = HistHead(num_experts)
        self.act: ActHead | None = None
        if mean is not None and scale is not None:
            self.act = ActHead(mean, scale, num_experts, start)
            self.gate_hidden = nn.Parameter(torch.zeros(mean.shape[0]))
            self.gate_router = nn.Parameter(torch.zeros(num_experts))
            self.gate_selected = nn.Parameter(torch.zeros(2 * num_experts))
            self.gate_bias = nn.Parameter(torch.tensor(0.0 if start is None else _ROUTER_TRUST))

    def forward(self, features: LayerFeatures) -> torch.Tensor:
        """Returns `[N, E]` logits over the target layer's experts."""
        hist = self.hist(features.histogram, features.busiest)
        if self.act is None:
            return hist
        assert features.hidden is not None
        act = self.act(features.hidden, features.router_logits)
        return torch.lerp(hist, act, self.alpha(features).unsqueeze(1))

    def alpha(self, features: LayerFeatures) -> torch.Tensor:
        """Returns the weight of the activation branch, `[N]`."""
        assert self.act is not None
        assert features.hidden is not None
        selected = torch.cat((features.histogram, features.busiest), dim=1)
        gate = ((features.hidden - self.act.mean) / self.act.scale) @ self.gate_hidden
        gate = gate + selected @ self.gate_selected + self.gate_bias
        if features.router_logits is not None:
            gate = gate + features.router_logits @ self.gate_router
        return torch.sigmoid(gate)

    @torch.no_grad()
    def fold(self, router: RouterWeights | None) -> FoldedHead:
        """Returns the head in the form that runs.

        Args:
            router: The layer's own router, whose logits the head was trained with; `None`
                where it was trained without.
        """
        selected = torch.cat((self.hist.direct.weight, self.hist.inner.weight))
        offset = torch.cat((self.hist.direct.bias, self.hist.inner.bias))
        tensors = {"outer": self.hist.outer.weight}
        if self.act is not None:
            selected = torch.cat((selected, self.gate_selected[None]))
            offset = torch.cat((offset, offset.new_zeros(1)))
            scaled = torch.cat((self.act.delta, self.gate_hidden[None])) / self.act.scale
            matrix = scaled + nn.functional.pad(self.act.start_scale * self.act.start, (0, 0, 0, 1))
            bias = torch.cat((self.act.bias, self.gate_bias[None])) - scaled @ self.act.mean
            if router is not None:
                by_logit = torch.cat((self.act.router_weight, self.gate_router[None]))
                matrix = matrix + by_logit @ router.weight
                bias = bias + by_logit @ router.bias
            tensors |= {"act_weight": matrix, "act_bias": bias}
        tensors |= {
            "histogram": selected[:, : self.num_experts].T,
            "busiest": selected[:, self.num_experts :].T,
            "selected_bias": offset,
        }
        return FoldedHead({name: t.detach().contiguous().clone() for name, t in tensors.items()})


class FoldedHead:
    """A trained MixtureHead, ready to run.

    Args:
        tensors: With D units in the history branch: `act_weight [E + 1, C]` and `act_bias`,
            logits of the activation branch and then the gate (absent without that branch);
            `histogram` and `busiest [E, E + D + 1]`, what a selected expert adds to the
            history branch's logits, its units and the gate; `selected_bias [E + D + 1]`;
            `outer [E, D]`.
    """

    kind = PredictorKind.HEAD

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = dict(tensors)
        self._act_weight = tensors.get("act_weight")
        self._act_bias = tensors.get("act_bias")
        self._histogram = tensors["histogram"]
        self._busiest = tensors["busiest"]
        self._selected_bias = tensors["selected_bias"]
        self._outer = tensors["outer"]
        self._num_experts, self._width = self._outer.shape
        self._token_tables: dict[int, torch.Tensor] = {}

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns the folded weights."""
        return dict(self._tensors)

    def logits(self, features: LayerFeatures) -> torch.Tensor:
        """Scores N situations. Router logits are taken from the hidden state."""
        selected = self._selected_bias + features.histogram @ self._histogram
        selected = selected + features.busiest @ self._busiest
        split = self._num_experts + self._width
        units = torch.relu(selected[:, self._num_experts : split])
        hist = selected[:, : self._num_experts] + units @ self._outer.T
        if self._act_weight is None:
            return hist
        assert features.hidden is not None
        assert self._act_bias is not None
        act = torch.addmm(self._act_bias, features.hidden, self._act_weight.T)
        alpha = torch.sigmoid(act[:, -1:] + selected[:, split:])
        return torch.lerp(hist, act[:, :-1], alpha)

    def token_logits(self, hidden: torch.Tensor, top_k_index: torch.Tensor) -> torch.Tensor:
        """Scores for one token; the same arithmetic in as few calls as possible."""
        num_experts, split = self._num_experts, self._num_experts + self._width
        table = self._token_table(top_k_index.shape[1])
        selected = table.index_select(0, top_k_index[0]).sum(dim=0).add_(self._selected_bias)
        units = selected[num_experts:split].relu_()
        hist = torch.addmv(selected[:num_experts], self._outer, units)
        if self._act_weight is None:
            return hist
        act = torch.addmv(self._act_bias, self._act_weight, hidden[0])
        alpha = torch.sigmoid(act[num_experts:] + selected[split:])
        return torch.lerp(hist, act[:num_experts], alpha)

    def native_parts(self, top_k: int) -> tuple[torch.Tensor | None, ...]:
        """Returns weight, bias, table, table bias and outer of `mira::predict_experts`."""
        table = self._token_table(top_k).contiguous()
        return (self._act_weight, self._act_bias, table, self._selected_bias, self._outer)

    def _token_table(self, top_k: int) -> torch.Tensor:
        """What each selected expert of a single token adds: its histogram entry is 1 / k."""
        table = self._token_tables.get(top_k)
        if table is None:
            table = self._token_tables[top_k] = self._histogram / top_k + self._busiest
        return table
