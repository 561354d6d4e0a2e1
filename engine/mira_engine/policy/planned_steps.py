"""What single steps of a planned model should take on the planned machine. Pure.

The plan's own predictions are made of these, and so are simulations of other systems with
the same memory.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..config import MachineRates
from ..events import MemoryPlan, PlanAlternative, PlannedSteps
from ..types import DraftDense, DraftExperts, Strategy
from .budget import ModelFacts
from .cost_model import CacheRoom, CostModel, Expectations
from .host_misses import HostSetup


def cost_model_of(
    facts: ModelFacts,
    plan: MemoryPlan,
    rates: MachineRates,
    expect: Expectations,
    *,
    num_cached_tokens: int,
    host: HostSetup | None = None,
) -> CostModel:
    """Returns what predicts the passes of a model whose memory is divided as planned.

    Args:
        facts: The model's sizes, `work` among them.
        plan: The division.
        rates: The machine.
        expect: Routing and drafting.
        num_cached_tokens: Tokens in the KV cache that a step reads.
        host: What the processor beside the card computes of its misses.
    """
    assert facts.work is not None
    dense = facts.work.dense_read_bytes
    room = CacheRoom(
        num_slots=plan.num_slots,
        slot_bytes=plan.slot_bytes,
        read_bytes=facts.whole_record_bytes,
        draft_read_bytes=facts.draft_record_bytes,
        # A split weight's high half and an INT8 copy are both half of it.
        draft_dense_bytes=dense if plan.draft_dense is DraftDense.TARGET else dense // 2,
        is_draft_cached=plan.draft_experts is DraftExperts.CACHED,
    )
    return CostModel(
        rates=rates,
        work=facts.work,
        room=room,
        expect=expect,
        num_cached_tokens=num_cached_tokens,
        host=host,
    )


def planned_steps(
    facts: ModelFacts,
    rates: MachineRates,
    alternatives: Sequence[PlanAlternative],
    *,
    num_cached_tokens: int,
) -> PlannedSteps | None:
    """Returns what steps take in the first alternative that fits, a draft's before the others.

    Args:
        facts: The model's sizes, `work` among them.
        rates: The machine.
        alternatives: Of `compare_plans`; those with INT4 experts as the target are left out.
        num_cached_tokens: Tokens in the KV cache that a step reads.

    Returns:
        The steps, `None` where nothing fits.
    """
    plans = [
        row.plan
        for row in alternatives
        if row.plan is not None and row.strategy is not Strategy.COMPACT
    ]
    if not plans:
        return None
    model = cost_model_of(
        facts, plans[0], rates, Expectations(), num_cached_tokens=num_cached_tokens
    )
    experts_bytes = facts.num_layers * facts.top_k * facts.whole_record_bytes
    return PlannedSteps(
        num_layers=facts.num_layers,
        num_experts=facts.num_experts_per_layer,
        top_k=facts.top_k,
        record_bytes=facts.whole_record_bytes,
        token_s=model.compute_s(1),
        experts_s=experts_bytes / rates.device_bytes_per_s,
        draft_s=model.draft_step().total_s,
        link_bytes_per_s=plans[0].slot_bytes / (model.link_s(1) - rates.link_latency_s),
        link_latency_s=rates.link_latency_s,
    )
