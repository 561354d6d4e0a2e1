"""What is each part of the engine worth?

Question: time per output token (TPOT) of the built-in model, row by row: experts on demand
with LRU; a static popular set; HOT and STAGE with the rebalancer; predictor heads besides;
speculation with one prefetch batch; with the planner; and everything, where the plan and
the governor choose. At equal memory, on three links: the machine's disk, and the link held
to a rate at which loading all experts of a token takes 3 and 10 times as long as decoding
one with all experts resident (about what PCIe 4 gives Qwen1.5-MoE and Phi-3.5-MoE on a
consumer card). Reports say "emulated" there.

Method: one process. For each budget all engines are loaded and take turns on the same
prompts, greedy, fixed lengths, medians over rounds; the first round warms up. Engines whose
layout does not depend on the link serve all links, their throttle changed between.
`bound` is max(compute of the row's schedule with all experts resident, bytes moved / link
rate); the compute is TPOT less stalls of the same K in an engine with room for all experts.
`gap` is the share of (LRU - its own bound of everything) that a row closes. With
`--same-cache` every row has slots for as many experts as LRU has: the rows that speculate,
everything among them, get a resident draft on top of that memory, and the governor its K.
transformers with accelerate has the same share of its layers in memory.

Left out: prefill, detokenising, the process boundary.

Run: python tests/bench/ablation.py [--quick] [--budgets 60,75,90] [--rounds 5] [--tokens 64]
`--quick`: one budget (75 %) and 3 rounds. Predictors must have been made (`mira-chat
prepare builtin`); without, that row repeats the one before it, and says so.
The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch
from decode import (
    PROMPTS,
    _prompt_tokens,
    expert_bytes_of_token,
    load_offloaded,
    run_engine,
    run_transformers,
)
from decode import Row as Replies
from gap import bound_ms, gap_closed
from mira_app.paths import cache_dir, data_dir
from mira_engine.config import EngineConfig, LinkConfig, MemoryAmount
from mira_engine.engine import Engine
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.types import (
    CachePolicy,
    CompileMode,
    DraftExperts,
    Eviction,
    ExpertId,
    Lookahead,
    Precision,
)

RATIOS = {"disk": None, "ratio3": 3.0, "ratio10": 10.0}

PLAIN = {"num_draft_tokens": 0, "cache_policy": CachePolicy.POOL, "is_predicting": False}
SPECULATING = {"num_draft_tokens": 4, "draft_experts": DraftExperts.ALL, "is_predicting": False}
SPECULATING |= {"lookahead": Lookahead.BATCHES}
ROWS: dict[str, dict[str, object]] = {
    "lru": PLAIN | {"eviction": Eviction.LRU, "is_prefetch_enabled": False},
    "static": PLAIN | {"cache_policy": CachePolicy.STATIC, "is_prefetch_enabled": False},
    "hot+stage": PLAIN | {"cache_policy": CachePolicy.REGIONS, "is_prefetch_enabled": False},
    "+predictor": PLAIN | {"cache_policy": CachePolicy.REGIONS, "is_predicting": True},
    "one batch": SPECULATING,
    "+planner": SPECULATING,
    "everything": {},
}


@dataclass
class Measured:
    """One row on one link."""

    replies: Replies
    depths: list[int] = field(default_factory=list)

    @property
    def tpot_ms(self) -> float:
        return self.replies.median_ms

    def per_token(self, attribute: str) -> float:
        """Median over replies of a figure, a token."""
        return statistics.median(
            getattr(s, attribute) / (s.num_new_tokens - 1) for s in self.replies.stats
        )

    @property
    def stall_ms(self) -> float:
        return 1e3 * self.per_token("stall_s")

    @property
    def bytes_per_token(self) -> float:
        return self.per_token("bytes_moved")

    @property
    def num_draft_tokens(self) -> int:
        """K that most rounds had."""
        return Counter(self.depths).most_common(1)[0][0] if self.depths else 0


class Bench:
    """Loads engines on one model and measures them."""

    def __init__(self, home: ModelHome, arguments: argparse.Namespace) -> None:
        self.home, self.arguments = home, arguments
        self.cache = arguments.cache_dir or cache_dir()

    def load(
        self, budget: float | MemoryAmount, bytes_per_s: float | None = None, **fields: object
    ) -> Engine:
        is_share = isinstance(budget, float)
        config = EngineConfig(
            budget=MemoryAmount(share=budget) if is_share else budget,
            link=LinkConfig(bytes_per_s=bytes_per_s),
            num_threads=self.arguments.threads,
            compile_mode=CompileMode.WAIT,
            **fields,
        )
        engine = Engine.load(self.home, config, cache_dir=self.cache)
        engine._end_ids = frozenset()  # every reply has the same number of tokens
        return engine

    def reply(self, engine: Engine, row: Measured, text: str) -> None:
        """Adds one reply's figures to the row."""
        depths: list[int] = []
        engine.on_round = lambda observed: depths.append(observed.num_draft)
        run_engine(engine, row.replies, _prompt_tokens(engine, text), self.arguments.tokens)
        row.depths += depths

    def compute_ms(self, num_draft_tokens: int, kept: dict[int, float]) -> float:
        """Milliseconds a token with all experts resident, by K; measured once each."""
        if num_draft_tokens not in kept:
            engine = self.load(
                4.0, num_draft_tokens=num_draft_tokens, draft_experts=DraftExperts.ALL
            )
            row = Measured(Replies("resident"))
            for number in range(-1, self.arguments.rounds):
                if number == 0:
                    row = Measured(Replies("resident"))
                self.reply(engine, row, PROMPTS[number % len(PROMPTS)])
            kept[num_draft_tokens] = row.tpot_ms - row.stall_ms
            engine.close()
        return kept[num_draft_tokens]


def popular_experts(engine: Engine, texts: Sequence[str], num_tokens: int) -> list[ExpertId]:
    """Counts what an engine's routers choose; most chosen first."""
    counts: Counter[ExpertId] = Counter()

    def count(name: str, arguments: Sequence[object], actions: object) -> None:
        del actions
        if name == "enter_layer":
            layer, demand = arguments
            for expert, num in demand:
                counts[ExpertId(layer, expert)] += num

    engine.executor.driver.on_decision = count
    for text in texts:
        run_engine(engine, Replies("popular"), _prompt_tokens(engine, text), num_tokens)
    engine.executor.driver.on_decision = None
    return [expert for expert, _ in counts.most_common()]


def room_beside_draft(engine: Engine) -> MemoryAmount:
    """Memory in which an engine with a resident draft has as many slots as this one."""
    fmt, manifest = engine._target.format, engine._target.manifest
    assert fmt.draft_plane is not None
    draft_bytes = fmt.record_bytes(fmt.draft_plane)
    slot_bytes = sum(fmt.record_bytes(plane) for plane in fmt.planes) - draft_bytes
    num_all = manifest.num_layers * manifest.num_experts
    return MemoryAmount(num_bytes=num_all * draft_bytes + engine.plan.num_slots * slot_bytes)


def hold(engine: Engine, bytes_per_s: float | None) -> None:
    """Changes the rate of an engine's link."""
    engine.transfer.limit_rate(bytes_per_s)


def measure_budget(bench: Bench, budget: float, rates: dict[str, float | None]) -> dict:
    """Measures all rows at one budget. Returns rows by link."""
    arguments = bench.arguments
    shared: dict[str, Engine] = {}
    room: float | MemoryAmount = budget
    everything = ROWS["everything"]
    for name, fields in ROWS.items():
        if name == "everything":
            continue
        is_drafting = fields["num_draft_tokens"] != 0
        shared[name] = bench.load(room if is_drafting else budget, bytes_per_s=1e12, **fields)
        if name == "lru" and arguments.same_cache:
            room = room_beside_draft(shared["lru"])
            everything = everything | {"draft_experts": DraftExperts.ALL}
    if arguments.same_cache:
        slots = {name: engine.plan.num_slots for name, engine in shared.items()}
        print(f"slots: {slots}")
    shared["one batch"].executor.driver.planner.max_batches = 1
    if shared["+predictor"].executor.predictor is None:
        print("no predictors were made: the row +predictor is hot+stage again")
    popular = popular_experts(shared["lru"], PROMPTS, arguments.tokens)
    shared["static"].fill_hot(popular)
    found: dict[str, dict[str, Measured]] = {}
    for link, rate in rates.items():
        engines = dict(shared)
        for engine in engines.values():
            hold(engine, rate)
        engines["everything"] = bench.load(room, bytes_per_s=rate, **everything)
        rows = {name: Measured(Replies(name)) for name in engines}
        for number in range(-2, arguments.rounds):
            if number == 0:
                rows = {name: Measured(Replies(name)) for name in engines}
            for name, engine in engines.items():
                bench.reply(engine, rows[name], PROMPTS[number % len(PROMPTS)])
        engines["everything"].close()
        found[link] = rows
    for engine in shared.values():
        engine.close()
    gc.collect()
    return found


def offload_ms(bench: Bench, root: Path) -> float:
    """TPOT of transformers with every fourth layer on the disk."""
    model = load_offloaded(bench.home, root / "bench-offload")
    engine = bench.load(0.75, num_draft_tokens=0)
    row = Replies("transformers")
    for number in range(-1, bench.arguments.rounds):
        if number == 0:
            row = Replies("transformers")
        prompt = _prompt_tokens(engine, PROMPTS[number % len(PROMPTS)])
        run_transformers(model, row, prompt, min(24, bench.arguments.tokens))
    engine.close()
    return row.median_ms


def report(
    rows: dict[str, Measured], rate: float | None, bench: Bench, kept: dict[int, float]
) -> dict[str, float]:
    """Prints one table. Returns the figures of everything."""
    head = ("", "TPOT", "stall", "MB/token", "unused", "accepted", "K", "bound", "gap")
    print(("{:<12}" + "{:>9}" * 8).format(*head))
    bounds = {}
    for name, row in rows.items():
        compute = bench.compute_ms(row.num_draft_tokens, kept)
        bounds[name] = bound_ms(compute, row.bytes_per_token, rate)
    lru, bound = rows["lru"].tpot_ms, bounds["everything"]
    for name, row in rows.items():
        stats = row.replies.stats
        rounds = sum(s.num_rounds for s in stats)
        ahead = sum(s.num_records_prefetched for s in stats)
        used = sum(s.num_prefetch_used for s in stats)
        gap = gap_closed(lru, row.tpot_ms, bound)
        cells = (
            name,
            f"{row.tpot_ms:.1f}",
            f"{row.stall_ms:.1f}",
            f"{row.bytes_per_token / 1e6:.1f}",
            f"{1 - used / ahead:.0%}" if ahead else "-",
            f"{sum(s.num_accepted for s in stats) / rounds:.2f}" if rounds else "-",
            str(row.num_draft_tokens),
            f"{bounds[name]:.1f}",
            f"{gap:.0%}" if gap is not None else "-",
        )
        print(("{:<12}" + "{:>9}" * 8).format(*cells))
    whole = rows["everything"].tpot_ms
    gap = gap_closed(lru, whole, bound)
    return {
        "tpot_ms": round(whole, 2),
        "speedup_over_lru": round(lru / whole, 3),
        "gap_closed": round(gap, 3) if gap is not None else None,
        "bound_ratio": round(whole / bound, 3),
        "best_other_over_it": round(
            min(row.tpot_ms for name, row in rows.items() if name != "everything") / whole, 3
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--budgets", default="60,75,90")
    parser.add_argument("--links", default=",".join(RATIOS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--same-cache", action="store_true")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--cache-dir", type=Path, default=None)
    arguments = parser.parse_args()
    if arguments.quick:
        arguments.budgets, arguments.rounds = "75", 3
    root = arguments.data_dir or data_dir()
    home = ModelLibrary(root).resolve("builtin")
    prepare(home, Precision.NESTED, on_progress=lambda *_: None)
    bench = Bench(home, arguments)
    kept: dict[int, float] = {}
    resident_ms = bench.compute_ms(0, kept)
    token_bytes = expert_bytes_of_token(home, Precision.NESTED)
    rates = {
        name: token_bytes / (1e-3 * resident_ms * ratio) if ratio else None
        for name, ratio in RATIOS.items()
        if name in arguments.links.split(",")
    }
    result: dict[str, object] = {
        "bench": "ablation",
        "threads": arguments.threads,
        "rounds": arguments.rounds,
        "tokens": arguments.tokens,
        "same_cache": arguments.same_cache,
        "resident_ms": round(resident_ms, 2),
        "link_mb_per_s": {n: round(r / 1e6) if r else None for n, r in rates.items()},
    }
    for text in arguments.budgets.split(","):
        found = measure_budget(bench, int(text) / 100, rates)
        figures = {}
        for link, rows in found.items():
            rate = rates[link]
            about = f"emulated, {rate / 1e6:.0f} MB/s" if rate else "the disk as it is"
            print(f"\nbudget {text} %, link {link} ({about}); ms a token, medians")
            figures[link] = report(rows, rate, bench, kept)
        result[f"{text}%"] = figures
    if "disk" in rates:
        transformers_ms = offload_ms(bench, root)
        result["transformers_ms"] = round(transformers_ms, 1)
        print(f"\ntransformers, a quarter of the layers on the disk: {transformers_ms:.1f} ms")
    print(json.dumps(result))


if __name__ == "__main__":
    main()
