"""A budget becomes slots, or a refusal that names the missing bytes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mira_engine.config import MemoryAmount
from mira_engine.errors import BudgetError
from mira_engine.policy.budget import (
    DEFAULT_NUM_DRAFT_TOKENS,
    NUM_TRANSIENT_SLOTS,
    ModelFacts,
    divide_slots,
    plan_memory,
)
from mira_engine.types import CacheMode, DraftDense, DraftExperts

MIB = 2**20

FACTS = ModelFacts(
    num_layers=4,
    num_experts_per_layer=25,
    top_k=2,
    reference_record_bytes=1 * MIB,
    draft_record_bytes=MIB // 2,
    draft_copy_bytes=0,
    target_record_bytes=MIB // 2,
    whole_record_bytes=1 * MIB,
    non_expert_bytes=10 * MIB,
    kv_bytes=2 * MIB,
    workspace_bytes=3 * MIB,
)

WITH_COPIES = replace(FACTS, draft_copy_bytes=8 * MIB)
"""Dense layers in bfloat16 that native kernels multiply: 8 MiB as INT8 copies."""


def test_plan_share_refers_to_int8_bytes() -> None:
    plan, note = plan_memory(FACTS, MemoryAmount(share=0.75), 4)
    assert plan.budget_bytes == 75 * MIB
    assert plan.draft_bytes == 50 * MIB
    assert plan.num_slots == 50
    assert plan.num_draft_tokens == 4
    assert plan.total_bytes == 90 * MIB
    assert not note


def test_plan_without_draft_holds_whole_records() -> None:
    plan, _ = plan_memory(FACTS, MemoryAmount(share=0.75), 0)
    assert plan.draft_bytes == 0
    assert plan.num_slots == 75


def test_plan_slots_never_exceed_experts() -> None:
    plan, _ = plan_memory(FACTS, MemoryAmount(share=4.0), 0)
    assert plan.num_slots == 100


def test_plan_takes_no_more_than_all_experts_need() -> None:
    for k, needed in ((0, 100 * MIB), (4, 100 * MIB)):
        plan, _ = plan_memory(FACTS, MemoryAmount(share=5.0), k)
        assert plan.budget_bytes == needed


def test_plan_experts_stay_within_budget() -> None:
    for share in (0.05, 0.3, 0.51, 0.77, 1.0, 1.3):
        plan, _ = plan_memory(FACTS, MemoryAmount(share=share), None)
        assert plan.draft_bytes + plan.num_slots * plan.slot_bytes <= plan.budget_bytes


def test_plan_below_minimum_says_the_minimum() -> None:
    with pytest.raises(BudgetError) as caught:
        plan_memory(FACTS, MemoryAmount(num_bytes=MIB), 0)
    assert "2.0 MiB (2%)" in caught.value.message
    assert "--budget 2MiB" in caught.value.hint


def test_plan_k_without_room_says_the_bytes_it_needs() -> None:
    with pytest.raises(BudgetError) as caught:
        plan_memory(FACTS, MemoryAmount(share=0.3), 4)
    assert "51.0 MiB" in caught.value.message
    assert "21.0 MiB short" in caught.value.message
    assert "-k 0" in caught.value.hint


def test_plan_default_k_is_given_up_visibly() -> None:
    plan, note = plan_memory(FACTS, MemoryAmount(share=0.3), None)
    assert plan.num_draft_tokens == 0
    assert "Speculation is off" in note
    plan, note = plan_memory(FACTS, MemoryAmount(share=0.8), None)
    assert plan.num_draft_tokens == DEFAULT_NUM_DRAFT_TOKENS
    assert not note


def test_plan_of_a_draft_with_cached_experts_has_the_slots_of_no_draft() -> None:
    for share in (0.02, 0.3, 0.75, 2.0):
        budget = MemoryAmount(share=share)
        plan, note = plan_memory(FACTS, budget, 4, draft_experts=DraftExperts.CACHED)
        plain, _ = plan_memory(FACTS, budget, 0)
        assert (plan.draft_bytes, plan.num_slots) == (0, plain.num_slots)
        assert plan.slot_bytes == plain.slot_bytes
        assert plan.num_draft_tokens == 4
        assert plan.draft_experts is DraftExperts.CACHED
        assert not note
    with pytest.raises(BudgetError):
        plan_memory(FACTS, MemoryAmount(share=0.01), 4, draft_experts=DraftExperts.CACHED)


def test_plan_splits_dense_layers_where_nobody_chose() -> None:
    for wanted in (DraftDense.AUTO, DraftDense.SPLIT):
        plan, note = plan_memory(WITH_COPIES, MemoryAmount(share=0.75), 4, wanted)
        assert (plan.draft_dense, plan.draft_dense_bytes) == (DraftDense.SPLIT, 0)
        assert plan.num_slots == 50, "splitting takes nothing of the budget"
        assert not note


@pytest.mark.parametrize("wanted", [DraftDense.AUTO, DraftDense.SPLIT, DraftDense.TARGET])
def test_plan_drafts_with_the_targets_layers_where_no_others_are_possible(
    wanted: DraftDense,
) -> None:
    plan, _ = plan_memory(FACTS, MemoryAmount(share=0.75), 4, wanted)
    assert (plan.draft_dense, plan.draft_dense_bytes) == (DraftDense.TARGET, 0)


def test_plan_drafts_with_the_targets_layers_where_asked() -> None:
    plan, _ = plan_memory(WITH_COPIES, MemoryAmount(share=0.75), 4, DraftDense.TARGET)
    assert (plan.draft_dense, plan.draft_dense_bytes) == (DraftDense.TARGET, 0)


@pytest.mark.parametrize("wanted", list(DraftDense))
def test_plan_without_a_draft_has_no_copies(wanted: DraftDense) -> None:
    plan, _ = plan_memory(WITH_COPIES, MemoryAmount(share=0.75), 0, wanted)
    assert (plan.draft_dense, plan.draft_dense_bytes) == (DraftDense.TARGET, 0)
    assert plan.num_slots == 75


def test_plan_counts_copies_in_the_budget() -> None:
    plan, _ = plan_memory(WITH_COPIES, MemoryAmount(share=0.75), 4, DraftDense.INT8)
    assert (plan.draft_dense, plan.draft_dense_bytes) == (DraftDense.INT8, 8 * MIB)
    assert plan.num_slots == (75 - 50 - 8) * 2
    assert plan.budget_bytes == 75 * MIB
    assert plan.total_bytes == 90 * MIB


def test_plan_takes_no_more_than_experts_and_copies_need() -> None:
    plan, _ = plan_memory(WITH_COPIES, MemoryAmount(share=5.0), 4, DraftDense.INT8)
    assert plan.num_slots == 100
    assert plan.budget_bytes == (50 + 8 + 50) * MIB


def test_plan_copies_without_room_say_the_bytes_they_need() -> None:
    fewest = 50 * MIB + 8 * MIB + 2 * (MIB // 2)
    plan, _ = plan_memory(WITH_COPIES, MemoryAmount(num_bytes=fewest), 4, DraftDense.INT8)
    assert plan.num_slots == FACTS.min_slots
    with pytest.raises(BudgetError):
        plan_memory(WITH_COPIES, MemoryAmount(num_bytes=fewest - 1), 4, DraftDense.INT8)
    with pytest.raises(BudgetError) as caught:
        plan_memory(WITH_COPIES, MemoryAmount(share=0.55), 4, DraftDense.INT8)
    assert "8.0 MiB" in caught.value.message
    assert "4.0 MiB short" in caught.value.message
    assert "--draft-dense split" in caught.value.hint


DEEPSEEK = replace(FACTS, num_layers=26, num_experts_per_layer=64, top_k=6)


@pytest.mark.parametrize("facts", [FACTS, DEEPSEEK])
def test_regions_of_every_number_of_slots_fill_the_arena(facts: ModelFacts) -> None:
    for num_slots in range(1, facts.num_experts):
        regions = divide_slots(num_slots, facts)
        transient = num_slots - regions.num_hot_slots - regions.num_stage_slots
        assert regions.mode is not CacheMode.RESIDENT
        assert regions.num_hot_slots > 0
        assert regions.num_stage_slots >= 0
        assert transient == min(NUM_TRANSIENT_SLOTS, num_slots - 1)


def test_regions_with_all_experts_resident_have_no_stage() -> None:
    plan, _ = plan_memory(FACTS, MemoryAmount(share=1.0), 0)
    assert plan.mode is CacheMode.RESIDENT
    assert (plan.num_hot_slots, plan.num_stage_slots, plan.num_transient_slots) == (100, 0, 0)


def test_stage_is_a_quarter_in_large_mode() -> None:
    regions = divide_slots(800, DEEPSEEK)
    assert regions.mode is CacheMode.LARGE
    assert regions.num_stage_slots == (800 - NUM_TRANSIENT_SLOTS) // 4


def test_stage_holds_the_next_two_layers_in_small_mode() -> None:
    regions = divide_slots(200, DEEPSEEK)
    assert regions.mode is CacheMode.SMALL
    assert regions.num_stage_slots == 2 * DEEPSEEK.top_k
    few = divide_slots(8, DEEPSEEK)
    assert (few.num_hot_slots, few.num_stage_slots) == (3, 3)


def test_mode_is_large_once_stage_holds_what_a_token_misses() -> None:
    modes = [divide_slots(n, DEEPSEEK).mode for n in range(1, DEEPSEEK.num_experts + 1)]
    assert modes == sorted(modes, key=[CacheMode.SMALL, CacheMode.LARGE, CacheMode.RESIDENT].index)
    first = modes.index(CacheMode.LARGE) + 1
    assert 0.15 < first / DEEPSEEK.num_experts < 0.3
