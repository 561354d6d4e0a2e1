"""Far heads: what they learn, what they leave out, and how they answer."""

from __future__ import annotations

import torch
from mira_engine.predictor.bank import BankFacts, PredictorBank
from mira_engine.predictor.far import FarSamples, far_layers, train_far_head

NUM_EXPERTS = 8
TOP_K = 2


def planted(num_tokens: int = 600, seed: int = 0) -> FarSamples:
    """Layer 1 follows the state, layer 2 is the same for everybody."""
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, 16, generator=generator)
    router = torch.randn(NUM_EXPERTS, 16, generator=generator)
    followed = (hidden @ router.T).topk(TOP_K, dim=1).indices
    always = torch.tensor([[3, 6]]).expand(num_tokens, -1)
    return FarSamples(
        hidden=hidden,
        target_ids=torch.stack([followed, always], dim=1).to(torch.int16),
        targets=(1, 2),
        is_validation=torch.arange(num_tokens) >= num_tokens - 100,
        num_experts=NUM_EXPERTS,
    )


def test_head_learns_what_the_state_tells_and_leaves_out_what_popularity_knows():
    samples = planted()
    head = train_far_head(samples, seed=0)
    assert head.targets == [1]
    states, ids = samples.hidden[-100:], samples.target_ids[-100:, 0].long()
    likely = head.probabilities(states)[:, 0].topk(TOP_K, dim=1).indices
    found = (likely[:, :, None] == ids[:, None, :]).any(dim=1).float().mean()
    assert found > 0.75  # Popularity: 0.25.


def test_training_twice_gives_the_same_head():
    first, second = (train_far_head(planted(), seed=3) for _ in range(2))
    for name, tensor in first.tensors().items():
        assert torch.equal(tensor, second.tensors()[name])


def test_nothing_to_learn_makes_no_head():
    samples = planted()
    always = FarSamples(
        hidden=samples.hidden,
        target_ids=samples.target_ids[:, 1:],
        targets=(2,),
        is_validation=samples.is_validation,
        num_experts=NUM_EXPERTS,
    )
    assert train_far_head(always, seed=0) is None


def test_expected_experts_come_nearest_layer_first_and_only_likely_ones():
    samples = planted()
    head = train_far_head(samples, seed=0)
    one = head.expect(samples.hidden[-1:], 0.4)
    probabilities = head.probabilities(samples.hidden[-1:])[0, 0]
    assert {expert for _, expert, _ in one} == set((probabilities >= 0.4).nonzero()[:, 0].tolist())
    assert [share for *_, share in one] == sorted((share for *_, share in one), reverse=True)
    many = head.expect(samples.hidden[-3:], 0.4)
    chance = 1 - (1 - head.probabilities(samples.hidden[-3:])[:, 0]).prod(dim=0)
    assert {e for _, e, _ in many} == set((chance >= 0.4).nonzero()[:, 0].tolist())


def test_heads_stand_in_few_layers_with_several_behind_them():
    assert list(far_layers(30)) == [0, 8, 16]
    assert list(far_layers(8)) == []
    assert list(far_layers(9)) == [0]


def test_bank_keeps_far_heads_over_a_file(tmp_path):
    head = train_far_head(planted(), seed=0)
    facts = BankFacts(
        revision="r", recipe="p", num_layers=3, num_experts=NUM_EXPERTS, top_k=TOP_K, offset=2
    )
    PredictorBank(facts, {}, {0: head}).save(tmp_path)
    bank = PredictorBank.load(tmp_path, "r")
    state = planted().hidden[:1]
    assert bank.predict_far(0, state, 0.4) == head.expect(state, 0.4) != []
    assert bank.predict_far(1, state, 0.4) == []
