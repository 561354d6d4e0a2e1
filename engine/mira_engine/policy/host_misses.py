"""Missing experts that the processor computes itself, where that is faster than to copy them.

Pure. Beside a card host memory holds the records, so a miss has two ways: its record goes
over the link, or its few tokens are computed where the record is. Both go on at once, so of
a layer's misses as many are computed on the host as make the later of both ends come first.
Rates come in as numbers that were measured; how long the host really took is observed.

What the host computes gets no slot by that. An expert that is missing again before as many
experts were used as there are slots, which would have it still had it been fetched, or that
every pass misses, is brought besides, behind everything that somebody waits for: a hot one
does not stay on the host.

Source: Fiddler (arXiv 2402.07033), the choice between copying an expert and computing it on
the processor by a latency model; HybriMoE (arXiv 2504.05897), both at once within a layer.
Fiddler's experts never move while it answers; ours do.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from ..config import MAX_DRAFT_TOKENS
from ..types import ExpertId
from .base import Fetch, FetchReason
from .residency import ResidencyTable

MAX_HOST_TOKENS = MAX_DRAFT_TOKENS + 1
"""Most tokens of a pass whose misses may be computed on the host: the largest verification."""

MIN_GAIN = 0.1
"""Share of the time by copies alone that must be saved: less is within what rates err by, and
not worth another rounding."""

MAX_OVERTAKING = 3
"""Records of prefetches that a demand waits for: as many as a card's link begins at once."""

RETURN_SPAN = 1.0
"""Uses of experts between two misses of one, by slots, up to which it is brought. Time of a
token by that without a host, a host that takes a quarter, half and all of a copy's time
(`tests/bench/host_misses.py`, law, LRU, 32 of 64, 2026-11-30): at 0 .36, .50, .68, at .5 .35,
.50, .68, at 1 .34, .50, .68, without a limit .35, .51, .75; where nothing was brought .44, .54,
.68."""

MAX_RETURNING = 1
"""Records under way of what the host computed: nobody waits for them."""

_WEIGHT = 0.1
"""Of one pass in the host's observed slowdown."""

_FORGOTTEN = 0.02
"""Of the observed slowdown, in a pass that computed nothing on the host: a bad moment must not
keep the host out for ever."""

_MAX_RATIO = 16.0
"""Most that one pass may say the host was slower than measured."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSetup:
    """What the host can compute, and how fast host and link are.

    Attributes:
        expert_s: Seconds of the processor for one expert and one token.
        token_s: Seconds of each further token of the expert.
        record_s: Seconds of the link for the records of one expert.
        num_held: Experts whose records are whole in host memory: the first so many, counted
            layer by layer.
    """

    expert_s: float
    token_s: float
    record_s: float
    num_held: int

    def compute_s(self, num_tokens: int) -> float:
        """Seconds of the processor for one expert."""
        return self.expert_s + (num_tokens - 1) * self.token_s


def num_on_host(
    host_s: Sequence[float],
    record_s: float,
    *,
    num_copied: int = 0,
    num_ahead: int = 0,
) -> int:
    """Returns how many misses to compute on the host, the first of those given.

    Args:
        host_s: Seconds of the host for each miss that it may compute, ascending.
        record_s: Seconds of the link for a record.
        num_copied: Records that this layer waits for in any case.
        num_ahead: Records that the link moves before any of this layer.

    Returns:
        The number whose time `max(host, link)` is least, the smaller of equals; 0 where that
        does not save `MIN_GAIN` of the time by copies alone.
    """

    def link_s(num_on_link: int) -> float:
        waited_for = num_copied + num_on_link
        return (num_ahead + waited_for) * record_s if waited_for else 0.0

    by_copies_s = best_s = link_s(len(host_s))
    best, on_host_s = 0, 0.0
    for number, seconds in enumerate(host_s, start=1):
        on_host_s += seconds
        whole_s = max(on_host_s, link_s(len(host_s) - number))
        if whole_s < best_s:
            best, best_s = number, whole_s
    return best if best_s <= (1.0 - MIN_GAIN) * by_copies_s else 0


class HostMisses:
    """Chooses which of a layer's misses the host computes, and whom of them to bring.

    Args:
        setup: What was measured at loading.
        num_experts: Experts of a layer.
        top_k: Experts of a token in a layer.
        num_reserved_slots: Slots whose records a miss need not wait for.
    """

    def __init__(
        self,
        setup: HostSetup,
        *,
        num_experts: int,
        top_k: int,
        num_reserved_slots: int = 0,
    ) -> None:
        self._setup = setup
        self._num_experts = num_experts
        self._max_routed = MAX_HOST_TOKENS * top_k
        self._num_reserved_slots = num_reserved_slots
        self._num_uses = 0
        """Experts that passes have used, each time counted."""
        self._num_pass_uses = 0
        """Of the last pass."""
        self._pass_began_at = 0
        self._missed_at: dict[ExpertId, int] = {}
        """The same number when an expert was last missing."""
        self._recurring: list[ExpertId] = []
        """What the host computes of the layer, and missed lately."""
        self._returning: list[ExpertId] = []
        self._expected_s = 0.0
        self.slowdown = 1.0
        """Seconds the host really takes by those measured at loading."""
        self.is_allowed = True
        """Whether the running reply may differ in rounding."""

    def enter_layer(
        self, tokens_of: Mapping[ExpertId, int], residency: ResidencyTable
    ) -> frozenset[ExpertId]:
        """Chooses among a layer's misses: those of the fewest tokens first, ties by expert id.

        Args:
            tokens_of: The layer's experts, and how many tokens chose each.
            residency: Told of the misses that get no slot.

        Returns:
            Whom the host computes; nobody while a prompt is read.
        """
        if residency.is_prefilling or not self.is_allowed:
            return frozenset()
        self._num_uses += len(tokens_of)
        misses = [e for e in sorted(tokens_of) if residency.slot_of(e) is None]
        if not misses or sum(tokens_of.values()) > self._max_routed:
            return frozenset()
        chosen = self._choose(misses, tokens_of, residency)
        self._expected_s += sum(self._setup.compute_s(tokens_of[expert]) for expert in chosen)
        span = max(RETURN_SPAN * residency.num_slots, self._num_pass_uses)
        recurring = [expert for expert in misses if self._note_miss(expert, span)]
        self._recurring = [expert for expert in recurring if expert in chosen]
        for expert in chosen:
            residency.note_miss(expert)
        return frozenset(chosen)

    def _choose(
        self,
        misses: Sequence[ExpertId],
        tokens_of: Mapping[ExpertId, int],
        residency: ResidencyTable,
    ) -> list[ExpertId]:
        held = [e for e in misses if e.layer * self._num_experts + e.expert < self._setup.num_held]
        held.sort(key=lambda expert: (tokens_of[expert], expert))
        num_awaited = len(tokens_of) - len(misses) - sum(map(residency.is_ready, tokens_of))
        number = num_on_host(
            [self.slowdown * self._setup.compute_s(tokens_of[expert]) for expert in held],
            self._setup.record_s,
            num_copied=len(misses) - len(held) + num_awaited,
            num_ahead=min(MAX_OVERTAKING, residency.num_loading - num_awaited),
        )
        return held[:number]

    def _note_miss(self, expert: ExpertId, span: float) -> bool:
        """Takes in that an expert was missing. Returns whether it was so within the span."""
        before = self._missed_at.get(expert)
        self._missed_at[expert] = self._num_uses
        return before is not None and self._num_uses - before <= span

    def bring_back(self, residency: ResidencyTable, protected: Collection[ExpertId]) -> list[Fetch]:
        """Fetches for the next time what the host computes now and did not for the first time.

        After the layer's own misses were given their slots.

        Args:
            residency: Gives slots.
            protected: Experts that must keep theirs.
        """
        fetches: list[Fetch] = []
        self._returning = [e for e in self._returning if _is_loading(residency, e)]
        for expert in self._recurring:
            num_busy = residency.num_loading + self._num_reserved_slots
            if len(self._returning) >= MAX_RETURNING or num_busy >= residency.num_slots:
                break
            fetch = residency.admit(expert, FetchReason.RECURRING, protected=protected)
            if fetch is None:
                break
            self._returning.append(expert)
            fetches.append(fetch)
        return fetches

    def end_pass(self, host_s: float) -> None:
        """A target pass is over, of which the host computed for `host_s` seconds."""
        self._num_pass_uses = self._num_uses - self._pass_began_at
        self._pass_began_at = self._num_uses
        if self._expected_s > 0.0:
            ratio = min(_MAX_RATIO, host_s / self._expected_s)
            self.slowdown += _WEIGHT * (ratio - self.slowdown)
        else:
            self.slowdown += _FORGOTTEN * (1.0 - self.slowdown)
        self._expected_s = 0.0

    def end_reply(self) -> None:
        """A reply is over in any way: what was begun of a pass says nothing."""
        self._expected_s = 0.0
        self._pass_began_at = self._num_uses


def _is_loading(residency: ResidencyTable, expert: ExpertId) -> bool:
    return residency.slot_of(expert) is not None and not residency.is_ready(expert)
