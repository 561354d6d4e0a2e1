"""The driver: all policies of the expert cache as one object, observations in, actions out.

`mira_engine.runtime.executor` tells it what the routers chose and what has landed, and
carries out what it answers; the simulator does the same on a virtual clock. It has no
clock, thread or file: the same observations give the same actions, which
`mira_engine.policy.replay` writes down and holds against a fresh driver. So observations
are methods whose arguments are numbers and sequences of numbers only.

One pass over a layer: `enter_layer` answers with what can be computed, what is on its way
and what to fetch; `landed` and `computed` go on from there until nothing is waited for.

Source: Specter, Verification Expert Cache Residency Manager; DESIGN, "Policies".
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from ..types import Eviction, ExpertId, Region, ServedBy
from .base import Action, Await, Compute, FetchReason
from .eviction import EVICTION_POLICIES, EvictionPolicy
from .lookahead import ExpertLookaheadBuffer
from .prefetch import plan_batch
from .residency import ResidencyTable, SlotState

OnDecision = Callable[[str, Sequence[Any], Sequence[Action]], None]
"""Told the name of an observation, its arguments, and the actions it was answered with."""

_Observation = TypeVar("_Observation", bound=Callable[..., list[Action]])


def _observation(method: _Observation) -> _Observation:
    """Tells `on_decision` of every call, with the answer."""

    @functools.wraps(method)
    def observe(self: ExpertCacheDriver, *arguments: Any) -> list[Action]:
        actions = method(self, *arguments)
        if self.on_decision is not None:
            self.on_decision(method.__name__, arguments, actions)
        return actions

    return observe  # type: ignore[return-value]


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheSetup:
    """All that a driver's answers depend on beside what it observes.

    Attributes:
        num_layers: MoE layers.
        num_experts: Routed experts of a layer.
        num_slots: Slots of the device.
        eviction: Which resident experts are given up first.
        num_reserved_slots: Slots that a prefetch leaves for misses.
    """

    num_layers: int
    num_experts: int
    num_slots: int
    eviction: Eviction
    num_reserved_slots: int = 0


class ExpertCacheDriver:
    """Decides which experts are computed, fetched, kept and given up.

    Args:
        setup: What it decides for.
        eviction: Orders victims in place of the setup's policy, for simulated baselines.

    Attributes:
        residency: Slots and their experts; changed by nobody else.
        lookahead: What the draft's routers chose in this window.
        on_decision: Told everything, `None` for nobody.
    """

    def __init__(self, setup: CacheSetup, eviction: EvictionPolicy | None = None) -> None:
        eviction = eviction or EVICTION_POLICIES[setup.eviction]()
        self.residency = ResidencyTable(setup.num_slots, eviction)
        self.lookahead = ExpertLookaheadBuffer(setup.num_layers, setup.num_experts)
        self.on_decision: OnDecision | None = None
        self._num_reserved_slots = setup.num_reserved_slots
        self._tokens_of: dict[ExpertId, int] = {}
        self._missing: list[ExpertId] = []
        self._waiting: dict[ExpertId, Compute] = {}
        self._pinned: set[ExpertId] = set()
        self._failed: list[int] = []

    @property
    def is_layer_open(self) -> bool:
        """Whether the layer that was entered still needs experts that are not there."""
        return bool(self._waiting or self._missing)

    # -- one layer of a target pass --------------------------------------------------------

    @_observation
    def enter_layer(self, layer: int, demand: Sequence[tuple[int, int]]) -> list[Action]:
        """The target's router has chosen.

        Args:
            layer: MoE layer.
            demand: Experts and how many tokens chose each, ascending by expert.

        Returns:
            `Compute` for experts that are there, `Await` for those on their way, `Fetch`
            for missing ones while there are slots to give, most tokens first. Unless all
            are there, all are pinned until they are computed.
        """
        residency = self.residency
        self._tokens_of = {ExpertId(layer, expert): count for expert, count in demand}
        is_whole = all(map(residency.is_ready, self._tokens_of))
        actions: list[Action] = []
        for expert, num_tokens in self._tokens_of.items():
            slot = residency.slot_of(expert)
            if slot is None:
                self._missing.append(expert)
                continue
            if not is_whole:
                self._pin(expert)
            served_by = ServedBy.STAGE if residency.region(slot) is Region.STAGE else ServedBy.HOT
            found = Compute(expert, slot, num_tokens, served_by, residency.use(expert))
            if residency.state(slot) is SlotState.READY:
                actions.append(found)
            else:
                self._waiting[expert] = found
                actions.append(Await(expert, slot))
        self._missing.sort(key=lambda e: (-self._tokens_of[e], e.expert))
        return actions + self._fetch_missing()

    @_observation
    def landed(self, slot: int) -> list[Action]:
        """A load has ended well.

        Returns:
            The expert's computation where it is waited for; fetches that had to wait for a
            slot that may be given up.
        """
        self.residency.complete(slot)
        expert = self.residency.expert_in(slot)
        awaited = self._waiting.pop(expert, None) if expert is not None else None
        return [*([awaited] if awaited is not None else []), *self._fetch_missing()]

    @_observation
    def failed(self, slot: int) -> list[Action]:
        """A load has failed. Where nobody waits for it, it only loses its slot."""
        if self.residency.is_pinned(slot):
            self._failed.append(slot)
        else:
            self.residency.abandon(slot)
        return []

    @_observation
    def computed(self, slots: Sequence[int]) -> list[Action]:
        """The tokens of the experts in these slots are done: the slots may go to missing ones."""
        for slot in slots:
            expert = self.residency.expert_in(slot)
            assert expert is not None
            self.residency.unpin(expert)
            self._pinned.discard(expert)
        return self._fetch_missing()

    @_observation
    def leave_layer(self) -> list[Action]:
        """The layer is done, or was broken off: nothing of it is waited for or pinned."""
        for expert in sorted(self._pinned):
            self.residency.unpin(expert)
        self._pinned.clear()
        self._waiting.clear()
        self._missing.clear()
        return []

    def _fetch_missing(self) -> list[Action]:
        fetches: list[Action] = []
        while self._missing:
            fetch = self.residency.admit(self._missing[0], FetchReason.MISS)
            if fetch is None:
                break
            self._missing.pop(0)
            self._pin(fetch.expert)
            num_tokens = self._tokens_of[fetch.expert]
            self._waiting[fetch.expert] = Compute(
                fetch.expert, fetch.slot, num_tokens, ServedBy.MISS, False
            )
            fetches.append(fetch)
        return fetches

    def _pin(self, expert: ExpertId) -> None:
        self.residency.pin(expert)
        self._pinned.add(expert)

    # -- drafting and passes ---------------------------------------------------------------

    @_observation
    def begin_draft(self) -> list[Action]:
        """A draft window begins: the counters are cleared."""
        self.lookahead.clear()
        return []

    @_observation
    def reach_boundary(self, counts: Sequence[Sequence[tuple[int, int]]]) -> list[Action]:
        """A draft boundary. Returns the batch to submit.

        Args:
            counts: By layer, the experts that this window's drafts chose, and how often:
                what `lookahead` holds. Given too, since kernels add to its memory.
        """
        self.lookahead.restore(counts)
        return plan_batch(
            self.lookahead, self.residency, num_reserved_slots=self._num_reserved_slots
        )

    @_observation
    def end_draft(self) -> list[Action]:
        """The draft is over: what its last routers said is discarded."""
        self.lookahead.clear()
        return []

    @_observation
    def end_pass(self) -> list[Action]:
        """The pass that prefetches were made for is over; unused ones have no claim."""
        self.residency.end_window()
        return []

    @_observation
    def end_reply(self) -> list[Action]:
        """The reply has ended in any way: failed loads give their slots up."""
        for slot in self._failed:
            self.residency.abandon(slot)
        self._failed.clear()
        self.residency.end_window()
        return []
