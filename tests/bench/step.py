"""Where does the time of one step go?

Question: with all experts resident, what do a plain decode step, a draft step and a
verification of five tokens cost, part by part, beside the least each part can cost; and
how does a plain step compare with transformers' own generate on the same checkpoint?

Method: one process, one prompt, steps of the three kinds and of transformers in turn,
medians. Parts are timed by hooks around modules, so each holds its own share of Python
and of torch's dispatch; `framework` is what is left between them. A part's bound is the
bytes of weights and KV state it must read, divided by the memory rate measured in the
same run (a sum over a matrix that no cache holds).

Left out: prefill, detokenising, the process boundary, loading (nothing is missing).

Run: python tests/bench/step.py [--rounds 30] [--threads N]
The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from mira_app.paths import data_dir
from mira_engine.checkpoint.experts import expert_modules_of
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import ChatMessage
from mira_engine.library import ModelLibrary
from mira_engine.model.sampling import Sampler
from mira_engine.prepare import prepare
from mira_engine.types import Phase, Precision
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

PROMPT = "Write a long story about a lighthouse keeper and his dog."
VERIFY_TOKENS = 5
PARTS = ("attention", "norms and routers", "shared experts", "routed experts", "output layer")
OTHER = ("sampling", "waiting", "framework")


def part_of(name: str) -> str | None:
    """Returns the part a module belongs to, `None` where its children or nobody count it."""
    leaf = name.rsplit(".", 1)[-1]
    if leaf in ("self_attn", "attention"):
        return "attention"
    if "norm" in leaf and ".self_attn." not in name:
        return "norms and routers"
    if leaf in ("gate", "router"):
        return "norms and routers"
    if leaf in ("shared_expert", "shared_experts", "shared_expert_gate"):
        return "shared experts"
    if leaf == "experts":
        return "routed experts"
    if leaf == "lm_head":
        return "output layer"
    return None


class PartTimer:
    """Adds up the time inside each part's modules."""

    def __init__(self, model: PreTrainedModel) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        self.weight_bytes: dict[str, int] = defaultdict(int)
        self._started: dict[int, float] = {}
        for name, module in model.named_modules():
            part = part_of(name)
            if part is None:
                continue
            self.weight_bytes[part] += sum(p.numel() * p.itemsize for p in module.parameters())
            module.register_forward_pre_hook(self._before)
            module.register_forward_hook(self._after(part))

    def _before(self, module: torch.nn.Module, inputs: object) -> None:
        self._started[id(module)] = time.perf_counter()

    def _after(self, part: str) -> Callable[..., None]:
        def hook(module: torch.nn.Module, inputs: object, output: object) -> None:
            self.seconds[part] += time.perf_counter() - self._started.pop(id(module))

        return hook


def memory_rate() -> float:
    """Returns bytes/s of reading what no cache holds, with the threads in force."""
    block = torch.ones(64 * 2**20)
    times = []
    for _ in range(5):
        started = time.perf_counter()
        block.sum()
        times.append(time.perf_counter() - started)
    return block.numel() * block.itemsize / min(times)


class StepBench:
    """Steps of the engine, timed part by part.

    Args:
        engine: With all experts resident and a draft.
    """

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.timer = PartTimer(engine.model)
        self.sampler = Sampler(SamplingConfig())
        self.samples: dict[str, list[dict[str, float]]] = defaultdict(list)
        prompt = engine.render([ChatMessage(role="user", content=PROMPT)])
        self.history = list(prompt)
        engine.passes.forward(prompt, Phase.PREFILL)
        engine.state.rollback(0)

    @contextmanager
    def _step(self, kind: str) -> Iterator[None]:
        executor = self.engine.executor
        self.timer.seconds.clear()
        stalled = executor.meter.decode.stall_s
        started = time.perf_counter()
        yield
        total = time.perf_counter() - started
        waiting = executor.meter.decode.stall_s - stalled
        parts = {part: self.timer.seconds[part] for part in PARTS}
        parts["routed experts"] -= waiting
        parts["sampling"] = self.timer.seconds["sampling"]
        parts["waiting"] = waiting
        parts["framework"] = total - sum(parts.values())
        parts["total"] = total
        self.samples[kind].append(parts)

    def _sample(self, logits: torch.Tensor) -> int:
        started = time.perf_counter()
        token = self.sampler.draw(self.history, logits).token
        self.timer.seconds["sampling"] += time.perf_counter() - started
        return token

    def run_round(self) -> None:
        """One step of each kind from the same state; the plain one advances the text."""
        passes, state = self.engine.passes, self.engine.state
        last = self.history[-1]
        with self._step("draft"):
            self._sample(passes.forward([last], Phase.DRAFT)[0])
            state.rollback(1)
        tokens = [last, *self.history[-VERIFY_TOKENS:-1]]
        with self._step("verify5"):
            logits = passes.forward(tokens, Phase.VERIFY, num_logits=len(tokens))
            for row in logits:
                self._sample(row)
            state.rollback(len(tokens))
        with self._step("decode"):
            token = self._sample(passes.forward([last], Phase.DECODE)[0])
            state.rollback(0)
        self.history.append(token)

    def median_ms(self, kind: str, part: str) -> float:
        return 1e3 * statistics.median(sample[part] for sample in self.samples[kind])

    def bounds_ms(self, rate: float) -> dict[str, dict[str, float]]:
        """Least time of each part and kind: bytes that must be read over the memory rate."""
        engine, fmt = self.engine, self.engine._target.format
        manifest = engine._target.manifest
        whole = sum(fmt.payload_bytes(plane) for plane in fmt.planes)
        draft = fmt.payload_bytes(fmt.draft_plane) if fmt.draft_plane else whole
        touched = manifest.num_layers * engine._top_k
        distinct = touched * min(VERIFY_TOKENS, manifest.num_experts / engine._top_k)
        kv = engine.state.num_bytes()
        bounds = {}
        for kind, routed in (
            ("decode", touched * whole),
            ("draft", touched * draft),
            ("verify5", distinct * whole),
        ):
            num_bytes = dict(self.timer.weight_bytes)
            num_bytes["attention"] += kv
            num_bytes["routed experts"] = routed
            bounds[kind] = {part: 1e3 * num_bytes[part] / rate for part in PARTS}
        return bounds


class TransformersStep:
    """transformers' own generate, one token at a time on a cache of its own."""

    def __init__(self, folder: Path, prompt: list[int]) -> None:
        self.model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).eval()
        self.cache = DynamicCache(config=self.model.config)
        self.tokens = torch.tensor([prompt])
        self.seconds: list[float] = []
        self.run_round()

    @torch.inference_mode()
    def run_round(self) -> None:
        """Generates as many tokens as cost about what the other systems' round costs."""
        started = time.perf_counter()
        before = self.tokens.shape[1]
        self.tokens = self.model.generate(
            self.tokens,
            cache=self.cache,
            max_new_tokens=4,
            min_new_tokens=4,
            do_sample=False,
            pad_token_id=0,
        )
        taken = time.perf_counter() - started
        self.seconds.append(taken / (self.tokens.shape[1] - before))


def print_table(bench: StepBench, bounds: dict[str, dict[str, float]]) -> None:
    """Prints milliseconds: measured, and in brackets the bound."""
    kinds = ("decode", "draft", "verify5")
    print(("{:<20}" + "{:>20}" * 3).format("ms (bound)", *kinds))
    for part in (*PARTS, *OTHER, "total"):
        cells = []
        for kind in kinds:
            measured = f"{bench.median_ms(kind, part):.2f}"
            bound = bounds[kind].get(part)
            if part == "total":
                bound = sum(bounds[kind].values())
            cells.append(measured + (f" ({bound:.2f})" if bound is not None else "       "))
        print(("{:<20}" + "{:>20}" * 3).format(part, *cells))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--data-dir", type=Path, default=None)
    arguments = parser.parse_args()
    home = ModelLibrary(arguments.data_dir or data_dir()).resolve("builtin")
    prepare(home, Precision.NESTED, on_progress=lambda *_: None, is_cancelled=lambda: False)
    config = EngineConfig(
        budget=MemoryAmount(share=2.0), num_draft_tokens=4, num_threads=arguments.threads
    )
    engine = Engine.load(home, config)
    bench = StepBench(engine)
    theirs = TransformersStep(home.checkpoint_dir, list(bench.history))
    modules = [module for _, module in expert_modules_of(engine.model)]
    for number in range(-10, arguments.rounds):
        bench.run_round()
        theirs.run_round()
        if number < 0:
            bench.samples.clear()  # until everything is resident and warm
            theirs.seconds.clear()
    rate = memory_rate()
    engine.close()
    reference_ms = 1e3 * statistics.median(theirs.seconds)
    total = {kind: bench.median_ms(kind, "total") for kind in ("decode", "draft", "verify5")}
    print(
        f"built-in model, nested, bfloat16, all experts resident, {len(modules)} MoE layers, "
        f"{arguments.threads} threads, memory {rate / 1e9:.1f} GB/s, {arguments.rounds} rounds"
    )
    print_table(bench, bench.bounds_ms(rate))
    print(f"transformers' generate: {reference_ms:.1f} ms a token")
    print(
        json.dumps(
            {
                "bench": "step",
                "threads": arguments.threads,
                "rounds": arguments.rounds,
                "memory_bytes_per_s": round(rate),
                "step_ms": {kind: round(value, 2) for kind, value in total.items()},
                "transformers_ms": round(reference_ms, 2),
                "speedup_over_transformers": round(reference_ms / total["decode"], 3),
                "draft_over_decode": round(total["draft"] / total["decode"], 3),
                "verify5_over_decode": round(total["verify5"] / total["decode"], 3),
            }
        )
    )


if __name__ == "__main__":
    main()
