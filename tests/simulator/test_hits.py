"""Hit rates: the figures of real traces, and a bound that bounds."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mira_engine.policy.eviction import EVICTION_POLICIES, LruEviction
from mira_engine.simulator.hits import (
    belady_hits,
    policy_hits,
    popular_sets,
    split_hits,
    static_hits,
    touches,
)
from mira_engine.simulator.statistics import describe
from mira_engine.simulator.synthetic import synthetic_trace
from mira_engine.simulator.workload import TokenTrace, read_token_trace

PUBLISHED_LRU = {
    "law": {8: 0.294, 16: 0.472, 32: 0.717},
    "summary": {8: 0.292, 16: 0.466, 32: 0.725},
}
"""Measured with a program of its own, before this one was written."""


@pytest.mark.parametrize("domain", PUBLISHED_LRU)
def test_lru_on_real_traces_has_the_published_hit_rates(shared_inputs, domain):
    layers = touches(read_token_trace(shared_inputs / "traces" / f"{domain}.npz"))
    for num_slots, published in PUBLISHED_LRU[domain].items():
        found = policy_hits(layers, num_slots, LruEviction)
        assert found == pytest.approx(published, abs=0.00051)


def test_bound_on_a_real_trace_is_above_all_others(shared_inputs):
    trace = read_token_trace(shared_inputs / "traces" / "law.npz").part(0, 600)
    layers = touches(trace)
    bound = belady_hits(layers, 16)
    others = [policy_hits(layers, 16, make) for make in EVICTION_POLICIES.values()]
    others.append(static_hits(layers, popular_sets(trace, 16)))
    others.append(split_hits(layers, popular_sets(trace, 8), 16, LruEviction))
    assert max(others) < bound < 1


@given(
    st.lists(st.integers(0, 7), min_size=1, max_size=60),
    st.integers(1, 7),
    st.sets(st.integers(0, 7)),
)
def test_belady_is_never_worse_than_any_policy(sequence, num_slots, held):
    layers = [sequence]
    bound = belady_hits(layers, num_slots) + 1e-12
    for make in EVICTION_POLICIES.values():
        assert policy_hits(layers, num_slots, make) <= bound
    kept = frozenset(sorted(held)[: num_slots - 1])
    assert static_hits(layers, [sorted(held)[:num_slots]]) <= bound
    assert split_hits(layers, [kept], num_slots, LruEviction) <= bound


@given(st.lists(st.integers(0, 4), min_size=1, max_size=9), st.integers(1, 4))
def test_belady_finds_as_many_hits_as_trying_everything(sequence, num_slots):
    best = max(
        best_hits(tuple(sequence), 0, frozenset(start))
        for start in itertools.combinations(range(5), num_slots)
    )
    assert belady_hits([sequence], num_slots) == pytest.approx(best / len(sequence))


@cache
def best_hits(sequence: Sequence[int], position: int, held: frozenset[int]) -> int:
    if position == len(sequence):
        return 0
    expert = sequence[position]
    if expert in held:
        return 1 + best_hits(sequence, position + 1, held)
    choices = [held, *((held - {victim}) | {expert} for victim in held)]
    return max(best_hits(sequence, position + 1, choice) for choice in choices)


def test_split_cache_counts_its_set_and_its_rest():
    layers = [[0, 1, 0, 1, 2, 0, 2], [3, 3, 0, 3]]
    sets = [frozenset({0}), frozenset({3})]
    # Layer 0 with one slot beside {0}: 1 misses, 1 hits, 2 misses, 2 hits; layer 1: 0 misses.
    assert split_hits(layers, sets, 2, LruEviction) == pytest.approx(1 - 3 / 11)


def test_popular_set_of_one_domain_is_worse_on_another(shared_inputs):
    law, summary = (
        read_token_trace(shared_inputs / "traces" / f"{name}.npz") for name in PUBLISHED_LRU
    )
    layers = touches(law)
    own = static_hits(layers, popular_sets(law, 16))
    other = static_hits(layers, popular_sets(summary, 16))
    assert other < own - 0.1
    assert 0.25 <= other <= 0.35


def test_synthetic_routing_resembles_the_real_one():
    trace = synthetic_trace(num_layers=6, num_experts=64, top_k=6, num_tokens=3072, seed=3)
    found = describe(trace)
    assert found.top_shares == pytest.approx((0.24, 0.47, 0.73), abs=0.04)
    assert found.reuse == pytest.approx(0.29, abs=0.03)
    assert found.distinct == pytest.approx((6, 14, 20, 27), abs=1.8)
    assert found.table_recall == pytest.approx(0.475, abs=0.07)
    assert policy_hits(touches(trace), 16, LruEviction) == pytest.approx(0.46, abs=0.04)


def test_synthetic_routing_of_one_seed_is_one_routing():
    def draw(seed: int) -> TokenTrace:
        return synthetic_trace(num_layers=2, num_experts=8, top_k=2, num_tokens=40, seed=seed)

    assert (draw(1).ids == draw(1).ids).all()
    assert (draw(1).ids != draw(2).ids).any()
    assert all(len(set(row)) == 2 for row in draw(1).ids.reshape(-1, 2).tolist())


def test_description_of_a_trace_counts_by_hand():
    ids = np.array([[[0, 1]], [[0, 2]], [[3, 2]], [[3, 2]]] * 2)
    found = describe(TokenTrace(name="hand", ids=ids, lengths=[8], num_experts=4))
    assert found.reuse == pytest.approx(8 / 14)
    assert found.top_shares == pytest.approx((3 / 8, 3 / 8, 5 / 8))
    assert found.distinct == (2.0, 4.0, 4.0, 4.0)
