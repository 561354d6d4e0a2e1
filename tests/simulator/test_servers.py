"""The virtual clock and the link, by hand."""

from __future__ import annotations

import math

import pytest
from mira_engine.errors import ConfigError
from mira_engine.simulator.clock import VirtualClock
from mira_engine.simulator.servers import LinkServer, MachineCosts
from mira_engine.types import ExpertId

A, B, C, D = (ExpertId(0, expert) for expert in range(4))


def make_link(*, latency_s: float = 0.0, num_readers: int = 1) -> LinkServer:
    """A record takes one second."""
    return LinkServer(
        bytes_per_s=100, latency_s=latency_s, num_readers=num_readers, record_bytes=100
    )


def landings(link: LinkServer) -> list[tuple[ExpertId, float]]:
    """Lets everything land."""
    found = []
    now_s = 0.0
    while not math.isinf(link.next_landing_s):
        now_s = max(now_s, link.next_landing_s)
        found += [(item.expert, item.at_s) for item in link.poll(now_s)]
    return found


def test_clock_goes_forward_only():
    clock = VirtualClock()
    clock.advance(1.5)
    assert clock.advance_to(2.0) == 0.5
    assert clock.advance_to(1.0) == 0.0
    assert clock.now_s == 2.0
    with pytest.raises(ValueError, match="back"):
        clock.advance(-1)


def test_link_moves_records_one_after_another():
    link = make_link()
    for slot, expert in enumerate((A, B)):
        link.submit(expert, slot, is_demand=True, now_s=0.0)
    assert landings(link) == [(A, 1.0), (B, 2.0)]
    assert link.busy_s == 2.0


def test_link_that_was_idle_begins_when_asked():
    link = make_link()
    link.submit(A, 0, is_demand=True, now_s=5.0)
    assert link.poll(5.9) == []
    assert landings(link) == [(A, 6.0)]


def test_link_serves_demand_before_prefetch_but_does_not_stop_what_has_begun():
    link = make_link()
    link.submit(A, 0, is_demand=False, now_s=0.0)
    link.submit(B, 1, is_demand=False, now_s=0.0)
    link.submit(C, 2, is_demand=True, now_s=0.5)
    assert landings(link) == [(A, 1.0), (C, 2.0), (B, 3.0)]


def test_link_with_two_readers_has_begun_two_records():
    link = make_link(num_readers=2)
    link.submit(A, 0, is_demand=False, now_s=0.0)
    link.submit(B, 1, is_demand=False, now_s=0.0)
    link.submit(C, 2, is_demand=True, now_s=0.5)
    assert landings(link) == [(A, 1.0), (B, 2.0), (C, 3.0)]


def test_link_takes_a_promoted_prefetch_as_demand():
    link = make_link()
    for slot, expert in enumerate((A, B, C)):
        link.submit(expert, slot, is_demand=False, now_s=0.0)
    link.submit(D, 3, is_demand=True, now_s=0.2)
    link.promote(C, 0.3)
    link.promote(A, 0.3)  # It has begun: nothing changes.
    assert landings(link) == [(A, 1.0), (D, 2.0), (C, 3.0), (B, 4.0)]


def test_link_latency_overlaps_only_with_another_readers_record():
    one, two = make_link(latency_s=0.5), make_link(latency_s=0.5, num_readers=2)
    for link in (one, two):
        for slot, expert in enumerate((A, B)):
            link.submit(expert, slot, is_demand=True, now_s=0.0)
    assert landings(one) == [(A, 1.5), (B, 3.0)]
    assert landings(two) == [(A, 1.5), (B, 2.5)]


def test_machine_without_a_link_is_refused():
    with pytest.raises(ConfigError, match="link rate"):
        MachineCosts(link_bytes_per_s=0)
    with pytest.raises(ConfigError, match="readers"):
        MachineCosts(link_bytes_per_s=1, num_readers=0)
