"""What does the processor beside a card save, and when should a miss come to the card all the same?

Method: real routing (two domains of DeepSeek-V2-Lite) through the engine's driver on a virtual
clock, plain decoding and drafts of four tokens, LRU, room for 16 and 32 of 64 experts a layer.
A record takes 1 ms of the link; an expert on the host between a quarter of that and four times
as much, a further token a tenth of it. Times are ratios to the same run without the host. What
the host computes is brought where its last miss is no more uses of experts ago than the span
times the slots, or in the pass before.
Left out: that link and processor share the host's memory, which the rates measured at loading
do not see either; prompts; other machines than the one these numbers stand for.

Run: python tests/bench/host_misses.py [--tokens 160]
The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from pathlib import Path

from mira_engine.policy import host_misses
from mira_engine.simulator.servers import MachineCosts
from mira_engine.simulator.simulate import CacheShape, SimulatedRun, simulate
from mira_engine.simulator.systems import System, all_systems
from mira_engine.simulator.workload import Round, make_rounds, read_token_trace

SHARED = Path(os.environ.get("MIRA_SHARED", Path(__file__).resolve().parents[3] / "shared"))
SPANS = (0.0, 0.25, 0.5, 1.0, 2.0, 1e9)
HOST_RATIOS = (0.25, 0.5, 1.0, 2.0, 4.0)
"""Seconds of the host for an expert by those of the link for its record."""

RECORD_BYTES, RECORD_S, WARMUP_TOKENS = 10**6, 1e-3, 64
COSTS = MachineCosts(
    link_bytes_per_s=RECORD_BYTES / RECORD_S, pass_s=2e-3, layer_s=1e-4, expert_s=2e-5,
    expert_token_s=2e-6, draft_s=5e-3,
)  # fmt: skip


def run(
    rounds: Sequence[Round], system: System, shape: CacheShape, host_ratio: float | None
) -> SimulatedRun:
    """Simulates; `None` leaves the host out."""
    host_s = None if host_ratio is None else host_ratio * RECORD_S
    costs = MachineCosts(
        **{name: getattr(COSTS, name) for name in COSTS.__slots__}
        | {"host_expert_s": host_s, "host_token_s": 0.1 * (host_s or 0.0)}
    )
    return simulate(rounds, system, shape, costs, num_warmup_tokens=WARMUP_TOKENS)


def compare(domain: str, k: int, share: int, num_tokens: int) -> dict[str, dict[str, float]]:
    """Prints times by span and speed of the host; returns them."""
    trace = read_token_trace(SHARED / "traces" / f"{domain}.npz")
    num_layers = trace.ids.shape[1]
    trace = trace.part(0, min(len(trace.ids), num_tokens + WARMUP_TOKENS))
    rounds = list(make_rounds(trace, k, acceptance=0.88, fidelity=0.909))
    system = next(s for s in all_systems() if s.name == ("mira+lookahead" if k else "lru"))
    shape = CacheShape(
        num_layers=num_layers,
        num_experts=trace.num_experts,
        num_slots=share * num_layers,
        record_bytes=RECORD_BYTES,
    )
    alone = run(rounds, system, shape, None)
    print(f"\n{domain}, K = {k}, {share} of {trace.num_experts}: {1e3 * alone.tpot_s:.1f} ms alone")
    found: dict[str, dict[str, float]] = {}
    for ratio in HOST_RATIOS:
        row = found[f"host {ratio}"] = {}
        for span in SPANS:
            host_misses.RETURN_SPAN = span
            done = run(rounds, system, shape, ratio)
            row[f"{span:g}"] = round(done.tpot_s / alone.tpot_s, 3)
        on_host = done.traffic.num_on_host / max(1, done.traffic.num_misses)
        cells = "  ".join(f"{span}: {value:.3f}" for span, value in row.items())
        print(f"  host takes {ratio:4.2f} of a copy  {cells}   ({on_host:.0%} of misses at last)")
    return found


def main() -> None:
    """Runs everything and prints tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=160)
    tokens = parser.parse_args().tokens
    if not (SHARED / "traces").is_dir():
        parser.error(f"No traces at {SHARED / 'traces'}; MIRA_SHARED names their parent folder.")
    result: dict[str, object] = {"bench": "host-misses"}
    for domain in ("law", "summary"):
        for k in (0, 4):
            for share in (16, 32):
                result[f"{domain} k{k} {share}"] = compare(domain, k, share, tokens)
    print(json.dumps(result))


if __name__ == "__main__":
    main()
