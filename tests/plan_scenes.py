"""A small model that is planned without torch, and a client that plans it."""

from __future__ import annotations

from dataclasses import replace

from mira_app.engine_call import EngineCall
from mira_engine.config import EngineConfig, MachineRates
from mira_engine.events import PlanMade, PlanModel
from mira_engine.policy.alternatives import PlanWishes, compare_plans, refusal, usable_memory
from mira_engine.policy.budget import ModelFacts
from mira_engine.policy.cost_model import ModelWork
from mira_engine.policy.planned_steps import planned_steps

MIB = 2**20
NUM_LAYERS, NUM_EXPERTS, TOP_K = 4, 16, 2

FACTS = ModelFacts(
    num_layers=NUM_LAYERS,
    num_experts_per_layer=NUM_EXPERTS,
    top_k=TOP_K,
    reference_record_bytes=100 * MIB,
    draft_record_bytes=50 * MIB,
    draft_copy_bytes=0,
    target_record_bytes=50 * MIB,
    whole_record_bytes=100 * MIB,
    non_expert_bytes=100 * MIB,
    kv_bytes=20 * MIB,
    workspace_bytes=30 * MIB,
    work=ModelWork(
        num_layers=NUM_LAYERS,
        num_experts=NUM_EXPERTS,
        top_k=TOP_K,
        dense_read_bytes=100 * MIB,
        dense_weights=50 * MIB,
        expert_weights=50 * MIB,
        kv_token_bytes=10_000,
        chunk_tokens=256,
    ),
)
"""Nested experts, 6400 MiB of them."""

MACHINE = MachineRates(
    name="card", device_memory_bytes=2**33, device_bytes_per_s=4e11, link_bytes_per_s=2e10,
    link_latency_s=1e-5, is_gpu=True,
)  # fmt: skip


def plan_of(
    request: PlanModel, facts: ModelFacts = FACTS, *, notes: tuple[str, ...] = ()
) -> PlanMade:
    """Answers a request as the engine does, for the small model."""
    config, rates = request.config, request.machine or replace(MACHINE, name="this machine")
    memory_bytes = min(
        config.memory_bytes or usable_memory(rates.device_memory_bytes), rates.device_memory_bytes
    )
    wishes = PlanWishes(
        budget=config.budget,
        memory_bytes=memory_bytes,
        num_draft_tokens=config.num_draft_tokens,
        draft_experts=config.draft_experts,
        precision=config.precision,
    )
    rows = compare_plans(facts, wishes, rates)
    error = None if any(row.is_chosen for row in rows) else refusal(facts, wishes, rows)
    return PlanMade(
        request_id=request.request_id,
        model=request.model,
        title="Small",
        machine=rates,
        memory_bytes=memory_bytes,
        context_length=2048,
        num_prompt_tokens=512,
        alternatives=rows,
        notes=notes,
        refusal=error.message if error else "",
        hint=error.hint if error else "",
        steps=planned_steps(facts, rates, rows, num_cached_tokens=512),
    )


def made(machine: MachineRates = MACHINE, facts: ModelFacts = FACTS, **config: object) -> PlanMade:
    """A plan for the small model."""
    return plan_of(
        PlanModel(request_id="r", model="m", config=EngineConfig(**config), machine=machine), facts
    )


class FakePlanningClient:
    """Stands in for `EngineClient`: plans the small model at once, whatever its name."""

    def __init__(self) -> None:
        self.requests: list[PlanModel] = []
        self.num_started = 0

    def __enter__(self) -> FakePlanningClient:
        self.num_started += 1
        return self

    def __exit__(self, *error: object) -> None:
        pass

    def new_request_id(self) -> str:
        return f"r{len(self.requests)}"

    def submit(self, request: PlanModel) -> EngineCall:
        self.requests.append(request)
        name = request.machine.name if request.machine else "this machine"
        call = EngineCall(request.request_id)
        call.deliver(plan_of(request, notes=("True of all.", f"True of {name}.")))
        return call
