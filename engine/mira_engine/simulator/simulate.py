"""One system, one workload, one machine: what it costs, on a virtual clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

from ..policy.cache_setup import CacheSetup
from ..policy.eviction import EvictionPolicy
from ..policy.host_misses import HostSetup
from ..policy.observation import OnDecision
from ..types import Eviction, ExpertId
from .executor import Prediction, SimulatedExecutor, SimulatedTraffic
from .predictions import Predictor
from .servers import LinkServer, MachineCosts
from .systems import BeladyEviction, Lead, Special, StaticEviction, System
from .workload import Demand, Ids, Round, demand_of

NUM_RESERVED_SLOTS = 2
"""Slots that prefetches leave for misses, as in the engine."""


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheShape:
    """What a system has to work with.

    Attributes:
        num_layers: MoE layers.
        num_experts: Routed experts of a layer.
        num_slots: Slots of the device, over all layers.
        record_bytes: What one miss moves.
    """

    num_layers: int
    num_experts: int
    num_slots: int
    record_bytes: int


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulatedRun:
    """What came of it, the warm-up left out. Times in virtual seconds.

    Attributes:
        num_tokens: New tokens.
        decode_s: Time they took.
        num_rounds: Rounds.
        num_accepted: Draft tokens that stood.
        traffic: Routed tokens by what served them; records; stalls; drafting.
        record_bytes: Of one record.
    """

    num_tokens: int
    decode_s: float
    num_rounds: int
    num_accepted: int
    traffic: SimulatedTraffic
    record_bytes: int

    @property
    def tpot_s(self) -> float:
        """Seconds a token."""
        return self.decode_s / self.num_tokens if self.num_tokens else 0.0

    @property
    def hit_rate(self) -> float:
        """Share of routed tokens whose expert was there or on its way."""
        asked = self.traffic.num_hits + self.traffic.num_misses
        return self.traffic.num_hits / asked if asked else 0.0

    @property
    def bytes_per_token(self) -> float:
        """Bytes moved a token."""
        moved = self.traffic.num_records * self.record_bytes
        return moved / self.num_tokens if self.num_tokens else 0.0


def simulate(
    rounds: Iterable[Round],
    system: System,
    shape: CacheShape,
    costs: MachineCosts,
    *,
    predictor: Predictor | None = None,
    popular: Sequence[ExpertId] = (),
    num_warmup_tokens: int = 0,
    is_prefetching: bool = True,
    on_decision: OnDecision | None = None,
) -> SimulatedRun:
    """Runs rounds through a system. The same arguments give the same result.

    Args:
        rounds: What is decoded; with drafts where the system drafts.
        system: Whose policies.
        shape: The model's experts and the slots.
        costs: The machine.
        predictor: Of systems with a lead that is not the draft.
        popular: Experts that a static set keeps, most popular first.
        num_warmup_tokens: New tokens before counting begins.
        is_prefetching: Whether a draft's routing fetches ahead.
        on_decision: Told every observation and its answer.
    """
    rounds = list(rounds)
    simulation = _Simulation(rounds, system, shape, costs, predictor, popular)
    if on_decision is not None:
        simulation.executor.listen(on_decision)
    num_tokens = num_rounds = num_accepted = 0
    executor = simulation.executor
    started_s, num_cold = executor.clock.now_s, num_warmup_tokens
    for item in rounds:
        if item.is_prefill or num_cold > 0:
            kept, executor.traffic = executor.traffic, SimulatedTraffic()
            before_s = executor.clock.now_s
            simulation.run_round(item, is_prefetching=is_prefetching)
            num_cold -= item.num_new_tokens
            executor.traffic = kept
            started_s += executor.clock.now_s - before_s
            continue
        simulation.run_round(item, is_prefetching=is_prefetching)
        num_tokens += item.num_new_tokens
        num_rounds += 1
        num_accepted += item.num_accepted
    return SimulatedRun(
        num_tokens=num_tokens,
        decode_s=executor.clock.now_s - started_s,
        num_rounds=num_rounds,
        num_accepted=num_accepted,
        traffic=executor.traffic,
        record_bytes=shape.record_bytes,
    )


class _Simulation:
    def __init__(
        self,
        rounds: Sequence[Round],
        system: System,
        shape: CacheShape,
        costs: MachineCosts,
        predictor: Predictor | None,
        popular: Sequence[ExpertId],
    ) -> None:
        self._system, self._costs, self._predictor = system, costs, predictor
        self._oracle = BeladyEviction(rounds) if system.eviction is Special.BELADY else None
        num_transient = min(shape.num_slots, max(NUM_RESERVED_SLOTS, _top_k(rounds)))
        self._kept = tuple(popular[: shape.num_slots - num_transient])
        link = LinkServer(
            bytes_per_s=costs.link_bytes_per_s,
            latency_s=costs.link_latency_s,
            num_readers=costs.num_readers,
            record_bytes=shape.record_bytes,
        )
        self.executor = SimulatedExecutor(
            _setup(system, shape, costs, _top_k(rounds)),
            costs,
            link,
            is_per_layer=system.is_per_layer,
            make_eviction=self._eviction(system),
        )
        if system.eviction is Special.STATIC:
            self.executor.preload(self._kept)

    def _eviction(self, system: System) -> Callable[[], EvictionPolicy] | None:
        if system.eviction is Special.STATIC:
            return lambda: StaticEviction(self._kept)
        oracle = self._oracle
        return (lambda: oracle) if oracle is not None else None

    def run_round(self, item: Round, *, is_prefetching: bool) -> None:
        """Drafts where there is something to draft, then runs the target."""
        if item.starts_reply:
            self.executor.end_reply()
            if self._predictor is not None:
                self._predictor.start_reply()
        if item.draft and self._system.is_drafting:
            is_ahead = is_prefetching and self._system.lead is Lead.DRAFT
            self.executor.run_draft(item.draft, is_prefetching=is_ahead)
        self._run_target(item.target)
        if not item.is_prefill:
            self.executor.end_pass(item.num_new_tokens)

    def _run_target(self, target: Ids) -> None:
        num_tokens = len(target[0])
        num_parts = min(self._system.num_microbatches, num_tokens)
        size = -(-num_tokens // num_parts)
        for layer, rows in enumerate(target):
            if self._oracle is not None:
                self._oracle.now += 1
            parts = [rows[start : start + size] for start in range(0, num_tokens, size)]
            prediction = self._predictor.predict(layer, target) if self._predictor else None
            for number, part in enumerate(parts):
                self.executor.clock.advance(self._costs.layer_seconds(len(part)))
                ahead: Prediction = prediction or {}
                if number + 1 < len(parts):
                    ahead = {layer: _demand_of_all(parts[number + 1 :])}
                self.executor.run_layer(layer, demand_of(part), ahead)
        self.executor.clock.advance(self._costs.pass_seconds(num_tokens))


def _demand_of_all(parts: Sequence[Sequence[Sequence[int]]]) -> Demand:
    return demand_of([row for part in parts for row in part])


def _top_k(rounds: Sequence[Round]) -> int:
    return len(rounds[0].target[0][0]) if rounds else 0


def _setup(system: System, shape: CacheShape, costs: MachineCosts, top_k: int) -> CacheSetup:
    is_special = isinstance(system.eviction, Special)
    return CacheSetup(
        num_layers=shape.num_layers,
        num_experts=shape.num_experts,
        top_k=top_k,
        num_slots=shape.num_slots,
        record_bytes=shape.record_bytes,
        num_links=costs.num_readers,
        max_predicted=shape.num_slots,
        eviction=Eviction.LRU if is_special else Eviction(system.eviction),
        num_reserved_slots=min(NUM_RESERVED_SLOTS, shape.num_slots - 1),
        host=_host(shape, costs),
    )


def _host(shape: CacheShape, costs: MachineCosts) -> HostSetup | None:
    """What the host beside the device computes: all experts are in its memory."""
    if costs.host_expert_s is None:
        return None
    return HostSetup(
        expert_s=costs.host_expert_s,
        token_s=costs.host_token_s,
        record_s=shape.record_bytes / costs.link_bytes_per_s,
        num_held=shape.num_layers * shape.num_experts,
    )
