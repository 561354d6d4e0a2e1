"""What predictors see of one token, of many tokens apart, and of many tokens together."""

import torch
from mira_engine.predictor.features import pass_features, token_features

HIDDEN = torch.tensor([[1.0, 3.0], [3.0, 5.0], [2.0, 1.0]])
LOGITS = torch.tensor([[1.0, 0.0, 0.0, 0.0], [0.0, 3.0, 0.0, 0.0], [2.0, 0.0, 0.0, 0.0]])
IDS = torch.tensor([[3, 1], [1, 2], [1, 3]])


def test_pass_features_pool_all_tokens_into_one_situation():
    features = pass_features(HIDDEN, LOGITS, IDS, 4)
    assert features.hidden.tolist() == [[2.0, 3.0]]
    assert features.router_logits.tolist() == [[1.0, 1.0, 0.0, 0.0]]
    assert torch.equal(features.histogram, torch.tensor([[0, 3, 1, 2]]) / 6)
    assert features.busiest.tolist() == [[0.0, 1.0, 0.0, 1.0]]


def test_pass_features_with_ties_take_the_lower_expert():
    features = pass_features(None, None, torch.tensor([[3, 2], [1, 0]]), 4)
    assert features.busiest.tolist() == [[1.0, 1.0, 0.0, 0.0]]


def test_token_features_of_one_token_are_its_pass_features():
    one = token_features(HIDDEN[:1], LOGITS[:1], IDS[:1], 4)
    pooled = pass_features(HIDDEN[:1], LOGITS[:1], IDS[:1], 4)
    for name in ("hidden", "router_logits", "histogram", "busiest"):
        assert torch.equal(getattr(one, name), getattr(pooled, name)), name


def test_select_keeps_rows_of_every_feature():
    some = token_features(HIDDEN, None, IDS, 4).select(torch.tensor([False, True, True]))
    assert len(some) == 2
    assert some.hidden.tolist() == [[3.0, 5.0], [2.0, 1.0]]
    assert some.router_logits is None
