"""A folded head computes what the trained modules compute, and a new one is the router."""

import pytest
import torch
from mira_engine.predictor.baselines import CountTable, Popularity, RouterWeights, TargetRouter
from mira_engine.predictor.features import token_features
from mira_engine.predictor.heads import MixtureHead

EXPERTS, WIDTH, TOP_K, TOKENS = 8, 12, 2, 20


@pytest.fixture
def generator():
    return torch.Generator().manual_seed(3)


def random_router(generator, *, input_gain=None):
    return RouterWeights(
        weight=torch.randn(EXPERTS, WIDTH, generator=generator),
        bias=torch.randn(EXPERTS, generator=generator),
        input_gain=input_gain,
    )


def random_features(generator, router=None):
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    scores = torch.rand(TOKENS, EXPERTS, generator=generator)
    logits = router.logits(hidden) if router is not None else None
    return token_features(hidden, logits, scores.topk(TOP_K).indices, EXPERTS)


def random_head(generator, *, has_hidden=True, start=None):
    mean = torch.randn(WIDTH, generator=generator) if has_hidden else None
    scale = torch.rand(WIDTH, generator=generator) + 0.5 if has_hidden else None
    head = MixtureHead(mean, scale, EXPERTS, start)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return head


@pytest.mark.parametrize("has_router", [False, True])
def test_folded_head_gives_the_logits_of_the_modules(generator, has_router):
    router = random_router(generator) if has_router else None
    head = random_head(generator, start=random_router(generator))
    features = random_features(generator, router)
    expected = head(features)
    torch.testing.assert_close(head.fold(router).logits(features), expected, rtol=1e-4, atol=1e-4)


def test_folded_head_without_hidden_states_is_the_history_branch(generator):
    head = random_head(generator, has_hidden=False)
    features = random_features(generator)
    torch.testing.assert_close(head.fold(None).logits(features), head(features))


def predictors(generator):
    router = random_router(generator)
    ids = torch.rand(50, EXPERTS, generator=generator).topk(TOP_K).indices
    yield random_head(generator, start=router).fold(random_router(generator))
    yield random_head(generator, has_hidden=False).fold(None)
    yield Popularity.fit(ids, EXPERTS)
    yield CountTable.fit(ids, ids.flip(0), EXPERTS)
    yield TargetRouter(router.weight, router.bias)


def test_token_logits_equal_the_logits_of_a_batch(generator):
    features = random_features(generator)
    ids = features.busiest.topk(TOP_K).indices
    for predictor in predictors(generator):
        batch = predictor.logits(features)
        for row in range(TOKENS):
            one = predictor.token_logits(features.hidden[row : row + 1], ids[row : row + 1])
            torch.testing.assert_close(one, batch[row], rtol=1e-4, atol=1e-4)


def test_new_head_ranks_as_the_router_it_starts_from(generator):
    start = random_router(generator)
    head = MixtureHead(torch.zeros(WIDTH), torch.ones(WIDTH), EXPERTS, start)
    features = random_features(generator)
    expected = start.logits(features.hidden).argsort(dim=1)
    assert torch.equal(head(features).argsort(dim=1), expected)
    assert torch.all(head.alpha(features) > 0.5)


def test_gate_at_its_ends_leaves_one_branch(generator):
    head = random_head(generator)
    features = random_features(generator)
    with torch.no_grad():
        for parameter in (head.gate_hidden, head.gate_selected, head.gate_router):
            parameter.zero_()
        head.gate_bias.fill_(50.0)
        act = head.act(features.hidden, None)
        torch.testing.assert_close(head(features), act)
        head.gate_bias.fill_(-50.0)
        hist = head.hist(features.histogram, features.busiest)
        torch.testing.assert_close(head(features), hist)


def test_router_seen_from_an_earlier_layer_undoes_its_norm(generator):
    gains = [torch.rand(WIDTH, generator=generator) + 0.5 for _ in range(2)]
    source, target = (random_router(generator, input_gain=gain) for gain in gains)
    stream = torch.randn(5, WIDTH, generator=generator)
    folded = target.seen_from(source)
    torch.testing.assert_close(folded.logits(stream * gains[0]), target.logits(stream * gains[1]))


def test_router_is_not_seen_through_a_gain_that_vanishes(generator):
    gain = torch.ones(WIDTH)
    gain[3] = 0.0
    source = random_router(generator, input_gain=gain)
    assert random_router(generator, input_gain=torch.ones(WIDTH)).seen_from(source) is None
    assert random_router(generator).seen_from(source) is None
