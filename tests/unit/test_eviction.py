"""Who is given up first: by counts that fade, by recency, and prefetched experts last."""

from __future__ import annotations

import pytest
from mira_engine.policy.base import FetchReason
from mira_engine.policy.eviction import (
    EVICTION_POLICIES,
    EvictionPolicy,
    LfruEviction,
    LfuEviction,
    LruEviction,
    preferred_eviction,
    preferred_stage_order,
)
from mira_engine.policy.residency import ResidencyTable
from mira_engine.types import Eviction, ExpertId

A, B, C, D = (ExpertId(0, expert) for expert in range(4))


def _admitted(policy: EvictionPolicy, *experts: ExpertId) -> EvictionPolicy:
    for expert in experts:
        policy.on_admit(expert)
    return policy


def _use(policy: EvictionPolicy, *experts: ExpertId) -> None:
    for expert in experts:
        policy.on_use(expert)


def test_lfu_offers_the_least_often_used_first() -> None:
    policy = _admitted(LfuEviction(), A, B, C)
    _use(policy, A, A, A, B, C, C)
    assert list(policy.victims()) == [B, C, A]


def test_lfu_among_equals_offers_the_least_recently_used_first() -> None:
    policy = _admitted(LfuEviction(), A, B, C, D)
    assert list(policy.victims()) == [A, B, C, D]
    _use(policy, C, A, B, D)
    assert list(policy.victims()) == [C, A, B, D]
    _use(policy, D, A)
    assert list(policy.victims()) == [C, B, D, A]


def test_lfu_counts_survive_a_removal() -> None:
    policy = _admitted(LfuEviction(), A, B)
    _use(policy, A, A, B)
    policy.on_remove(A)
    assert list(policy.victims()) == [B]
    _admitted(policy, C, A)
    assert list(policy.victims()) == [C, B, A]


def test_lfu_fading_halves_counts_and_keeps_residents() -> None:
    policy = _admitted(LfuEviction(fade_after=10), A, B, C, D)
    _use(policy, A, A, A, A, A, A, B, B, C)
    before = list(policy.victims())
    assert before == [D, C, B, A]
    policy.on_use(B)  # The tenth use: 6, 3, 1, 0 become 3, 1, 0, 0.
    assert list(policy.victims()) == [D, C, B, A]
    policy.on_use(C)  # As often as B, whose three uses are one now, and later.
    assert list(policy.victims()) == [D, B, C, A]
    _use(policy, C, C, C)  # Four, more than A's three.
    assert list(policy.victims()) == [D, B, A, C]


def test_lfu_fading_halves_the_counts_of_those_that_are_gone() -> None:
    policy = _admitted(LfuEviction(fade_after=6), A, B)
    _use(policy, A, A, A, A)
    policy.on_remove(A)
    _use(policy, B, B)  # The sixth: A has two left, B one.
    _use(policy, B, B)
    _admitted(policy, A)
    assert list(policy.victims()) == [A, B]


def test_lfu_fades_again_and_again_without_growing() -> None:
    policy = LfuEviction(fade_after=8)
    for expert in range(200):
        one = ExpertId(1, expert)
        policy.on_admit(one)
        policy.on_use(one)
        policy.on_remove(one)
    assert len(policy._counts) <= 16
    assert list(policy.victims()) == []
    assert not policy._by_count


def test_lru_offers_the_least_recently_used_first() -> None:
    policy = _admitted(LruEviction(), A, B, C)
    _use(policy, A, A, B)
    assert list(policy.victims()) == [C, A, B]
    policy.on_remove(C)
    _admitted(policy, C)
    assert list(policy.victims()) == [A, B, C]


def test_every_eviction_has_a_policy() -> None:
    assert set(EVICTION_POLICIES) == set(Eviction)
    assert isinstance(EVICTION_POLICIES[Eviction.LFU](), LfuEviction)
    assert isinstance(EVICTION_POLICIES[Eviction.LRU](), LruEviction)
    assert isinstance(EVICTION_POLICIES[Eviction.LFRU](), LfruEviction)


@pytest.mark.parametrize(
    ("k", "expected"), [(0, Eviction.LRU), (1, Eviction.LFU), (4, Eviction.LFU)]
)
def test_drafting_prefers_counts(k: int, expected: Eviction) -> None:
    assert preferred_eviction(k) is expected


def _filled(policy: EvictionPolicy) -> ResidencyTable:
    """Three slots: A by a prefetch and unused, then B and C by misses and used."""
    table = ResidencyTable(3, policy)
    for expert, reason in (
        (A, FetchReason.LOOKAHEAD),
        (B, FetchReason.MISS),
        (C, FetchReason.MISS),
    ):
        fetch = table.admit(expert, reason)
        assert fetch is not None
        table.complete(fetch.slot)
    for expert in (B, C):
        assert not table.use(expert)
    assert next(policy.victims()) == A
    return table


def _evicted(table: ResidencyTable, expert: ExpertId, **options: object) -> ExpertId | None:
    fetch = table.admit(expert, FetchReason.MISS, **options)
    assert fetch is not None
    table.complete(fetch.slot)
    return fetch.evicted


@pytest.fixture(params=list(Eviction))
def policy(request: pytest.FixtureRequest) -> EvictionPolicy:
    return EVICTION_POLICIES[request.param]()


def test_prefetched_unused_expert_goes_last(policy: EvictionPolicy) -> None:
    table = _filled(policy)
    table.pin(C)
    assert _evicted(table, D) == B, "by the policy's order it would be A"
    table.pin(D)
    assert _evicted(table, B) == A, "nobody else may go"


def test_prefetched_expert_that_was_used_has_no_claim(policy: EvictionPolicy) -> None:
    table = _filled(policy)
    assert table.use(A)
    assert not table.use(A)
    for expert in (B, C, B, C):
        table.use(expert)
    assert _evicted(table, D) == A


def test_end_of_the_window_ends_the_claim(policy: EvictionPolicy) -> None:
    table = _filled(policy)
    table.end_window()
    assert not table.use(A), "a later use is not the prefetch's merit"
    for expert in (B, C, B, C):
        table.use(expert)
    assert _evicted(table, D) == A


def test_slot_of_a_prefetch_makes_no_claim_for_the_next_tenant(policy: EvictionPolicy) -> None:
    table = _filled(policy)
    table.evict(A)
    assert _evicted(table, D) is None
    assert not table.use(D)


# -- misses count; frequency and recency together ------------------------------------------


def test_lfu_counts_a_miss_as_a_use() -> None:
    policy = LfuEviction()
    table = ResidencyTable(2, policy)
    for _ in range(3):
        for expert in (A, B):
            fetch = table.admit(expert, FetchReason.MISS)
            assert fetch is not None
            table.complete(fetch.slot)
        table.evict(A)
        table.evict(B)
    assert policy._counts == {A: 3, B: 3}


def test_lfu_does_not_count_a_prefetch_as_a_use() -> None:
    policy = LfuEviction()
    assert ResidencyTable(2, policy).admit(A, FetchReason.LOOKAHEAD) is not None
    assert policy._counts == {A: 0}


def test_lfu_misses_fade_counts_too() -> None:
    policy = LfuEviction(fade_after=4)
    for _ in range(4):
        policy.on_miss(A)
    assert policy._counts == {A: 2}


def test_lfru_keeps_what_is_used_often_over_what_is_used_last() -> None:
    policy = _admitted(LfruEviction(half_life=100), A, B, C)
    _use(policy, A, A, A, A, B, C)
    assert list(policy.victims()) == [B, C, A]


def test_lfru_forgets_uses_of_long_ago() -> None:
    policy = _admitted(LfruEviction(half_life=2), A, B, C)
    _use(policy, A, A, A, A, *[C] * 12, B)
    assert list(policy.victims()) == [A, B, C]


def test_lfru_weight_outlives_a_removal() -> None:
    policy = _admitted(LfruEviction(half_life=100), A, B)
    _use(policy, A, A, A, B)
    policy.on_remove(A)
    assert list(policy.victims()) == [B]
    _admitted(policy, A)
    assert list(policy.victims()) == [B, A]


def test_lfru_does_not_grow_when_experts_come_and_go() -> None:
    policy = _admitted(LfruEviction(), A, B)
    for _ in range(50):
        policy.on_remove(A)
        policy.on_admit(A)
    assert sorted(policy.victims()) == [A, B]
    assert len(policy._heap) == 2


def test_lfru_orders_as_the_sum_of_faded_uses_does() -> None:
    half_life = 5
    policy = LfruEviction(half_life)
    experts = [ExpertId(layer, number) for layer in range(3) for number in range(7)]
    uses: dict[ExpertId, list[int]] = {expert: [] for expert in experts}
    for now in range(400):
        expert = experts[(now * now + 3 * now) % len(experts)]
        if not uses[expert]:
            policy.on_miss(expert)
            policy.on_admit(expert)
        else:
            policy.on_use(expert)
        uses[expert].append(now)
        if now % 7 == 0:
            weights = {
                e: sum(2.0 ** ((then - now) / half_life) for then in times)
                for e, times in uses.items()
                if times
            }
            got = [weights[e] for e in policy.victims()]
            assert len(got) == len(weights)
            assert got == sorted(got) or got == pytest.approx(sorted(got), rel=1e-9)


def test_stage_below_what_a_pass_uses_does_not_go_by_recency() -> None:
    assert preferred_stage_order(155, 156) is Eviction.LFRU
    assert preferred_stage_order(156, 156) is Eviction.LRU
