"""Heads learn what is there to learn, and give way where a baseline is better."""

import pytest
import torch
from mira_engine.errors import CancelledError
from mira_engine.predictor.baselines import (
    CountTable,
    Popularity,
    PredictorKind,
    RouterWeights,
)
from mira_engine.predictor.train import (
    TrainingSettings,
    choose,
    layer_samples,
    train_head,
    train_layer,
    validation_prompts,
)
from planted_routing import NUM_EXPERTS, TOP_K, hidden_decides, history_decides, noise, trace_of

SETTINGS = TrainingSettings(max_epochs=60, learning_rate=1e-2, wide_weight_decay=0.01)


def samples_of(trace, hidden, routers=(), settings=SETTINGS):
    return layer_samples(
        trace, hidden, 0, num_experts=NUM_EXPERTS, routers=routers, settings=settings
    )


def test_count_table_counts_what_follows():
    source = torch.tensor([[0, 1]] * 400 + [[2, 3]] * 400)
    target = torch.tensor([[4, 5]] * 400 + [[6, 7]] * 400)
    table = CountTable.fit(source, target, 8)
    assert table.token_logits(None, torch.tensor([[0, 1]])).topk(2).indices.tolist() in (
        [4, 5], [5, 4]
    )  # fmt: skip
    torch.testing.assert_close(table.shares.sum(dim=1), torch.ones(8))


def test_popularity_gives_shares_of_tokens():
    shares = Popularity.fit(torch.tensor([[0, 1], [0, 2]]), 3).log_shares.exp()
    torch.testing.assert_close(shares, torch.tensor([3.0, 2.0, 2.0]) / 7)


def test_head_learns_what_hidden_states_decide_and_popularity_cannot():
    choice = train_layer(samples_of(*hidden_decides()), SETTINGS)
    assert choice.predictor.kind is PredictorKind.HEAD
    assert choice.scores["head"] > 0.85
    assert choice.scores["popularity"] < 0.5
    assert choice.scores["table"] < 0.75


def test_history_branch_learns_pairs_that_no_table_can():
    choice = train_layer(samples_of(history_decides(), None), SETTINGS)
    assert choice.predictor.kind is PredictorKind.HEAD
    assert choice.scores["head"] > 0.9
    assert choice.scores["table"] < 0.6
    assert "router" not in choice.scores


def test_head_that_beats_nothing_is_replaced_by_the_best_baseline():
    trace, hidden = noise()
    samples = samples_of(trace, hidden)
    # One sample by heart: the head is sure of nonsense.
    settings = TrainingSettings(max_epochs=1, learning_rate=1.0, wide_weight_decay=0.0)
    choice = train_layer(samples, settings)
    assert choice.predictor.kind in (PredictorKind.POPULARITY, PredictorKind.TABLE)
    assert "does not beat" in choice.reason
    assert choice.scores["head"] <= choice.scores[choice.predictor.kind.value]


def test_choose_at_a_draw_takes_the_baseline():
    samples = samples_of(*noise())
    popularity = Popularity.fit(samples.target_ids, NUM_EXPERTS)
    twin = Popularity(popularity.log_shares.clone())
    twin.kind = PredictorKind.HEAD
    candidates = {PredictorKind.POPULARITY: popularity, PredictorKind.HEAD: twin}
    assert choose(candidates, samples).predictor is popularity


def test_training_twice_gives_the_same_weights():
    trained = [
        train_head(samples_of(*hidden_decides(400)), TrainingSettings(max_epochs=3)).tensors()
        for _ in range(2)
    ]
    assert trained[0].keys() == trained[1].keys()
    assert all(torch.equal(trained[0][name], trained[1][name]) for name in trained[0])
    other = train_head(
        samples_of(*hidden_decides(400)), TrainingSettings(max_epochs=3, seed=1)
    ).tensors()
    assert not torch.equal(other["outer"], trained[0]["outer"])


def test_training_leaves_the_callers_random_numbers_alone():
    state = torch.random.get_rng_state()
    train_head(samples_of(*noise(200)), TrainingSettings(max_epochs=1))
    assert torch.equal(torch.random.get_rng_state(), state)


def test_training_stops_where_it_is_cancelled():
    def cancel():
        raise CancelledError("Stopped.")

    with pytest.raises(CancelledError):
        train_head(samples_of(*noise(200)), SETTINGS, check_cancelled=cancel)


def test_validation_takes_whole_prompts_and_leaves_some():
    sequence = torch.arange(100) // 5
    is_aside = validation_prompts(sequence, TrainingSettings(validation_share=0.2))
    by_prompt = is_aside.view(20, 5)
    assert torch.equal(by_prompt.all(dim=1), by_prompt.any(dim=1))
    assert int(by_prompt.all(dim=1).sum()) == 4
    assert not validation_prompts(torch.zeros(9), TrainingSettings()).any()
    assert validation_prompts(torch.tensor([0, 0, 1]), TrainingSettings()).any()


def test_replies_decide_and_prompts_aside_are_not_trained_on():
    trace, hidden = noise(200)
    trace.is_reply[::2] = False
    samples = samples_of(trace, hidden)
    is_aside = validation_prompts(trace.sequence, SETTINGS)
    assert torch.equal(samples.is_validation, is_aside & trace.is_reply)
    assert torch.equal(samples.is_training, ~is_aside)


def routers_of(*weights):
    return tuple(
        RouterWeights(weight=weight, bias=torch.zeros(NUM_EXPERTS), input_gain=None)
        for weight in weights
    )


def test_router_logits_are_a_feature_only_where_they_explain_the_choices():
    generator = torch.Generator().manual_seed(5)
    hidden = torch.randn(300, 16, generator=generator)
    own, other = (torch.randn(NUM_EXPERTS, 16, generator=generator) for _ in range(2))
    ids = (hidden @ own.T).topk(TOP_K).indices
    trace = trace_of([ids, ids, ids])
    samples = samples_of(trace, hidden, routers_of(own, own, own))
    assert samples.own_router is not None
    assert samples.features.router_logits is not None
    samples = samples_of(trace, hidden, routers_of(other, own, own))
    assert samples.own_router is None
    assert samples.features.router_logits is None


def test_target_router_that_is_right_already_is_hardly_beaten():
    trace, hidden = hidden_decides(600)
    generator = torch.Generator().manual_seed(0)
    torch.randn(600, 16, generator=generator)
    maps = torch.randn(3, NUM_EXPERTS, 16, generator=generator)
    maps = maps / maps.norm(dim=2, keepdim=True)
    choice = train_layer(samples_of(trace, hidden, routers_of(*maps)), TrainingSettings())
    assert choice.scores["router"] == 1.0
    assert choice.predictor.kind is PredictorKind.ROUTER
    assert choice.scores["head"] > 0.9
