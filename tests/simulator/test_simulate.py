"""Whole simulations: time by hand, determinism, and each system's own rules."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from mira_engine.errors import ConfigError
from mira_engine.policy.driver import ExpertCacheDriver
from mira_engine.policy.replay import DecisionLog, replay
from mira_engine.simulator.predictions import ActivationTraces, CountTable, NextLayerGuess
from mira_engine.simulator.servers import MachineCosts
from mira_engine.simulator.simulate import CacheShape, SimulatedRun, simulate
from mira_engine.simulator.sweep import most_popular
from mira_engine.simulator.synthetic import synthetic_trace
from mira_engine.simulator.systems import BeladyEviction, StaticEviction, System, all_systems
from mira_engine.simulator.workload import Round, TokenTrace, blurred, make_rounds
from mira_engine.types import Eviction, ExpertId

COSTS = MachineCosts(link_bytes_per_s=100, layer_s=2.0, expert_s=0.5, draft_s=1.0)
SYSTEMS = {system.name: system for system in all_systems()}
TRACE = synthetic_trace(num_layers=4, num_experts=16, top_k=2, num_tokens=160, seed=5)


def one_layer(num_slots: int) -> CacheShape:
    """A record takes one second."""
    return CacheShape(num_layers=1, num_experts=8, num_slots=num_slots, record_bytes=100)


def plain(*tokens: list[int]) -> list[Round]:
    return [Round(draft=(), target=[[token]]) for token in tokens]


def run(name: str, *, num_slots: int = 20, seed: int = 0, **others) -> SimulatedRun:
    """Runs a system over the second half of the trace."""
    system = SYSTEMS[name]
    half = len(TRACE.ids) // 2
    predictors = {
        "next-layer": lambda: NextLayerGuess(fidelity=0.8, num_experts=16, seed=seed),
        "count-table": lambda: CountTable(TRACE.part(0, half)),
        "activation-trace": lambda: ActivationTraces(TRACE.part(0, half)),
    }
    make_predictor = predictors.get(str(system.lead))
    rounds = make_rounds(
        TRACE.part(half, 160),
        4 if system.is_drafting else 0,
        acceptance=0.8,
        fidelity=0.9,
        seed=seed,
    )
    return simulate(
        rounds,
        system,
        CacheShape(num_layers=4, num_experts=16, num_slots=num_slots, record_bytes=100),
        COSTS,
        predictor=make_predictor() if make_predictor else None,
        popular=most_popular(TRACE.part(0, half)),
        **others,
    )


# -- time by hand --------------------------------------------------------------------------


def test_misses_overlap_with_what_is_resident():
    found = simulate(plain([0, 1], [0, 2]), SYSTEMS["lru"], one_layer(2), COSTS)
    # Pass 1: router done at 2, records land at 3 and 4, computed at 3.5 and 4.5.
    # Pass 2: router done at 6.5; 0 is computed until 7 while 2 comes, which lands at 7.5.
    assert found.decode_s == 8.0
    assert found.traffic.stall_s == 1.0 + 0.5 + 0.5
    assert (found.traffic.num_hits, found.traffic.num_misses) == (1, 3)
    assert (found.traffic.num_records, found.bytes_per_token) == (3, 150)


def test_prefetch_of_a_draft_overlaps_with_drafting():
    rounds = [Round(draft=[[[3]], [[3]]], target=[[[3], [3], [3]]], num_accepted=2)]
    system = SYSTEMS["mira+lookahead"]
    found = simulate(rounds, system, one_layer(3), COSTS)
    # Submitted after draft token 1, landed with token 2; verification then waits for nothing.
    assert found.decode_s == 2 * 1.0 + 2.0 + 0.5
    assert found.num_tokens == 3
    assert (found.traffic.stall_s, found.traffic.draft_s) == (0.0, 2.0)
    assert (found.traffic.num_prefetch_hits, found.traffic.num_prefetched) == (3, 1)
    without = simulate(rounds, system, one_layer(3), COSTS, is_prefetching=False)
    assert without.decode_s == found.decode_s + 1.0
    assert without.traffic.num_misses == 3


def test_further_tokens_of_a_pass_cost_what_they_are_said_to():
    costs = replace(
        COSTS, pass_s=10, pass_token_s=1, layer_token_s=0.25, expert_token_s=0.125, draft_s=0
    )
    found = simulate(
        [Round(draft=(), target=[[[3], [3], [4]]], num_accepted=2)],
        SYSTEMS["lru"],
        one_layer(2),
        costs,
    )
    # 10 + 2 outside of the layer; router 2.5; 3 lands, two tokens; 4 has landed meanwhile.
    assert found.decode_s == 12 + 2.5 + 1 + max(0.625, 1.0) + 0.5


def test_warm_up_and_prompts_are_not_counted():
    prompt = Round(draft=(), target=[[[0, 1], [2, 3]]], is_prefill=True, starts_reply=True)
    rounds = [prompt, *plain([0, 1], [0, 1], [0, 1])]
    found = simulate(rounds, SYSTEMS["lru"], one_layer(4), COSTS, num_warmup_tokens=1)
    assert found.num_tokens == 2
    assert found.decode_s == 2 * (2.0 + 2 * 0.5)
    assert (found.traffic.num_hits, found.traffic.num_misses) == (4, 0)


class FakeLead:
    """Expects the expert of the same number in the next layer."""

    def start_reply(self) -> None:
        pass

    def predict(self, layer: int, target: list) -> dict:
        return {layer + 1: [(target[layer][0][0], 1)]} if layer < 2 else {}


def test_prediction_overlaps_with_the_layers_before_it_and_is_computed_when_it_lands():
    shape = CacheShape(num_layers=3, num_experts=8, num_slots=6, record_bytes=100)
    rounds = [Round(draft=(), target=[[[5]], [[5]], [[5]]])]
    found = simulate(rounds, SYSTEMS["mira+predictor"], shape, COSTS, predictor=FakeLead())
    # Layer 0: router 2, its miss lands at 3, layer 1's expert at 4. Layer 1: router done at
    # 5.5, computed until 6, while layer 2's comes. Layer 2: router done at 8.
    assert found.decode_s == 8.5
    assert found.traffic.stall_s == 1.0
    assert (found.traffic.num_prefetch_hits, found.traffic.num_records) == (2, 3)


def test_driver_is_told_what_the_engines_is_in_the_same_order():
    log = DecisionLog()
    prompt = Round(draft=(), target=[[[0]]], is_prefill=True, starts_reply=True)
    spoken = Round(draft=[[[0]], [[1]]], target=[[[0], [1], [0]]], num_accepted=2)
    simulate([prompt, spoken], SYSTEMS["mira+lookahead"], one_layer(5), COSTS, on_decision=log)
    assert [json.loads(line)[0] for line in log.lines] == [
        "end_reply",
        *("enter_layer", "landed", "computed", "leave_layer"),
        *("begin_draft", "reach_boundary", "reach_boundary", "end_draft"),
        *("enter_layer", "landed", "computed", "leave_layer", "end_pass"),
    ]


# -- systems -------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SYSTEMS)
def test_simulation_of_one_seed_is_one_result(name):
    first, second = run(name), run(name)
    assert first == second
    assert first.num_tokens == 80
    if SYSTEMS[name].is_drafting or name.startswith("mixtral"):
        assert run(name, seed=1) != first


@pytest.mark.parametrize("name", SYSTEMS)
def test_simulation_asks_for_every_routed_token_once(name):
    found = run(name)
    num_target_tokens = 80
    if SYSTEMS[name].is_drafting:
        rounds = make_rounds(TRACE.part(80, 160), 4, acceptance=0.8, fidelity=0.9)
        num_target_tokens = sum(item.num_target_tokens for item in rounds)
    asked = found.traffic.num_hits + found.traffic.num_misses
    assert asked == num_target_tokens * 4 * 2


@pytest.mark.parametrize("name", [n for n, s in SYSTEMS.items() if str(s.lead) == "none"])
def test_bound_moves_no_more_than_any_other_on_demand(name):
    if not SYSTEMS[name].is_drafting:
        assert run("belady").traffic.num_records <= run(name).traffic.num_records


@given(
    st.lists(st.lists(st.integers(0, 5), min_size=1, max_size=1), min_size=1, max_size=30),
    st.integers(1, 5),
)
def test_bound_in_the_driver_has_the_most_hits(tokens, num_slots):
    shape = one_layer(num_slots)
    best = simulate(plain(*tokens), SYSTEMS["belady"], shape, COSTS)
    for eviction in Eviction:
        system = System(name="plain", about="", eviction=eviction)
        assert simulate(plain(*tokens), system, shape, COSTS).hit_rate <= best.hit_rate


def test_decisions_of_a_simulation_can_be_replayed(monkeypatch):
    log = DecisionLog()
    setups = []
    make = ExpertCacheDriver.__init__

    def noting(self, setup, eviction=None):
        setups.append(setup)
        make(self, setup, eviction)

    monkeypatch.setattr(ExpertCacheDriver, "__init__", noting)
    run("mira+lookahead", on_decision=log)
    monkeypatch.undo()
    (setup,) = setups
    assert replay(log.lines, ExpertCacheDriver(setup)) is None
    assert replay(log.lines, ExpertCacheDriver(replace(setup, num_slots=19))) is not None


def test_slots_of_a_layer_are_not_given_to_another():
    """A greedy first layer takes the other layers' slots where they are shared."""
    others = [[0], [0], [0]]
    rounds = [Round(draft=(), target=[[[0], [1], [2]], others, others, others])] * 4
    shape = CacheShape(num_layers=4, num_experts=8, num_slots=4, record_bytes=100)
    each = System(name="each", about="", eviction=Eviction.LRU, is_per_layer=True)
    # The first layer's one slot rolls, and keeps the last of three for the next pass.
    assert simulate(rounds, each, shape, COSTS).traffic.num_records == (3 + 3 * 2) + 3
    assert simulate(rounds, SYSTEMS["lru"], shape, COSTS).traffic.num_records > 12


def test_second_microbatch_is_on_its_way_while_the_first_is_computed():
    system = SYSTEMS["specmoeoff"]
    rounds = [Round(draft=[[[0]]], target=[[[0], [1]]], num_accepted=1)]
    found = simulate(rounds, system, one_layer(4), COSTS)
    # Draft 1; router of part one at 3; 0 lands at 4 and 1 at 5; part one is done at 4.5, the
    # router of part two at 6.5, when its expert is there.
    assert found.decode_s == 1 + 2 + 1 + 0.5 + 2 + 0.5
    assert found.traffic.num_prefetch_hits == 1


def test_static_set_stays_and_the_rest_passes_through():
    popular = [ExpertId(0, 0), ExpertId(0, 1)]
    rounds = plain([0], [2], [3], [2], [1])
    shape = one_layer(4)
    found = simulate(rounds, SYSTEMS["static"], shape, COSTS, popular=popular)
    assert (found.traffic.num_hits, found.traffic.num_misses) == (3, 2)
    eviction = StaticEviction([ExpertId(0, 0)])
    for expert in (0, 1, 2):
        eviction.on_admit(ExpertId(0, expert))
    assert list(eviction.victims()) == [ExpertId(0, 1), ExpertId(0, 2)]


def test_bound_gives_up_what_is_used_last():
    eviction = BeladyEviction(plain([0], [1], [2], [1], [0]))
    for expert in (0, 1, 3):
        eviction.now += 1
        eviction.on_admit(ExpertId(0, expert))
    assert next(eviction.victims()) == ExpertId(0, 3)
    eviction.on_remove(ExpertId(0, 3))
    assert next(eviction.victims()) == ExpertId(0, 0)


# -- what systems expect -------------------------------------------------------------------


def test_count_table_names_what_went_together():
    ids = np.array([[[0], [5], [2]], [[0], [5], [2]], [[1], [5], [3]]])
    table = CountTable(TokenTrace(name="t", ids=ids, lengths=[3], num_experts=6))
    assert table.predict(0, [[[0]], [[5]], [[9]]]) == {2: [(2, 1)]}
    assert table.predict(0, [[[1], [0]]]) == {2: [(2, 1), (3, 1)]}
    assert table.predict(1, [[[0]], [[5]], [[9]]]) == {}


def test_activation_traces_match_the_most_similar_text():
    ids = np.array([[[0], [1]]] * 4 + [[[2], [3]]] * 4)
    traces = ActivationTraces(TokenTrace(name="t", ids=ids, lengths=[4, 4], num_experts=4))
    target = [[[2]], [[3]]]
    traces.predict(0, target)
    assert traces.predict(0, target) == {1: [(3, 1)]}
    traces.start_reply()
    assert traces.predict(0, target) == {1: [(1, 1)]}


def test_draft_routing_has_the_fidelity_it_is_given():
    rng = np.random.default_rng(0)
    ids = np.argsort(rng.random((400, 64)), axis=1)[:, :6]
    assert (blurred(rng, ids, 1.0, 64) == ids).all()
    other = blurred(rng, ids, 0.9, 64)
    kept = sum(len(set(a) & set(b)) for a, b in zip(ids.tolist(), other.tolist(), strict=True))
    assert kept / ids.size == pytest.approx(0.9, abs=0.02)
    assert all(len(set(row)) == 6 for row in other.tolist())


def test_made_rounds_cover_every_token_and_stop_at_the_end_of_a_text():
    trace = replace(TRACE, lengths=[100, 60])
    rounds = list(make_rounds(trace, 4, acceptance=0.7, fidelity=1.0, seed=2))
    assert sum(item.num_new_tokens for item in rounds) == 160
    assert sum(item.starts_reply for item in rounds) == 2
    assert max(len(item.draft) for item in rounds) == 4
    drafted = sum(len(item.draft) for item in rounds)
    assert 0 < sum(item.num_accepted for item in rounds) < drafted
    first = rounds[0]
    assert [layer[0] for layer in first.target] == TRACE.ids[0].tolist()


# -- the host beside a card ----------------------------------------------------------------


def test_host_computes_beside_the_link_and_the_card():
    costs = replace(COSTS, host_expert_s=0.9)
    found = simulate(plain([0, 1, 2]), SYSTEMS["lru"], one_layer(4), costs)
    # Router done at 2. One record lands at 3 and is computed until 3.5; the other two are
    # computed on the host meanwhile, until 3.8.
    assert found.decode_s == pytest.approx(3.8)
    assert (found.traffic.num_misses, found.traffic.num_on_host) == (3, 2)
    assert found.traffic.num_records == 1
    assert found.traffic.host_s == pytest.approx(1.8)


def test_host_that_is_too_slow_changes_nothing():
    slow = replace(COSTS, host_expert_s=1e3)
    rounds = plain([0, 1], [2, 3], [0, 2])
    found = simulate(rounds, SYSTEMS["lru"], one_layer(3), slow)
    assert found == simulate(rounds, SYSTEMS["lru"], one_layer(3), COSTS)
    assert found.traffic.num_on_host == 0


@pytest.mark.parametrize("name", ["lru", "mira+lookahead"])
def test_host_saves_time_and_its_run_replays(name: str):
    costs, log = replace(COSTS, host_expert_s=0.6), DecisionLog()
    rounds = list(make_rounds(TRACE.part(80, 160), 4, acceptance=0.8, fidelity=0.9, seed=0))
    shape = CacheShape(num_layers=4, num_experts=16, num_slots=20, record_bytes=100)
    without = simulate(rounds, SYSTEMS[name], shape, COSTS)

    found = simulate(rounds, SYSTEMS[name], shape, costs, on_decision=log)

    assert found.tpot_s < without.tpot_s
    assert found.traffic.num_on_host > 0
    assert any('"ComputeOnHost"' in line for line in log.lines)
    assert any('"recurring"' in line for line in log.lines)


def test_host_time_of_nothing_is_refused():
    with pytest.raises(ConfigError, match="host time"):
        replace(COSTS, host_expert_s=0.0)
