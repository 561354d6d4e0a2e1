"""What would a cache do, and does the simulator say what the machine says?

Questions on a virtual clock:
(a) Hit rates on real routing (two domains of DeepSeek-V2-Lite): LRU beside the figures
    measured before, then every other policy, sets learned on the same and on the other
    domain, and Belady's bound; then all systems through the engine's driver, prefetches too.
(b) The papers' models on the papers' machine (A100-40GB, PCIe 4): time per token of
    Transformers, Mixtral-Offloading at same memory and Specter, as ratios beside the published.
(c) `--engine`: the simulator against the engine; see `simulate_engine.py`.

Method of (a): caches a layer, experts touched one by one in stored order, texts in a row;
sets are learned on the first half and asked on the second, so that no row knows its future.
Method of (b): synthetic routing with the statistics of the real traces, published acceptance
(.966) and fidelity of INT4 routing (.909), costs of an eager program as `A100` says. How much
of the experts the "high-memory setting" holds is not in the text: several shares are simulated
(Phi's limited by 40 GB), and the ratios of the one with the nearest times are held against
the published.
Left out: prefill, batches, vLLM and llama.cpp (other programs, not other policies).

Run: python tests/bench/simulate.py [--tokens 160] [--only hits|papers] [--engine]
The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import math
import os
from dataclasses import dataclass
from pathlib import Path

from mira_engine.policy.eviction import EVICTION_POLICIES, LruEviction, preferred_eviction
from mira_engine.simulator.hits import (
    belady_hits,
    policy_hits,
    popular_sets,
    split_hits,
    static_hits,
    touches,
)
from mira_engine.simulator.predictions import NextLayerGuess
from mira_engine.simulator.servers import MachineCosts
from mira_engine.simulator.simulate import CacheShape, simulate
from mira_engine.simulator.sweep import NEXT_LAYER_FIDELITY, SimulationRequest, compare
from mira_engine.simulator.synthetic import synthetic_trace
from mira_engine.simulator.systems import Lead, System, all_systems
from mira_engine.simulator.workload import make_rounds, read_token_trace

SHARED = Path(os.environ.get("MIRA_SHARED", Path(__file__).resolve().parents[3] / "shared"))

PUBLISHED_LRU = {
    "law": {8: 0.294, 16: 0.472, 32: 0.717},
    "summary": {8: 0.292, 16: 0.466, 32: 0.725},
}


# -- (a) real routing ------------------------------------------------------------------------


def hit_tables(num_tokens: int | None) -> dict[str, dict[str, float]]:
    """Prints hit rates by domain, policy and slots; returns them."""
    traces = {name: read_token_trace(SHARED / "traces" / f"{name}.npz") for name in PUBLISHED_LRU}
    found: dict[str, dict[str, float]] = {}
    for name, whole in traces.items():
        layers = touches(whole)
        print(f"\n{name}: whole trace, {len(whole.ids)} tokens; LRU here / measured before")
        for slots, published in PUBLISHED_LRU[name].items():
            lru = policy_hits(layers, slots, LruEviction)
            found.setdefault(name, {})[f"whole lru@{slots}"] = round(lru, 3)
            print(f"  {slots:>2} of 64: {lru:.3f} / {published:.3f}")
        half = len(whole.ids) // 2
        end = min(len(whole.ids), half + num_tokens) if num_tokens else len(whole.ids)
        learned, decoded = whole.part(0, half), whole.part(half, end)
        other = traces["summary" if name == "law" else "law"]
        layers = touches(decoded)
        print(f"{name}: second half, {len(decoded.ids)} tokens")
        print(("  {:<26}" + "{:>8}" * 3).format("slots of 64", *PUBLISHED_LRU[name]))
        rows: dict[str, list[float]] = {}
        for slots in PUBLISHED_LRU[name]:
            half_sets = {"same": learned, "other": other}
            for policy, make in EVICTION_POLICIES.items():
                rows.setdefault(str(policy), []).append(policy_hits(layers, slots, make))
            for domain, source in half_sets.items():
                rows.setdefault(f"static ({domain} domain)", []).append(
                    static_hits(layers, popular_sets(source, slots))
                )
                rows.setdefault(f"half static ({domain}) + lru", []).append(
                    split_hits(layers, popular_sets(source, slots // 2), slots, LruEviction)
                )
            rows.setdefault("belady (bound on demand)", []).append(belady_hits(layers, slots))
        for row, rates in rows.items():
            print(("  {:<26}" + "{:>8.3f}" * 3).format(row, *rates))
            found[name] |= {
                f"{row}@{slots}": round(rate, 3)
                for slots, rate in zip(PUBLISHED_LRU[name], rates, strict=True)
            }
    return found


def system_tables(num_tokens: int) -> dict[str, dict[str, float]]:
    """Prints all systems through the driver, learned on either domain; returns hit rates."""
    found: dict[str, dict[str, float]] = {}
    for trained in PUBLISHED_LRU:
        request = SimulationRequest(
            trace_path=str(SHARED / "traces" / "law.npz"),
            training_path=str(SHARED / "traces" / f"{trained}.npz") if trained != "law" else None,
            slots_per_layer=(16,),
            num_tokens=num_tokens,
        )
        print(f"\nlaw through the driver, learned on {trained}; 16 slots a layer, 25 GB/s")
        print(
            ("  {:<22}" + "{:>10}" * 5).format("", "hits", "ahead", "MiB/token", "TPOT", "memory")
        )
        for row in compare(request).rows:
            print(
                f"  {row.policy:<22}{row.hit_rate:>10.3f}{row.prefetched_share:>10.3f}"
                f"{row.bytes_per_token / 2**20:>10.1f}{1e3 * row.tpot_s:>10.1f}"
                f"{row.memory_share:>10.0%}"
            )
            found.setdefault(row.policy, {})[trained] = round(row.hit_rate, 3)
    return found


# -- (b) the papers' machine -----------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class PaperModel:
    """A model of the paper, and what was published of it (ms a token).

    `dense_bytes` is what a layer holds beside its routed experts, in FP16.
    """

    num_layers: int
    num_experts: int
    top_k: int
    record_bytes: int
    dense_bytes: int
    k: int
    cache_shares: tuple[float, ...]
    published: dict[str, float]


PAPER_MODELS = {
    "Qwen1.5-MoE": PaperModel(
        num_layers=24, num_experts=60, top_k=4, record_bytes=2 * 3 * 2048 * 1408, k=8,
        dense_bytes=103_000_000, cache_shares=(0.2, 0.3, 0.4),
        published={"transformers": 258.2, "mixtral-offloading-sm": 74.2, "specter": 35.3},
    ),
    "DeepSeek-V2-Lite": PaperModel(
        num_layers=26, num_experts=64, top_k=6, record_bytes=2 * 3 * 2048 * 1408, k=16,
        dense_bytes=62_000_000, cache_shares=(0.2, 0.3, 0.4),
        published={"transformers": 344.9, "specter": 72.2},
    ),
    "Phi-3.5-MoE": PaperModel(
        num_layers=32, num_experts=16, top_k=2, record_bytes=2 * 3 * 4096 * 6400, k=16,
        dense_bytes=84_000_000, cache_shares=(0.05, 0.1, 0.17),
        published={"transformers": 960.6, "mixtral-offloading-sm": 295.1, "specter": 163.3},
    ),
}  # fmt: skip

DRAFT_SHARE = 0.26
"""Bytes of an INT4 expert with its scales, of the FP16 one."""

PINNED_BYTES_PER_S, PAGEABLE_BYTES_PER_S = 25e9, 6e9
"""PCIe 4 x16 from pinned memory by a stream; from ordinary memory, one tensor after another."""


def a100_costs(model: PaperModel, *, is_swapping: bool = False) -> MachineCosts:
    """Assumed costs of an eager program on an A100: launches, or bytes at 1.3 TB/s.

    A layer is some 15 launches of 40 us; an expert three products and their gathering; a
    draft layer has one fused launch for all experts, and reads a quarter of their bytes.
    Mixtral-Offloading swaps: what is given up is copied back on the same stream, which
    halves the link.
    """
    expert_s = 0.15e-3 + model.record_bytes / 1.3e12
    draft_layer_s = 0.7e-3 + DRAFT_SHARE * model.top_k * model.record_bytes / 1.3e12
    return MachineCosts(
        link_bytes_per_s=PINNED_BYTES_PER_S / (2 if is_swapping else 1),
        link_latency_s=20e-6,
        pass_s=2e-3,
        layer_s=0.6e-3,
        layer_token_s=0.005e-3,
        expert_s=expert_s,
        expert_token_s=0.002e-3,
        draft_s=2e-3 + model.num_layers * draft_layer_s,
    )


def transformers_tpot_s(model: PaperModel, memory_share: float) -> float:
    """Returns a token's time where whole layers stay on the host.

    Their attention, shared experts and chosen experts are moved when they are called, each
    by itself, from ordinary memory, and nothing is kept: no policy, nothing to simulate.
    """
    costs = a100_costs(model)
    experts = model.num_layers * model.top_k
    compute_s = costs.pass_s + model.num_layers * costs.layer_s + experts * costs.expert_s
    moved = (1 - memory_share) * (
        experts * model.record_bytes + model.num_layers * model.dense_bytes
    )
    return compute_s + moved / PAGEABLE_BYTES_PER_S


def paper_tpots(model: PaperModel, cache_share: float, num_tokens: int) -> dict[str, float]:
    """Simulates the three systems; milliseconds a token."""
    trace = synthetic_trace(
        num_layers=model.num_layers,
        num_experts=model.num_experts,
        top_k=model.top_k,
        num_tokens=num_tokens,
    )
    systems = {system.name: system for system in all_systems()}
    specter = System(
        name="specter",
        about="INT4 draft, FP16 target, one record an expert",
        eviction=preferred_eviction(model.k),
        lead=Lead.DRAFT,
        is_drafting=True,
        is_draft_resident=True,
    )
    memory_share = min(1.0, cache_share + DRAFT_SHARE)
    found = {"transformers": 1e3 * transformers_tpot_s(model, memory_share)}
    for system, share, k in (
        (systems["mixtral-offloading-sm"], memory_share, 0),
        (specter, cache_share, model.k),
    ):
        num_all = model.num_layers * model.num_experts
        run = simulate(
            make_rounds(trace, k, acceptance=0.9663, fidelity=0.909),
            system,
            CacheShape(
                num_layers=model.num_layers,
                num_experts=model.num_experts,
                num_slots=max(model.num_layers * model.top_k // 2, round(share * num_all)),
                record_bytes=model.record_bytes,
            ),
            a100_costs(model, is_swapping=not system.is_drafting),
            predictor=None
            if system.is_drafting
            else NextLayerGuess(fidelity=NEXT_LAYER_FIDELITY, num_experts=model.num_experts),
            num_warmup_tokens=min(48, num_tokens // 4),
        )
        found[system.name] = 1e3 * run.tpot_s
    return found


def paper_tables(num_tokens: int) -> dict[str, dict[str, float]]:
    """Prints simulated beside published times and ratios to Specter; returns the nearest."""
    nearest: dict[str, dict[str, float]] = {}
    for name, model in PAPER_MODELS.items():
        print(f"\n{name}, K = {model.k}, A100-40GB, PCIe 4: ms a token (ratio to Specter)")
        published = {s: ms / model.published["specter"] for s, ms in model.published.items()}
        print("  published       " + _cells(model.published))
        for share in model.cache_shares:
            found = paper_tpots(model, share, num_tokens)
            print(f"  {share:>4.0%} of experts " + _cells(found))
            distance = sum(abs(math.log(found[s] / ms)) for s, ms in model.published.items())
            if name not in nearest or distance < nearest[name]["distance"]:
                off = {s: found[s] / found["specter"] / ratio for s, ratio in published.items()}
                nearest[name] = {"cache_share": share, "distance": distance}
                nearest[name] |= {f"{s}_ratio_over_published": value for s, value in off.items()}
                nearest[name] |= {f"{s}_ms": ms for s, ms in found.items()}
        best = nearest[name] = {key: round(value, 3) for key, value in nearest[name].items()}
        print(f"  nearest times at {best['cache_share']:.0%} of experts:")
        calls = model.num_layers * model.top_k
        for system, ms in model.published.items():
            off = best[f"{system}_ratio_over_published"] - 1
            lacking = (ms - best[f"{system}_ms"]) / calls
            print(
                f"    {system}: ratio off by {off:+.0%}; published has {lacking:+.2f} ms an "
                "expert call more than the model"
            )
    return nearest


def _cells(times: dict[str, float]) -> str:
    return "  ".join(f"{name} {ms:.1f} ({ms / times['specter']:.2f})" for name, ms in times.items())


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--tokens", type=int, default=160, help="of simulations with time")
    parser.add_argument("--hit-tokens", type=int, default=None, help="of hit rates; all else")
    parser.add_argument("--only", choices=("hits", "papers"), default=None)
    parser.add_argument("--engine", action="store_true", help="hold it against the engine too")
    arguments = parser.parse_args()
    result: dict[str, object] = {"bench": "simulate"}
    if arguments.only != "papers":
        if (SHARED / "traces").is_dir():
            result["hits"] = hit_tables(arguments.hit_tokens)
            result["systems"] = system_tables(arguments.tokens)
        else:
            print(f"No traces at {SHARED / 'traces'}; MIRA_SHARED names their parent folder.")
    if arguments.only != "hits":
        result["papers"] = paper_tables(arguments.tokens)
    if arguments.engine:
        import simulate_engine

        result["engine"] = simulate_engine.measure(simulate_engine.parse_arguments([]))
    print(json.dumps(result))


if __name__ == "__main__":
    main()
