"""Does the simulator say what the engine measures?

Question: simulated over measured TPOT of the built-in model at three budgets and three K.

Method: the rates of this machine are measured first, with all experts resident and nothing
to wait for: for each K the time of a draft token, and of target passes by least squares over
their tokens and distinct experts; the link by many records at once (rate) and one at a time
(latency). Then each budget and K runs with a trace, and the trace's rounds go through the
simulator with these rates and the engine's own driver setup. The first reply warms both up.

The verdict is on rates measured elsewhere: nothing of a run is used to simulate it but its
routing, its acceptance and its length. `own` is the same with step costs of the run itself
(without its stalls): where the two differ, the machine changed its pace between the runs.
`--link-rate` holds the link to MB/s, which then weighs more than the machine's noise.
Left out: prefill. Where the processor has no core to spare, readers and arithmetic share one
and steps beside transfers take longer than the resident ones; the simulator knows no such
sharing, so such a machine reads below 1.

Run: python tests/bench/simulate_engine.py [--tokens 64] [--rounds 5] [--link-rate MB/s]
The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import torch
from decode import PROMPTS
from mira_app.paths import cache_dir, data_dir
from mira_engine.config import EngineConfig, LinkConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import ChatMessage
from mira_engine.library import ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.simulator.servers import MachineCosts
from mira_engine.simulator.simulate import CacheShape, SimulatedRun, simulate
from mira_engine.simulator.systems import Lead, System
from mira_engine.simulator.workload import recorded_rounds
from mira_engine.trace import RoutingTrace, TracedPass, TracedRound, read_trace
from mira_engine.types import CompileMode, Eviction, ExpertId, Phase, Precision

BUDGETS = (0.6, 0.75, 0.9)
DRAFT_TOKENS = (0, 2, 4)


@dataclass(frozen=True, kw_only=True)
class Measured:
    """One engine's replies, the first left out."""

    trace: RoutingTrace
    tpot_s: float
    stall_s: float
    hit_rate: float
    num_warmup_tokens: int
    link: tuple[float, float] | None


def parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--link-rate", type=float, default=None, help="emulated link, MB/s")
    parser.add_argument("--compile", type=CompileMode, default=CompileMode.WAIT)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--cache-dir", type=Path, default=None)
    return parser.parse_args(argv)


def load(arguments: argparse.Namespace, *, share: float, k: int, trace: Path) -> Engine:
    """Loads the built-in model with a trace."""
    home = ModelLibrary(arguments.data_dir or data_dir()).resolve("builtin")
    prepare(home, Precision.NESTED, on_progress=lambda *_: None)
    rate = arguments.link_rate * 1e6 if arguments.link_rate else None
    config = EngineConfig(
        budget=MemoryAmount(share=share),
        num_draft_tokens=k,
        link=LinkConfig(bytes_per_s=rate),
        num_threads=arguments.threads,
        compile_mode=arguments.compile,
        trace_path=str(trace),
    )
    engine = Engine.load(home, config, cache_dir=arguments.cache_dir or cache_dir())
    engine._end_ids = frozenset()  # every reply has the same number of tokens
    return engine


def measure_link(engine: Engine) -> tuple[float, float]:
    """Measures bytes per second, many records at once, and a single one's further seconds.

    Overwrites slots, so only before the first reply, when no expert is in them.
    """
    setup, transfer = engine.cache_setup, engine.transfer
    experts = [ExpertId(*divmod(n, setup.num_experts)) for n in range(min(setup.num_slots, 96))]

    def move(batch: Sequence[ExpertId]) -> float:
        started = time.perf_counter()
        for slot, expert in enumerate(batch):
            transfer.submit(expert, slot, is_demand=True)
        num_landed = 0
        while num_landed < len(batch):
            num_landed += len(transfer.wait_any(1.0))
        return time.perf_counter() - started

    move(experts)  # Opens the files.
    record_s = min(move(experts) for _ in range(3)) / len(experts)
    alone_s = float(np.median([move([expert]) for expert in experts]))
    return transfer.record_bytes / record_s, max(0.0, alone_s - record_s)


def run(arguments: argparse.Namespace, *, share: float, k: int, is_link_wanted: bool) -> Measured:
    """Runs replies with a trace; the first one warms up."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "run.trace"
        engine = load(arguments, share=share, k=k, trace=path)
        link = measure_link(engine) if is_link_wanted else None
        seconds = stall_s = 0.0
        num_tokens = num_hits = num_misses = num_warmup = 0
        for number in range(-1, arguments.rounds):
            engine.state.reset()
            message = ChatMessage(role="user", content=PROMPTS[number % len(PROMPTS)])
            sampling = SamplingConfig(max_new_tokens=arguments.tokens)
            for _ in engine.reply(engine.render([message]), sampling):
                pass
            stats = engine.stats()
            if number < 0:
                num_warmup = stats.num_new_tokens - 1
                continue
            seconds += stats.decode_s
            stall_s += stats.stall_s
            num_tokens += stats.num_new_tokens - 1
            num_hits += stats.num_hits
            num_misses += stats.num_misses
        engine.close()
        return Measured(
            trace=read_trace(path),
            tpot_s=seconds / num_tokens,
            stall_s=stall_s / num_tokens,
            hit_rate=num_hits / (num_hits + num_misses),
            num_warmup_tokens=num_warmup,
            link=link,
        )


def fit_costs(resident: Sequence[Measured], link: tuple[float, float]) -> MachineCosts:
    """Fits a target pass to `layer_s`, `layer_token_s` and `expert_s`, by its layers."""
    rows, seconds = [], []
    for measured in resident:
        target: TracedPass | None = None
        for item in measured.trace.items:
            if isinstance(item, TracedPass) and item.phase in (Phase.DECODE, Phase.VERIFY):
                target = item
            elif isinstance(item, TracedRound) and target is not None:
                num_distinct = sum(len({e for row in layer for e in row}) for layer in target.ids)
                num_layers = len(target.ids)
                rows.append((num_layers, num_layers * (target.num_tokens - 1), num_distinct))
                seconds.append(item.verify_s - item.stall_s)
    features, times = np.array(rows, dtype=float), np.array(seconds)
    usual = times <= 3 * np.median(times)  # A round that was disturbed says nothing of a step.
    layer_s, token_s, expert_s = np.linalg.lstsq(features[usual], times[usual], rcond=None)[0]
    if expert_s < 0 or token_s < 0:  # Too few kinds of passes to tell them apart.
        layer_s, token_s = np.linalg.lstsq(features[usual][:, :2], times[usual], rcond=None)[0]
        expert_s = 0.0
    return MachineCosts(
        link_bytes_per_s=link[0],
        link_latency_s=link[1],
        num_readers=EngineConfig().num_reader_threads,
        layer_s=max(0.0, float(layer_s)),
        layer_token_s=max(0.0, float(token_s)),
        expert_s=float(expert_s),
    )


def draft_seconds(measured: Measured) -> float:
    """Returns the median time of a draft token, 0 without a draft."""
    rounds = [item for item in measured.trace.items if isinstance(item, TracedRound)]
    times = [item.draft_s / item.num_drafted for item in rounds if item.num_drafted]
    return float(np.median(times)) if times else 0.0


def simulated(measured: Measured, costs: MachineCosts) -> SimulatedRun:
    """Sends a recorded run through the simulator."""
    head = measured.trace.header
    system = System(
        name="engine",
        about="as it ran",
        eviction=Eviction(head.eviction),
        lead=Lead.DRAFT if head.num_draft_tokens else Lead.NONE,
        is_drafting=head.num_draft_tokens > 0,
    )
    shape = CacheShape(
        num_layers=head.num_layers,
        num_experts=head.num_experts,
        num_slots=head.num_slots,
        record_bytes=head.record_bytes,
    )
    return simulate(
        recorded_rounds(measured.trace),
        system,
        shape,
        costs,
        num_warmup_tokens=measured.num_warmup_tokens,
    )


def measure(arguments: argparse.Namespace) -> dict[str, object]:
    """Measures rates, then every budget and K; prints and returns simulated over measured."""
    resident = {k: run(arguments, share=2.0, k=k, is_link_wanted=k == 0) for k in DRAFT_TOKENS}
    whole_link = resident[0].link
    assert whole_link is not None
    base = fit_costs(list(resident.values()), whole_link)
    print(
        f"resident: layer {1e3 * base.layer_s:.3f} ms + {1e3 * base.layer_token_s:.3f} a further "
        f"token, expert {1e3 * base.expert_s:.3f} ms; TPOT by K: "
        + ", ".join(f"{k}: {1e3 * m.tpot_s:.1f} ms" for k, m in resident.items())
    )
    print(("{:>7}{:>4}" + "{:>12}" * 7).format(
        "budget", "K", "measured", "simulated", "ratio", "own", "stall", "simulated", "link MB/s"
    ))  # fmt: skip
    rows = []
    for share in BUDGETS:
        for k in DRAFT_TOKENS:
            measured = run(arguments, share=share, k=k, is_link_wanted=True)
            assert measured.link is not None
            costs = replace(
                base,
                link_bytes_per_s=measured.link[0],
                link_latency_s=measured.link[1],
                draft_s=draft_seconds(resident[k]),
            )
            found = simulated(measured, costs)
            ratio = found.tpot_s / measured.tpot_s
            own_costs = fit_costs([measured], measured.link)
            own = simulated(measured, replace(own_costs, draft_s=draft_seconds(measured)))
            own_ratio = own.tpot_s / measured.tpot_s
            stall_s = found.traffic.stall_s / found.num_tokens
            print(
                f"{share:>7.0%}{k:>4}{1e3 * measured.tpot_s:>12.2f}{1e3 * found.tpot_s:>12.2f}"
                f"{ratio:>12.3f}{own_ratio:>12.3f}{1e3 * measured.stall_s:>12.2f}"
                f"{1e3 * stall_s:>12.2f}{measured.link[0] / 1e6:>12.0f}",
                flush=True,
            )
            rows.append(
                {
                    "budget": share,
                    "k": k,
                    "measured_ms": round(1e3 * measured.tpot_s, 3),
                    "simulated_ms": round(1e3 * found.tpot_s, 3),
                    "simulated_over_measured": round(ratio, 3),
                    "own_steps_over_measured": round(own_ratio, 3),
                    "hit_rate": round(measured.hit_rate, 3),
                    "simulated_hit_rate": round(found.hit_rate, 3),
                }
            )
    worst = max(abs(row["simulated_over_measured"] - 1) for row in rows)
    return {
        "bench": "simulate-engine",
        "tokens": arguments.tokens,
        "rounds": arguments.rounds,
        "link_rate_mb_per_s": arguments.link_rate,
        "rows": rows,
        "worst_off": round(worst, 3),
    }


if __name__ == "__main__":
    print(json.dumps(measure(parse_arguments(None))))
