"""How long does a token take, and where does the time go?

Question: time per output token (TPOT) of the engine at one memory budget, plain (K = 0)
and speculating (K = 4), against (a) the same engine, kernels and memory with on-demand
LRU and no prefetch, and (b) transformers with accelerate's disk offload of a quarter of
the layers, on the same checkpoint in bfloat16.

Method: one process, all systems loaded, rounds that alternate between them on the same
prompts, greedy, medians over rounds, ratios. The first token is left out of TPOT. Time
is split into waiting for records (stall), drafting, target passes without their stalls,
and the rest (sampling, acceptance, bookkeeping).

The link is the machine's disk, or held to a rate: `--link-rate` in MB/s, or
`--link-ratio R`, at which moving all experts of a token takes R times as long as decoding
one with all experts resident (measured first; R is 2 to 4 for a small model on PCIe 4,
about 10 for Phi-3.5-MoE). The engine runs compiled steps unless `--compile off`.

Left out: prefill, detokenising, the process boundary. With K = 0 the engine has no draft
to prefetch from and evicts as `lru` does: the two rows then show the noise of the machine.

Run: python tests/bench/decode.py [--rounds 5] [--tokens 64] [--budget 75%] [--link-ratio R]
The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from mira_app.paths import cache_dir, data_dir
from mira_engine.checkpoint.store import ExpertStore
from mira_engine.config import EngineConfig, LinkConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import ChatMessage, ReplyStats
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.types import CompileMode, Eviction, Precision
from transformers import AutoModelForCausalLM, PreTrainedModel
from transformers.generation.streamers import BaseStreamer

PROMPTS = (
    "Explain what a cache is.",
    "Write a Python function that reverses a list.",
    "Tell me a short story about a lighthouse.",
    "What are the main differences between cats and dogs?",
    "Give me three tips for learning to cook.",
)


@dataclass
class Row:
    """One system's measurements, one entry a round."""

    name: str
    tpot_ms: list[float] = field(default_factory=list)
    stats: list[ReplyStats] = field(default_factory=list)

    @property
    def median_ms(self) -> float:
        return statistics.median(self.tpot_ms)

    def per_token_ms(self, pick: Callable[[ReplyStats], float]) -> float | None:
        """Median over rounds of seconds picked from the figures, in ms a token."""
        if not self.stats:
            return None
        return statistics.median(1e3 * pick(s) / (s.num_new_tokens - 1) for s in self.stats)

    def total(self, pick: Callable[[ReplyStats], float]) -> float | None:
        return sum(map(pick, self.stats)) if self.stats else None


class _Clock(BaseStreamer):
    """Notes when transformers' generate hands over each token; the prompt comes first."""

    def __init__(self) -> None:
        self.times: list[float] = []

    def put(self, value: torch.Tensor) -> None:
        self.times.append(time.perf_counter())

    def end(self) -> None:
        pass


def _prompt_tokens(engine: Engine, text: str) -> list[int]:
    return engine.render([ChatMessage(role="user", content=text)])


def run_engine(engine: Engine, row: Row, prompt: list[int], num_tokens: int) -> None:
    """Adds one reply's figures to the row."""
    engine.state.reset()
    for _ in engine.reply(prompt, SamplingConfig(max_new_tokens=num_tokens)):
        pass
    stats = engine.stats()
    row.tpot_ms.append(1e3 * stats.decode_s / (stats.num_new_tokens - 1))
    row.stats.append(stats)


@torch.inference_mode()
def run_transformers(model: PreTrainedModel, row: Row, prompt: list[int], num_tokens: int) -> None:
    """Adds one generate call's time per token to the row."""
    clock = _Clock()
    model.generate(
        torch.tensor([prompt]),
        max_new_tokens=num_tokens,
        min_new_tokens=num_tokens,
        do_sample=False,
        pad_token_id=0,
        streamer=clock,
    )
    first, last = clock.times[1], clock.times[-1]
    row.tpot_ms.append(1e3 * (last - first) / (len(clock.times) - 2))


def resident_decode_ms(engine: Engine) -> float:
    """Returns milliseconds a token with every expert resident; closes the engine."""
    row = Row("resident")
    prompt = _prompt_tokens(engine, PROMPTS[0])
    for _ in range(3):
        run_engine(engine, row, prompt, 48)
    engine.close()
    return min(row.tpot_ms)


def expert_bytes_of_token(home: ModelHome, precision: Precision) -> int:
    """Bytes of all experts that one token uses, whole."""
    store = ExpertStore.open(home.store_dir(precision))
    record_bytes = sum(store.format.record_bytes(plane) for plane in store.format.planes)
    config = json.loads((home.checkpoint_dir / "config.json").read_text())
    return store.manifest.num_layers * config["num_experts_per_tok"] * record_bytes


def load_offloaded(home: ModelHome, folder: Path) -> PreTrainedModel:
    """Loads the checkpoint with every fourth layer on the disk, the rest in memory."""
    num_layers = json.loads((home.checkpoint_dir / "config.json").read_text())["num_hidden_layers"]
    device_map: dict[str, str] = {
        f"model.layers.{i}": "disk" if i % 4 == 3 else "cpu" for i in range(num_layers)
    }
    for name in ("model.embed_tokens", "model.norm", "model.rotary_emb", "lm_head"):
        device_map[name] = "cpu"
    return AutoModelForCausalLM.from_pretrained(
        home.checkpoint_dir,
        dtype=torch.bfloat16,
        device_map=device_map,
        offload_folder=str(folder),
    ).eval()


def print_table(rows: list[Row]) -> None:
    """Prints medians in milliseconds a token."""
    head = ("", "TPOT", "stall", "draft", "target", "rest", "hit rate", "MB/token", "accepted")
    print(("{:<14}" + "{:>10}" * 8).format(*head))
    for row in rows:
        cells = [row.name, f"{row.median_ms:.1f}"]
        if row.stats:
            stall = row.per_token_ms(lambda s: s.stall_s) or 0.0
            draft = row.per_token_ms(lambda s: s.draft_s) or 0.0
            target = (row.per_token_ms(lambda s: s.verify_s - s.stall_s)) or 0.0
            hits, misses = row.total(lambda s: s.num_hits), row.total(lambda s: s.num_misses)
            tokens = row.total(lambda s: s.num_new_tokens - 1)
            rounds = row.total(lambda s: s.num_rounds)
            cells += [f"{v:.1f}" for v in (stall, draft, target)]
            cells.append(f"{row.median_ms - stall - draft - target:.1f}")
            cells.append(f"{hits / (hits + misses):.3f}")
            cells.append(f"{row.total(lambda s: s.bytes_moved) / tokens / 1e6:.1f}")
            cells.append(f"{row.total(lambda s: s.num_accepted) / rounds:.2f}" if rounds else "-")
        else:
            cells += ["-"] * 7
        print(("{:<14}" + "{:>10}" * 8).format(*cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--budget", default="75%")
    parser.add_argument("--precision", default="nested")
    link = parser.add_mutually_exclusive_group()
    link.add_argument("--link-rate", type=float, help="emulated link, MB/s")
    link.add_argument("--link-ratio", type=float, help="emulated link, by its ratio to decoding")
    parser.add_argument("--compile", type=CompileMode, default=CompileMode.WAIT)
    parser.add_argument("--cache-dir", type=Path, default=None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--data-dir", type=Path, default=None)
    arguments = parser.parse_args()
    root = arguments.data_dir or data_dir()
    home = ModelLibrary(root).resolve("builtin")
    precision = Precision(arguments.precision)
    prepare(home, precision, on_progress=lambda *_: None, is_cancelled=lambda: False)
    rate = arguments.link_rate * 1e6 if arguments.link_rate else None

    def load(
        num_draft_tokens: int,
        *,
        is_prefetch_enabled: bool = True,
        eviction: Eviction | None = None,
        budget: MemoryAmount | None = None,
        bytes_per_s: float | None = None,
    ) -> Engine:
        config = EngineConfig(
            precision=precision,
            budget=budget or MemoryAmount.parse(arguments.budget),
            num_draft_tokens=num_draft_tokens,
            is_prefetch_enabled=is_prefetch_enabled,
            eviction=eviction,
            link=LinkConfig(bytes_per_s=bytes_per_s or rate),
            num_threads=arguments.threads,
            compile_mode=arguments.compile,
        )
        engine = Engine.load(home, config, cache_dir=arguments.cache_dir or cache_dir())
        engine._end_ids = frozenset()  # every reply has the same number of tokens
        return engine

    resident_ms = resident_decode_ms(load(0, budget=MemoryAmount(share=2.0)))
    if arguments.link_ratio:
        token_bytes = expert_bytes_of_token(home, precision)
        rate = token_bytes / (1e-3 * resident_ms * arguments.link_ratio)
    engines = {
        "lru": load(0, is_prefetch_enabled=False, eviction=Eviction.LRU),
        "k0": load(0),
        "k4-ondemand": load(4, is_prefetch_enabled=False),
        "k4": load(4),
    }
    offloaded = load_offloaded(home, root / "bench-offload")
    rows = {name: Row(name) for name in (*engines, "transformers")}
    for number in range(-1, arguments.rounds):
        text = PROMPTS[number % len(PROMPTS)]
        prompt = _prompt_tokens(engines["k0"], text)
        for name, engine in engines.items():
            run_engine(engine, rows[name], prompt, arguments.tokens)
        run_transformers(offloaded, rows["transformers"], prompt, arguments.tokens)
        if number < 0:
            rows = {name: Row(name) for name in rows}  # the first round warms everything up
    plan = engines["k4"].plan
    print(
        f"budget {arguments.budget} = {plan.budget_bytes / 2**20:.0f} MiB, {precision}, "
        f"{arguments.tokens} tokens, {arguments.rounds} rounds, "
        f"{torch.get_num_threads()} threads; ms per token, medians"
        f"; all resident {resident_ms:.1f}"
        + (f"; link emulated at {rate / 1e6:.0f} MB/s" if rate else "")
    )
    print_table(list(rows.values()))
    for engine in engines.values():
        engine.close()
    medians = {name: row.median_ms for name, row in rows.items()}
    print(
        json.dumps(
            {
                "bench": "decode",
                "budget": arguments.budget,
                "precision": precision,
                "tokens": arguments.tokens,
                "rounds": arguments.rounds,
                "threads": arguments.threads,
                "link_mb_per_s": round(rate / 1e6) if rate else None,
                "link_ratio": arguments.link_ratio,
                "compile": arguments.compile,
                "resident_ms": round(resident_ms, 2),
                "tpot_ms": {name: round(value, 2) for name, value in medians.items()},
                "k4_over_k0": round(medians["k4"] / medians["k0"], 3),
                "k4_over_lru": round(medians["k4"] / medians["lru"], 3),
                "k0_over_lru": round(medians["k0"] / medians["lru"], 3),
                "speedup_k0_over_transformers": round(medians["transformers"] / medians["k0"], 3),
                "speedup_k4_over_transformers": round(medians["transformers"] / medians["k4"], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
