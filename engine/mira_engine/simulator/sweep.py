"""A comparison of systems over caches and links: what `mira-chat simulate` prints.

Half of the trace is what profiles, tables and earlier texts are learned from, unless another
trace is given for that; the other half is decoded.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..errors import ConfigError
from ..types import ExpertId
from .hits import expert_counts
from .predictions import ActivationTraces, CountTable, NextLayerGuess, Predictor
from .servers import MachineCosts
from .simulate import CacheShape, simulate
from .synthetic import synthetic_trace
from .systems import Lead, Memory, System, all_systems
from .workload import TokenTrace, make_rounds, read_token_trace

DEFAULT_FIDELITY = 0.909
"""Share of the target's experts that an INT4 draft's routing names. Source: Specter."""

DEFAULT_ACCEPTANCE = 0.847
"""Of the nested draft, built-in model, 2026-11-30."""

NEXT_LAYER_FIDELITY = 0.8
"""Share of the next layer's experts that its router finds one layer early; an assumption."""

SMALL_DRAFT_ACCEPTANCE = 0.7
"""Of a small dense draft, which is not quantised from its target; an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRequest:
    """What is compared. Numbers of the machine are taken as given; nothing is measured.

    Attributes:
        trace_path: Routing to decode; `None` draws some like DeepSeek-V2-Lite's.
        training_path: Routing to learn from; `None` takes the first half of the trace.
        policies: Names of systems; none for all.
        slots_per_layer: Whole experts that the cache holds for each layer; none for an
            eighth, a quarter and a half of them.
        link_rates: Bytes per second, one sweep each.
        record_bytes: One whole expert.
        resident_s: A token with every expert resident.
        draft_s: A draft token; `None` takes three quarters of `resident_s`.
        num_draft_tokens: K of systems with a draft.
        acceptance: Of the draft; `None` takes the trace's, or the nested draft's.
        fidelity: Of the draft's routing; `None` takes the trace's, or the paper's.
        num_tokens: Most tokens to decode.
        seed: Of everything that is drawn.
    """

    trace_path: str | None = None
    training_path: str | None = None
    policies: tuple[str, ...] = ()
    slots_per_layer: tuple[int, ...] = ()
    link_rates: tuple[float, ...] = (25e9,)
    record_bytes: int = 3 * 2048 * 1408
    resident_s: float = 0.01
    draft_s: float | None = None
    num_draft_tokens: int = 4
    acceptance: float | None = None
    fidelity: float | None = None
    num_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        counts = ("record_bytes", "num_draft_tokens", "num_tokens")
        for name in (*counts, "resident_s"):
            if getattr(self, name) <= 0:
                raise ConfigError.for_field(name.replace("_", " "), getattr(self, name), "Give >0.")
        for name in ("acceptance", "fidelity"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError.for_field(name, value, "Give 0 to 1.")
        if any(slots < 1 for slots in self.slots_per_layer):
            raise ConfigError.for_field("slots per layer", self.slots_per_layer, "Give at least 1.")


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRow:
    """One system with one cache and one link.

    Attributes:
        policy: The system.
        slots_per_layer: Whole experts that its slots hold for each layer.
        memory_share: Bytes of slots and draft, of the bytes of all experts.
        link_bytes_per_s: The link.
        hit_rate: Of routed tokens.
        prefetched_share: Of routed tokens, those served first by a prefetch.
        bytes_per_token: Moved.
        stall_s: A token's waiting.
        tpot_s: A token's time.
        tokens_per_round: New tokens of a target pass.
    """

    policy: str
    slots_per_layer: float
    memory_share: float
    link_bytes_per_s: float
    hit_rate: float
    prefetched_share: float
    bytes_per_token: float
    stall_s: float
    tpot_s: float
    tokens_per_round: float


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationReport:
    """What came of a request.

    Attributes:
        title: What was decoded.
        num_layers: MoE layers.
        num_experts: Routed experts of a layer.
        top_k: Experts of a token in a layer.
        acceptance: That was simulated.
        fidelity: That was simulated.
        rows: Link by link, cache by cache.
    """

    title: str
    num_layers: int
    num_experts: int
    top_k: int
    acceptance: float
    fidelity: float
    rows: tuple[SimulationRow, ...]


def compare(
    request: SimulationRequest, on_row: Callable[[SimulationRow], None] = lambda row: None
) -> SimulationReport:
    """Simulates every combination that a request names.

    Args:
        request: What to compare.
        on_row: Told each row as it is done.

    Raises:
        ConfigError: No such policy, or more slots than experts.
        TraceError: A trace cannot be read.
    """
    systems = _chosen(request.policies)
    learned, decoded = _workload(request)
    num_experts = decoded.num_experts
    slots = request.slots_per_layer or tuple(max(1, num_experts // part) for part in (8, 4, 2))
    if not request.link_rates:
        raise ConfigError("There is no link to simulate.", hint="Give a link rate.")
    if max(slots) > num_experts:
        raise ConfigError.for_field("slots per layer", max(slots), f"Give 1 to {num_experts}.")
    comparison = _Comparison(request, learned, decoded)
    rows = []
    for link_rate in request.link_rates:
        for slots_per_layer in slots:
            for system in systems:
                rows.append(comparison.row(system, slots_per_layer, link_rate))
                on_row(rows[-1])
    _, num_layers, top_k = decoded.ids.shape
    return SimulationReport(
        title=decoded.name,
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        acceptance=comparison.acceptance,
        fidelity=comparison.fidelity,
        rows=tuple(rows),
    )


def _chosen(names: tuple[str, ...]) -> list[System]:
    systems = {system.name: system for system in all_systems()}
    for name in names:
        if name not in systems:
            raise ConfigError.for_field("policy", name, f"Choose of {', '.join(systems)}.")
    return [systems[name] for name in names or systems]


def _workload(request: SimulationRequest) -> tuple[TokenTrace, TokenTrace]:
    """Returns what is learned from and what is decoded."""
    if request.trace_path is None:
        trace = synthetic_trace(
            num_layers=26, num_experts=64, top_k=6, num_tokens=2048, seed=request.seed
        )
    else:
        trace = read_token_trace(Path(request.trace_path))
    if len(trace.ids) < 2:
        raise ConfigError("The trace has a single token.", hint="Record a longer reply.")
    half = len(trace.ids) // 2
    learned = trace.part(0, half)
    if request.training_path is not None:
        learned = read_token_trace(Path(request.training_path))
        if learned.ids.shape[1:] != trace.ids.shape[1:]:
            raise ConfigError("The two traces are of different models.", hint="Give two of one.")
        learned = replace(learned, num_experts=trace.num_experts)
    return learned, trace.part(half, min(len(trace.ids), half + request.num_tokens))


class _Comparison:
    """What the rows of one comparison share."""

    def __init__(
        self, request: SimulationRequest, learned: TokenTrace, decoded: TokenTrace
    ) -> None:
        self._request, self._learned, self._decoded = request, learned, decoded
        self.acceptance = _first_known(request.acceptance, decoded.acceptance, DEFAULT_ACCEPTANCE)
        self.fidelity = _first_known(request.fidelity, decoded.fidelity, DEFAULT_FIDELITY)
        self._popular = most_popular(learned)

    def row(self, system: System, slots_per_layer: int, link_rate: float) -> SimulationRow:
        """Simulates one system."""
        request, decoded = self._request, self._decoded
        _, num_layers, top_k = decoded.ids.shape
        shape, memory_share = system_shape(system, decoded, slots_per_layer, request.record_bytes)
        is_own_draft = system.is_draft_resident
        rounds = make_rounds(
            decoded,
            request.num_draft_tokens if system.is_drafting else 0,
            acceptance=self.acceptance if is_own_draft else SMALL_DRAFT_ACCEPTANCE,
            fidelity=self.fidelity,
            seed=request.seed,
        )
        run = simulate(
            rounds,
            system,
            shape,
            costs_of(
                num_layers,
                top_k,
                link_rate,
                resident_s=request.resident_s,
                draft_s=request.draft_s,
            ),
            predictor=self._predictor(system),
            popular=self._popular,
            num_warmup_tokens=min(32, len(decoded.ids) // 4),
        )
        asked = max(1, run.traffic.num_hits + run.traffic.num_misses)
        return SimulationRow(
            policy=system.name,
            slots_per_layer=shape.num_slots
            * shape.record_bytes
            / request.record_bytes
            / num_layers,
            memory_share=memory_share,
            link_bytes_per_s=link_rate,
            hit_rate=run.hit_rate,
            prefetched_share=run.traffic.num_prefetch_hits / asked,
            bytes_per_token=run.bytes_per_token,
            stall_s=run.traffic.stall_s / max(1, run.num_tokens),
            tpot_s=run.tpot_s,
            tokens_per_round=run.num_tokens / max(1, run.num_rounds),
        )

    def _predictor(self, system: System) -> Predictor | None:
        match system.lead:
            case Lead.NEXT_LAYER:
                return NextLayerGuess(
                    fidelity=NEXT_LAYER_FIDELITY,
                    num_experts=self._decoded.num_experts,
                    seed=self._request.seed,
                )
            case Lead.COUNT_TABLE:
                return CountTable(self._learned)
            case Lead.ACTIVATION_TRACE:
                return ActivationTraces(self._learned)
        return None


def most_popular(trace: TokenTrace) -> list[ExpertId]:
    """Returns all experts, those that most tokens chose first; ties by id."""
    counts = expert_counts(trace)
    num_experts = counts.shape[1]
    order = np.argsort(-counts.reshape(-1), kind="stable").tolist()
    return [ExpertId(*divmod(number, num_experts)) for number in order]


def system_shape(
    system: System, trace: TokenTrace, slots_per_layer: int, record_bytes: int
) -> tuple[CacheShape, float]:
    """Returns a system's cache, and its bytes with the draft as a share of all experts.

    A resident draft is the hi planes of nested experts: half of every expert, always there,
    so that a slot of the same bytes holds the other half of two. Same memory gives a system
    without a draft the room of that half as slots.
    """
    _, num_layers, _ = trace.ids.shape
    num_all = num_layers * trace.num_experts
    num_slots, draft_share = slots_per_layer * num_layers, 0.0
    if system.is_draft_resident:
        num_slots, record_bytes, draft_share = 2 * num_slots, record_bytes // 2, 0.5
        num_slots = min(num_slots, num_all)
        memory_share = draft_share + 0.5 * num_slots / num_all
    else:
        if system.memory is Memory.SAME_MEMORY:
            num_slots += num_all // 2
        num_slots = min(num_slots, num_all)
        memory_share = num_slots / num_all
    shape = CacheShape(
        num_layers=num_layers,
        num_experts=trace.num_experts,
        num_slots=num_slots,
        record_bytes=record_bytes,
    )
    return shape, memory_share


def costs_of(
    num_layers: int,
    top_k: int,
    link_bytes_per_s: float,
    *,
    resident_s: float,
    draft_s: float | None = None,
) -> MachineCosts:
    """Divides a resident token's time into parts: half experts, half all else.

    A further token of the same pass costs a twentieth: one pass of a few tokens reads the
    same weights. A draft reads half of the experts' bytes.
    """
    layer_s = 0.5 * resident_s / num_layers
    expert_s = layer_s / top_k
    return MachineCosts(
        link_bytes_per_s=link_bytes_per_s,
        layer_s=layer_s,
        layer_token_s=layer_s / 20,
        expert_s=expert_s,
        expert_token_s=expert_s / 20,
        draft_s=0.75 * resident_s if draft_s is None else draft_s,
    )


def _first_known(*values: float | None) -> float:
    return next(value for value in values if value is not None)
