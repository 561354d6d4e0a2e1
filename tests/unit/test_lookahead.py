"""Lookahead counters, and the snapshots that the pattern analyzer makes of them."""

from __future__ import annotations

import torch
from mira_engine.policy.lookahead import (
    ExpertLookaheadBuffer,
    IncrementalRoutingPatternAnalyzer,
)
from mira_engine.runtime.fused import lookahead_counts
from mira_engine.types import ExpertId


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


def test_snapshot_ranks_each_layer_by_count_then_id() -> None:
    buffer = ExpertLookaheadBuffer(3, 5)
    for experts in ([3, 1], [3, 4], [1, 0]):
        buffer.record(0, experts)
    buffer.record(2, [4])
    snapshot = IncrementalRoutingPatternAnalyzer(buffer).snapshot()
    assert snapshot.rankings == (((1, 2), (3, 2), (0, 1), (4, 1)), (), ((4, 1),))
    assert snapshot.needed == {ExpertId(0, e) for e in (0, 1, 3, 4)} | {ExpertId(2, 4)}


def test_snapshot_tells_only_what_came_since_the_boundary_before() -> None:
    buffer = ExpertLookaheadBuffer(2, 4)
    analyzer = IncrementalRoutingPatternAnalyzer(buffer)
    buffer.record(1, [2])
    assert analyzer.snapshot().new == (ExpertId(1, 2),)
    buffer.record(0, [3])
    buffer.counters(1)[2] += 1  # as a kernel adds, past `record`
    later = analyzer.snapshot()
    assert later.new == (ExpertId(0, 3),)
    assert later.rankings == (((3, 1),), ((2, 2),))
    assert analyzer.snapshot().new == ()


def test_snapshot_does_not_change_with_the_counters() -> None:
    buffer = ExpertLookaheadBuffer(1, 4)
    analyzer = IncrementalRoutingPatternAnalyzer(buffer)
    buffer.record(0, [1])
    snapshot = analyzer.snapshot()
    buffer.record(0, [1, 2])
    assert snapshot.rankings == (((1, 1),),)


def test_clear_lets_no_routing_into_the_next_window() -> None:
    buffer = ExpertLookaheadBuffer(1, 4)
    analyzer = IncrementalRoutingPatternAnalyzer(buffer)
    buffer.record(0, [1])
    analyzer.snapshot()
    buffer.record(0, [2])  # the final chunk
    analyzer.clear()
    assert buffer.is_empty
    buffer.record(0, [1])
    assert analyzer.snapshot().new == (ExpertId(0, 1),), "new to this window"
