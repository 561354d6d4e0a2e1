"""HOT/STAGE rebalancer: which experts have earned a long stay on the device.

Owns the counts of routed tokens and the choice of HOT experts. Pure: it is told what was
routed and how many tokens have passed; it changes labels in the residency table and asks
it for slots, and returns what is to be moved. One thread calls it.

Source: Mira IV-D. Counters are reset after each pass as there; what an expert showed in
earlier windows is kept as one fading number and as the length of its history.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from ..types import ExpertId, ServedBy
from .base import Action, FetchReason, Skip, SkipReason
from .residency import ResidencyTable

# The figures below are hit rates of 2026-11-30 by `tests/bench/regions.py --tokens 4000
# --layers 7 --varied 16`: one pool with room for 16 of 64 experts a layer, STAGE by recency,
# the others at probation 2, 32 swaps and 256 tokens; law / summary / summary after law.
# Plain LRU: .465 / .450 / .450.

DEFAULT_HOT_SHARE = 0.5
"""HOT's part of the slots. .25: .466 / .461 / .463, .5: .463 / .480 / .482,
.75: .429 / .459 / .451, .9: .414 / .441 / .426."""

DEFAULT_INTERVAL_TOKENS = 256
"""64: .454 / .485 / .486, 128: .463 / .483 / .482, 256: .463 / .480 / .482,
512: .463 / .474 / .473, 1024: .463 / .467 / .455, 2048: .465 / .450 / .431."""

DEFAULT_MAX_SWAPS = 16
"""1: .466 / .470 / .440, 4: .466 / .477 / .467, 16: .464 / .480 / .480,
32 and 64: .463 / .480 / .482. Of 112 slots; a larger pool may want more."""

DEFAULT_PROBATION_WINDOWS = 1
"""Admitting whatever missed (0): .463 / .484 / .482, 1: the same, 2: .463 / .480 / .482,
3: .463 / .478 / .480. So on these traces probation gains nothing over admitting every miss;
one window costs nothing, longer histories promote later than the text changes."""

DEFAULT_HYSTERESIS = 0.25
"""0: .462 / .476 / .477, .25: .463 / .480 / .482, .5: .465 / .480 / .478,
1: .466 / .476 / .475."""

DEFAULT_MISS_WEIGHT = 0.5
"""0: .464 / .477 / .476, .5: .463 / .480 / .482, 1: .462 / .477 / .478."""


@dataclass(slots=True)
class ExpertUsage:
    """What is known of one expert's traffic.

    Attributes:
        num_tokens: Tokens routed to it in the window.
        num_hot: Of those, served by HOT.
        num_stage: Of those, served by STAGE.
        num_missed: Of those, served by a fetch on demand.
        frequency: Tokens per window in earlier windows, each counting half of the next.
        num_windows: Windows running, up to the last one, in which at least as much was
            routed to it as to an expert on average: how persistent its demand is.
        last_used: Number of the token it was last routed to.
    """

    num_tokens: int = 0
    num_hot: int = 0
    num_stage: int = 0
    num_missed: int = 0
    frequency: float = 0.0
    num_windows: int = 0
    last_used: int = 0


class RoutingTelemetry:
    """Counts routed tokens by expert and by what served them, over a window of tokens."""

    def __init__(self) -> None:
        self.num_tokens = 0
        """Tokens seen since the start."""
        self.num_window_tokens = 0
        """Tokens seen in the window."""
        self._num_routed = 0
        self._usage: dict[ExpertId, ExpertUsage] = {}

    def record(self, expert: ExpertId, num_tokens: int, served_by: ServedBy) -> None:
        """Counts tokens routed to an expert. Called once per expert of a layer's pass."""
        usage = self._usage.get(expert)
        if usage is None:
            usage = self._usage[expert] = ExpertUsage()
        self._num_routed += num_tokens
        usage.num_tokens += num_tokens
        usage.last_used = self.num_tokens
        if served_by is ServedBy.HOT:
            usage.num_hot += num_tokens
        elif served_by is ServedBy.STAGE:
            usage.num_stage += num_tokens
        else:
            usage.num_missed += num_tokens

    def advance(self, num_tokens: int) -> None:
        """Counts tokens that went through all layers."""
        self.num_tokens += num_tokens
        self.num_window_tokens += num_tokens

    def usage(self, expert: ExpertId) -> ExpertUsage:
        """Returns an expert's counters; zeros for one that was never routed to."""
        return self._usage.get(expert) or ExpertUsage()

    def experts(self) -> Mapping[ExpertId, ExpertUsage]:
        """Returns the counters of all experts that were ever routed to."""
        return self._usage

    def num_windows(self, usage: ExpertUsage) -> int:
        """Returns the windows running, this one included, in which it was in demand."""
        return usage.num_windows + 1 if self._is_in_demand(usage) else 0

    def end_window(self) -> None:
        """Adds the window to each expert's history and resets its counters."""
        for usage in self._usage.values():
            usage.num_windows = self.num_windows(usage)
            usage.frequency = (usage.frequency + usage.num_tokens) / 2
            usage.num_tokens = usage.num_hot = usage.num_stage = usage.num_missed = 0
        self.num_window_tokens = self._num_routed = 0

    def _is_in_demand(self, usage: ExpertUsage) -> bool:
        """Whether the window routed at least as much to it as to an expert on average."""
        return 0 < self._num_routed <= usage.num_tokens * len(self._usage)


def demand(usage: ExpertUsage) -> float:
    """Returns the tokens a window is expected to route to the expert.

    This window's count and the faded earlier ones weigh alike.
    """
    return (usage.num_tokens + usage.frequency) / 2


def victim_score(usage: ExpertUsage, *, age_tokens: int, interval_tokens: int) -> float:
    """Scores a HOT expert: the higher, the sooner it is demoted.

    Low routed volume makes it high. Among experts of like volume the one that was not used
    for longer goes first: an age of one interval weighs as much as one token.
    """
    return age_tokens / interval_tokens - demand(usage)


def candidate_score(usage: ExpertUsage, *, miss_weight: float) -> float:
    """Scores an expert outside of HOT: the higher, the sooner it is promoted.

    High routed volume makes it high, and more so what of it had to be fetched on demand:
    what STAGE serves anyway gains little by a promotion.
    """
    return demand(usage) + miss_weight * usage.num_missed


class Rebalancer:
    """Swaps HOT and other experts by measured demand, a few at a time.

    Args:
        interval_tokens: Tokens between two passes.
        max_swaps: Most experts exchanged, or fetched into HOT's free room, in one pass.
        probation_windows: Windows running in which an expert must have been in demand
            before it is promoted; 0 admits whatever was routed to.
        hysteresis: Share by which a candidate must exceed the victim's demand; of one
            token where the victim has less.
        miss_weight: What a missed token counts beside a routed one.
    """

    def __init__(
        self,
        *,
        interval_tokens: int = DEFAULT_INTERVAL_TOKENS,
        max_swaps: int = DEFAULT_MAX_SWAPS,
        probation_windows: int = DEFAULT_PROBATION_WINDOWS,
        hysteresis: float = DEFAULT_HYSTERESIS,
        miss_weight: float = DEFAULT_MISS_WEIGHT,
    ) -> None:
        self.interval_tokens = interval_tokens
        self.max_swaps = max_swaps
        self.probation_windows = probation_windows
        self.hysteresis = hysteresis
        self.miss_weight = miss_weight
        self.telemetry = RoutingTelemetry()

    def observe_routing(self, expert: ExpertId, num_tokens: int, served_by: ServedBy) -> None:
        """Tokens were routed to an expert in one layer's pass."""
        self.telemetry.record(expert, num_tokens, served_by)

    def observe_tokens(self, num_tokens: int) -> None:
        """Tokens went through all layers."""
        self.telemetry.advance(num_tokens)

    def is_due(self) -> bool:
        """Whether an interval has passed since the last pass."""
        return self.telemetry.num_window_tokens >= self.interval_tokens

    def decide(self, residency: ResidencyTable) -> list[Action]:
        """Makes one pass over HOT and ends the window. Called between forward passes.

        Args:
            residency: With regions; labels are changed and slots given at once.

        Returns:
            In order: for each swap a demotion and then a promotion or a fetch. Only
            fetches move bytes. Nothing while a prompt is read, whose window goes on.
        """
        if residency.is_prefilling:
            return []
        usages = self.telemetry.experts()
        now = self.telemetry.num_tokens
        wanted = {
            expert: candidate_score(usage, miss_weight=self.miss_weight)
            for expert, usage in usages.items()
            if usage.num_tokens
            and (
                not self.probation_windows
                or self.telemetry.num_windows(usage) >= self.probation_windows
            )
        }
        kept = {}
        for expert in _hot(residency):
            usage = self.telemetry.usage(expert)
            age = now - usage.last_used
            kept[expert] = -victim_score(
                usage, age_tokens=age, interval_tokens=self.interval_tokens
            )
        actions = self._exchange(residency, wanted, kept, self.max_swaps)
        self.telemetry.end_window()
        return actions

    def warm(
        self,
        residency: ResidencyTable,
        last_counts: Mapping[ExpertId, int],
        max_swaps: int | None = None,
    ) -> list[Action]:
        """Exchanges HOT experts by what a prompt's last tokens were routed to.

        Called after `end_prefill`. There is no probation: what follows a prompt is mostly
        routed like its end, and nothing else is known yet.

        Args:
            residency: With regions.
            last_counts: Routed tokens by expert, of the last tokens of the prompt.
            max_swaps: Most swaps and fetches; `None` for as many as a pass makes.

        Returns:
            As `decide`; the window is left as it is.
        """
        kept = {expert: float(last_counts.get(expert, 0)) for expert in _hot(residency)}
        wanted = {expert: float(count) for expert, count in last_counts.items() if count}
        limit = self.max_swaps if max_swaps is None else max_swaps
        return self._exchange(residency, wanted, kept, limit)

    def fill(self, residency: ResidencyTable, experts: Sequence[tuple[int, int]]) -> list[Action]:
        """Fetches experts while there is room, into HOT where there are regions.

        Args:
            residency: Gives slots.
            experts: Layer and number, those wanted most first.

        Returns:
            Fetches to submit, and skips of what finds no room.
        """
        actions: list[Action] = []
        for layer, expert in experts:
            wanted = ExpertId(layer, expert)
            if residency.slot_of(wanted) is None:
                fetch = residency.admit(wanted, FetchReason.REBALANCE)
                actions.append(fetch or Skip(wanted, SkipReason.NO_ROOM))
        return actions

    def _exchange(
        self,
        residency: ResidencyTable,
        wanted: Mapping[ExpertId, float],
        kept: Mapping[ExpertId, float],
        max_swaps: int,
    ) -> list[Action]:
        """Promotes the most wanted, for the least kept where HOT is full."""
        # One that is HOT and still on its way, or pinned, is neither kept nor wanted.
        candidates = sorted(
            (-score, e)
            for e, score in wanted.items()
            if e not in kept and residency.served_by(e) is not ServedBy.HOT
        )
        victims = sorted((score, e) for e, score in kept.items())
        actions: list[Action] = []
        num_left = max_swaps
        for minus_score, expert in candidates:
            is_resident = residency.slot_of(expert) is not None
            if _has_room(residency):
                if not is_resident and not num_left:
                    continue
                num_left -= not is_resident
            elif not num_left or not victims:
                break
            else:
                keep, victim = victims[0]
                if -minus_score <= keep + self.hysteresis * max(keep, 1.0):
                    break
                victims.pop(0)
                num_left -= 1
                actions.append(residency.demote(victim))
            action = (
                residency.promote(expert)
                if is_resident
                else residency.admit(expert, FetchReason.REBALANCE)
            )
            actions.append(action or Skip(expert, SkipReason.NO_ROOM))
        return actions


def _hot(residency: ResidencyTable) -> list[ExpertId]:
    """Returns the HOT experts that can be demoted now: loaded, not pinned."""
    regions = residency.regions
    if regions is None:
        return []
    return [expert for expert in regions.hot() if regions.is_idle(expert)]


def _has_room(residency: ResidencyTable) -> bool:
    regions = residency.regions
    return regions is not None and regions.num_hot < regions.num_hot_slots
