"""A bank ranks, and comes back from the disk as it was or not at all."""

import json

import pytest
import torch
from mira_engine.errors import ConfigError
from mira_engine.predictor.bank import (
    MANIFEST_FILE,
    MAX_TOKENS_APART,
    TENSORS_FILE,
    BankFacts,
    PredictorBank,
    load_choice,
    save_choice,
)
from mira_engine.predictor.baselines import CountTable, Popularity, TargetRouter
from mira_engine.predictor.heads import MixtureHead
from mira_engine.predictor.train import LayerChoice
from mira_kernels import native

EXPERTS, WIDTH = 6, 8
FACTS = BankFacts(
    revision="weights", recipe="prompts", num_layers=6, num_experts=EXPERTS, top_k=2, offset=2
)


def choice(predictor, reason="because"):
    return LayerChoice(predictor=predictor, reason=reason, scores={"head": 0.5, "table": 0.25})


def random_bank(**options):
    generator = torch.Generator().manual_seed(1)
    head = MixtureHead(torch.zeros(WIDTH), torch.ones(WIDTH), EXPERTS)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    ids = torch.rand(40, EXPERTS, generator=generator).topk(2).indices
    weight = torch.randn(EXPERTS, WIDTH, generator=generator)
    predictors = [
        head.fold(None),
        Popularity.fit(ids, EXPERTS),
        CountTable.fit(ids, ids.flip(0), EXPERTS),
        TargetRouter(weight, torch.zeros(EXPERTS)),
    ]
    return PredictorBank(FACTS, dict(enumerate(map(choice, predictors))), **options)


def asked(bank, num_tokens, dtype=torch.float32):
    generator = torch.Generator().manual_seed(2)
    hidden = torch.randn(num_tokens, WIDTH, generator=generator).to(dtype)
    ids = torch.rand(num_tokens, EXPERTS, generator=generator).topk(2).indices
    return [bank.predict(layer, hidden, ids) for layer in range(6)]


def test_native_prediction_of_one_token_is_the_same(native_cache):
    expected = asked(random_bank(max_picks=EXPERTS), 1, torch.bfloat16)
    assert native.load(native_cache).is_available
    found = asked(random_bank(max_picks=EXPERTS), 1, torch.bfloat16)
    for picks, others in zip(found, expected, strict=True):
        assert [expert for expert, _ in picks] == [expert for expert, _ in others]
        assert [share for _, share in picks] == pytest.approx(
            [share for _, share in others], abs=1e-5
        )
    assert found[0] != found[3]


def test_native_prediction_of_a_few_tokens_is_the_mean_of_each_ones(native_cache):
    assert native.load(native_cache).is_available
    bank = random_bank(max_picks=EXPERTS)
    generator = torch.Generator().manual_seed(4)
    hidden = torch.randn(3, WIDTH, generator=generator).to(torch.bfloat16)
    ids = torch.tensor([[0, 1], [5, 2], [3, 0]])
    alone = [dict(bank.predict(0, hidden[t : t + 1], ids[t : t + 1])) for t in range(3)]
    together = bank.predict(0, hidden, ids)
    for expert, share in together:
        assert share == pytest.approx(sum(shares[expert] for shares in alone) / 3)
    assert [share for _, share in together] == sorted((s for _, s in together), reverse=True)


def test_prediction_of_many_tokens_is_the_pooled_one(native_cache):
    num_tokens = MAX_TOKENS_APART + 1
    expected = asked(random_bank(max_picks=EXPERTS), num_tokens, torch.bfloat16)
    assert native.load(native_cache).is_available
    assert asked(random_bank(max_picks=EXPERTS), num_tokens, torch.bfloat16) == expected


@pytest.mark.parametrize("num_tokens", [1, 5])
def test_predict_ranks_experts_with_their_shares(num_tokens):
    for picks in asked(random_bank(max_picks=EXPERTS), num_tokens)[:4]:
        assert sorted(expert for expert, _ in picks) == list(range(EXPERTS))
        shares = [share for _, share in picks]
        assert shares == sorted(shares, reverse=True)
        assert sum(shares) == pytest.approx(1.0)


def test_predict_gives_at_most_max_picks():
    assert [len(picks) for picks in asked(random_bank(), 1)[:4]] == [4] * 4
    assert [len(picks) for picks in asked(random_bank(max_picks=3), 1)[:4]] == [3] * 4
    assert random_bank(max_picks=99).max_picks == EXPERTS
    with pytest.raises(ConfigError):
        random_bank(max_picks=0)


def test_predict_for_a_layer_without_a_predictor_is_empty():
    assert asked(random_bank(), 1)[4:] == [[], []]


def test_predict_at_a_draw_prefers_the_lower_expert():
    bank = PredictorBank(FACTS, {0: choice(Popularity(torch.zeros(EXPERTS)))}, max_picks=3)
    assert [expert for expert, _ in asked(bank, 1)[0]] == [0, 1, 2]


def test_predict_takes_bfloat16_states():
    assert all(asked(random_bank(), 3, torch.bfloat16)[:4])


def test_bank_comes_back_as_it_was(tmp_path):
    bank = random_bank()
    bank.save(tmp_path)
    loaded = PredictorBank.load(tmp_path, "weights")
    assert loaded.facts == FACTS
    assert asked(loaded, 1) == asked(bank, 1)
    assert asked(loaded, 4) == asked(bank, 4)
    assert loaded.choices[1].reason == "because"
    assert loaded.choices[1].scores == bank.choices[1].scores
    assert sorted(path.name for path in tmp_path.iterdir()) == [MANIFEST_FILE, TENSORS_FILE]


def test_empty_bank_comes_back(tmp_path):
    PredictorBank(FACTS, {}).save(tmp_path)
    assert PredictorBank.load(tmp_path, "weights").choices == {}


def test_bank_of_other_weights_is_no_bank(tmp_path):
    random_bank().save(tmp_path)
    assert PredictorBank.load(tmp_path, "other weights") is None


def rewrite(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def flip_last_byte(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize(
    "spoil",
    [
        lambda folder: rewrite(folder / MANIFEST_FILE, version=0),
        lambda folder: rewrite(folder / MANIFEST_FILE, layers={"0": {}}),
        lambda folder: (folder / MANIFEST_FILE).write_text("{"),
        lambda folder: (folder / MANIFEST_FILE).unlink(),
        lambda folder: (folder / TENSORS_FILE).unlink(),
        lambda folder: flip_last_byte(folder / TENSORS_FILE),
    ],
    ids=["version", "layers", "json", "no manifest", "no tensors", "bytes"],
)
def test_spoilt_bank_is_no_bank(tmp_path, spoil):
    random_bank().save(tmp_path)
    spoil(tmp_path)
    assert PredictorBank.load(tmp_path, "weights") is None


def test_save_removes_the_old_manifest_before_the_tensors_change(tmp_path, monkeypatch):
    random_bank().save(tmp_path)

    def fail(*args, **kwargs):
        raise RuntimeError("killed")

    monkeypatch.setattr("mira_engine.predictor.bank.write_tensors", fail)
    with pytest.raises(RuntimeError):
        random_bank().save(tmp_path)
    assert PredictorBank.load(tmp_path, "weights") is None


def test_choice_of_one_layer_comes_back(tmp_path):
    made = random_bank().choices[0]
    save_choice(tmp_path / "layer.safetensors", made)
    loaded = load_choice(tmp_path / "layer.safetensors")
    assert (loaded.reason, loaded.scores) == (made.reason, made.scores)
    assert loaded.predictor.kind is made.predictor.kind
    for name, tensor in made.predictor.tensors().items():
        assert torch.equal(loaded.predictor.tensors()[name], tensor)
