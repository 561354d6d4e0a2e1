"""Asks the predictor what later layers will need, and the driver what to do about it.

Which heads answer, and about which tokens, is a policy's choice (`mira_engine.policy.prediction`);
here it is carried out. Runs in the engine thread, inside the model's forward pass.

Source: Mira, prediction of layer i+2 from layer i; the far heads are ours.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..policy.base import Action
from ..policy.driver import ExpertCacheDriver
from ..policy.prediction import MIN_FAR_PROBABILITY, question_for
from ..predictor.bank import PredictorBank
from ..types import Phase


def ask_ahead(
    predictor: PredictorBank,
    driver: ExpertCacheDriver,
    phase: Phase,
    layer: int,
    hidden: torch.Tensor,
    top_k_index: torch.Tensor,
) -> Sequence[Action]:
    """Returns what the driver makes of the experts expected in later layers.

    Args:
        predictor: Its heads are on the host.
        driver: Has entered `layer`.
        phase: Of the pass.
        layer: The layer that is computed now.
        hidden: What reached its experts, `[T, C]`.
        top_k_index: What its router chose, `[T, k]`.
    """
    question = question_for(phase, has_far_heads=bool(predictor.far_heads))
    if question.is_last_token_only:
        hidden, top_k_index = hidden[-1:], top_k_index[-1:]
    hidden, top_k_index = hidden.cpu(), top_k_index.cpu()
    if question.is_far:
        if layer not in predictor.far_heads:
            return ()
        return driver.predict_far(predictor.predict_far(layer, hidden, MIN_FAR_PROBABILITY))
    max_picks = predictor.facts.num_experts if question.is_unbounded else None
    picks = predictor.predict(layer, hidden, top_k_index, max_picks=max_picks)
    if not picks:
        return ()
    return driver.predict(layer + predictor.facts.offset, picks, hidden.shape[0])
