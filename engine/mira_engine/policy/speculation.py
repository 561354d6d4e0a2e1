"""Speculation governor: the K, 0 included, that gives the most tokens per second.

Pure and deterministic: one observation a round goes in, the next round's K comes out, with
a sentence why. It keeps moving averages of what a round is made of and predicts the rate
of every candidate K from them:

    tokens a round   E(K) = (1 - a^(K+1)) / (1 - a), a = share of judged drafts accepted
    seconds a round  K * draft + compute(K+1) + stall(K+1)

Seconds of a K that ran are its own average; of another K, a line fitted over the number of
verified tokens. K changes only when another one was better by a margin for several rounds
running, and only to one that was tried just before. Each change makes the next one dearer
for a while, so that two equal candidates do not alternate.

Source: Specter, selection of K, which is offline; E(K) from Leviathan et al. 2023.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

from ..config import MAX_DRAFT_TOKENS
from ..errors import ConfigError
from .acceptance import AcceptanceRate
from .averages import MovingAverage

DRAFT_DEPTHS = (0, 1, 2, 3, 4, 6, 8, 12, 16, 20, 24, 32)
"""Depths worth choosing among where all of them are compiled."""

_PRIOR_SLOPE = 0.15
"""What one more token adds to a verification, as a share of one token's, until two depths
have been measured. Guarded, not measured: a trial comes before any change."""

_PRIOR_DRAFT_SHARE = 0.4
"""A drafted token's time, as a share of a plain step's, until one has been drafted."""

_MARGIN = 0.05
_MAX_MARGIN = 0.4
_MARGIN_FADE = 0.998
"""Of the extra margin, after each round."""

_HICCUP = 3.0
"""A round's seconds count as this many averages at most: a busy machine stalls now and then."""

_PATIENCE_ROUNDS = 6
_TRIAL_ROUNDS = 4
_FRESH_ROUNDS = 128
"""A depth's own average is believed that long after its last round."""

_EXPLORE_AFTER = 24
_EXPLORE_MAX = 384
"""Rounds between two trials of a neighbour: doubled each time it leads nowhere."""

_EXPLORE_FLOOR = 0.6
"""A neighbour that ran, or has a prior, is not tried if its expected rate is a smaller share
of the present one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundObservation:
    """What one round did.

    Attributes:
        num_draft: Tokens drafted for a request, the most of any; 0 for a plain step.
        num_accepted: Of all of them, accepted.
        draft_s: Seconds of drafting.
        verify_s: Seconds of the target pass, `stall_s` included.
        stall_s: Seconds in which it waited for records.
        num_records: Records that landed during the round.
        num_requests: Requests that shared the round.
        num_judged: Draft tokens that were accepted or the first of their request to be
            rejected; `None` for what follows from the others where one request drafted.
    """

    num_draft: int
    num_accepted: int
    draft_s: float
    verify_s: float
    stall_s: float
    num_records: int
    num_requests: int = 1
    num_judged: int | None = None


@dataclass(frozen=True, slots=True)
class KChoice:
    """K of the next round, and why, in one sentence for people."""

    num_draft_tokens: int
    reason: str


def expected_tokens(acceptance: float, num_draft_tokens: int) -> float:
    """Returns E(K): tokens a round emits, the target's own one included."""
    if acceptance >= 1:
        return num_draft_tokens + 1.0
    return (1 - acceptance ** (num_draft_tokens + 1)) / (1 - acceptance)


def allowed_depths(max_draft_tokens: int, wanted: Collection[int] | None = None) -> tuple[int, ...]:
    """Returns the candidates of a governor: 0, the plan's K, and what is wanted below it.

    Args:
        max_draft_tokens: The plan's K.
        wanted: Candidates, for example `DRAFT_DEPTHS`; `None` for 0 and the plan's K alone,
            since steps are compiled for these.
    """
    inside = {k for k in wanted or () if 0 < k < max_draft_tokens}
    return tuple(sorted({0, max_draft_tokens} | inside))


class DepthPolicy(Protocol):
    """Says how many tokens the next round drafts."""

    def choose(self) -> KChoice:
        """Returns K for the next round, and why."""


class FixedDepth:
    """Always the same K."""

    def __init__(self, num_draft_tokens: int, reason: str) -> None:
        self._choice = KChoice(num_draft_tokens, f"K {num_draft_tokens}: {reason}.")

    def choose(self) -> KChoice:
        """Returns that K."""
        return self._choice


class _DepthCost:
    """Seconds of a verification at one depth."""

    __slots__ = ("compute_s", "last_round", "num_records", "stall_s")

    def __init__(self) -> None:
        self.compute_s = MovingAverage(0.1)
        self.stall_s = MovingAverage(0.1)
        self.num_records = MovingAverage(0.1)
        self.last_round = 0

    @property
    def num_rounds(self) -> int:
        return self.compute_s.num_values

    def add(self, observation: RoundObservation, number: int) -> None:
        verify_s, stall_s = observation.verify_s, min(observation.stall_s, observation.verify_s)
        known_s = (self.compute_s.value or 0.0) + (self.stall_s.value or 0.0)
        scale = min(1.0, _HICCUP * known_s / verify_s) if known_s and verify_s else 1.0
        self.compute_s.add(scale * (verify_s - stall_s))
        self.stall_s.add(scale * stall_s)
        self.num_records.add(observation.num_records)
        self.last_round = number

    def reset(self) -> None:
        for average in (self.compute_s, self.stall_s, self.num_records):
            average.reset()


class SpeculationGovernor:
    """Chooses K for each round.

    Args:
        candidates: K's to choose from, 0 to `MAX_DRAFT_TOKENS`.
        initial: K to begin with; the largest candidate where it is `None` or no candidate.
        prior_rates: Tokens per second by K, from a profile or a cost model. Only their
            ratios are used, for a K that has not run yet.
        acceptance: Share of drafts accepted; governors of the same drafts share it. `None`
            for one of its own.
        origin: Where `initial` comes from, for the first reason.

    Raises:
        ConfigError: No candidates, or one out of range.
    """

    def __init__(
        self,
        candidates: Collection[int],
        *,
        initial: int | None = None,
        prior_rates: Mapping[int, float] | None = None,
        acceptance: AcceptanceRate | None = None,
        origin: str = "the default",
    ) -> None:
        self.candidates = tuple(sorted(set(candidates)))
        if not self.candidates or not set(self.candidates) <= set(range(MAX_DRAFT_TOKENS + 1)):
            raise ConfigError.for_field(
                "draft depths", candidates, f"Give at least one of 0 to {MAX_DRAFT_TOKENS}."
            )
        self.current = initial if initial in self.candidates else self.candidates[-1]
        self._priors = {k: rate for k, rate in (prior_rates or {}).items() if rate > 0}
        self._accepted = acceptance if acceptance is not None else AcceptanceRate()
        self._origin = origin
        self._draft_s = MovingAverage(0.1)
        self._costs = {k: _DepthCost() for k in self.candidates}
        self._num_rounds = 0
        self._num_better = 0
        self._extra_margin = 0.0
        self._trial: int | None = None
        self._trial_left = 0
        self._explore_after = _EXPLORE_AFTER
        self._num_settled = 0
        """Rounds since the last trial or change."""
        self._goes_down = True
        self._num_requests = 1
        self.num_changes = 0

    # -- what is expected ------------------------------------------------------------------

    @property
    def acceptance(self) -> float:
        """Share of judged draft tokens that were accepted; what follows a rejected one is
        not judged.
        """
        return self._accepted.value

    def expected_rate(self, num_draft_tokens: int) -> float | None:
        """Returns tokens per second at this K, of all requests; `None` while nothing is known."""
        own = self._modelled_rate(num_draft_tokens)
        if self._costs[num_draft_tokens].num_rounds:
            return own
        prior = self._priors.get(num_draft_tokens)
        if prior is None:
            return own
        base = self._priors.get(self.current)
        present = self._modelled_rate(self.current) if base else None
        return prior * present / base if base and present else prior

    def _modelled_rate(self, k: int) -> float | None:
        verify_s = self._seconds(k, "compute_s")
        stall_s = self._seconds(k, "stall_s")
        if verify_s is None or stall_s is None:
            return None
        draft_s = self._draft_s.value
        if draft_s is None:
            draft_s = _PRIOR_DRAFT_SHARE * (self._seconds(0, "compute_s") or verify_s)
        total_s = k * draft_s + verify_s + stall_s
        num_tokens = self._num_requests * expected_tokens(self.acceptance, k)
        return num_tokens / total_s if total_s > 0 else None

    def _seconds(self, k: int, what: str) -> float | None:
        cost = self._costs.get(k)
        if cost is not None and cost.num_rounds:
            return getattr(cost, what).value
        points = [
            (depth + 1, getattr(each, what).value, min(each.num_rounds, 10))
            for depth, each in self._costs.items()
            if each.num_rounds
        ]
        return _line_at(points, k + 1) if points else None

    # -- a round ---------------------------------------------------------------------------

    def choose(self) -> KChoice:
        """Returns K for the next round. The same until the next observation."""
        if self._trial is not None:
            return KChoice(self._trial, f"K {self._trial}: tried for a moment. {self._compare()}")
        return KChoice(self.current, self._compare())

    def forget_costs(self) -> None:
        """Drops all measured seconds, for example when compiled steps are taken up."""
        for cost in self._costs.values():
            cost.reset()
        self._draft_s.reset()
        self._num_better = 0

    def observe(self, observation: RoundObservation) -> None:
        """Takes in a round, whatever its K was."""
        self._num_rounds += 1
        self._extra_margin *= _MARGIN_FADE
        k = observation.num_draft
        self._num_requests = observation.num_requests
        if k > 0:
            num_accepted, num_judged = observation.num_accepted, observation.num_judged
            if num_judged is None:
                num_judged = num_accepted + (num_accepted < k)
            self._accepted.add(num_accepted, num_judged)
            known_s = self._draft_s.value or float("inf")
            self._draft_s.add(min(observation.draft_s / k, _HICCUP * known_s))
        if k in self._costs:
            self._costs[k].add(observation, self._num_rounds)
        if self._trial is not None:
            self._continue_trial(k)
        else:
            self._judge()

    def _continue_trial(self, k: int) -> None:
        """Counts the trial's rounds; one that was cut short at the reply's end is none."""
        self._trial_left -= k == self._trial
        if self._trial_left <= 0:
            self._trial = None
            self._num_settled = 0

    def _judge(self) -> None:
        """Changes K, begins a trial, or leaves all as it is."""
        self._num_settled += 1
        present = self.expected_rate(self.current)
        if present is None or len(self.candidates) == 1:
            return
        best, best_rate = self._best()
        if best_rate <= present * (1 + _MARGIN + self._extra_margin):
            self._num_better = 0
            if self._num_settled >= self._explore_after:
                self._explore(present)
            return
        self._num_better += 1
        if self._num_better < _PATIENCE_ROUNDS:
            return
        if self._is_fresh(best):
            self._change_to(best)
        else:
            self._begin_trial(best)

    def _best(self) -> tuple[int, float]:
        """Returns the candidate with the highest rate; the present one among equals."""
        rates = {k: self.expected_rate(k) or 0.0 for k in self.candidates}
        best = max(rates, key=lambda k: (rates[k], k == self.current, -k))
        return best, rates[best]

    def _is_fresh(self, k: int) -> bool:
        cost = self._costs[k]
        age = self._num_rounds - cost.last_round
        return cost.num_rounds >= _TRIAL_ROUNDS and age <= _FRESH_ROUNDS

    def _change_to(self, k: int) -> None:
        self.current = k
        self.num_changes += 1
        self._num_better = self._num_settled = 0
        self._explore_after = _EXPLORE_AFTER
        self._extra_margin = min(_MAX_MARGIN, 2 * self._extra_margin + _MARGIN)

    def _begin_trial(self, k: int) -> None:
        self._trial, self._trial_left = k, _TRIAL_ROUNDS
        self._costs[k].reset()

    def _explore(self, present: float) -> None:
        """Tries a neighbour, the two in turn, unless it is far behind by all that is known."""
        self._num_settled = 0
        self._explore_after = min(_EXPLORE_MAX, 2 * self._explore_after)
        index = self.candidates.index(self.current)
        self._goes_down = not self._goes_down
        neighbours = [index - 1, index + 1] if self._goes_down else [index + 1, index - 1]
        for neighbour in neighbours:
            if not 0 <= neighbour < len(self.candidates):
                continue
            k = self.candidates[neighbour]
            is_guess = not self._costs[k].num_rounds and k not in self._priors
            if is_guess or (self.expected_rate(k) or 0.0) >= _EXPLORE_FLOOR * present:
                self._begin_trial(k)
                return

    # -- words -----------------------------------------------------------------------------

    def _compare(self) -> str:
        rate = self.expected_rate(self.current)
        cost = self._costs[self.current]
        if rate is None or not cost.num_rounds:
            return f"K {self.current}: {self._origin}, not measured yet."
        text = f"K {self.current}: {_rate_text(rate)} tok/s expected"
        others = {k: self.expected_rate(k) or 0.0 for k in self.candidates if k != self.current}
        if others:
            rival = max(others, key=lambda k: (others[k], -k))
            text += f", K {rival} {_rate_text(others[rival])}"
        records = cost.num_records.value or 0.0
        return f"{text}; {records:.0f} records a round." if records >= 0.5 else f"{text}."


def _rate_text(rate: float) -> str:
    return f"{rate:.0f}" if rate >= 10 else f"{rate:.1f}"


def _line_at(points: Iterable[tuple[int, float, int]], at: int) -> float:
    """Weighted least squares through `(tokens, seconds, weight)`, never falling or below 0."""
    points = list(points)
    total = sum(weight for _, _, weight in points)
    mean_x = sum(weight * x for x, _, weight in points) / total
    mean_y = sum(weight * y for _, y, weight in points) / total
    spread = sum(weight * (x - mean_x) ** 2 for x, _, weight in points)
    if not spread:
        return mean_y * (1 + _PRIOR_SLOPE * (at - 1)) / (1 + _PRIOR_SLOPE * (mean_x - 1))
    slope = sum(weight * (x - mean_x) * (y - mean_y) for x, y, weight in points) / spread
    slope = max(0.0, slope)
    return max(0.0, mean_y + slope * (at - mean_x))
