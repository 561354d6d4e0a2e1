"""Lookahead counters and the batch planned from them."""

from __future__ import annotations

import pytest
import torch
from mira_engine.policy.base import Fetch, FetchReason, Skip, SkipReason
from mira_engine.policy.eviction import LruEviction
from mira_engine.policy.lookahead import ExpertLookaheadBuffer
from mira_engine.policy.prefetch import first_boundary, plan_batch
from mira_engine.policy.residency import ResidencyTable
from mira_engine.runtime.fused import lookahead_counts
from mira_engine.types import ExpertId, Region


def _table(num_slots: int, residents: list[ExpertId]) -> ResidencyTable:
    table = ResidencyTable(num_slots, LruEviction())
    for expert in residents:
        fetch = table.admit(expert, FetchReason.MISS)
        assert fetch is not None
        table.complete(fetch.slot)
    return table


def test_ranking_orders_by_count_then_id() -> None:
    buffer = ExpertLookaheadBuffer(1, 5)
    for experts in ([3, 1], [3, 4], [1, 0]):
        buffer.record(0, experts)
    assert buffer.ranking(0) == [
        (ExpertId(0, 1), 2),
        (ExpertId(0, 3), 2),
        (ExpertId(0, 0), 1),
        (ExpertId(0, 4), 1),
    ]
    assert buffer.count(ExpertId(0, 3)) == 2


def test_clear_forgets_the_window() -> None:
    buffer = ExpertLookaheadBuffer(2, 3)
    buffer.record(1, [2])
    assert not buffer.is_empty
    buffer.clear()
    assert buffer.is_empty
    assert buffer.ranking(1) == []


def test_counters_are_the_buffers_own_memory() -> None:
    buffer = ExpertLookaheadBuffer(2, 4)
    view, others = buffer.counters(1), buffer.counters(0)
    assert (view.itemsize, view.shape) == (4, (4,))
    view[3] += 2
    buffer.record(1, [3, 0])
    assert view.tolist() == [1, 0, 0, 3]
    assert others.tolist() == [0, 0, 0, 0]
    assert buffer.ranking(1) == [(ExpertId(1, 3), 3), (ExpertId(1, 0), 1)]
    assert not buffer.is_empty
    buffer.clear()
    assert view.tolist() == [0, 0, 0, 0]
    view[2] += 1
    assert buffer.count(ExpertId(1, 2)) == 1


def test_counters_can_be_added_to_as_a_tensor() -> None:
    buffer = ExpertLookaheadBuffer(2, 4)
    counts = lookahead_counts(buffer)
    assert [(c.dtype, tuple(c.shape)) for c in counts] == [(torch.int32, (4,))] * 2
    counts[0] += torch.tensor([0, 5, 0, 1], dtype=torch.int32)
    buffer.record(0, [1])
    assert buffer.ranking(0) == [(ExpertId(0, 1), 6), (ExpertId(0, 3), 1)]
    assert buffer.ranking(1) == []
    buffer.clear()
    assert buffer.is_empty
    assert not any(bool(c.any()) for c in counts)


def test_batch_fetches_what_is_missing_layer_by_layer() -> None:
    buffer = ExpertLookaheadBuffer(2, 4)
    buffer.record(1, [0, 1])
    buffer.record(0, [2, 3])
    table = _table(8, [ExpertId(0, 3)])
    actions = plan_batch(buffer, table, num_reserved_slots=2)
    fetched = [a.expert for a in actions if isinstance(a, Fetch)]
    assert fetched == [ExpertId(0, 2), ExpertId(1, 0), ExpertId(1, 1)]
    assert Skip(ExpertId(0, 3), SkipReason.RESIDENT) in actions
    assert all(table.region(a.slot) is Region.STAGE for a in actions if isinstance(a, Fetch))


def test_batch_never_evicts_what_the_draft_named() -> None:
    buffer = ExpertLookaheadBuffer(1, 6)
    buffer.record(0, [0, 1, 2, 3])
    table = _table(3, [ExpertId(0, 0), ExpertId(0, 5), ExpertId(0, 1)])
    actions = plan_batch(buffer, table, num_reserved_slots=0)
    fetches = [a for a in actions if isinstance(a, Fetch)]
    assert [(a.expert, a.evicted) for a in fetches] == [(ExpertId(0, 2), ExpertId(0, 5))]
    assert Skip(ExpertId(0, 3), SkipReason.NO_ROOM) in actions


def test_batch_leaves_reserved_slots() -> None:
    buffer = ExpertLookaheadBuffer(1, 6)
    buffer.record(0, [0, 1, 2, 3])
    actions = plan_batch(buffer, _table(4, []), num_reserved_slots=3)
    assert sum(isinstance(a, Fetch) for a in actions) == 1


@pytest.mark.parametrize(
    ("k", "boundary"), [(1, 1), (2, 1), (4, 1), (5, 1), (7, 1), (8, 2), (12, 2), (32, 6)]
)
def test_boundary_is_a_fifth_of_k_at_least_one(k: int, boundary: int) -> None:
    assert first_boundary(k) == boundary
