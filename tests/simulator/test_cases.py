"""What a plan is to the simulator: slots, bytes and times of its own, for every system."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from mira_engine.api import MemoryAmount, Precision, SimulationRequest, simulate
from mira_engine.errors import ConfigError
from mira_engine.simulator.cases import (
    case_by_hand,
    case_for_trace,
    costs_of,
    mapping_note,
    planned_case,
    system_shape,
    trace_of_model,
    with_record,
)
from mira_engine.simulator.synthetic import synthetic_trace
from mira_engine.simulator.systems import all_systems
from mira_engine.simulator.workload import TokenTrace, read_token_trace
from mira_engine.types import DraftExperts, Strategy
from plan_scenes import FACTS, MACHINE, MIB, NUM_EXPERTS, NUM_LAYERS, TOP_K, made

SYSTEMS = {system.name: system for system in all_systems()}
SHARES = (0.2, 0.4, 0.6, 0.9, 1.5)


def case_at(share: float = 0.75, **config: object):
    plan = made(budget=MemoryAmount(share=share), **config)
    case = planned_case(plan, model="Small", memory=f"{share:.0%}")
    assert case is not None
    return case


def rows_of(plan):
    return {row.strategy: row for row in plan.alternatives}


def drawn(num_layers: int, num_experts: int, top_k: int, num_tokens: int = 24) -> TokenTrace:
    return synthetic_trace(
        num_layers=num_layers, num_experts=num_experts, top_k=top_k, num_tokens=num_tokens
    )


# -- what a plan gives ------------------------------------------------------------------------


@pytest.mark.parametrize("share", SHARES)
def test_case_has_the_slots_and_the_draft_of_the_plans_own_rows(share):
    plan, case = made(budget=MemoryAmount(share=share)), case_at(share)
    rows = rows_of(plan)
    alone, drafting = rows[Strategy.ON_DEMAND], rows[Strategy.SPECULATIVE]
    assert case.num_slots == case.num_same_memory_slots == alone.plan.num_slots
    assert case.draft.num_slots == drafting.plan.num_slots
    assert case.draft.slot_bytes == drafting.plan.slot_bytes
    assert case.draft.draft_bytes == drafting.plan.draft_bytes
    assert case.draft.num_draft_tokens == drafting.num_draft_tokens
    assert (case.model, case.machine) == ("Small", "card")


@pytest.mark.parametrize("share", SHARES)
@pytest.mark.parametrize("draft_experts", [DraftExperts.ALL, DraftExperts.CACHED])
def test_no_system_holds_more_than_the_budget(share, draft_experts):
    case = case_at(share, draft_experts=draft_experts)
    budget = MemoryAmount(share=min(1.0, share)).resolve(FACTS.reference_bytes)
    all_bytes = FACTS.num_experts * FACTS.whole_record_bytes
    for system in SYSTEMS.values():
        found = system_shape(system, case)
        if found is None:
            assert system.is_draft_resident
            assert draft_experts is DraftExperts.ALL
            assert share < 0.55
            continue
        shape, memory_share = found
        assert 0 < memory_share <= budget / all_bytes
        assert shape.num_slots * shape.record_bytes <= memory_share * all_bytes + 1


def test_same_cache_has_what_the_drafting_system_has_as_cache():
    case = case_at(0.75, draft_experts=DraftExperts.ALL)
    assert case.draft.draft_bytes > 0
    same_cache, share = system_shape(SYSTEMS["mixtral-offloading-sc"], case)
    assert same_cache.num_slots == case.draft.num_slots // 2 < case.num_slots
    assert share < system_shape(SYSTEMS["lru"], case)[1]
    assert system_shape(SYSTEMS["mixtral-offloading-sm"], case) == system_shape(
        SYSTEMS["lru"], case
    )


def test_draft_of_cached_experts_takes_no_memory_and_is_accepted_less():
    whole = case_at(0.75, draft_experts=DraftExperts.ALL)
    cached = case_at(0.75, draft_experts=DraftExperts.CACHED)
    assert whole.draft.acceptance_share == 1.0
    plan = made(budget=MemoryAmount(share=0.75), draft_experts=DraftExperts.CACHED)
    assert cached.draft.acceptance_share == rows_of(plan)[Strategy.SPECULATIVE].hit_rate < 1.0
    assert cached.draft.draft_bytes == 0
    assert cached.draft.slot_bytes == FACTS.whole_record_bytes == 2 * whole.draft.slot_bytes


def test_case_without_room_for_one_whole_expert_is_none():
    plan = made(memory_bytes=200 * MIB)
    assert plan.refusal
    assert planned_case(plan, model="Small", memory="") is None


def test_steps_are_those_that_the_plan_predicts_with():
    resident = made(memory_bytes=8 * 2**30)
    assert resident.steps.token_s == pytest.approx(rows_of(resident)[Strategy.ON_DEMAND].tpot_s)
    assert resident.steps.experts_s == pytest.approx(8 * FACTS.whole_record_bytes / 4e11)
    assert 0 < resident.steps.draft_s < resident.steps.token_s
    assert resident.steps.link_bytes_per_s == pytest.approx(2e10)
    assert resident.steps.link_latency_s == 1e-5
    slower = made(replace(MACHINE, host_memory_bytes=640 * MIB, disk_bytes_per_s=1e9))
    per_byte = 1 / 2e10 + (1 - 640 / 6400) / 1e9
    assert slower.steps.link_bytes_per_s == pytest.approx(1 / per_byte, rel=0.2)


def test_costs_of_a_token_add_up_to_its_time():
    steps = case_at().steps
    costs = costs_of(steps)
    layer_s = costs.layer_seconds(1) + TOP_K * costs.expert_seconds(1)
    assert NUM_LAYERS * layer_s + costs.pass_seconds(1) == pytest.approx(steps.token_s)
    assert (costs.link_latency_s, costs.draft_s) == (steps.link_latency_s, steps.draft_s)


# -- numbers by hand --------------------------------------------------------------------------


def test_record_by_hand_changes_the_bytes_and_no_slot():
    case = case_at(0.75, draft_experts=DraftExperts.ALL)
    larger = with_record(case, 2 * case.steps.record_bytes)
    assert larger.draft.slot_bytes == 2 * case.draft.slot_bytes
    assert larger.num_slots == case.num_slots
    for system in SYSTEMS.values():
        (shape, share), (before, share_before) = (system_shape(system, c) for c in (larger, case))
        assert shape.num_slots == before.num_slots
        assert share == pytest.approx(share_before)


def test_numbers_by_hand_win_over_the_plan():
    def request(**fields):
        return SimulationRequest(cases=(case_at(0.5),), policies=("lru",), num_tokens=16, **fields)

    planned = simulate(request()).rows[0]
    (slow, fast) = simulate(request(link_rates=(1e9, 4e10))).rows
    assert (slow.link_bytes_per_s, fast.link_bytes_per_s) == (1e9, 4e10)
    assert slow.tpot_s > planned.tpot_s > fast.tpot_s
    assert simulate(request(record_bytes=MIB)).rows[0].bytes_per_token < planned.bytes_per_token
    longer = simulate(request(resident_s=1.0)).rows[0]
    assert longer.tpot_s - longer.stall_s == pytest.approx(1.0)
    (few,) = simulate(request(slots_per_layer=(3,))).rows
    assert (few.slots_per_layer, few.memory) == (3, "3 of 16 experts a layer")
    assert few.machine == "card"
    with pytest.raises(ConfigError, match="1 to 16"):
        simulate(request(slots_per_layer=(17,)))


def test_draft_tokens_and_acceptance_follow_the_plan_unless_given():
    case = case_at(0.75, draft_experts=DraftExperts.CACHED)
    k = 6
    fields = {"cases": (case,), "policies": ("mira+lookahead", "lru"), "num_tokens": 24}
    row, plain = simulate(SimulationRequest(**fields)).rows
    assert row.num_draft_tokens == case.draft.num_draft_tokens
    assert plain.num_draft_tokens == 0
    given, _ = simulate(SimulationRequest(**fields, num_draft_tokens=k, acceptance=1.0)).rows
    assert given.num_draft_tokens == k
    assert given.tokens_per_round > 0.7 * (k + 1)


def test_draft_with_some_experts_is_accepted_less_often_unless_said_otherwise():
    case = case_at(0.5, draft_experts=DraftExperts.CACHED)
    whole = replace(case, draft=replace(case.draft, acceptance_share=1.0))

    def tokens_per_round(case, **fields):
        request = SimulationRequest(
            cases=(case,),
            policies=("mira+lookahead",),
            num_tokens=200,
            num_draft_tokens=4,
            **fields,
        )
        return simulate(request).rows[0].tokens_per_round

    assert tokens_per_round(case) < 0.9 * tokens_per_round(whole)
    assert tokens_per_round(case, acceptance=0.8) == tokens_per_round(whole, acceptance=0.8)


def test_number_of_draft_tokens_by_hand_is_also_that_of_a_draft_of_another_kind():
    case = replace(case_at(0.5), draft=None)
    request = SimulationRequest(
        cases=(case,), policies=("specmoeoff",), num_tokens=16, num_draft_tokens=6
    )
    assert simulate(request).rows[0].num_draft_tokens == 6


# -- a sweep over cards and memories ----------------------------------------------------------


def test_comparison_has_a_row_for_every_case_link_and_system():
    cases = (case_at(0.4), case_at(0.9))
    request = SimulationRequest(cases=cases, link_rates=(1e9, 2e9), num_tokens=8)
    report = simulate(request)
    places = dict.fromkeys((row.memory, row.link_bytes_per_s) for row in report.rows)
    assert list(places) == [(m, r) for m in ("40%", "90%") for r in (1e9, 2e9)]
    assert [row.policy for row in report.rows] == list(SYSTEMS) * 4
    assert {row.policy for row in report.rows if row.is_bound} == {"belady"}
    assert (report.model, report.num_layers, report.num_experts) == ("Small", 4, 16)
    assert not report.notes


def test_system_without_room_is_left_out_and_named():
    case = case_at(0.2, draft_experts=DraftExperts.ALL)
    assert case.draft is None
    tiny = replace(case, num_slots=TOP_K, num_same_cache_slots=TOP_K, num_same_memory_slots=TOP_K)
    report = simulate(SimulationRequest(cases=(tiny,), num_tokens=8))
    left_out = {"mira+lookahead", "mixtral-offloading-sc", "mixtral-offloading-sm"}
    assert {row.policy for row in report.rows} == set(SYSTEMS) - left_out
    assert {note.split(" is left out at card, 20%: ")[0] for note in report.notes} == left_out
    assert {note.split(": ")[1] for note in report.notes} == {
        "there is no room for its draft.", "there are fewer slots than layers.",
    }  # fmt: skip


def test_int4_target_has_no_draft():
    facts = replace(FACTS, whole_record_bytes=50 * MIB)
    plan = made(MACHINE, facts, budget=MemoryAmount(share=0.4), precision=Precision.INT4)
    case = planned_case(plan, model="Small", memory="40%")
    assert case.draft is None
    assert case.num_slots == case.num_same_cache_slots == int(0.8 * FACTS.num_experts)


# -- traces of other shapes -------------------------------------------------------------------


def test_trace_of_the_models_shape_is_taken_as_it_is():
    case, trace = case_at(), drawn(NUM_LAYERS, NUM_EXPERTS, TOP_K)
    assert case_for_trace(case, trace) is case
    assert mapping_note(case, trace) == ""


@pytest.mark.parametrize("shape", [(6, 32, 4), (2, 8, 1), (4, 16, 3), (1, 2, 1)])
@pytest.mark.parametrize("share", SHARES)
def test_trace_of_another_shape_keeps_shares_bytes_and_times(shape, share):
    case = case_at(share)
    mapped = case_for_trace(case, drawn(*shape))
    num_all, top_k = shape[0] * shape[1], shape[2]
    assert mapped.shape == shape
    asked = [c.steps.num_layers * c.steps.top_k * c.steps.record_bytes for c in (case, mapped)]
    assert asked[1] == pytest.approx(asked[0], rel=1e-6)
    for now, before in (
        (mapped.num_slots, case.num_slots),
        (mapped.num_same_cache_slots, case.num_same_cache_slots),
        (mapped.draft.num_slots, case.draft.num_slots),
    ):
        assert top_k <= now <= num_all
        assert now == top_k or now / num_all == pytest.approx(
            before / case.num_experts, abs=0.5 / num_all
        )
    assert mapped.steps.token_s == case.steps.token_s
    assert mapped.draft.draft_bytes / (num_all * mapped.steps.record_bytes) == pytest.approx(
        case.draft.draft_bytes / (case.num_experts * case.steps.record_bytes)
    )
    before, now = (
        c.steps.num_layers * c.steps.top_k * c.steps.link_latency_s for c in (case, mapped)
    )
    assert now == pytest.approx(before)


def test_trace_of_another_shape_is_simulated_and_told(tmp_path):
    trace = drawn(6, 32, 4, num_tokens=32)
    path = tmp_path / "other.npz"
    np.savez(path, ids=trace.ids, seq_len=np.array(trace.lengths))
    report = simulate(
        SimulationRequest(trace_path=str(path), cases=(case_at(0.5),), policies=("lru",))
    )
    assert (report.num_layers, report.num_experts, report.top_k) == (6, 32, 4)
    (note,) = report.notes
    assert "6 layers, 4 of 32 experts" in note
    assert "planned: 4 layers, 2 of 16 experts" in note
    assert report.rows[0].memory_share == pytest.approx(0.5, abs=0.01)


def test_number_of_experts_that_a_file_does_not_say_is_the_models(tmp_path):
    trace = drawn(NUM_LAYERS, NUM_EXPERTS, TOP_K)
    path = tmp_path / "same.npz"
    ids = np.minimum(trace.ids, NUM_EXPERTS // 2 - 1)
    np.savez(path, ids=ids, seq_len=np.array(trace.lengths))
    guessed = read_token_trace(path)
    assert guessed.num_experts == NUM_EXPERTS // 2
    assert trace_of_model(guessed, case_at()).num_experts == NUM_EXPERTS
    said = replace(guessed, is_num_experts_guessed=False)
    assert trace_of_model(said, case_at()) is said
    too_many = replace(guessed, ids=guessed.ids + NUM_EXPERTS)
    assert trace_of_model(too_many, case_at()) is too_many
    one_more = replace(guessed, ids=np.repeat(guessed.ids, 2, axis=1))
    assert trace_of_model(one_more, case_at()) is one_more


def test_case_by_hand_gives_same_cache_and_same_memory():
    steps = replace(case_at().steps, num_layers=3, record_bytes=1000)
    case = case_by_hand(steps, 4, 5)
    shapes = {name: system_shape(system, case) for name, system in SYSTEMS.items()}
    same_cache, share = shapes["mixtral-offloading-sc"]
    assert (same_cache.num_slots, share) == (12, 0.25)
    assert shapes["lru"] == shapes["mixtral-offloading-sc"]
    same_memory, share = shapes["mixtral-offloading-sm"]
    assert (same_memory.num_slots, share) == (12 + 24, 0.75)
    lookahead, share = shapes["mira+lookahead"]
    assert (lookahead.num_slots, lookahead.record_bytes, share) == (24, 500, 0.75)
    assert case.draft.num_draft_tokens == 5
