"""More of anything good never makes a predicted token slower; nothing is negative."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from mira_engine.config import MachineRates
from mira_engine.policy.cost_model import (
    CacheRoom,
    CostModel,
    Expectations,
    HitCurve,
    ModelWork,
    expected_accepted,
)

shares = st.floats(0, 1)
depths = st.integers(1, 16)


@st.composite
def models(draw: st.DrawFn) -> CostModel:
    num_experts = draw(st.integers(2, 128))
    work = ModelWork(
        num_layers=draw(st.integers(1, 60)),
        num_experts=num_experts,
        top_k=draw(st.integers(1, num_experts)),
        dense_read_bytes=draw(st.integers(1, 10**10)),
        dense_weights=draw(st.integers(1, 10**10)),
        expert_weights=draw(st.integers(1, 10**9)),
        kv_token_bytes=draw(st.integers(0, 10**6)),
        chunk_tokens=draw(st.integers(1, 4096)),
    )
    whole = draw(st.integers(2, 10**9))
    room = CacheRoom(
        num_slots=draw(st.integers(1, work.num_layers * num_experts)),
        slot_bytes=draw(st.integers(1, whole)),
        read_bytes=whole,
        draft_read_bytes=whole // 2,
        draft_dense_bytes=work.dense_read_bytes,
    )
    rates = MachineRates(
        name="m",
        device_memory_bytes=2**33,
        device_bytes_per_s=draw(st.floats(1e8, 1e13)),
        flops_per_s=draw(st.none() | st.floats(1e9, 1e15)),
        link_bytes_per_s=draw(st.floats(1e6, 1e12)),
        link_latency_s=draw(st.floats(0, 1e-2)),
        host_memory_bytes=draw(st.none() | st.integers(1, 2**40)),
    )
    expect = Expectations(
        hits=HitCurve(sharpness=draw(st.floats(0.3, 3))),
        acceptance=draw(st.floats(0, 1)),
        lookahead_recall=draw(shares),
        head_recall=draw(shares),
    )
    return CostModel(rates=rates, work=work, room=room, expect=expect)


def times(model: CostModel, k: int) -> list[float]:
    return [
        model.plain_step().total_s,
        model.predictive_step().total_s,
        model.speculative_tpot_s(k),
        model.ttft_s(700),
    ]


def assert_no_slower(better: CostModel, worse: CostModel, k: int) -> None:
    for fast, slow in zip(times(better, k), times(worse, k), strict=True):
        assert fast <= slow * (1 + 1e-9)


@given(models(), depths)
def test_times_and_bytes_are_never_negative(model, k):
    assert all(value > 0 for value in times(model, k))
    for costs in (
        model.plain_step(), model.predictive_step(), model.draft_step(), model.prefill(300),
        model.verify(k + 1, draft_s=0.01),
    ):  # fmt: skip
        assert costs.stall_s >= 0
        assert costs.moved_bytes >= 0


@given(models(), depths, st.integers(1, 4000))
def test_more_slots_make_nothing_slower(model, k, more):
    roomier = replace(model, room=replace(model.room, num_slots=model.room.num_slots + more))
    assert_no_slower(roomier, model, k)


@given(models(), depths, st.floats(1, 100))
def test_faster_machine_makes_nothing_slower(model, k, factor):
    rates = model.rates
    for field in ("link_bytes_per_s", "disk_bytes_per_s"):
        faster = replace(rates, **{field: factor * getattr(rates, field)})
        assert_no_slower(replace(model, rates=faster), model, k)
    assert_no_slower(replace(model, rates=replace(rates, link_latency_s=0.0)), model, k)


@given(models(), depths, shares)
def test_better_acceptance_and_lookahead_make_drafts_no_slower(model, k, better):
    for field in ("acceptance", "lookahead_recall"):
        value = max(better, getattr(model.expect, field))
        improved = replace(model, expect=replace(model.expect, **{field: value}))
        assert improved.speculative_tpot_s(k) <= model.speculative_tpot_s(k) * (1 + 1e-9)


@given(shares, shares, st.floats(0.2, 4))
def test_hit_rate_rises_with_slots_and_stays_a_share(one, other, sharpness):
    curve = HitCurve(sharpness=sharpness)
    low, high = sorted((one, other))
    assert 0 <= curve.at(low) <= curve.at(high) <= 1


@given(models(), st.integers(1, 200))
def test_distinct_experts_stay_between_one_tokens_and_all(model, num_tokens):
    work = model.work
    distinct = work.distinct_experts(num_tokens)
    assert work.top_k * (1 - 1e-9) <= distinct <= work.num_experts * (1 + 1e-9)
    assert distinct <= num_tokens * work.top_k * (1 + 1e-9)
    assert distinct <= work.distinct_experts(num_tokens + 1) * (1 + 1e-9)


@given(depths, shares)
def test_accepted_tokens_are_never_more_than_drafted(k, acceptance):
    assert 0 <= expected_accepted(k, acceptance) <= k
    assert expected_accepted(k, acceptance) <= expected_accepted(k + 1, acceptance)


@given(models())
def test_one_token_costs_the_same_as_a_check_of_one_without_a_draft(model):
    assert model.verify(1, draft_s=0.0).total_s == pytest.approx(model.plain_step().total_s)
