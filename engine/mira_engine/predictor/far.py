"""FarHead: from one layer's hidden state to the experts of every later layer at once.

A head for layer i + 2 leaves a link that needs several layers' time for one record too
little of it. A far head sits at few layers, sees the last token's hidden state there, and
tells what all layers behind it will need, less surely the later they are. It is linear and
of low rank: one product of `[rank, C]` and one of `[targets * E, rank]`.

Ours. Mira's heads look two layers ahead (IV-E); what they find is taken first.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from mira_kernels import native
from torch.nn import functional

from .coverage import coverage
from .features import pieces_of, selection_counts
from .traces import RoutingTrace

STRIDE = 8
"""Layers from one far head to the next, beginning with the first layer. On a virtual clock
with the built-in model's routing, 8 gains within 3 % of what 4 does, at half the time of the
heads themselves; heads of every layer that look two layers ahead add nothing to either."""

RANK = 128
"""Most units between the two matrices. Measured on the built-in model: Coverage@2 of all
later layers from layer 0 is .680 with 128, .660 with 64, .681 without a bound."""

_EPOCHS = 12
_MIN_STEPS = 200
"""Few samples are gone through more often."""
_BATCH_SIZE = 256
_LEARNING_RATE = 4e-3
_WEIGHT_DECAY = 1.0


class FarHead:
    """Predicts the experts of later layers from one layer's hidden state.

    Args:
        tensors: `inner` `[rank, C]` and `inner_bias` `[rank]`; `outer` `[J * E, rank]` and
            `outer_bias` `[J * E]`; `targets` `[J]` int64, the later layers. All else float32.
        top_k: Experts of a token in a layer.
    """

    def __init__(self, tensors: Mapping[str, torch.Tensor], top_k: int) -> None:
        self._tensors = dict(tensors)
        self._inner, self._inner_bias = tensors["inner"], tensors["inner_bias"]
        self._outer, self._outer_bias = tensors["outer"], tensors["outer_bias"]
        self.targets: list[int] = tensors["targets"].tolist()
        self._top_k = top_k
        self._narrow: tuple[torch.Tensor, ...] | None = None

    def tensors(self) -> dict[str, torch.Tensor]:
        """Returns what a file has to keep."""
        return self._tensors

    def probabilities(self, hidden: torch.Tensor) -> torch.Tensor:
        """Returns `[N, J, E]`: how likely each expert is to be one of its token's.

        Args:
            hidden: `[N, C]` float32.
        """
        units = torch.addmm(self._inner_bias, hidden, self._inner.T)
        logits = torch.addmm(self._outer_bias, units, self._outer.T)
        shares = torch.softmax(logits.view(len(hidden), len(self.targets), -1), dim=-1)
        return (shares * self._top_k).clamp_max_(1.0)

    def expect(self, hidden: torch.Tensor, min_probability: float) -> list[tuple[int, int, float]]:
        """Returns `(layer, expert, probability)` of what these tokens will likely use.

        Args:
            hidden: `[T, C]` in any floating dtype.
            min_probability: Least probability, of a use by at least one of the tokens.

        Returns:
            Nearest layer first, likeliest first within it.
        """
        if len(hidden) == 1 and hidden.dtype is torch.bfloat16 and native.is_loaded():
            shares = self._native_shares(hidden)
        else:
            used = self.probabilities(hidden.float())
            shares = used[0] if len(used) == 1 else 1 - (1 - used).prod(dim=0)
        # Probabilities of one token sum to the top-k, so not many can be likely.
        num_likely = int(len(hidden) * self._top_k / min_probability)
        best = shares.topk(min(num_likely, shares.shape[-1]), dim=-1)
        return [
            (target, expert, share)
            for target, row, ids in zip(
                self.targets, best.values.tolist(), best.indices.tolist(), strict=True
            )
            for expert, share in zip(ids, row, strict=True)
            if share >= min_probability
        ]

    def _native_shares(self, hidden: torch.Tensor) -> torch.Tensor:
        """`[J, E]` of one token, by bfloat16 products: half the bytes to read."""
        if self._narrow is None:
            parts = (self._inner, self._inner_bias, self._outer, self._outer_bias)
            self._narrow = tuple(part.bfloat16() for part in parts)
        inner, inner_bias, outer, outer_bias = self._narrow
        units = torch.ops.mira.dense_linear(hidden, inner, inner_bias)
        logits = torch.ops.mira.dense_linear(units, outer, outer_bias)
        shares = torch.softmax(logits.view(len(self.targets), -1), dim=-1, dtype=torch.float32)
        return shares.mul_(self._top_k).clamp_max_(1.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class FarSamples:
    """What a far head is trained on.

    Attributes:
        hidden: `[N, C]` float32, the experts' input in its layer.
        target_ids: `[N, J, k]`, experts that the later layers used.
        targets: Those layers.
        is_validation: `[N]` bool, not trained on.
        num_experts: E.
    """

    hidden: torch.Tensor
    target_ids: torch.Tensor
    targets: tuple[int, ...]
    is_validation: torch.Tensor
    num_experts: int

    @classmethod
    def of_layer(
        cls,
        trace: RoutingTrace,
        hidden: torch.Tensor,
        layer: int,
        *,
        num_experts: int,
        is_validation: torch.Tensor,
    ) -> FarSamples:
        """Collects the samples of one layer and all layers behind it."""
        return cls(
            hidden=hidden,
            target_ids=trace.ids[:, layer + 1 :],
            targets=tuple(range(layer + 1, trace.num_layers)),
            is_validation=is_validation,
            num_experts=num_experts,
        )


def far_layers(num_layers: int) -> range:
    """Returns the layers that have a far head: where more than one `STRIDE` is behind them."""
    return range(0, max(0, num_layers - STRIDE), STRIDE)


def train_far_head(
    samples: FarSamples,
    *,
    seed: int,
    rows_at_once: int | None = None,
    check_cancelled: Callable[[], None] = lambda: None,
) -> FarHead | None:
    """Trains a layer's far head; later layers that popularity predicts as well are left out.

    Args:
        samples: Of one layer.
        seed: Of the first weights and the order of samples.
        rows_at_once: Most tokens that are computed at once, `None` for a whole batch.
        check_cancelled: Called after every epoch; raises where the work should stop.

    Returns:
        `None` where popularity does as well for all of them, or there is too little to learn.
    """
    rows = (~samples.is_validation).nonzero()[:, 0]
    if not len(rows) or not bool(samples.is_validation.any()) or not samples.targets:
        return None
    seen = samples.hidden[rows]
    mean, scale = seen.mean(dim=0), seen.std(dim=0, correction=0)
    scale = scale.clamp_min(1e-3 * float(scale.mean()) + 1e-8)
    inner, outer, bias = _fit(samples, rows, mean, scale, seed, rows_at_once, check_cancelled)
    # The norm folded into the first product: ((x - mean) / scale) @ inner.T.
    folded = inner / scale
    inner_bias = -(folded @ mean)
    top_k = samples.target_ids.shape[-1]
    kept = _better_than_popular(samples, rows, (folded, inner_bias, outer, bias))
    if not kept:
        return None
    num_experts = samples.num_experts
    positions = torch.tensor(kept)
    chosen = (positions[:, None] * num_experts + torch.arange(num_experts)).flatten()
    tensors = {
        "inner": folded.contiguous(),
        "inner_bias": inner_bias,
        "outer": outer[chosen].contiguous(),
        "outer_bias": bias[chosen].contiguous(),
        "targets": torch.tensor([samples.targets[position] for position in kept]),
    }
    return FarHead(tensors, top_k)


def _fit(
    samples: FarSamples,
    rows: torch.Tensor,
    mean: torch.Tensor,
    scale: torch.Tensor,
    seed: int,
    rows_at_once: int | None,
    check_cancelled: Callable[[], None],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Returns the inner and outer matrix and the outer bias, for standardised inputs."""
    generator = torch.Generator().manual_seed(seed)
    width, num_targets = samples.hidden.shape[1], len(samples.targets)
    rank, num_outputs = min(RANK, width), num_targets * samples.num_experts
    inner = (torch.randn(rank, width, generator=generator) / width**0.5).requires_grad_()
    outer = torch.zeros(num_outputs, rank, requires_grad=True)
    bias = torch.zeros(num_outputs, requires_grad=True)
    groups = [
        {"params": [inner, outer], "weight_decay": _WEIGHT_DECAY},
        {"params": [bias], "weight_decay": 0.0},
    ]
    optimiser = torch.optim.AdamW(groups, lr=_LEARNING_RATE)
    num_batches = -(-len(rows) // _BATCH_SIZE)
    num_epochs = max(_EPOCHS, -(-_MIN_STEPS // num_batches))
    num_steps = num_epochs * num_batches
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=num_steps)
    top_k = samples.target_ids.shape[-1]
    for _ in range(num_epochs):
        for batch in rows[torch.randperm(len(rows), generator=generator)].split(_BATCH_SIZE):
            optimiser.zero_grad()
            for piece, share in pieces_of(batch, rows_at_once):
                inputs = (samples.hidden[piece] - mean) / scale
                logits = (inputs @ inner.T @ outer.T + bias).view(-1, samples.num_experts)
                ids = samples.target_ids[piece].flatten(0, 1)
                shares = selection_counts(ids, samples.num_experts) / top_k
                loss = functional.cross_entropy(logits, shares)
                (loss * share).backward()
            optimiser.step()
            schedule.step()
        check_cancelled()
    return inner.detach(), outer.detach(), bias.detach()


def _better_than_popular(
    samples: FarSamples, rows: torch.Tensor, parts: Sequence[torch.Tensor]
) -> list[int]:
    """Returns the positions of the targets whose Coverage@k beats popularity's."""
    inner, inner_bias, outer, bias = parts
    held_out = samples.is_validation
    units = torch.addmm(inner_bias, samples.hidden[held_out], inner.T)
    num_experts = samples.num_experts
    top_k = samples.target_ids.shape[-1]
    kept = []
    for position in range(len(samples.targets)):
        ids = samples.target_ids[held_out, position]
        own = slice(position * num_experts, (position + 1) * num_experts)
        logits = torch.addmm(bias[own], units, outer[own].T)  # One layer's: all are large.
        seen = selection_counts(samples.target_ids[rows, position], num_experts).sum(dim=0)
        popular = seen.expand(len(ids), -1)
        found = coverage(logits, ids, (top_k,))[0]
        if found > coverage(popular, ids, (top_k,))[0]:
            kept.append(position)
    return kept
