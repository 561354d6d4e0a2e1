"""What is simulated beside the policy: a machine, a model's sizes, a division of the memory.

A case is what a plan says of a card and a budget (`planned_case`), or slots and a link given
by hand (`case_by_hand`). A trace of another model's shape is led to the case's model by
`case_for_trace`. Pure.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..events import PlanAlternative, PlanMade, PlannedSteps
from ..types import DraftExperts, Strategy
from .servers import MachineCosts
from .simulate import CacheShape
from .systems import Memory, System
from .workload import TokenTrace


@dataclass(frozen=True, slots=True, kw_only=True)
class DraftDivision:
    """The memory divided into a draft and slots.

    Attributes:
        num_draft_tokens: K.
        num_slots: Slots, over all layers.
        slot_bytes: What one miss moves.
        draft_bytes: What of the draft is always there; 0 where it computes with the slots.
        acceptance_share: Its acceptance, as a share of a whole draft's.
    """

    num_draft_tokens: int
    num_slots: int
    slot_bytes: int
    draft_bytes: int
    acceptance_share: float = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class SimulationCase:
    """One machine with one amount of memory.

    Attributes:
        model: Its title, empty where only numbers were given.
        machine: Its name, likewise.
        memory: The amount, for people.
        steps: The model's shape, and what its steps take there.
        num_slots: Whole experts in slots, over all layers, where there is no draft.
        num_same_cache_slots: Those of a system that has no more cache than one with a draft.
        num_same_memory_slots: Those of a system that has the draft's memory as slots.
        draft: The division with a draft; `None` where it does not fit.
    """

    model: str = ""
    machine: str = ""
    memory: str
    steps: PlannedSteps
    num_slots: int
    num_same_cache_slots: int
    num_same_memory_slots: int
    draft: DraftDivision | None = None

    @property
    def num_experts(self) -> int:
        """Routed experts, over all layers."""
        return self.steps.num_layers * self.steps.num_experts

    @property
    def shape(self) -> tuple[int, int, int]:
        """Layers, routed experts of each, experts of a token in each."""
        return self.steps.num_layers, self.steps.num_experts, self.steps.top_k


def planned_case(made: PlanMade, *, model: str, memory: str) -> SimulationCase | None:
    """Takes the case out of a plan, the figures that `plan` prints.

    A draft is as the plan's own: with all experts resident in INT4, or with those in the
    slots. The latter is accepted as often as the plan expects; what it names of the experts
    to come is taken to be as good as a whole draft's.

    Args:
        made: The plan.
        model: Its title.
        memory: What was asked for, for people.

    Returns:
        The case, `None` where no whole expert fits.
    """
    alone = _fitting(made.alternatives, Strategy.ON_DEMAND)
    if alone is None or alone.plan is None or made.steps is None:
        return None
    num_slots, draft = alone.plan.num_slots, _planned_draft(made.alternatives)
    num_cached = num_slots
    if draft is not None:
        num_cached = draft.num_slots * draft.slot_bytes // made.steps.record_bytes
    return SimulationCase(
        model=model,
        machine=made.machine.name,
        memory=memory,
        steps=made.steps,
        num_slots=num_slots,
        num_same_cache_slots=num_cached,
        num_same_memory_slots=num_slots,
        draft=draft,
    )


def _fitting(rows: Sequence[PlanAlternative], strategy: Strategy) -> PlanAlternative | None:
    return next((r for r in rows if r.strategy is strategy and r.plan is not None), None)


def _planned_draft(rows: Sequence[PlanAlternative]) -> DraftDivision | None:
    row = _fitting(rows, Strategy.SPECULATIVE)
    if row is None or row.plan is None:
        return None
    is_cached = row.plan.draft_experts is DraftExperts.CACHED
    share = row.hit_rate if is_cached and row.hit_rate is not None else 1.0
    return DraftDivision(
        num_draft_tokens=row.num_draft_tokens,
        num_slots=row.plan.num_slots,
        slot_bytes=row.plan.slot_bytes,
        draft_bytes=row.plan.draft_bytes,
        acceptance_share=share,
    )


def case_by_hand(
    steps: PlannedSteps, slots_per_layer: int, num_draft_tokens: int, *, machine: str = ""
) -> SimulationCase:
    """Makes a case of slots: all systems have the same cache, unless they say otherwise.

    A resident draft is the hi planes of nested experts: half of every expert, always there,
    so that a slot of the same bytes holds the other half of two. Same memory gives a system
    without a draft the room of that half as slots.
    """
    num_experts = steps.num_layers * steps.num_experts
    num_slots = slots_per_layer * steps.num_layers
    return SimulationCase(
        machine=machine,
        memory=f"{slots_per_layer} of {steps.num_experts} experts a layer",
        steps=steps,
        num_slots=num_slots,
        num_same_cache_slots=num_slots,
        num_same_memory_slots=min(num_experts, num_slots + num_experts // 2),
        draft=DraftDivision(
            num_draft_tokens=num_draft_tokens,
            num_slots=min(2 * num_slots, num_experts),
            slot_bytes=steps.record_bytes // 2,
            draft_bytes=num_experts * steps.record_bytes // 2,
        ),
    )


def with_record(case: SimulationCase, record_bytes: int) -> SimulationCase:
    """Returns the case with experts of another size; as many are resident as before."""
    before = case.steps.record_bytes
    draft = case.draft and replace(
        case.draft,
        slot_bytes=case.draft.slot_bytes * record_bytes // before,
        draft_bytes=case.draft.draft_bytes * record_bytes // before,
    )
    return replace(case, steps=replace(case.steps, record_bytes=record_bytes), draft=draft)


def trace_of_model(trace: TokenTrace, case: SimulationCase) -> TokenTrace:
    """Returns the trace with the model's number of experts, where it was only guessed."""
    num_layers, num_experts, top_k = case.shape
    is_alike = (trace.shape[0], trace.shape[2]) == (num_layers, top_k)
    if not (trace.is_num_experts_guessed and is_alike and int(trace.ids.max()) < num_experts):
        return trace
    return replace(trace, num_experts=num_experts, is_num_experts_guessed=False)


def case_for_trace(case: SimulationCase, trace: TokenTrace) -> SimulationCase:
    """Returns the case in experts of the trace, where that is of a model of another shape.

    The cache holds the same share of all experts, and a token asks for as many bytes and
    takes as long as in the case's model: an expert of the trace stands for several of the
    model's, or for a part of one.
    """
    if case.shape == trace.shape:
        return case
    num_layers, num_experts, top_k = trace.shape
    steps = case.steps
    asked = (steps.num_layers * steps.top_k) / (num_layers * top_k)
    held = (num_layers * num_experts) / case.num_experts

    def slots(number: int) -> int:
        return min(num_layers * num_experts, max(top_k, round(number * held)))

    draft = case.draft and replace(
        case.draft,
        num_slots=slots(case.draft.num_slots),
        slot_bytes=max(1, round(case.draft.slot_bytes * asked)),
        draft_bytes=round(case.draft.draft_bytes * asked * held),
    )
    return replace(
        case,
        steps=replace(
            steps,
            num_layers=num_layers,
            num_experts=num_experts,
            top_k=top_k,
            record_bytes=max(1, round(steps.record_bytes * asked)),
            link_latency_s=steps.link_latency_s * asked,
        ),
        num_slots=slots(case.num_slots),
        num_same_cache_slots=slots(case.num_same_cache_slots),
        num_same_memory_slots=slots(case.num_same_memory_slots),
        draft=draft,
    )


def mapping_note(case: SimulationCase, trace: TokenTrace) -> str:
    """Says how a trace of another shape is mapped; empty where it is of the model's shape."""
    if case.shape == trace.shape:
        return ""
    model, other = (f"{n} layers, {k} of {e} experts" for n, e, k in (case.shape, trace.shape))
    return (
        f"The trace is of another model ({other}; planned: {model}). Its experts stand for the "
        "planned model's: the cache holds the same share of them, and a token asks for as many "
        "bytes and takes as long. How often routing repeats itself stays the trace's."
    )


def system_shape(system: System, case: SimulationCase) -> tuple[CacheShape, float] | None:
    """Returns a system's cache, and its bytes with the draft as a share of all experts.

    Returns:
        Both, `None` where the system has no room: its draft does not fit, or not every
        layer gets a slot of its own.
    """
    steps, draft_bytes, record_bytes = case.steps, 0, case.steps.record_bytes
    if system.is_draft_resident:
        if case.draft is None:
            return None
        num_slots, record_bytes = case.draft.num_slots, case.draft.slot_bytes
        draft_bytes = case.draft.draft_bytes
    else:
        num_slots = {
            Memory.USUAL: case.num_slots,
            Memory.SAME_CACHE: case.num_same_cache_slots,
            Memory.SAME_MEMORY: case.num_same_memory_slots,
        }[system.memory]
    if num_slots < (steps.num_layers if system.is_per_layer else 1):
        return None
    shape = CacheShape(
        num_layers=steps.num_layers,
        num_experts=steps.num_experts,
        num_slots=num_slots,
        record_bytes=record_bytes,
    )
    held_bytes = draft_bytes + num_slots * record_bytes
    return shape, held_bytes / (case.num_experts * steps.record_bytes)


def costs_of(steps: PlannedSteps) -> MachineCosts:
    """Divides a resident token's time among layers and experts.

    A further token of the same pass costs a twentieth: one pass of a few tokens reads the
    same weights.
    """
    layer_s = (steps.token_s - steps.experts_s) / steps.num_layers
    expert_s = steps.experts_s / (steps.num_layers * steps.top_k)
    return MachineCosts(
        link_bytes_per_s=steps.link_bytes_per_s,
        link_latency_s=steps.link_latency_s,
        layer_s=layer_s,
        layer_token_s=layer_s / 20,
        expert_s=expert_s,
        expert_token_s=expert_s / 20,
        draft_s=steps.draft_s,
    )
