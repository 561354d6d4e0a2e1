"""HOT and STAGE: who is declined, reclaimed or kept, and what finding a victim costs."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from mira_engine.policy.base import (
    Decline,
    DeclineReason,
    Evict,
    EvictReason,
    Fetch,
    FetchReason,
    Promote,
    PromoteReason,
)
from mira_engine.policy.eviction import LfuEviction, LruEviction
from mira_engine.policy.residency import ResidencyTable
from mira_engine.policy.slot_table import ResidencyError
from mira_engine.types import CacheMode, ExpertId, Region, ServedBy

A, B, C, D, E, F = (ExpertId(0, expert) for expert in range(6))
NEXT = ExpertId(2, 0)


def _load(table: ResidencyTable, expert: ExpertId, reason: FetchReason) -> Fetch:
    fetch = table.admit(expert, reason)
    assert fetch is not None
    table.complete(fetch.slot)
    return fetch


def _table(mode: CacheMode = CacheMode.LARGE, num_hot: int = 2) -> ResidencyTable:
    """Six slots: HOT, STAGE of two or more, two for misses."""
    return ResidencyTable(
        6, LruEviction(), num_hot_slots=num_hot, num_stage_slots=4 - num_hot, mode=mode
    )


@pytest.mark.parametrize(("num_hot", "num_stage"), [(5, None), (3, 2), (-1, 2), (2, -1)])
def test_regions_that_leave_too_few_slots_for_misses_are_refused(
    num_hot: int, num_stage: int | None
) -> None:
    with pytest.raises(ResidencyError):
        ResidencyTable(6, LruEviction(), num_hot_slots=num_hot, num_stage_slots=num_stage)


def test_served_by_tells_the_region_or_a_miss() -> None:
    table = _table()
    _load(table, A, FetchReason.REBALANCE)
    _load(table, B, FetchReason.MISS)
    assert [table.served_by(e) for e in (A, B, C)] == [
        ServedBy.HOT,
        ServedBy.STAGE,
        ServedBy.MISS,
    ]


def test_full_stage_declines_a_prediction_and_still_serves_misses() -> None:
    table = _table(CacheMode.SMALL)
    for expert in (A, B):
        assert isinstance(table.stage(expert), Fetch)
    assert table.stage(C) == Decline(C, DeclineReason.STAGE_FULL)
    for expert in (D, E):
        fetch = table.admit(expert, FetchReason.MISS)
        assert fetch is not None
        assert fetch.evicted is None
    assert table.admit(F, FetchReason.MISS) is None, "both transient slots are loading"


def test_transient_slot_serves_the_next_miss_when_its_tokens_are_done() -> None:
    table = _table(CacheMode.SMALL)
    for expert in (A, B):
        assert isinstance(table.stage(expert), Fetch)
    for expert in (D, E):
        _load(table, expert, FetchReason.MISS)
        table.pin(expert)
    table.unpin(D)
    assert _load(table, F, FetchReason.MISS).evicted == D


def test_small_mode_reclaims_the_entries_of_a_layer_that_is_done() -> None:
    table = _table(CacheMode.SMALL, num_hot=0)
    slot = _load(table, A, FetchReason.MISS).slot
    _load(table, NEXT, FetchReason.LOOKAHEAD)
    assert table.leave_layer(0) == [Evict(A, slot, EvictReason.LAYER_BEHIND)]
    assert [e for e, _ in table.residents()] == [NEXT]


def test_small_mode_keeps_what_was_used_while_hot_has_room_and_reclaims_the_rest() -> None:
    table = _table(CacheMode.SMALL, num_hot=1)
    slots = [_load(table, e, FetchReason.MISS).slot for e in (A, B)]
    unused = _load(table, C, FetchReason.LOOKAHEAD).slot
    assert table.leave_layer(0) == [
        Promote(A, slots[0], PromoteReason.ROOM),
        Evict(B, slots[1], EvictReason.LAYER_BEHIND),
        Evict(C, unused, EvictReason.LAYER_BEHIND),
    ]


def test_small_mode_entry_that_lands_late_has_no_claim() -> None:
    table = _table(CacheMode.SMALL, num_hot=3)
    late = table.stage(A)
    assert isinstance(late, Fetch)
    assert table.leave_layer(0) == []
    table.complete(late.slot)
    fetch = table.stage(NEXT)
    assert isinstance(fetch, Fetch)
    assert fetch.evicted == A


def test_large_mode_keeps_entries_until_their_slot_is_wanted() -> None:
    table = _table(num_hot=0)
    for expert in (A, B, C, D, E, F):
        _load(table, expert, FetchReason.MISS)
    assert table.leave_layer(0) == []
    assert table.num_used == 6
    assert _load(table, NEXT, FetchReason.MISS).evicted == A


def test_misses_never_take_a_hot_slot() -> None:
    table = _table()
    for expert in (A, B):
        _load(table, expert, FetchReason.REBALANCE)
    for number in range(20):
        evicted = _load(table, ExpertId(1, number), FetchReason.MISS).evicted
        assert evicted not in (A, B)
    assert table.is_ready(A)
    assert table.is_ready(B)


def test_prefill_keeps_hot_from_demotion_and_eviction() -> None:
    table = _table()
    _load(table, A, FetchReason.REBALANCE)
    table.begin_prefill()
    for forbidden in (table.demote, table.evict):
        with pytest.raises(ResidencyError):
            forbidden(A)
    table.end_prefill()
    table.demote(A)
    table.evict(A)


def test_full_hot_takes_nobody() -> None:
    table = _table(num_hot=1)
    _load(table, A, FetchReason.REBALANCE)
    _load(table, B, FetchReason.MISS)
    assert table.promote(B) is None
    assert table.admit(C, FetchReason.REBALANCE) is None
    assert table.demote(A).slot == table.slot_of(A)
    assert table.promote(B) is not None


def test_one_pool_has_no_regions_to_change() -> None:
    table = ResidencyTable(2, LruEviction())
    _load(table, A, FetchReason.MISS)
    assert table.leave_layer(0) == []
    with pytest.raises(ResidencyError):
        table.demote(A)


def test_hot_uses_count_for_the_order_of_stage() -> None:
    table = ResidencyTable(4, LfuEviction(), num_hot_slots=1)
    _load(table, A, FetchReason.REBALANCE)
    for _ in range(5):
        table.use(A)
    table.demote(A)
    for expert in (B, C, D):
        _load(table, expert, FetchReason.MISS)
    assert _load(table, E, FetchReason.MISS).evicted == B


class _CountingLru(LruEviction):
    """Counts the experts it offers."""

    num_offered = 0

    def victims(self) -> Iterator[ExpertId]:
        for expert in super().victims():
            self.num_offered += 1
            yield expert


def _big_table(order: LruEviction) -> ResidencyTable:
    """3072 of 48 x 128 experts resident: half HOT, the rest STAGE entries that can go."""
    table = ResidencyTable(3072, order, num_hot_slots=1536)
    for layer in range(48):
        for number in range(64):
            reason = FetchReason.MISS if number % 2 else FetchReason.REBALANCE
            _load(table, ExpertId(layer, number), reason)
    assert table.num_used == 3072
    return table


def test_victim_of_a_miss_is_found_at_once_among_thousands() -> None:
    order = _CountingLru()
    table = _big_table(order)
    for layer in range(48):
        chosen = [ExpertId(layer, number) for number in range(64)]
        pinned = [expert for expert in chosen if table.slot_of(expert) is not None]
        for expert in pinned:
            table.pin(expert)
            table.use(expert)
        for number in range(64, 96):
            _load(table, ExpertId(layer, number), FetchReason.MISS)
        for expert in pinned:
            table.unpin(expert)
    assert order.num_offered == 48 * 32, "one for each miss"


def test_batch_passes_over_each_protected_expert_once() -> None:
    order = _CountingLru()
    table = _big_table(order)
    protected = frozenset(ExpertId(layer, n) for layer in range(24) for n in range(64))
    num_staged = 0
    for layer in range(48):
        for number in range(64, 96):
            fetch = table.stage(ExpertId(layer, number), protected=protected)
            if isinstance(fetch, Fetch):
                num_staged += 1
                assert fetch.evicted not in protected
    num_protected = 24 * 32  # Those in STAGE: HOT is not passed over.
    assert num_staged == 1536 - num_protected - 2
    assert order.num_offered == num_protected + num_staged


def test_labels_are_not_places() -> None:
    table = _table()
    slot = _load(table, A, FetchReason.MISS).slot
    assert table.region(slot) is Region.STAGE
    assert table.promote(A) == Promote(A, slot, PromoteReason.DEMAND)
    assert table.region(slot) is Region.HOT
    assert table.slot_of(A) == slot
