"""The one module of the simulator that talks to the driver.

Does on a virtual clock what `mira_engine.runtime.executor` and `mira_engine.runtime.draft`
do in the engine, observation by observation: same driver, same order of calls.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from ..policy.base import (
    AHEAD,
    Action,
    Await,
    Compute,
    ComputeOnHost,
    Fetch,
    FetchReason,
    next_boundary,
)
from ..policy.cache_setup import CacheSetup
from ..policy.driver import ExpertCacheDriver
from ..policy.eviction import EvictionPolicy
from ..policy.observation import OnDecision
from ..types import ExpertId, ServedBy
from .clock import VirtualClock
from .servers import Landing, LinkServer, MachineCosts
from .workload import Demand

Prediction = Mapping[int, Demand]
"""By layer, experts that are expected there and how many tokens want each."""


@dataclass(slots=True)
class SimulatedTraffic:
    """Routed tokens by what served them, and what was moved for them."""

    num_hits: int = 0
    num_prefetch_hits: int = 0
    num_misses: int = 0
    num_records: int = 0
    num_prefetched: int = 0
    stall_s: float = 0.0
    draft_s: float = 0.0
    num_on_host: int = 0
    host_s: float = 0.0


class SimulatedExecutor:
    """One driver, or one a layer, with a link and a processor.

    Args:
        setup: Of the one driver; with `is_per_layer` its slots are divided evenly.
        costs: What the processor's steps take.
        link: Moves records.
        is_per_layer: Whether each layer has slots of its own.
        make_eviction: Orders victims; `None` leaves it to the setup.
    """

    def __init__(
        self,
        setup: CacheSetup,
        costs: MachineCosts,
        link: LinkServer,
        *,
        is_per_layer: bool = False,
        make_eviction: Callable[[], EvictionPolicy] | None = None,
    ) -> None:
        self.clock = VirtualClock()
        self.traffic = SimulatedTraffic()
        self._costs = costs
        self._link = link
        self._host = setup.host
        self._host_free_at = 0.0
        self._slots_each = setup.num_slots
        num_drivers = 1
        if is_per_layer:
            num_drivers = setup.num_layers
            self._slots_each = setup.num_slots // num_drivers
            setup = replace(
                setup,
                num_slots=self._slots_each,
                num_reserved_slots=min(setup.num_reserved_slots, self._slots_each - 1),
            )
        self._drivers = [
            ExpertCacheDriver(setup, make_eviction() if make_eviction is not None else None)
            for _ in range(num_drivers)
        ]
        self._num_layers = setup.num_layers
        self._host_s = [0.0] * num_drivers
        """Of each driver, since the pass before ended."""

    def listen(self, on_decision: OnDecision) -> None:
        """Has every observation and its answer told, as the engine's driver can."""
        for driver in self._drivers:
            driver.on_decision = on_decision

    def preload(self, experts: Iterable[ExpertId]) -> None:
        """Fills free slots before the clock starts."""
        for expert in experts:
            residency = self._drivers[self._owner(expert.layer)].residency
            if residency.num_used < residency.num_slots:
                fetch = residency.admit(expert, FetchReason.MISS)
                assert fetch is not None
                residency.complete(fetch.slot)

    # -- what the engine does ----------------------------------------------------------------

    def run_layer(self, layer: int, demand: Demand, prediction: Prediction | None = None) -> None:
        """Computes a layer's experts as they are there, until all are, the host's too.

        Args:
            layer: MoE layer.
            demand: What the target's router chose.
            prediction: Submitted behind the layer's own misses.
        """
        self._host_free_at = self.clock.now_s
        num_on_host = self.traffic.num_on_host
        self._run_layer(layer, demand, prediction)
        if self.traffic.num_on_host > num_on_host:
            self.clock.advance_to(self._host_free_at)
            self._collect(self._link.poll(self.clock.now_s))

    def _run_layer(self, layer: int, demand: Demand, prediction: Prediction | None) -> None:
        owner = self._owner(layer)
        driver = self._drivers[owner]
        ready = self._obey(owner, driver.enter_layer(layer, demand))
        is_open = driver.is_layer_open  # Asked first: what lands meanwhile may close it.
        if prediction:
            ready += self._predict(prediction)
        if not is_open:
            self._compute(ready)
            if driver.has_layer_ends:
                self._obey(owner, driver.leave_layer())
            return
        ready += self._collect(self._link.poll(self.clock.now_s))
        while True:
            if ready:
                self._compute(ready)
                slots = [action.slot for action in ready]
                self._obey(owner, driver.computed(slots))
            if not driver.is_layer_open:
                break
            ready = self._await_some()
        self._obey(owner, driver.leave_layer())

    def run_draft(self, tokens: Sequence[Sequence[Sequence[int]]], *, is_prefetching: bool) -> None:
        """Drafts tokens whose choices are `[num_layers][top_k]` each, and fetches meanwhile."""
        started_s = self.clock.now_s
        (driver,) = self._drivers
        boundary = next_boundary(0, driver.begin_draft(len(tokens), is_prefetching))
        for number, choices in enumerate(tokens, start=1):
            self.clock.advance(self._costs.draft_s)
            for layer, experts in enumerate(choices):
                driver.lookahead.record(layer, experts)
            if number == boundary:
                self._collect(self._link.poll(self.clock.now_s))
                actions = driver.reach_boundary(number, driver.lookahead.snapshot())
                self._obey(0, actions)
                boundary = next_boundary(number, actions)
        driver.end_draft(len(tokens), self.clock.now_s - started_s)
        self.traffic.draft_s += self.clock.now_s - started_s

    def end_pass(self, num_tokens: int) -> None:
        """A target pass is over, on which the text goes on by `num_tokens`."""
        num_bytes, busy_s = self._link.take_usage()
        for owner, driver in enumerate(self._drivers):
            host_s, self._host_s[owner] = self._host_s[owner], 0.0
            actions = driver.end_pass(num_tokens, num_bytes, busy_s, 0.0, 0.0, 0.0, host_s)
            self._obey(owner, actions)

    def end_reply(self) -> None:
        """A reply is over."""
        for driver in self._drivers:
            driver.end_reply()

    # -- parts -------------------------------------------------------------------------------

    def _await_some(self) -> list[Compute]:
        """Waits for a record. Returns what can be computed then."""
        landing_s = self._link.next_landing_s
        if math.isinf(landing_s):
            raise RuntimeError("the open layer waits for a record that nobody moves")
        self.traffic.stall_s += self.clock.advance_to(landing_s)
        return self._collect(self._link.poll(self.clock.now_s))

    def _predict(self, prediction: Prediction) -> list[Compute]:
        """Fetches ahead what is expected, as a batch at a boundary of a draft.

        Returns:
            What the open layer waited for and has landed meanwhile.
        """
        ready = self._collect(self._link.poll(self.clock.now_s))
        for layer, demand in sorted(prediction.items()):
            owner = self._owner(layer)
            certain = [(e, 1.0) for e, _ in sorted(demand, key=lambda d: (-d[1], d[0]))]
            self._obey(owner, self._drivers[owner].predict(layer, certain, 1))
        return ready

    def _owner(self, layer: int) -> int:
        return layer if len(self._drivers) > 1 else 0

    def _compute(self, ready: Sequence[Compute]) -> None:
        self.clock.advance(sum(self._costs.expert_seconds(a.num_tokens) for a in ready))

    def _compute_on_host(self, owner: int, num_tokens: int) -> None:
        """Puts an expert into the host's line; the clock goes on without it."""
        assert self._host is not None
        seconds = self._host.compute_s(num_tokens)
        self._host_free_at += seconds
        self._host_s[owner] += seconds
        traffic = self.traffic
        traffic.host_s += seconds
        traffic.num_misses += num_tokens
        traffic.num_on_host += num_tokens

    def _obey(self, owner: int, actions: Sequence[Action]) -> list[Compute]:
        """Submits what is to be fetched and counts. Returns what is to be computed."""
        traffic, offset = self.traffic, owner * self._slots_each
        ready = []
        for action in actions:
            match action:
                case Compute(_, _, num_tokens, served_by, is_prefetched):
                    ready.append(action)
                    if served_by is ServedBy.MISS:
                        traffic.num_misses += num_tokens
                        continue
                    traffic.num_hits += num_tokens
                    if is_prefetched:
                        traffic.num_prefetch_hits += num_tokens
                case ComputeOnHost(_, num_tokens):
                    self._compute_on_host(owner, num_tokens)
                case Await(expert):
                    self._link.promote(expert, self.clock.now_s)
                case Fetch(expert, slot, reason):
                    is_demand = reason is FetchReason.MISS
                    traffic.num_prefetched += reason in AHEAD
                    self._link.submit(
                        expert, slot + offset, is_demand=is_demand, now_s=self.clock.now_s
                    )
        return ready

    def _collect(self, landed: Sequence[Landing]) -> list[Compute]:
        """Tells the drivers what has landed. Returns what the open layer waited for."""
        ready = []
        for item in landed:
            owner, slot = divmod(item.slot, self._slots_each)
            self.traffic.num_records += 1
            ready += self._obey(owner, self._drivers[owner].landed(slot))
        return ready
