"""The panels' history: it adds up to the replies, stays bounded, and tells what is new."""

from __future__ import annotations

import pytest
from app_scenes import NOTICES
from fake_engine import PLAN
from mira_app.panel_history import MAX_RECENT, MAX_SESSION, Interval, PanelHistory, age_s
from mira_engine.api import ReplyStats, ResidencySample


def stats_at(step: int) -> ReplyStats:
    """A reply of 3 tokens and two rounds every quarter of a second."""
    return ReplyStats(
        num_new_tokens=3 * step,
        elapsed_s=1.0 + 0.25 * step,
        ttft_s=1.0,
        decode_s=0.25 * step,
        num_hits=80 * step,
        num_stage_hits=30 * step,
        num_misses=20 * step,
        bytes_moved=1000 * step,
        prefill_bytes_moved=5000,
        stall_s=0.08 * step,
        prefetch_stall_s=0.02 * step,
        sample_s=0.01 * step,
        draft_s=0.05 * step,
        verify_s=0.15 * step,
        num_drafted=8 * step,
        num_accepted=5 * step,
        num_rounds=2 * step,
    )


def test_interval_splits_time_without_overlap_or_gap() -> None:
    interval = Interval.between(stats_at(1), stats_at(3))
    assert interval.seconds == pytest.approx(0.5)
    assert interval.num_bytes == 2000
    assert interval.served.shares == (0.5, 0.3, 0.2)
    assert interval.time.parts == pytest.approx((0.04, 0.12, 0.10, 0.12, 0.02, 0.10))
    assert interval.time.total_s == pytest.approx(0.5)
    assert sum(interval.ms_per_token or ()) == pytest.approx(500 / 6)
    assert interval.accepted_per_round == 2.5
    assert interval.drafted_per_round == 4
    assert interval.link_bytes_per_s == 4000


def test_interval_with_a_pass_under_way_counts_no_time_twice() -> None:
    before = stats_at(2)
    during = ReplyStats(elapsed_s=2.0, decode_s=before.decode_s, stall_s=before.stall_s + 0.2)
    interval = Interval.between(before, during)
    assert interval.time.missed_s == pytest.approx(0.2)
    assert interval.time.verify_s == interval.time.other_s == 0


def test_interval_of_nothing_has_no_rates() -> None:
    interval = Interval.between(ReplyStats(), ReplyStats())
    assert interval == Interval()
    assert interval.served.shares is None
    assert interval.ms_per_token is None
    assert interval.accepted_per_round is None
    assert interval.tokens_per_s == interval.link_bytes_per_s == 0


def test_history_adds_up_to_the_replies() -> None:
    history = PanelHistory()
    for _ in range(3):
        history.snapshot(ReplyStats())
        for step in range(1, 200):
            state = history.snapshot(stats_at(step))
    whole = Interval()
    for interval in state.session:
        whole += interval
    assert whole.num_tokens == 3 * 3 * 199
    assert whole.served.num_missed == 3 * 20 * 199
    assert whole.num_bytes == 3 * (1000 * 199 + 5000)
    assert whole.seconds == pytest.approx(3 * age_s(stats_at(199)))
    assert whole.time.total_s == pytest.approx(3 * 0.25 * 199)
    assert state.reply.num_tokens == 3 * 199


def test_history_stays_bounded_over_a_long_session() -> None:
    history = PanelHistory()
    for step in range(1, 20 * MAX_SESSION):
        state = history.snapshot(stats_at(step))
        assert len(state.recent) <= MAX_RECENT
        assert len(state.session) <= MAX_SESSION
    assert len(state.session) > MAX_SESSION // 2
    lengths = [interval.num_tokens for interval in state.session]
    assert max(lengths[:-1]) == min(lengths[:-1])


def test_history_tells_a_new_reply_by_its_age() -> None:
    history = PanelHistory()
    history.snapshot(stats_at(9))
    state = history.snapshot(stats_at(2))
    assert state.recent[-1] == Interval.between(ReplyStats(), stats_at(2))


def test_snapshot_of_nothing_new_is_the_same_object() -> None:
    history, residency = PanelHistory(), ResidencySample(request_id="r", regions=(), heat=())
    facts = {"plan": PLAN, "notices": NOTICES, "link_bytes_per_s": 1e9, "residency": residency}
    first = history.snapshot(stats_at(1), **facts)
    assert history.snapshot(stats_at(1), **facts) is first
    assert history.snapshot(stats_at(2), **facts) is not first


def test_recent_values_leave_out_intervals_without_the_figure() -> None:
    history = PanelHistory()
    history.snapshot(ReplyStats(elapsed_s=0.5))
    state = history.snapshot(stats_at(1))
    assert len(state.recent) == 2
    assert state.recent_values(lambda i: i.accepted_per_round) == [2.5]
