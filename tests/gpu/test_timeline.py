"""Spans in lanes: how much of the copies is hidden, and how that is drawn."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton has no wheel for this system")

import torch
from fake_queues import FakeQueues
from gpu.timeline import RecordedQueues, Recorder, Span, common, draw, hidden_share, merged
from mira_engine.runtime.streams import Lane


def span(lane: str, start: float, end: float) -> Span:
    return Span(lane, "work", start, end)


def test_merged_spans_that_touch_are_one() -> None:
    spans = [span("demand", 5, 6), span("demand", 0, 2), span("ahead", 1, 3), span("ahead", 3, 4)]

    assert merged(spans) == [(0, 4), (5, 6)]


def test_common_of_intervals_is_where_both_are() -> None:
    assert common([(0, 4), (6, 8)], [(1, 2), (3, 7), (8, 9)]) == [(1, 2), (3, 4), (6, 7)]


def test_hidden_share_counts_the_copies_time_under_computing() -> None:
    spans = [span("compute", 0, 3), span("demand", 2, 6), span("ahead", 1, 3)]

    # Copies go on from 1 to 6, computing until 3.
    assert hidden_share(spans) == pytest.approx(2 / 5)


def test_hidden_share_without_copies_is_unknown() -> None:
    assert hidden_share([span("compute", 0, 3)]) is None


def test_drawing_has_a_line_for_each_lane_and_marks_busy_columns() -> None:
    spans = [span("compute", 0, 5), span("demand", 5, 8), span("demand", 9.2, 10)]

    head, compute, demand, ahead = draw(spans, width=10)

    assert head.endswith("10 calls, no times")
    assert compute == "compute |#####.....|  50%"
    assert demand == "demand  |.....###.#|  38%"
    assert ahead == "ahead   |..........|   0%"


def test_recorder_notes_copies_only_while_it_is_on() -> None:
    queues = FakeQueues()
    recorder = Recorder(queues)
    recorded = RecordedQueues(queues, recorder)
    target, source = torch.zeros(4), torch.ones(4)

    recorded.copy(target, source, Lane.DEMAND)
    recorder.start()
    recorded.copy(target, source, Lane.DEMAND)
    begun = recorder.mark(Lane.COMPUTE)
    recorder.add(Lane.COMPUTE, "experts", begun)
    spans = recorder.stop()

    assert [(s.lane, s.what) for s in spans] == [("demand", "copy"), ("compute", "experts")]
    assert spans[0].start < spans[0].end < spans[1].start < spans[1].end
    assert target.equal(source)
