"""Sampling: reproducible, history-aware, and speculative acceptance keeps the distribution."""

from __future__ import annotations

import pytest
import torch
from mira_engine.config import SamplingConfig
from mira_engine.errors import ConfigError, NonFiniteError
from mira_engine.model.sampling import DraftToken, Sampler

VOCAB = 6


def _logits(seed: int, rows: int = 1) -> torch.Tensor:
    return torch.randn(rows, VOCAB, generator=torch.Generator().manual_seed(seed)) * 1.5


def _chi_square(counts: torch.Tensor, probabilities: torch.Tensor) -> float:
    expected = probabilities * counts.sum()
    return float(((counts - expected) ** 2 / expected).sum())


def _speculative_counts(num_rounds: int, sampler: Sampler) -> torch.Tensor:
    """First emitted token of each round, drafted from one distribution, judged by another."""
    target, draft = _logits(1, 2), _logits(2)[0]
    counts = torch.zeros(VOCAB)
    for _ in range(num_rounds):
        drafted = [sampler.draw([0], draft)]
        num_accepted, following = sampler.accept([0], drafted, target)
        counts[drafted[0].token if num_accepted else following] += 1
    return counts


def test_speculative_sampling_keeps_the_target_distribution() -> None:
    sampler = Sampler(SamplingConfig(temperature=0.8, seed=11))
    target = (_logits(1, 2)[0] / 0.8).softmax(-1)
    # 20.5 is the 99.9th percentile of chi-square with 5 degrees of freedom.
    assert _chi_square(_speculative_counts(4000, sampler), target) < 20.5


def test_chi_square_catches_a_judge_that_accepts_everything() -> None:
    class Credulous(Sampler):
        def _judge(self, draft: DraftToken, target: torch.Tensor) -> int | None:
            return None

    sampler = Credulous(SamplingConfig(temperature=0.8, seed=11))
    target = (_logits(1, 2)[0] / 0.8).softmax(-1)
    assert _chi_square(_speculative_counts(4000, sampler), target) > 20.5


def test_same_seed_same_tokens() -> None:
    config = SamplingConfig(temperature=1.0, top_p=0.9, seed=5)
    first, second = Sampler(config), Sampler(config)
    logits = _logits(3)[0]
    assert [first.draw([0], logits).token for _ in range(20)] == [
        second.draw([0], logits).token for _ in range(20)
    ]


def test_greedy_accepts_the_longest_match() -> None:
    sampler = Sampler(SamplingConfig())
    logits = _logits(4, 4)
    best = logits.argmax(-1).tolist()
    wrong = (best[1] + 1) % VOCAB
    drafted = [DraftToken(best[0], None), DraftToken(wrong, None), DraftToken(best[2], None)]
    assert sampler.accept([0], drafted, logits) == (1, best[1])
    drafted[1] = DraftToken(best[1], None)
    assert sampler.accept([0], drafted, logits) == (3, best[3])


@pytest.mark.parametrize("temperature", [1e-300, 1e-30, 1e-5])
def test_temperature_too_small_to_divide_by_takes_the_likeliest_token(temperature: float) -> None:
    config = SamplingConfig(temperature=temperature)
    assert config.is_greedy
    logits = torch.tensor([0.0, 50.0, 49.9])
    assert Sampler(config).draw([0], logits).token == 1


@pytest.mark.parametrize("penalty", [1e-300, 0.0, 1e9])
def test_repetition_penalty_beyond_reason_is_refused(penalty: float) -> None:
    with pytest.raises(ConfigError, match="repetition penalty"):
        SamplingConfig(repetition_penalty=penalty)


def test_repetition_penalty_sees_each_position_s_own_history() -> None:
    config = SamplingConfig(repetition_penalty=3.0)
    logits = torch.tensor([[2.0, 1.9, 0, 0, 0, 0]] * 3)
    plain, history = [], [5]
    for position in range(3):
        token = Sampler(config).draw(history, logits[position]).token
        plain.append(token)
        history.append(token)
    sampler, drafted, seen = Sampler(config), [], [5]
    for position in range(2):
        drafted.append(sampler.draw(seen, logits[position]))
        seen.append(drafted[-1].token)
    num_accepted, following = sampler.accept([5], drafted, logits)
    assert (num_accepted, [d.token for d in drafted] + [following]) == (2, plain)
    assert plain[0] != plain[1]


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_stop_with_an_error(bad: float) -> None:
    logits = _logits(5, 2)
    logits[1, 2] = bad
    with pytest.raises(NonFiniteError) as caught:
        Sampler(SamplingConfig()).accept([0], [DraftToken(0, None)], logits)
    assert caught.value.hint
    with pytest.raises(NonFiniteError):
        Sampler(SamplingConfig()).draw([0], logits[1])


def test_minus_infinity_is_a_masked_token_not_an_error() -> None:
    logits = _logits(6)[0]
    logits[:3] = -float("inf")
    assert Sampler(SamplingConfig(temperature=1.0, seed=1)).draw([0], logits).token >= 3


@pytest.mark.parametrize(
    "config",
    [
        SamplingConfig(temperature=1.0, top_k=1, seed=0),
        SamplingConfig(temperature=1.0, top_p=1e-6, seed=0),
        SamplingConfig(temperature=1.0, min_p=0.999, seed=0),
    ],
)
def test_narrow_filters_leave_the_most_likely(config: SamplingConfig) -> None:
    logits = _logits(8)[0]
    assert Sampler(config).draw([0], logits).token == int(logits.argmax())
