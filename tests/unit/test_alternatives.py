"""Which plan is chosen, what the others are refused for, and what a refusal says."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mira_engine.config import MachineRates, MemoryAmount
from mira_engine.errors import BudgetError
from mira_engine.events import PlanAlternative
from mira_engine.policy.alternatives import (
    DRAFT_TOKEN_CANDIDATES,
    PlanWishes,
    choose_plan,
    compare_plans,
    usable_memory,
    usual_budget,
    with_link,
)
from mira_engine.policy.budget import (
    DEFAULT_NUM_DRAFT_TOKENS,
    ModelFacts,
    plan_memory,
    usual_draft_experts,
)
from mira_engine.policy.cost_model import BUILTIN_HITS, Expectations, ModelWork
from mira_engine.types import CacheMode, DraftDense, DraftExperts, Precision, Strategy

MIB = 2**20

FACTS = ModelFacts(
    num_layers=20,
    num_experts_per_layer=50,
    top_k=4,
    reference_record_bytes=1 * MIB,
    draft_record_bytes=MIB // 2,
    draft_copy_bytes=0,
    target_record_bytes=MIB // 2,
    whole_record_bytes=1 * MIB,
    non_expert_bytes=100 * MIB,
    kv_bytes=20 * MIB,
    workspace_bytes=30 * MIB,
    work=ModelWork(
        num_layers=20,
        num_experts=50,
        top_k=4,
        dense_read_bytes=100 * MIB,
        dense_weights=50 * MIB,
        expert_weights=1 * MIB,
        kv_token_bytes=10_000,
        chunk_tokens=256,
    ),
)
FIXED = 150 * MIB
MACHINE = MachineRates(
    name="m", device_memory_bytes=2**33, device_bytes_per_s=2e10, link_bytes_per_s=2e9, is_gpu=True
)


def rows_of(wishes: PlanWishes, rates: MachineRates | None = MACHINE, facts: ModelFacts = FACTS):
    rows = {row.strategy: row for row in compare_plans(facts, wishes, rates)}
    assert list(rows) == [strategy for strategy in Strategy if strategy in rows]
    return rows


def chosen_of(rows: dict[Strategy, PlanAlternative]) -> PlanAlternative | None:
    chosen = [row for row in rows.values() if row.is_chosen]
    assert len(chosen) <= 1
    return chosen[0] if chosen else None


def wishes(**fields: object) -> PlanWishes:
    if "budget" not in fields and "memory_bytes" not in fields:
        fields["budget"] = MemoryAmount(share=0.75)
    return PlanWishes(**fields)


# -- without rates: as it always was


@pytest.mark.parametrize("share", [0.01, 0.3, 0.51, 0.75, 1.0, 3.0])
@pytest.mark.parametrize("k", [None, 0])
def test_without_rates_the_plan_is_the_budgets_own(share, k):
    budget = MemoryAmount(share=share)
    source = usual_draft_experts(FACTS, budget.resolve(FACTS.reference_bytes))
    assert choose_plan(FACTS, wishes(budget=budget, num_draft_tokens=k), None) == plan_memory(
        FACTS, budget, k, draft_experts=DraftExperts.ALL if k == 0 else source
    )


def test_without_rates_nothing_is_predicted_and_the_draft_is_taken_where_it_fits():
    rows = rows_of(wishes(), rates=None)
    assert all(row.tpot_s is row.ttft_s is row.hit_rate is None for row in rows.values())
    assert chosen_of(rows).strategy is Strategy.SPECULATIVE
    assert chosen_of(rows).num_draft_tokens == DEFAULT_NUM_DRAFT_TOKENS
    assert chosen_of(rows_of(wishes(has_heads=True), rates=None)).num_draft_tokens == 4
    tight = rows_of(wishes(budget=MemoryAmount(share=0.3), has_heads=True), rates=None)
    assert chosen_of(tight).strategy is Strategy.PREDICTIVE


# -- with rates


def test_fastest_of_what_fits_is_chosen():
    for memory in range(300, 1400, 100):
        rows = rows_of(wishes(memory_bytes=memory * MIB, has_heads=True, is_compact_allowed=True))
        chosen = chosen_of(rows)
        fitting = [row for row in rows.values() if row.plan is not None]
        assert chosen.tpot_s == min(row.tpot_s for row in fitting)
        assert all(row.plan.total_bytes <= memory * MIB for row in fitting)


def test_slow_link_drops_the_draft_and_says_so():
    slow = with_link(MACHINE, bytes_per_s=1e8, latency_s=0.001)
    plan, note = choose_plan(FACTS, wishes(), slow)
    assert plan.num_draft_tokens == 0
    assert "Speculation is off: " in note
    assert "turns it on" in note


def test_good_drafts_on_a_fast_link_are_chosen_with_the_best_depth():
    expect = Expectations(acceptance=0.99)
    roomy = wishes(budget=MemoryAmount(share=1.2))
    facts = replace(FACTS, draft_copy_bytes=50 * MIB)
    plan, note = choose_plan(facts, roomy, MACHINE, expect)
    assert not note
    times = {
        k: next(
            row.tpot_s
            for row in compare_plans(facts, replace(roomy, num_draft_tokens=k), MACHINE, expect)
            if row.strategy is Strategy.SPECULATIVE
        )
        for k in DRAFT_TOKEN_CANDIDATES
    }
    assert plan.num_draft_tokens == min(times, key=times.get) > 1


def test_what_was_asked_for_is_never_overruled():
    slow = with_link(MACHINE, bytes_per_s=1e7, latency_s=0.0)
    for k in (1, 4, 7):
        plan, note = choose_plan(FACTS, wishes(num_draft_tokens=k), slow)
        assert (plan.num_draft_tokens, note) == (k, "")
    expect = Expectations(acceptance=1.0)
    plan, note = choose_plan(FACTS, wishes(num_draft_tokens=0), MACHINE, expect)
    assert (plan.num_draft_tokens, note) == (0, "")
    assert plan == plan_memory(FACTS, MemoryAmount(share=0.75), 0)[0]


def test_resident_experts_leave_nothing_to_predict():
    rows = rows_of(wishes(memory_bytes=4096 * MIB, num_draft_tokens=0, has_heads=True))
    assert chosen_of(rows).strategy is Strategy.ON_DEMAND
    assert chosen_of(rows).plan.mode is CacheMode.RESIDENT
    assert "nothing to predict" in rows[Strategy.PREDICTIVE].reason


def test_prediction_is_taken_only_with_heads():
    rates = replace(MACHINE, link_bytes_per_s=5e9)
    asked = wishes(budget=MemoryAmount(share=0.4))
    assert "no predictor heads" in rows_of(asked, rates)[Strategy.PREDICTIVE].reason
    assert chosen_of(rows_of(asked, rates)).strategy is Strategy.ON_DEMAND
    with_heads = rows_of(replace(asked, has_heads=True), rates)
    assert chosen_of(with_heads).strategy is Strategy.PREDICTIVE


def test_handling_records_counts_where_the_processor_does_it():
    asked = wishes(budget=MemoryAmount(share=0.4))
    card = rows_of(asked)[Strategy.ON_DEMAND]
    processor = rows_of(asked, replace(MACHINE, is_gpu=False))[Strategy.ON_DEMAND]
    assert processor.tpot_s > card.tpot_s


def test_compact_experts_are_taken_only_where_allowed():
    asked = wishes(memory_bytes=FIXED + 3 * MIB)
    assert chosen_of(rows_of(asked)) is None
    row = chosen_of(rows_of(replace(asked, is_compact_allowed=True)))
    assert (row.strategy, row.precision) == (Strategy.COMPACT, Precision.INT4)
    assert row.plan.num_slots == 6
    with pytest.raises(BudgetError, match="1\\.0 MiB short") as caught:
        choose_plan(FACTS, asked, MACHINE)
    assert "allow INT4 experts" in caught.value.hint


def test_int4_target_has_neither_a_draft_nor_a_compact_form():
    rows = rows_of(wishes(precision=Precision.INT4))
    assert list(rows) == [Strategy.PREDICTIVE, Strategy.ON_DEMAND]
    _, note = choose_plan(FACTS, wishes(precision=Precision.INT4), MACHINE)
    assert not note


# -- memory


def test_slots_follow_from_the_memory_and_stay_within_it():
    for memory in range(160, 1500, 7):
        plan, _ = choose_plan(FACTS, wishes(memory_bytes=memory * MIB, num_draft_tokens=0), None)
        assert plan.total_bytes <= memory * MIB
        assert plan.num_slots == min(1000, memory - 150)


def test_fewest_bytes_that_suffice_are_the_ones_the_refusal_names():
    for k, minimum in ((0, 4 * MIB), (4, 502 * MIB)):
        needed = FIXED + minimum
        asked = wishes(memory_bytes=needed, num_draft_tokens=k, draft_experts=DraftExperts.ALL)
        assert choose_plan(FACTS, asked, MACHINE)[0].total_bytes == needed
        short = replace(asked, memory_bytes=needed - MIB)
        with pytest.raises(BudgetError, match="1\\.0 MiB short") as caught:
            choose_plan(FACTS, short, MACHINE)
        assert f"--memory {needed // MIB}MiB" in caught.value.hint
        missing = rows_of(short)[Strategy.SPECULATIVE if k else Strategy.ON_DEMAND]
        assert missing.missing_bytes == MIB
        assert "1.0 MiB short" in missing.reason


def test_draft_that_was_asked_for_uses_the_cached_experts_where_all_do_not_fit():
    for memory in (4, 100, 501):
        asked = wishes(memory_bytes=FIXED + memory * MIB, num_draft_tokens=4)
        plan, note = choose_plan(FACTS, asked, None)
        assert (plan.draft_experts, plan.num_draft_tokens) == (DraftExperts.CACHED, 4)
        assert plan.num_slots == memory
        assert not note
        undecided, note = choose_plan(FACTS, replace(asked, num_draft_tokens=None), None)
        has_room = memory == 501
        assert undecided.num_draft_tokens == (4 if has_room else 0)
        assert bool(note) != has_room
    with pytest.raises(BudgetError, match="1\\.0 MiB short"):
        choose_plan(FACTS, wishes(memory_bytes=FIXED + 3 * MIB, num_draft_tokens=4), None)
    whole = replace(FACTS, target_record_bytes=FACTS.whole_record_bytes)
    plan, _ = choose_plan(whole, wishes(memory_bytes=FIXED + 900 * MIB), None)
    assert plan.draft_experts is DraftExperts.ALL, "a slot has no draft of its own"


def test_longer_fixed_draft_uses_all_experts_unless_the_link_is_slow():
    asked = wishes(budget=MemoryAmount(share=0.75), num_draft_tokens=4)
    sources = [
        choose_plan(FACTS, each, None)[0].draft_experts
        for each in (
            asked,
            replace(asked, is_link_slow=True),
            replace(asked, num_draft_tokens=2),
            replace(asked, num_draft_tokens=None),
        )
    ]
    assert sources == [DraftExperts.ALL, *[DraftExperts.CACHED] * 3]


def test_slow_link_makes_the_draft_use_the_cached_experts():
    asked = wishes(budget=MemoryAmount(share=0.75), num_draft_tokens=4)
    slow = replace(MACHINE, link_bytes_per_s=MACHINE.link_bytes_per_s / 100)
    local = Expectations(hits=BUILTIN_HITS)
    assert choose_plan(FACTS, asked, slow, local)[0].draft_experts is DraftExperts.CACHED
    assert choose_plan(FACTS, asked, MACHINE, local)[0].draft_experts is DraftExperts.ALL


def test_memory_below_the_fixed_costs_names_all_that_is_missing():
    with pytest.raises(BudgetError, match="104\\.0 MiB short"):
        choose_plan(FACTS, wishes(memory_bytes=50 * MIB), None)


def test_budget_beyond_the_memory_is_refused_with_the_missing_bytes():
    asked = wishes(
        budget=MemoryAmount(num_bytes=300 * MIB), memory_bytes=FIXED + 290 * MIB, num_draft_tokens=0
    )
    assert rows_of(asked)[Strategy.ON_DEMAND].missing_bytes == 10 * MIB
    with pytest.raises(BudgetError, match="10\\.0 MiB short") as caught:
        choose_plan(FACTS, asked, MACHINE)
    assert "--budget" in caught.value.hint


def test_budget_that_is_too_small_is_refused_as_without_memory():
    budget = MemoryAmount(num_bytes=MIB)
    with pytest.raises(BudgetError) as with_memory:
        choose_plan(FACTS, wishes(budget=budget, memory_bytes=4096 * MIB), MACHINE)
    with pytest.raises(BudgetError) as without:
        plan_memory(FACTS, budget, None)
    assert str(with_memory.value) == str(without.value)


def test_int8_copies_count_in_what_a_draft_needs():
    facts = replace(FACTS, draft_copy_bytes=50 * MIB)
    asked = wishes(memory_bytes=FIXED + 540 * MIB, num_draft_tokens=4, draft_dense=DraftDense.INT8)
    asked = replace(asked, draft_experts=DraftExperts.ALL)
    assert rows_of(asked, facts=facts)[Strategy.SPECULATIVE].missing_bytes == 12 * MIB
    enough = replace(asked, memory_bytes=FIXED + 552 * MIB)
    assert choose_plan(facts, enough, None)[0].draft_dense_bytes == 50 * MIB


def test_usual_budget_is_three_quarters_or_what_memory_leaves():
    budget, note = usual_budget(FACTS, FIXED + 750 * MIB)
    assert budget == MemoryAmount(share=0.75)
    assert "75%" in note
    budget, note = usual_budget(FACTS, FIXED + 749 * MIB)
    assert budget == MemoryAmount(num_bytes=749 * MIB)
    assert "what free memory leaves" in note
    assert usual_budget(FACTS, 10)[0].num_bytes == 1, "then the plan refuses it"


def test_usable_memory_leaves_a_margin_and_is_never_negative():
    assert usable_memory(100 * 2**30) == 95 * 2**30
    assert usable_memory(2**30) == 512 * MIB
    assert usable_memory(100) == 0


def test_emulated_link_is_never_faster_than_the_machines():
    assert with_link(MACHINE, bytes_per_s=None, latency_s=0.0) == MACHINE
    assert with_link(MACHINE, bytes_per_s=1e12, latency_s=0.0) == MACHINE
    slow = with_link(MACHINE, bytes_per_s=1e6, latency_s=0.5)
    assert (slow.link_bytes_per_s, slow.link_latency_s) == (1e6, 0.5)


def test_every_row_has_a_reason():
    for memory in range(100, 1400, 50):
        for k in (None, 0, 4):
            rows = rows_of(wishes(memory_bytes=memory * MIB, num_draft_tokens=k))
            assert all(row.reason for row in rows.values())
            assert all((row.plan is None) == (row.missing_bytes > 0) for row in rows.values())
