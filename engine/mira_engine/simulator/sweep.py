"""A comparison of systems over machines, memories and links: what `mira-chat simulate` prints.

Half of the trace is what profiles, tables and earlier texts are learned from, unless another
trace is given for that; the other half is decoded.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np

from ..errors import ConfigError
from ..events import PlannedSteps
from ..types import ExpertId
from .cases import (
    SimulationCase,
    case_by_hand,
    case_for_trace,
    costs_of,
    mapping_note,
    system_shape,
    trace_of_model,
    with_record,
)
from .hits import expert_counts
from .predictions import ActivationTraces, CountTable, NextLayerGuess, Predictor
from .report import SimulationReport, SimulationRow
from .simulate import simulate
from .synthetic import synthetic_trace
from .systems import Lead, Special, System, all_systems
from .workload import TokenTrace, make_rounds, read_token_trace

DEFAULT_FIDELITY = 0.909
"""Share of the target's experts that an INT4 draft's routing names. Source: Specter."""

DEFAULT_ACCEPTANCE = 0.847
"""Of the nested draft, built-in model, 2026-11-30."""

NEXT_LAYER_FIDELITY = 0.8
"""Share of the next layer's experts that its router finds one layer early; an assumption."""

SMALL_DRAFT_ACCEPTANCE = 0.7
"""Of a small dense draft, which is not quantised from its target; an assumption."""

DEFAULT_NUM_DRAFT_TOKENS = 4
DEFAULT_LINK_BYTES_PER_S = 25e9
DEFAULT_RECORD_BYTES = 3 * 2048 * 1408
DEFAULT_RESIDENT_S = 0.01
DRAFT_TOKEN_SHARE = 0.75
"""What a draft token takes of a resident token, where nothing says so; an assumption."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationRequest:
    """What is compared. Nothing is measured; what is given by hand wins over a case's.

    Attributes:
        trace_path: Routing to decode; `None` draws some, of the cases' shape or, without
            cases, of DeepSeek-V2-Lite's.
        training_path: Routing to learn from; `None` takes the first half of the trace.
        policies: Names of systems; none for all.
        cases: Machines and memories, all of one model; none for slots and links by hand.
        slots_per_layer: Whole experts that the cache holds for each layer; without cases,
            none is for an eighth, a quarter and a half of them.
        link_rates: Bytes per second, one sweep each; `None` for the cases' or 25 GB/s.
        record_bytes: One whole expert.
        resident_s: A token with every expert resident.
        draft_s: A draft token; without it and without cases, three quarters of `resident_s`.
        num_draft_tokens: K of systems with a draft.
        acceptance: Of the draft; `None` takes the trace's, or the nested draft's, and for a
            draft that has some experts only the part of it that the plan expects.
        fidelity: Of the draft's routing; `None` takes the trace's, or the paper's.
        num_tokens: Most tokens to decode.
        seed: Of everything that is drawn.
    """

    trace_path: str | None = None
    training_path: str | None = None
    policies: tuple[str, ...] = ()
    cases: tuple[SimulationCase, ...] = ()
    slots_per_layer: tuple[int, ...] = ()
    link_rates: tuple[float, ...] | None = None
    record_bytes: int | None = None
    resident_s: float | None = None
    draft_s: float | None = None
    num_draft_tokens: int | None = None
    acceptance: float | None = None
    fidelity: float | None = None
    num_tokens: int = 256
    seed: int = 0

    def __post_init__(self) -> None:
        _chosen(self.policies)
        for name in ("record_bytes", "num_draft_tokens", "num_tokens", "resident_s", "draft_s"):
            value = getattr(self, name)
            if value is not None and value <= 0:
                raise ConfigError.for_field(name.replace("_", " "), value, "Give >0.")
        for name in ("acceptance", "fidelity"):
            value = getattr(self, name)
            if value is not None and not 0 <= value <= 1:
                raise ConfigError.for_field(name, value, "Give 0 to 1.")
        if any(slots < 1 for slots in self.slots_per_layer):
            raise ConfigError.for_field("slots per layer", self.slots_per_layer, "Give at least 1.")
        if self.link_rates is not None and not self.link_rates:
            raise ConfigError("There is no link to simulate.", hint="Give a link rate.")
        for rate in self.link_rates or ():
            if not rate > 0:
                raise ConfigError.for_field("link rate", rate, "Give more than 0.")


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
    comparison = _Comparison(request, learned, decoded)
    notes = dict.fromkeys(mapping_note(case, decoded) for case in request.cases)
    rows = []
    for case in list(_cases(request, decoded)):
        for system in systems:
            row = comparison.row(system, case)
            if row is None:
                notes[_left_out(system, case)] = None
                continue
            rows.append(row)
            on_row(row)
    num_layers, num_experts, top_k = decoded.shape
    return SimulationReport(
        title=decoded.name,
        model=request.cases[0].model if request.cases else "",
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        acceptance=comparison.acceptance,
        fidelity=comparison.fidelity,
        rows=tuple(rows),
        notes=tuple(filter(None, notes)),
    )


def _left_out(system: System, case: SimulationCase) -> str:
    where = ", ".join(filter(None, (case.machine, case.memory)))
    why = "there are fewer slots than layers"
    if system.is_draft_resident:
        why = "there is no room for its draft"
    return f"{system.name} is left out at {where}: {why}."


def _cases(request: SimulationRequest, decoded: TokenTrace) -> Iterator[SimulationCase]:
    """Yields what is simulated, in experts of the trace; what is given by hand has been put in.

    Raises:
        ConfigError: More slots than experts.
    """
    for case in request.cases or (_default_case(request, decoded),):
        case = case_for_trace(_with_own_numbers(case, request), decoded)
        for rate in request.link_rates or (case.steps.link_bytes_per_s,):
            steps = replace(case.steps, link_bytes_per_s=rate)
            slots = request.slots_per_layer
            if not (slots or request.cases):
                slots = tuple(max(1, steps.num_experts // part) for part in (8, 4, 2))
            if not slots:
                yield replace(case, steps=steps)
            elif max(slots) > steps.num_experts:
                hint = f"Give 1 to {steps.num_experts}."
                raise ConfigError.for_field("slots per layer", max(slots), hint)
            for number in slots:
                k = case.draft.num_draft_tokens if case.draft else DEFAULT_NUM_DRAFT_TOKENS
                yield case_by_hand(steps, number, k, machine=case.machine)


def _default_case(request: SimulationRequest, decoded: TokenTrace) -> SimulationCase:
    """Returns a case of the trace's model where there is no plan; its slots are never used."""
    num_layers, num_experts, top_k = decoded.shape
    token_s = request.resident_s or DEFAULT_RESIDENT_S
    steps = PlannedSteps(
        num_layers=num_layers,
        num_experts=num_experts,
        top_k=top_k,
        record_bytes=DEFAULT_RECORD_BYTES,
        token_s=token_s,
        experts_s=0.5 * token_s,  # Half experts, half all else: of many models about true.
        draft_s=DRAFT_TOKEN_SHARE * token_s,
        link_bytes_per_s=DEFAULT_LINK_BYTES_PER_S,
    )
    return case_by_hand(steps, 1, DEFAULT_NUM_DRAFT_TOKENS)


def _with_own_numbers(case: SimulationCase, request: SimulationRequest) -> SimulationCase:
    """Puts what was given by hand in the place of a case's own figures."""
    if request.record_bytes is not None:
        case = with_record(case, request.record_bytes)
    steps = case.steps
    token_s = request.resident_s or steps.token_s
    steps = replace(
        steps,
        token_s=token_s,
        experts_s=steps.experts_s * token_s / steps.token_s,
        draft_s=request.draft_s or steps.draft_s,
    )
    draft = case.draft
    if draft is not None and request.num_draft_tokens is not None:
        draft = replace(draft, num_draft_tokens=request.num_draft_tokens)
    return replace(case, steps=steps, draft=draft)


def _chosen(names: tuple[str, ...]) -> list[System]:
    systems = {system.name: system for system in all_systems()}
    for name in names:
        if name not in systems:
            raise ConfigError.for_field("policy", name, f"Choose of {', '.join(systems)}.")
    return [systems[name] for name in names or systems]


def _workload(request: SimulationRequest) -> tuple[TokenTrace, TokenTrace]:
    """Returns what is learned from and what is decoded."""
    if request.trace_path is None:
        num_layers, num_experts, top_k = request.cases[0].shape if request.cases else (26, 64, 6)
        trace = synthetic_trace(
            num_layers=num_layers,
            num_experts=num_experts,
            top_k=top_k,
            num_tokens=2048,
            seed=request.seed,
        )
    else:
        trace = read_token_trace(Path(request.trace_path))
        if request.cases:
            trace = trace_of_model(trace, request.cases[0])
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

    def row(self, system: System, case: SimulationCase) -> SimulationRow | None:
        """Simulates one system; `None` where it has no room."""
        found = system_shape(system, case)
        if found is None:
            return None
        shape, memory_share = found
        steps, k = case.steps, self._num_draft_tokens(system, case)
        run = simulate(
            make_rounds(
                self._decoded,
                k,
                acceptance=self._acceptance(system, case),
                fidelity=self.fidelity,
                seed=self._request.seed,
            ),
            system,
            shape,
            costs_of(steps),
            predictor=self._predictor(system),
            popular=self._popular,
            num_warmup_tokens=min(32, len(self._decoded.ids) // 4),
        )
        asked = max(1, run.traffic.num_hits + run.traffic.num_misses)
        held_bytes = shape.num_slots * shape.record_bytes
        return SimulationRow(
            policy=system.name,
            is_bound=system.eviction is Special.BELADY,
            machine=case.machine,
            memory=case.memory,
            slots_per_layer=held_bytes / steps.record_bytes / steps.num_layers,
            memory_share=memory_share,
            link_bytes_per_s=steps.link_bytes_per_s,
            num_draft_tokens=k,
            hit_rate=run.hit_rate,
            prefetched_share=run.traffic.num_prefetch_hits / asked,
            bytes_per_token=run.bytes_per_token,
            stall_s=run.traffic.stall_s / max(1, run.num_tokens),
            tpot_s=run.tpot_s,
            tokens_per_round=run.num_tokens / max(1, run.num_rounds),
        )

    def _num_draft_tokens(self, system: System, case: SimulationCase) -> int:
        if not system.is_drafting:
            return 0
        planned = case.draft.num_draft_tokens if case.draft else DEFAULT_NUM_DRAFT_TOKENS
        return self._request.num_draft_tokens or planned

    def _acceptance(self, system: System, case: SimulationCase) -> float:
        if not system.is_draft_resident:
            return SMALL_DRAFT_ACCEPTANCE
        if self._request.acceptance is not None or case.draft is None:
            return self.acceptance
        return self.acceptance * case.draft.acceptance_share

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


def _first_known(*values: float | None) -> float:
    return next(value for value in values if value is not None)
