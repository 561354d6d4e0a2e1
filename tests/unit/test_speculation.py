"""The speculation governor on synthetic machines: where it ends up and how calmly."""

from __future__ import annotations

import random
from dataclasses import dataclass

import pytest
from mira_engine.errors import ConfigError
from mira_engine.policy import speculation
from mira_engine.policy.speculation import (
    DRAFT_DEPTHS,
    FixedDepth,
    RoundObservation,
    SpeculationGovernor,
    allowed_depths,
    expected_tokens,
)

EVERY = (0, 1, 2, 4, 6, 8, 12, 16)


@dataclass
class Machine:
    """A machine whose rounds cost what it says, with noise."""

    acceptance: float
    draft_s: float
    base_s: float
    token_s: float
    stall_s: float = 0.0
    """Per verified token."""
    noise: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        self.random = random.Random(self.seed)

    def rate(self, k: int) -> float:
        seconds = k * self.draft_s + self.base_s + (k + 1) * (self.token_s + self.stall_s)
        return expected_tokens(self.acceptance, k) / seconds

    def best(self, candidates: tuple[int, ...]) -> int:
        return max(candidates, key=lambda k: (self.rate(k), -k))

    def round(self, k: int) -> RoundObservation:
        num_accepted = 0
        while num_accepted < k and self.random.random() < self.acceptance:
            num_accepted += 1
        shake = lambda: max(0.2, self.random.gauss(1, self.noise))
        stall_s = (k + 1) * self.stall_s * shake()
        return RoundObservation(
            num_draft=k,
            num_accepted=num_accepted,
            draft_s=k * self.draft_s * shake(),
            verify_s=(self.base_s + (k + 1) * self.token_s) * shake() + stall_s,
            stall_s=stall_s,
            num_records=k,
        )


FAST_DRAFT = Machine(acceptance=0.95, draft_s=0.001, base_s=0.030, token_s=0.001)
SLOW_DRAFT = Machine(acceptance=0.5, draft_s=0.012, base_s=0.010, token_s=0.004)
MEDIUM = Machine(acceptance=0.82, draft_s=0.005, base_s=0.016, token_s=0.002)
STALLING = Machine(acceptance=0.9, draft_s=0.003, base_s=0.010, token_s=0.001, stall_s=0.03)
SHAPES = {"fast": FAST_DRAFT, "slow": SLOW_DRAFT, "medium": MEDIUM, "stalling": STALLING}


def drive(governor: SpeculationGovernor, machine: Machine, num_rounds: int) -> list[int]:
    """Runs rounds as the engine does. Returns the K of each."""
    ks = []
    for _ in range(num_rounds):
        k = governor.choose().num_draft_tokens
        governor.observe(machine.round(k))
        ks.append(k)
    return ks


def fresh(machine: Machine, seed: int = 0, **changes: float) -> Machine:
    values = {
        name: getattr(machine, name)
        for name in ("acceptance", "draft_s", "base_s", "token_s", "stall_s", "noise")
    }
    return Machine(**(values | changes), seed=seed)


@pytest.mark.parametrize("seed", range(2))
@pytest.mark.parametrize("initial", [0, 4, 16])
@pytest.mark.parametrize("shape", SHAPES)
def test_governor_comes_close_to_the_best_k(shape: str, initial: int, seed: int) -> None:
    machine = fresh(SHAPES[shape], seed)
    governor = SpeculationGovernor(EVERY, initial=initial)
    drive(governor, machine, 800)
    assert machine.rate(governor.current) >= 0.9 * machine.rate(machine.best(EVERY))


@pytest.mark.parametrize("shape", SHAPES)
def test_governor_of_two_finds_the_better_one(shape: str) -> None:
    machine = fresh(SHAPES[shape])
    for initial in (0, 4):
        governor = SpeculationGovernor((0, 4), initial=initial)
        drive(governor, machine, 600)
        assert machine.rate(governor.current) >= 0.9 * machine.rate(machine.best((0, 4)))


def num_changes_between_equals(make: type[SpeculationGovernor], seed: int) -> int:
    """Changes of K in 2500 rounds on a machine where K = 4 and K = 0 are equally fast."""
    machine = Machine(
        acceptance=0.7, draft_s=0.010, base_s=0.0, token_s=0.0, stall_s=0.0, noise=0.2, seed=seed
    )
    machine.base_s = 4 * machine.draft_s / (expected_tokens(0.7, 4) - 1)
    assert machine.rate(4) == pytest.approx(machine.rate(0))
    governor = make((0, 4), initial=4)
    drive(governor, machine, 2500)
    return governor.num_changes


@pytest.mark.parametrize("seed", range(3))
def test_governor_does_not_alternate_between_equals(seed: int) -> None:
    assert num_changes_between_equals(SpeculationGovernor, seed) <= 6


def test_governor_spends_little_on_trials() -> None:
    machine = fresh(MEDIUM, acceptance=0.9)
    governor = SpeculationGovernor((0, 4), initial=4)
    ks = drive(governor, machine, 2000)
    assert governor.current == 4
    assert 0 < ks.count(0) <= 40


def depths_as_the_text_changes(make: type[SpeculationGovernor]) -> list[int]:
    """K at the end of texts whose drafts are accepted, are not, and are again."""
    governor, depths = make((0, 4), initial=4), []
    for acceptance, num_rounds in ((0.9, 300), (0.1, 400), (0.95, 2500)):
        drive(governor, fresh(MEDIUM, acceptance=acceptance), num_rounds)
        depths.append(governor.current)
    return depths


def test_governor_follows_the_text() -> None:
    assert depths_as_the_text_changes(SpeculationGovernor) == [4, 0, 4]


def test_one_slow_round_changes_nothing() -> None:
    governor = SpeculationGovernor((0, 4), initial=4)
    machine = fresh(MEDIUM, acceptance=0.9, noise=0.0)
    drive(governor, machine, 100)
    hiccup = RoundObservation(
        num_draft=4, num_accepted=0, draft_s=0.5, verify_s=0.5, stall_s=0.4, num_records=90
    )
    governor.observe(hiccup)
    drive(governor, machine, 50)
    assert governor.num_changes == 0


def test_governor_is_deterministic_and_choose_changes_nothing() -> None:
    first, second = (SpeculationGovernor(EVERY, initial=4) for _ in range(2))
    machine = fresh(MEDIUM)
    for _ in range(400):
        choice = first.choose()
        assert first.choose() == choice
        assert second.choose() == choice
        observation = machine.round(choice.num_draft_tokens)
        first.observe(observation)
        second.observe(observation)


def test_reason_names_the_rates_of_k_and_of_its_rival() -> None:
    governor = SpeculationGovernor((0, 4), initial=4, origin="from the profile")
    assert governor.choose().reason == "K 4: from the profile, not measured yet."
    drive(governor, fresh(MEDIUM, noise=0.0), 5)
    assert governor.choose().reason.startswith("K 4: ")
    assert "tok/s expected, K 0 " in governor.choose().reason
    assert "4 records a round" in governor.choose().reason


def test_prior_rates_speak_for_a_k_that_never_ran() -> None:
    governor = SpeculationGovernor((0, 4, 8), initial=4, prior_rates={0: 10, 4: 20, 8: 30})
    assert governor.expected_rate(8) == 30
    drive(governor, fresh(MEDIUM, noise=0.0), 3)
    present = governor.expected_rate(4)
    assert present is not None
    assert governor.expected_rate(8) == pytest.approx(1.5 * present)


def test_hopeless_neighbour_is_never_tried() -> None:
    governor = SpeculationGovernor((0, 4), initial=4, prior_rates={0: 1, 4: 20})
    assert set(drive(governor, fresh(FAST_DRAFT), 500)) == {4}


def test_round_cut_short_counts_for_acceptance_only() -> None:
    governor = SpeculationGovernor((0, 4), initial=4)
    governor.observe(MEDIUM.round(2))
    assert governor.choose().reason.endswith("not measured yet.")
    assert governor.acceptance != pytest.approx(0.7)


def test_forgotten_costs_are_measured_anew() -> None:
    governor = SpeculationGovernor((0, 4), initial=4)
    drive(governor, fresh(SLOW_DRAFT), 300)
    governor.forget_costs()
    assert "not measured yet" in governor.choose().reason
    drive(governor, fresh(FAST_DRAFT), 400)
    assert governor.current == 4


def test_acceptance_is_the_share_of_judged_tokens() -> None:
    governor = SpeculationGovernor((0, 8), initial=8)
    for num_accepted in (8, 3, 0, 5):
        governor.observe(
            RoundObservation(
                num_draft=8, num_accepted=num_accepted, draft_s=0.1, verify_s=0.1, stall_s=0,
                num_records=0,
            )
        )  # fmt: skip
    assert governor.acceptance == pytest.approx(16 / 19)


@pytest.mark.parametrize("candidates", [(), (-1, 0), (0, 33)])
def test_candidates_out_of_range_are_refused(candidates: tuple[int, ...]) -> None:
    with pytest.raises(ConfigError):
        SpeculationGovernor(candidates)


def test_allowed_depths_are_compiled_ones_unless_others_are_wanted() -> None:
    assert allowed_depths(4) == (0, 4)
    assert allowed_depths(8, DRAFT_DEPTHS) == (0, 1, 2, 3, 4, 6, 8)
    assert allowed_depths(0) == (0,)


def test_fixed_depth_says_so() -> None:
    assert FixedDepth(3, "as asked for").choose() == speculation.KChoice(3, "K 3: as asked for.")


# -- planted faults, as the tests above see them -------------------------------------------------


class _NeverTries(SpeculationGovernor):
    """Never looks at a neighbour that seems slower."""

    def _explore(self, present: float) -> None:
        self._num_settled = 0


def test_governor_without_hysteresis_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("_MARGIN", 0.0), ("_MAX_MARGIN", 0.0), ("_PATIENCE_ROUNDS", 1)):
        monkeypatch.setattr(speculation, name, value)
    assert max(num_changes_between_equals(SpeculationGovernor, seed) for seed in range(3)) > 6


def test_governor_that_never_tries_is_seen() -> None:
    assert depths_as_the_text_changes(_NeverTries) != [4, 0, 4]
