"""Trains a layer's head on recorded routing, fits the baselines, and lets the best one win.

Everything is seeded; the same trace gives the same predictors. Whole prompts are set
aside for validation: they stop the training early and decide who wins.

Source: Mira IV-E: cross-entropy against the distribution of routed tokens over the
target layer's experts. A head that does not beat the best baseline is replaced by it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch.nn import functional

from .baselines import CountTable, Popularity, Predictor, PredictorKind, RouterWeights, TargetRouter
from .coverage import coverage
from .features import LayerFeatures, pieces_of, selection_counts, token_features
from .heads import MixtureHead
from .traces import RoutingTrace

OFFSET = 2
"""Layers ahead. Source: Mira IV-E, i + 2."""

MIN_ROUTER_AGREEMENT = 0.9
"""Share of recorded choices that a layer's own router has to reproduce as a linear map, or
its logits are no feature: grouped or corrected routers choose otherwise than they score."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingSettings:
    """How heads are trained.

    Attributes:
        seed: Of the split, the initial weights and the order of samples.
        max_epochs: Most passes over the samples.
        patience: Epochs without a better validation loss before training stops.
        batch_size: Tokens a step.
        learning_rate: Of AdamW, falling to nothing along a cosine.
        weight_decay: Of the history branch and what reads router logits.
        wide_weight_decay: Of what reads hidden states: pulls the activation branch to the
            router that it began as.
        validation_share: Share of the prompts that is set aside.
    """

    seed: int = 0
    max_epochs: int = 30
    patience: int = 4
    batch_size: int = 128
    learning_rate: float = 2e-3
    weight_decay: float = 0.1
    wide_weight_decay: float = 10.0
    validation_share: float = 0.15


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerSamples:
    """N situations of one layer and what followed.

    Attributes:
        features: What the layer shows.
        target_ids: `[N, k]`, experts that the target layer used.
        is_validation: `[N]` bool, situations that are not trained on and decide.
        is_ignored: `[N]` bool, situations that are neither.
        num_experts: E.
        own_router: The layer's own router where its logits are a feature.
        target_routers: Forms of the target layer's router for this layer's inputs.
    """

    features: LayerFeatures
    target_ids: torch.Tensor
    is_validation: torch.Tensor
    is_ignored: torch.Tensor
    num_experts: int
    own_router: RouterWeights | None
    target_routers: tuple[RouterWeights, ...]

    @property
    def is_training(self) -> torch.Tensor:
        """`[N]` bool: situations that are trained on."""
        return ~(self.is_validation | self.is_ignored)


@dataclass(frozen=True, slots=True, kw_only=True)
class LayerChoice:
    """Who predicts for a layer, and why.

    Attributes:
        predictor: The winner.
        reason: For people.
        scores: Validation score of every candidate: mean of Coverage@k and Coverage@2k.
    """

    predictor: Predictor
    reason: str
    scores: dict[str, float]


def validation_prompts(sequence: torch.Tensor, settings: TrainingSettings) -> torch.Tensor:
    """Marks the tokens, `[N]` bool, of the prompts that are set aside; none of a single one."""
    prompts = torch.unique(sequence)
    generator = torch.Generator().manual_seed(settings.seed)
    order = prompts[torch.randperm(len(prompts), generator=generator)]
    num_aside = max(1, round(settings.validation_share * len(prompts)))
    return torch.isin(sequence, order[: min(num_aside, len(prompts) - 1)])


def layer_samples(
    trace: RoutingTrace,
    hidden: torch.Tensor | None,
    layer: int,
    *,
    num_experts: int,
    routers: tuple[RouterWeights | None, ...],
    settings: TrainingSettings,
    offset: int = OFFSET,
) -> LayerSamples:
    """Collects one layer's samples from a trace: one situation a token.

    Args:
        trace: Routing of all layers.
        hidden: `[N, C]` float32, the experts' input in this layer, `None` where unknown.
        layer: The layer that predicts.
        num_experts: E.
        routers: Every layer's router, `None` where it is not known.
        settings: The split.
        offset: How many layers ahead.
    """
    ids, target_ids = trace.ids[:, layer], trace.ids[:, layer + offset]
    own = target = None
    if hidden is not None and routers:
        own, target = routers[layer], routers[layer + offset]
    forms = _router_forms(target, own)
    if own is not None and not _is_reproduced(own, hidden, ids):
        own = None
    is_aside = validation_prompts(trace.sequence, settings)
    # Decoding is what is predicted later, so replies decide, where there are any.
    is_deciding = is_aside & trace.is_reply
    if not bool(is_deciding.any()):
        is_deciding = is_aside
    logits = own.logits(hidden) if own is not None and hidden is not None else None
    return LayerSamples(
        features=token_features(hidden, logits, ids, num_experts),
        target_ids=target_ids,
        is_validation=is_deciding,
        is_ignored=is_aside & ~is_deciding,
        num_experts=num_experts,
        own_router=own,
        target_routers=forms,
    )


def _router_forms(
    target: RouterWeights | None, source: RouterWeights | None
) -> tuple[RouterWeights, ...]:
    """Returns the target's router as it is, and as seen through the source's norm."""
    if target is None:
        return ()
    folded = target.seen_from(source) if source is not None else None
    return (target,) if folded is None else (target, folded)


def _is_reproduced(router: RouterWeights, hidden: torch.Tensor | None, ids: torch.Tensor) -> bool:
    assert hidden is not None
    found = coverage(router.logits(hidden), ids, (ids.shape[1],))
    return found[0] >= MIN_ROUTER_AGREEMENT


def fit_baselines(samples: LayerSamples) -> dict[PredictorKind, Predictor]:
    """Fits what needs no training: popularity, the count table, the target's router."""
    rows = samples.is_training
    ids = samples.features.busiest[rows].topk(samples.target_ids.shape[1], dim=1).indices
    target_ids = samples.target_ids[rows]
    found: dict[PredictorKind, Predictor] = {
        PredictorKind.POPULARITY: Popularity.fit(target_ids, samples.num_experts),
        PredictorKind.TABLE: CountTable.fit(ids, target_ids, samples.num_experts),
    }
    router = best_router(samples)
    if router is not None:
        found[PredictorKind.ROUTER] = TargetRouter(router.weight, router.bias)
    return found


def best_router(samples: LayerSamples) -> RouterWeights | None:
    """Returns the form of the target's router that covers the training samples best."""
    if samples.features.hidden is None:
        return None
    hidden, target_ids = samples.features.hidden[samples.is_training], samples.target_ids
    target_ids = target_ids[samples.is_training]
    best, best_found = None, -1.0
    for router in samples.target_routers:
        found = coverage(router.logits(hidden), target_ids, (target_ids.shape[1],))[0]
        if found > best_found:
            best, best_found = router, found
    return best


def train_head(
    samples: LayerSamples,
    settings: TrainingSettings,
    *,
    rows_at_once: int | None = None,
    check_cancelled: Callable[[], None] = lambda: None,
) -> Predictor:
    """Trains a MixtureHead and folds it.

    Args:
        samples: Of one layer.
        settings: Epochs, rates, seed.
        rows_at_once: Most situations that are computed at once, `None` for a whole batch. A
            step is the same but for rounding.
        check_cancelled: Called after every epoch; raises where the work should stop.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(settings.seed)
        head = _new_head(samples)
    rows = samples.is_training.nonzero()[:, 0]
    shares = selection_counts(samples.target_ids, samples.num_experts)
    shares /= samples.target_ids.shape[1]
    held_out = samples.features.select(samples.is_validation)
    held_out_shares = shares[samples.is_validation]
    steps = settings.max_epochs * -(-len(rows) // settings.batch_size)
    optimiser = torch.optim.AdamW(_parameter_groups(head, settings), lr=settings.learning_rate)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimiser, T_max=max(1, steps))
    generator = torch.Generator().manual_seed(settings.seed)
    best, best_loss, num_worse = copy.deepcopy(head.state_dict()), float("inf"), 0
    for _ in range(settings.max_epochs):
        for batch in rows[torch.randperm(len(rows), generator=generator)].split(
            settings.batch_size
        ):
            optimiser.zero_grad()
            for piece, share in pieces_of(batch, rows_at_once):
                loss = functional.cross_entropy(head(samples.features.select(piece)), shares[piece])
                (loss * share).backward()
            optimiser.step()
            schedule.step()
        check_cancelled()
        held_out_loss = _loss(head, held_out, held_out_shares, rows_at_once)
        if held_out_loss < best_loss:
            best, best_loss, num_worse = copy.deepcopy(head.state_dict()), held_out_loss, 0
        else:
            num_worse += 1
            if num_worse > settings.patience:
                break
    head.load_state_dict(best)
    return head.fold(samples.own_router)


@torch.no_grad()
def _loss(
    head: MixtureHead, features: LayerFeatures, shares: torch.Tensor, rows_at_once: int | None
) -> float:
    """Returns the mean loss of situations that are not trained on; nan of none."""
    num_rows = len(features)
    if not num_rows:
        return float("nan")
    total, size = 0.0, rows_at_once or num_rows
    for start in range(0, num_rows, size):
        piece = slice(start, start + size)
        loss = functional.cross_entropy(head(features.select(piece)), shares[piece])
        total += float(loss) * (len(shares[piece]) / num_rows)
    return total


def _parameter_groups(head: MixtureHead, settings: TrainingSettings) -> list[dict[str, Any]]:
    """Weights by their decay. Those with one per channel could learn the samples by heart."""
    wide, narrow, free = [], [], []
    for name, parameter in head.named_parameters():
        if name in ("act.delta", "gate_hidden"):
            wide.append(parameter)
        elif parameter.ndim < 2:
            free.append(parameter)
        else:
            narrow.append(parameter)
    return [
        {"params": wide, "weight_decay": settings.wide_weight_decay},
        {"params": narrow, "weight_decay": settings.weight_decay},
        {"params": free, "weight_decay": 0.0},
    ]


def _new_head(samples: LayerSamples) -> MixtureHead:
    hidden = samples.features.hidden
    if hidden is None:
        return MixtureHead(None, None, samples.num_experts)
    seen = hidden[samples.is_training]
    scale = seen.std(dim=0)
    return MixtureHead(
        seen.mean(dim=0),
        scale.clamp_min(1e-3 * float(scale.mean()) + 1e-8),
        samples.num_experts,
        best_router(samples),
    )


def choose(candidates: dict[PredictorKind, Predictor], samples: LayerSamples) -> LayerChoice:
    """Returns the candidate with the best validation score; a head has to be strictly better."""
    features = samples.features.select(samples.is_validation)
    target_ids = samples.target_ids[samples.is_validation]
    top_k = target_ids.shape[1]
    scores = {
        kind: sum(coverage(candidate.logits(features), target_ids, (top_k, 2 * top_k))) / 2
        for kind, candidate in candidates.items()
    }
    baselines = [kind for kind in candidates if kind is not PredictorKind.HEAD]
    best = max(baselines, key=lambda kind: scores[kind])
    head_score = scores.get(PredictorKind.HEAD)
    if head_score is None:
        winner, reason = best, f"no head; {best} {scores[best]:.3f} is the best baseline"
    elif head_score > scores[best]:
        winner = PredictorKind.HEAD
        reason = f"head {head_score:.3f} against {best} {scores[best]:.3f}"
    else:
        winner, reason = best, f"head {head_score:.3f} does not beat {best} {scores[best]:.3f}"
    return LayerChoice(
        predictor=candidates[winner],
        reason=reason,
        scores={str(kind): round(score, 4) for kind, score in scores.items()},
    )


def train_layer(
    samples: LayerSamples,
    settings: TrainingSettings,
    *,
    rows_at_once: int | None = None,
    check_cancelled: Callable[[], None] = lambda: None,
) -> LayerChoice:
    """Fits the baselines, trains the head, and returns who wins on the validation prompts."""
    candidates = fit_baselines(samples)
    candidates[PredictorKind.HEAD] = train_head(
        samples, settings, rows_at_once=rows_at_once, check_cancelled=check_cancelled
    )
    return choose(candidates, samples)
