"""The governor of batches on a synthetic machine: K by how many requests share a round."""

from __future__ import annotations

import random
from collections.abc import Iterable
from dataclasses import dataclass, field

import pytest
from mira_engine.policy.batch_speculation import BatchGovernor, width_of
from mira_engine.policy.speculation import (
    RoundObservation,
    SpeculationGovernor,
    expected_tokens,
)

DEPTHS = (0, 1, 2, 3, 4)


@dataclass
class Machine:
    """Rounds whose verification costs by the tokens in it, with noise."""

    acceptance: float = 0.9
    draft_s: float = 0.002
    base_s: float = 0.030
    token_s: float = 0.001
    noise: float = 0.05
    random: random.Random = field(default_factory=lambda: random.Random(7))

    def round_s(self, width: int, k: int) -> float:
        return k * self.draft_s + self.base_s + width * (k + 1) * self.token_s

    def rate(self, width: int, k: int) -> float:
        return width * expected_tokens(self.acceptance, k) / self.round_s(width, k)

    def best(self, width: int) -> int:
        return max(DEPTHS, key=lambda k: self.rate(width, k))

    def round(self, width: int, k: int) -> RoundObservation:
        num_accepted = num_judged = 0
        for _ in range(width):
            accepted = 0
            while accepted < k and self.random.random() < self.acceptance:
                accepted += 1
            num_accepted += accepted
            num_judged += min(k, accepted + 1)
        return RoundObservation(
            num_draft=k,
            num_accepted=num_accepted,
            draft_s=k * self.draft_s,
            verify_s=max(0.2, self.random.gauss(1, self.noise))
            * (self.base_s + width * (k + 1) * self.token_s),
            stall_s=0.0,
            num_records=0,
            num_requests=width,
            num_judged=num_judged,
        )


def costly_wide(noise: float = 0.05) -> Machine:
    """Drafts pay for one request and for no more than a few."""
    return Machine(acceptance=0.6, token_s=0.006, noise=noise)


def drive(governor: BatchGovernor, machine: Machine, widths: Iterable[int]) -> list[int]:
    """Runs rounds as a batch does. Returns the K of each."""
    ks = []
    for width in widths:
        k = governor.choose(width).num_draft_tokens
        governor.observe(machine.round(width, k))
        ks.append(k)
    return ks


def make(candidates: tuple[int, ...] = DEPTHS, initial: int = 4) -> BatchGovernor:
    return BatchGovernor(candidates, initial=initial)


@pytest.mark.parametrize(
    ("num_requests", "width"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (17, 32), (32, 32)]
)
def test_width_is_the_next_power_of_two(num_requests: int, width: int) -> None:
    assert width_of(num_requests) == width


@pytest.mark.parametrize("width", [1, 2, 8, 32])
def test_governor_comes_close_to_the_best_k_of_every_width(width: int) -> None:
    governor, machine = make(), costly_wide()
    drive(governor, machine, [width] * 400)
    found = governor.choose(width).num_draft_tokens
    assert machine.rate(width, found) >= 0.85 * machine.rate(width, machine.best(width))
    assert machine.best(1) > machine.best(32) == 0, "the machine tells widths apart"


def test_widths_keep_their_k_when_they_take_turns() -> None:
    governor = make()
    drive(governor, costly_wide(), [32] * 200 + [1] * 200)
    assert drive(governor, costly_wide(), [32] * 4) == [0] * 4
    assert min(drive(governor, costly_wide(), [1] * 4)) > 0


def test_batch_begins_without_a_draft_and_one_request_as_a_conversation() -> None:
    assert make().choose(8).num_draft_tokens == 0
    assert make().choose(8).reason == "K 0: batches begin without a draft, not measured yet."
    assert make(initial=2).choose(1).num_draft_tokens == 2
    assert make(initial=2).choose(1).reason == "K 2: as in conversations, not measured yet."


def test_batch_tries_a_draft_within_its_first_rounds() -> None:
    ks = drive(make(), costly_wide(), [32] * 24)
    assert ks[0] == ks[-1] == 0
    assert 0 < 24 - ks.count(0) <= 8, "what does not pay is tried, and not for long"


def test_new_width_begins_with_the_k_of_the_nearest_known_one() -> None:
    governor = make()
    cheap = Machine()
    drive(governor, cheap, [4] * 300)
    known = governor.choose(4).num_draft_tokens
    assert known > 0
    assert governor.choose(32).num_draft_tokens == known
    assert governor.choose(32).reason.startswith(f"K {known}: as with up to 4 requests")


def test_of_two_widths_equally_near_the_wider_one_is_asked() -> None:
    governor = make()
    drive(governor, Machine(), [2] * 300)
    drive(governor, costly_wide(), [32] * 1)
    governor._of_width[32].current = 1
    assert governor.choose(8).num_draft_tokens == 1


def test_acceptance_is_shared_by_all_widths() -> None:
    governor = make()
    refused = Machine(acceptance=0.0)
    governor.observe(refused.round(4, 4))
    governor.observe(refused.round(2, 0))
    assert {each.acceptance for each in governor._of_width.values()} == {0.0}


def test_acceptance_counts_every_requests_first_rejection() -> None:
    governor = make()
    governor.observe(
        RoundObservation(
            num_draft=4, num_accepted=6, draft_s=0.1, verify_s=0.1, stall_s=0, num_records=0,
            num_requests=3, num_judged=8,  # 4 of 4, 2 and a rejection, a rejection
        )
    )  # fmt: skip
    assert governor._of_width[4].acceptance == pytest.approx(6 / 8)


def test_expected_rate_is_that_of_all_requests() -> None:
    governor = make(candidates=(0, 4))
    still = Machine(noise=0.0)
    drive(governor, still, [8] * 2)
    rate = still.rate(8, 0)
    assert governor.choose(8).reason.startswith(f"K 0: {rate:.0f} tok/s expected")


def test_requests_that_end_inside_a_width_do_not_make_other_depths_look_better() -> None:
    governor, machine = make(candidates=(0, 2)), costly_wide(noise=0.0)
    ks = drive(governor, machine, [8] * 40)
    assert (set(ks), ks[-1]) == ({0, 2}, 0), "both were measured at eight requests"
    assert set(drive(governor, machine, [5] * 30)) == {0}


def test_forgotten_costs_are_forgotten_in_every_width() -> None:
    governor = make()
    drive(governor, costly_wide(), [8, 4, 2, 1] * 5)
    governor.forget_costs()
    reasons = [governor.choose(width).reason for width in (8, 4, 2, 1)]
    assert all("not measured yet" in reason for reason in reasons)


def test_choice_is_the_same_until_a_round_is_observed() -> None:
    governor = make()
    drive(governor, costly_wide(), [8] * 30)
    assert len({governor.choose(8) for _ in range(5)}) == 1


# -- planted faults, as the tests above see them -------------------------------------------------


class _OneForAll(BatchGovernor):
    """Takes every width for the same."""

    def _governor(self, num_requests: int) -> SpeculationGovernor:
        return super()._governor(8)


def test_governor_that_knows_no_widths_is_seen() -> None:
    governor = _OneForAll(DEPTHS, initial=4)
    drive(governor, costly_wide(), [32] * 200 + [1] * 200)
    wide = drive(governor, costly_wide(), [32] * 4)
    narrow = drive(governor, costly_wide(), [1] * 4)
    assert not (wide == [0] * 4 and min(narrow) > 0)
