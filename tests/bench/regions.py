"""Which rule keeps the right experts on the device?

Question: on real routing traces, how often is an expert resident under LRU, LFU, LFRU, and
under HOT + STAGE with the rebalancer, by interval, swap bound, probation and HOT share;
and does a HOT set learned on one text adapt to another?

Method: the policies of the engine on traces of DeepSeek-V2-Lite (26 layers, 64 experts,
top 6), token by token in order, sequences one after another, a token's experts in stored
order; a miss is admitted at once. Room for 8, 16 or 32 of 64 experts a layer, either in
each layer (`layer`) or in one pool over all (`pool`). Hit rates count choices. `moved` is
records a token: misses and the rebalancer's fetches. One parameter is varied at a time
around the defaults, in one pool with room for `--varied` experts a layer and STAGE in the
order `--order`. `cross` is the
second trace after the first, in one go; its rate is that of the second trace alone.

Left out: time, prefetching, drafting (a token is one pass), prefill. Text is teacher-forced.

Run: python tests/bench/regions.py [--tokens 0] [--layers 0] [--traces ../shared/traces]
With fewer layers (evenly spaced) counts that fade by uses fade more slowly in tokens.
The last line printed is one JSON document. Counts only: any machine gives the same.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
from mira_engine.policy.base import Fetch, FetchReason
from mira_engine.policy.eviction import EVICTION_POLICIES
from mira_engine.policy.rebalance import (
    DEFAULT_HOT_SHARE,
    DEFAULT_HYSTERESIS,
    DEFAULT_INTERVAL_TOKENS,
    DEFAULT_MAX_SWAPS,
    DEFAULT_MISS_WEIGHT,
    DEFAULT_PROBATION_WINDOWS,
    Rebalancer,
)
from mira_engine.policy.regions import MIN_TRANSIENT_SLOTS
from mira_engine.policy.residency import ResidencyTable
from mira_engine.types import CacheMode, Eviction, ExpertId, ServedBy

NUM_EXPERTS = 64
ROOMS = (8, 16, 32)
NAMES = ("law", "summary")
LRU_BY_LAYER = {"law": (0.294, 0.472, 0.717), "summary": (0.292, 0.466, 0.725)}
"""What any plain LRU for each layer gives on the whole traces; checked before the rest."""

Trace = Sequence[Sequence[Sequence[int]]]
"""Expert numbers `[tokens][layers][top_k]`."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Rule:
    """What decides who stays."""

    eviction: Eviction
    hot_share: float | None = None
    interval_tokens: int = DEFAULT_INTERVAL_TOKENS
    max_swaps: int = DEFAULT_MAX_SWAPS
    probation_windows: int = DEFAULT_PROBATION_WINDOWS
    hysteresis: float = DEFAULT_HYSTERESIS
    miss_weight: float = DEFAULT_MISS_WEIGHT
    mode: CacheMode = CacheMode.LARGE


@dataclass(slots=True)
class Outcome:
    """Counts of one run over one trace."""

    num_hits: int = 0
    num_misses: int = 0
    num_rebalanced: int = 0
    num_tokens: int = 0

    @property
    def hit_rate(self) -> float:
        return self.num_hits / (self.num_hits + self.num_misses)

    @property
    def moved(self) -> float:
        """Records moved to the device a token."""
        return (self.num_misses + self.num_rebalanced) / self.num_tokens


class Cache:
    """One pool, or one for each layer, under a rule."""

    def __init__(self, rule: Rule, num_layers: int, room: int, *, is_pool: bool) -> None:
        num_slots = room * num_layers if is_pool else room
        self._pools = [_table(rule, num_slots) for _ in range(1 if is_pool else num_layers)]
        self._tables = self._pools * num_layers if is_pool else self._pools
        self._rebalancers: list[Rebalancer] = []
        if rule.hot_share is not None:
            self._rebalancers = [
                Rebalancer(
                    interval_tokens=rule.interval_tokens,
                    max_swaps=rule.max_swaps,
                    probation_windows=rule.probation_windows,
                    hysteresis=rule.hysteresis,
                    miss_weight=rule.miss_weight,
                )
                for _ in self._pools
            ]
        self._experts = [
            [ExpertId(layer, e) for e in range(NUM_EXPERTS)] for layer in range(num_layers)
        ]

    def run(self, trace: Trace) -> Outcome:
        """Feeds the trace on top of what came before."""
        outcome = Outcome(num_tokens=len(trace))
        for token in trace:
            for layer, chosen in enumerate(token):
                self._route(layer, chosen, outcome)
            for rebalancer, table in zip(self._rebalancers, self._pools, strict=False):
                rebalancer.observe_tokens(1)
                if rebalancer.is_due():
                    fetches = [a for a in rebalancer.decide(table) if isinstance(a, Fetch)]
                    outcome.num_rebalanced += len(fetches)
                    for fetch in fetches:
                        table.complete(fetch.slot)
        return outcome

    def _route(self, layer: int, chosen: Sequence[int], outcome: Outcome) -> None:
        table, experts = self._tables[layer], self._experts[layer]
        if self._rebalancers:
            rebalancer = self._rebalancers[layer % len(self._rebalancers)]
            for number in chosen:
                expert = experts[number]
                rebalancer.observe_routing(expert, 1, table.served_by(expert))
        for number in chosen:
            expert = experts[number]
            if table.served_by(expert) is not ServedBy.MISS:
                outcome.num_hits += 1
                table.use(expert)
                continue
            outcome.num_misses += 1
            fetch = table.admit(expert, FetchReason.MISS)
            assert fetch is not None
            table.complete(fetch.slot)
        table.leave_layer(layer)


def _table(rule: Rule, num_slots: int) -> ResidencyTable:
    eviction = EVICTION_POLICIES[rule.eviction]()
    if rule.hot_share is None:
        return ResidencyTable(num_slots, eviction)
    num_hot = min(round(rule.hot_share * num_slots), num_slots - MIN_TRANSIENT_SLOTS)
    return ResidencyTable(num_slots, eviction, num_hot_slots=num_hot, mode=rule.mode)


def rules(order: Eviction) -> Iterator[tuple[str, Rule]]:
    """Yields every rule with its name in the table; `order` is STAGE's where others vary."""
    for eviction in Eviction:
        yield eviction.value, Rule(eviction=eviction)
    for eviction in Eviction:
        rule = Rule(eviction=eviction, hot_share=DEFAULT_HOT_SHARE)
        yield f"HOT + STAGE by {eviction.value}", rule
    base = Rule(eviction=order, hot_share=DEFAULT_HOT_SHARE)
    varied: list[tuple[str, Sequence[object]]] = [
        ("hot_share", (0.25, 0.75, 0.9)),
        ("interval_tokens", (64, 128, 512, 1024, 2048)),
        ("max_swaps", (1, 4, 16, 64)),
        ("probation_windows", (0, 1, 3)),
        ("hysteresis", (0.0, 0.5, 1.0)),
        ("miss_weight", (0.0, 1.0)),
        ("mode", (CacheMode.SMALL,)),
    ]
    for field, values in varied:
        for value in values:
            yield f"  {field} {value}", replace(base, **{field: value})


def load(folder: Path, name: str, num_tokens: int, num_layers: int) -> Trace:
    """Reads a trace's expert numbers; all tokens and layers where a number is 0."""
    with np.load(folder / f"{name}.npz") as arrays:
        ids = arrays["ids"][: num_tokens or None]
    stride = -(-ids.shape[1] // num_layers) if num_layers else 1
    return ids[:, ::stride].tolist()


def check_baseline(traces: dict[str, Trace]) -> None:
    """Compares plain LRU for each layer with what is known of the whole traces."""
    for name, expected in LRU_BY_LAYER.items():
        trace = traces[name]
        for room, rate in zip(ROOMS, expected, strict=True):
            cache = Cache(Rule(eviction=Eviction.LRU), len(trace[0]), room, is_pool=False)
            got = round(cache.run(trace).hit_rate, 3)
            assert got == rate, f"LRU on {name} with {room}: {got}, expected {rate}"


def measure(
    traces: dict[str, Trace], varied: Sequence[int], order: Eviction, say: Callable[[str], None]
) -> list[dict[str, object]]:
    """Runs every rule at every room on every trace; returns a row for each."""
    rows: list[dict[str, object]] = []
    for is_pool in (True, False):
        for room in ROOMS:
            say(f"\n{'pool' if is_pool else 'layer'}, room for {room} of 64 a layer")
            say(f"{'rule':34} {'law':>6} {'moved':>6} {'summ.':>6} {'moved':>6} {'cross':>6}")
            for label, rule in rules(order):
                if label.startswith("  ") and not (is_pool and room in varied):
                    continue
                figures: dict[str, float] = {}
                cache = None
                for name in NAMES:
                    trace = traces[name]
                    alone = Cache(rule, len(trace[0]), room, is_pool=is_pool)
                    outcome = alone.run(trace)
                    figures[name] = round(outcome.hit_rate, 3)
                    figures[f"{name}_moved"] = round(outcome.moved, 1)
                    cache = cache or alone
                assert cache is not None
                figures["cross"] = round(cache.run(traces["summary"]).hit_rate, 3)
                say(f"{label:34} " + " ".join(f"{v:6}" for v in figures.values()))
                rows.append({"pool": is_pool, "room": room, "rule": label.strip(), **figures})
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--traces", type=Path, default=Path("../shared/traces"))
    parser.add_argument("--tokens", type=int, default=0, help="of each trace; 0 for all")
    parser.add_argument("--layers", type=int, default=0, help="of the model; 0 for all")
    parser.add_argument("--varied", type=int, nargs="*", default=[16], choices=ROOMS)
    parser.add_argument("--order", type=Eviction, default=Eviction.LRU, choices=list(Eviction))
    options = parser.parse_args()
    if not all((options.traces / f"{name}.npz").is_file() for name in NAMES):
        print(f"skipped: no traces in {options.traces}")
        return
    traces = {name: load(options.traces, name, options.tokens, options.layers) for name in NAMES}
    if not options.tokens and not options.layers:
        check_baseline(traces)
        print("LRU for each layer gives what is known of these traces")
    rows = measure(traces, options.varied, options.order, lambda line: print(line, flush=True))
    size = {name: (len(trace), len(trace[0])) for name, trace in traces.items()}
    print(json.dumps({"bench": "regions", "tokens_layers": size, "rows": rows}))


if __name__ == "__main__":
    main()
