"""Predicted times against what was measured, and each term when it alone changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mira_engine.config import MachineRates
from mira_engine.errors import ConfigError
from mira_engine.policy.cost_model import (
    BUILTIN_HITS,
    CacheRoom,
    CostModel,
    Expectations,
    HitCurve,
    ModelWork,
    expected_accepted,
)

DEEPSEEK = ModelWork(
    num_layers=26,
    num_experts=64,
    top_k=6,
    dense_read_bytes=2_000_000_000,
    dense_weights=1_000_000_000,
    expert_weights=3 * 2048 * 1408,
    kv_token_bytes=31_104,
    chunk_tokens=256,
)
BUILTIN = ModelWork(
    num_layers=30,
    num_experts=16,
    top_k=2,
    dense_read_bytes=216_000_000,
    dense_weights=108_000_000,
    expert_weights=3 * 576 * 512,
    kv_token_bytes=23_040,
    chunk_tokens=256,
)
CARD = MachineRates(
    name="card",
    device_memory_bytes=24 * 2**30,
    device_bytes_per_s=7e11,
    link_bytes_per_s=2.5e10,
    link_latency_s=1e-5,
    is_gpu=True,
)
ZEN4 = MachineRates(
    name="two Zen 4 cores, one thread",
    device_memory_bytes=24 * 2**30,
    device_bytes_per_s=2.0e10,
    flops_per_s=2e11,
    link_bytes_per_s=1.2e9,
    layer_overhead_s=8e-5,
)


def room_of(work: ModelWork, num_slots: int) -> CacheRoom:
    """Room without a draft: what a miss moves is what the target reads."""
    whole = work.expert_weights
    return CacheRoom(
        num_slots=num_slots,
        slot_bytes=whole,
        read_bytes=whole,
        draft_read_bytes=whole // 2,
        draft_dense_bytes=work.dense_read_bytes,
    )


def model_of(work: ModelWork = DEEPSEEK, share: float = 0.5, **changes: object) -> CostModel:
    room = room_of(work, round(share * work.num_layers * work.num_experts))
    return CostModel(**{"rates": CARD, "work": work, "room": room, **changes})


@pytest.mark.parametrize(("share", "rate"), [(8 / 64, 0.293), (16 / 64, 0.469), (32 / 64, 0.721)])
def test_hit_curve_meets_what_lru_was_measured_at(share, rate):
    assert HitCurve().at(share) == pytest.approx(rate, abs=0.01)


def test_hit_curve_ends_at_none_and_all():
    assert HitCurve().at(0) == 0
    assert HitCurve().at(1) == HitCurve().at(1.5) == 1


def test_hit_curve_bent_through_a_measured_point_meets_it_and_the_ends():
    assert BUILTIN_HITS.at(0.71) == pytest.approx(0.95)
    assert (BUILTIN_HITS.at(0), BUILTIN_HITS.at(1)) == (0, 1)
    assert HitCurve.through(0.25, 0.6).at(0.25) == pytest.approx(0.6)


@pytest.mark.parametrize(("num_tokens", "distinct"), [(1, 6), (3, 14), (5, 20), (8, 27)])
def test_distinct_experts_meet_what_was_measured(num_tokens, distinct):
    assert DEEPSEEK.distinct_experts(num_tokens) == pytest.approx(distinct, abs=0.3)


def test_expected_accepted_of_the_builtin_model_is_what_was_measured():
    assert expected_accepted(4, Expectations().acceptance) / 4 == pytest.approx(0.733, abs=0.01)
    assert expected_accepted(0, 0.9) == 0
    assert expected_accepted(8, 1.0) == 8


def test_builtin_steps_have_the_measured_ratios():
    """Measured 2026-11-30 with one thread: draft .58 of a plain step, five tokens 1.59."""
    model = model_of(
        BUILTIN, share=1.0, rates=ZEN4,
        room=replace(room_of(BUILTIN, 480), draft_dense_bytes=BUILTIN.dense_read_bytes // 2),
    )  # fmt: skip
    plain = model.plain_step().total_s
    assert plain == pytest.approx(17.1e-3, rel=0.2)
    assert model.draft_step().total_s / plain == pytest.approx(0.58, abs=0.08)
    assert model.verify(5, draft_s=0.04).total_s / plain == pytest.approx(1.59, abs=0.25)


def test_resident_experts_stall_nothing():
    model = model_of(share=1.0)
    assert model.misses(1) == model.misses(9) == 0
    assert model.plain_step().stall_s == model.prefill(2000).stall_s == 0
    assert model.verify(5, draft_s=0).moved_bytes == 0


def test_misses_are_never_more_than_a_layer_is_missing():
    model = model_of(share=0.9)
    outside = DEEPSEEK.num_layers * DEEPSEEK.num_experts * 0.1
    assert model.misses(33) <= outside + 1
    assert model_of(share=0.1).misses(33) <= 26 * DEEPSEEK.distinct_experts(33)


def test_stall_on_demand_is_bytes_and_latency_less_what_computes():
    model = model_of(share=0.25)
    misses = 26 * 6 * (1 - model.hit_rate)
    needed = misses * (1e-5 + 3 * 2048 * 1408 / 2.5e10)
    resident = (26 * 6 - misses) * 3 * 2048 * 1408 / 7e11
    assert model.plain_step().stall_s == pytest.approx(needed - resident)


def test_a_draft_hides_what_the_link_moves_meanwhile_but_not_the_unforeseen():
    model = model_of(share=0.25)
    slow, fast = model.verify(5, draft_s=10.0), model.verify(5, draft_s=0.0)
    assert slow.stall_s < fast.stall_s
    certain = replace(model, expect=Expectations(lookahead_recall=1.0))
    assert certain.verify(5, draft_s=10.0).stall_s == 0
    unforeseen = model.link_s(model.misses(5)) * (1 - 0.909)
    assert slow.stall_s == pytest.approx(
        max(0.0, unforeseen - model._resident_s(5, model.misses(5)))
    )


def test_prediction_moves_more_bytes_and_pays_where_computing_is_long():
    fast_link = model_of(share=0.5, rates=replace(CARD, link_bytes_per_s=5e10))
    slow_link = replace(fast_link, rates=replace(CARD, link_bytes_per_s=2e9))
    for model in (fast_link, slow_link):
        assert model.predictive_step().moved_bytes > model.plain_step().moved_bytes
    assert fast_link.predictive_step().total_s < fast_link.plain_step().total_s
    assert slow_link.predictive_step().total_s > slow_link.plain_step().total_s


def test_host_memory_that_is_too_small_slows_the_link_to_the_disk():
    model = model_of(share=0.25)
    whole = 26 * 64 * model.room.slot_bytes
    enough = replace(model, rates=replace(CARD, host_memory_bytes=whole))
    half = replace(model, rates=replace(CARD, host_memory_bytes=whole // 2))
    assert enough.link_s(10) == model.link_s(10)
    extra = 10 * model.room.slot_bytes * 0.5 / CARD.disk_bytes_per_s
    assert half.link_s(10) - model.link_s(10) == pytest.approx(extra)


def test_long_prompts_are_bound_by_operations_and_chunks():
    model = model_of(share=1.0)
    weights = DEEPSEEK.dense_weights + 26 * 6 * DEEPSEEK.expert_weights
    fast = replace(model, rates=replace(CARD, flops_per_s=1e12))
    computing = 2 * 512 * weights / 1e12 + 2 * 26 * CARD.layer_overhead_s
    assert fast.ttft_s(512) == pytest.approx(computing)
    partial = model_of(share=0.25)
    assert partial.prefill(257).moved_bytes > partial.prefill(256).moved_bytes


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("device_memory_bytes", 0), ("device_bytes_per_s", -1.0), ("flops_per_s", 0.0),
        ("link_bytes_per_s", float("nan")), ("link_latency_s", -1e-9),
        ("layer_overhead_s", float("inf")), ("host_memory_bytes", -5), ("disk_bytes_per_s", 0),
    ],
)  # fmt: skip
def test_rates_that_cannot_be_are_refused_by_name(field, value):
    with pytest.raises(ConfigError, match=field):
        replace(CARD, **{field: value})
