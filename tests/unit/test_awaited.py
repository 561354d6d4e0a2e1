"""What a pass waits for where link and processor share its misses, on average over layers."""

from __future__ import annotations

import itertools
import math
import random
from dataclasses import replace

import pytest
from mira_engine.config import MachineRates
from mira_engine.policy import cost_model
from mira_engine.policy.awaited import AwaitedMisses, divided
from mira_engine.policy.cost_model import CacheRoom, CostModel, ModelWork
from mira_engine.policy.host_misses import HostSetup, num_on_host

RECORD_S = 1e-3
WORK = ModelWork(
    num_layers=26,
    num_experts=64,
    top_k=6,
    dense_read_bytes=2_000_000_000,
    dense_weights=1_000_000_000,
    expert_weights=3 * 2048 * 1408,
    kv_token_bytes=31_104,
    chunk_tokens=256,
)
CARD = MachineRates(
    name="card", device_memory_bytes=24 * 2**30, device_bytes_per_s=7e11,
    link_bytes_per_s=WORK.expert_weights / RECORD_S, is_gpu=True,
)  # fmt: skip


def host_of(ratio: float, num_held: int = 26 * 64) -> HostSetup:
    """A host that takes so many times as long as the link."""
    return HostSetup(
        expert_s=ratio * RECORD_S,
        token_s=0.1 * ratio * RECORD_S,
        record_s=RECORD_S,
        num_held=num_held,
    )


def model_of(share: float, host: HostSetup | None) -> CostModel:
    whole = WORK.expert_weights
    room = CacheRoom(
        num_slots=round(share * 26 * 64),
        slot_bytes=whole,
        read_bytes=whole,
        draft_read_bytes=whole // 2,
        draft_dense_bytes=WORK.dense_read_bytes,
    )
    return CostModel(rates=CARD, work=WORK, room=room, host=host)


def wait_of(
    num_misses: float, ratio: float, *, held_share: float = 1.0, **changes: float
) -> AwaitedMisses:
    given = {"num_layers": 26, "num_choices": 6, "tokens_per_expert": 1.0} | changes
    return divided(
        num_misses, host_of(ratio), held_share=held_share, link_record_s=RECORD_S, **given
    )


@pytest.mark.parametrize("ratio", [0.25, 0.5, 1.0, 2.0])
def test_division_is_the_mean_of_what_the_driver_does_layer_by_layer(ratio: float) -> None:
    num_misses, drawn = 52.0, random.Random(3)
    waits, on_host, num_layers = 0.0, 0, 20_000
    for _ in range(num_layers):
        number = sum(drawn.random() < num_misses / (26 * 6) for _ in range(6))
        taken = num_on_host([ratio * RECORD_S] * number, RECORD_S)
        waits += max(taken * ratio * RECORD_S, (number - taken) * RECORD_S)
        on_host += taken

    found = wait_of(num_misses, ratio)

    assert found.wait_s == pytest.approx(26 * waits / num_layers, rel=0.03)
    assert found.num_on_host == pytest.approx(26 * on_host / num_layers, rel=0.03)
    assert found.num_on_host + found.num_on_link == pytest.approx(num_misses)


def test_host_that_saves_nothing_leaves_the_time_of_the_copies() -> None:
    found = wait_of(52.0, 50.0)
    assert found.num_on_host == 0
    assert found.wait_s == pytest.approx(52.0 * RECORD_S)
    assert wait_of(0.0, 0.5) == AwaitedMisses(wait_s=0.0, num_on_link=0.0)


def test_more_tokens_of_an_expert_and_fewer_held_leave_less_to_the_host() -> None:
    usual = wait_of(52.0, 0.9)
    for other in (
        wait_of(52.0, 0.9, tokens_per_expert=8.0),
        wait_of(52.0, 0.9, held_share=0.5),
    ):
        assert other.num_on_host < usual.num_on_host
        assert other.wait_s > usual.wait_s
    assert wait_of(52.0, 0.9, held_share=0.0).num_on_host == 0


@pytest.mark.parametrize("share", [0.0, 0.1, 0.5, 0.77, 1.0])
def test_misses_that_are_held_are_their_share_on_average(share: float) -> None:
    found = wait_of(52.0, 1e-6, held_share=share)
    assert found.num_on_host == pytest.approx(share * 52.0, abs=1e-3)


def test_every_miss_of_a_layer_that_is_certain_is_divided_once() -> None:
    found = wait_of(26 * 6.0, 1.0)
    assert found.wait_s == pytest.approx(26 * 3 * RECORD_S)
    assert found.num_on_host == pytest.approx(26 * 3)


# -- in a plan's predictions ---------------------------------------------------------------


def test_prediction_lies_where_the_driver_on_a_virtual_clock_does() -> None:
    """Real routing gave .62 to .71 for a host as fast as the link, .44 to .50 for twice as fast."""
    for share, (ratio, (least, most)) in itertools.product(
        (0.25, 0.5), ((1.0, (0.55, 0.8)), (0.5, (0.38, 0.6)))
    ):
        alone, both = (model_of(share, host).plain_step() for host in (None, host_of(ratio)))
        assert least < both.total_s / alone.total_s < most, (share, ratio)


@pytest.mark.parametrize("share", [0.05, 0.25, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("ratio", [0.1, 0.5, 1.0, 3.0, 100.0])
def test_host_makes_no_step_slower_and_moves_no_more(share: float, ratio: float) -> None:
    alone, both = model_of(share, None), model_of(share, host_of(ratio))
    steps = [
        (model.plain_step(), model.predictive_step(), model.verify(5, draft_s=0.01))
        for model in (alone, both)
    ]
    for without, helped in zip(*steps, strict=True):
        assert helped.total_s <= without.total_s * (1 + 1e-6)
        assert helped.moved_bytes <= without.moved_bytes * (1 + 1e-6)
    for k in (1, 4, 16):
        assert both.speculative_tpot_s(k) <= alone.speculative_tpot_s(k) * (1 + 1e-6)


def test_what_a_draft_has_fetched_is_not_computed_again() -> None:
    model = model_of(0.25, host_of(0.5))
    sure = replace(model, expect=replace(model.expect, lookahead_recall=1.0))
    assert sure.verify(5, draft_s=10.0).stall_s == 0
    fetched = sure.verify(5, draft_s=10.0).moved_bytes / sure.room.slot_bytes
    assert fetched == pytest.approx(sure.misses(5))


def test_prompts_are_the_cards() -> None:
    alone, both = model_of(0.25, None), model_of(0.25, host_of(0.1))
    assert both.ttft_s(512) == alone.ttft_s(512)


def test_share_of_the_host_is_that_of_the_misses_that_the_step_waits_for() -> None:
    assert model_of(0.25, None).plain_step().host_share == 0
    assert model_of(1.0, host_of(0.1)).plain_step().host_share == 0
    model = model_of(0.25, host_of(1.0))
    found = model.plain_step().host_share
    assert 0.2 < found < 0.5
    nearly_all = model_of(0.25, host_of(1e-6)).plain_step().host_share
    assert math.isclose(nearly_all, 1.0, rel_tol=1e-3)
    sure = replace(model, expect=replace(model.expect, lookahead_recall=1.0))
    assert sure.verify(5, draft_s=10.0).host_share == 0, "the link has brought everything before"
    assert model.verify(5, draft_s=0.0).host_share > 0


@pytest.mark.parametrize(("num_experts", "top_k"), [(384, 8), (16, 2), (60, 4), (128, 8)])
def test_layer_of_one_token_asks_for_top_k_experts(
    num_experts: int, top_k: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[int] = []

    def note(num_misses: float, host: HostSetup, *, num_choices: int, **others: object):
        asked.append(num_choices)
        return divided(num_misses, host, num_choices=num_choices, **others)  # type: ignore[arg-type]

    monkeypatch.setattr(cost_model, "divided", note)
    model = model_of(0.25, host_of(1.0))
    work = replace(model.work, num_experts=num_experts, top_k=top_k)
    replace(model, work=work).plain_step()
    assert asked == [top_k]
