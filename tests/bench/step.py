"""Where does the time of one step go?

Question: with all experts resident, what do a plain decode step, a draft step and a
verification of five tokens cost, part by part, beside the least each part can cost;
before (module by module, torch's kernels) and after (compiled steps, native kernels); and
how does a plain step compare with transformers' own generate on the same checkpoint?

Method: one process, one prompt; first the engine as it is without compiling, then as it
is with; in each, steps of the three kinds and of transformers in turn, medians. Before,
parts are timed by hooks around modules, so each holds its own share of Python and of
torch's dispatch, and `framework` is what is left between them. After, a step is one graph:
experts and attention over the cache are timed at their operators, the dense products of a
part apart from the step, one after another with the same weights; `norms, routers,
framework` is what is left. A part's bound is the bytes of weights and KV state it must
read, divided by the memory rate measured in the same run (a sum over a matrix that no
cache holds). Ratios are those of the second half.

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
from mira_app.paths import cache_dir, data_dir
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import ChatMessage
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.model.linear import DenseRows, SplitRows
from mira_engine.model.operators import StepBinding
from mira_engine.model.sampling import Sampler
from mira_engine.prepare import prepare
from mira_engine.types import CompileMode, Phase, Precision
from transformers import AutoModelForCausalLM, DynamicCache, PreTrainedModel

PROMPT = "Write a long story about a lighthouse keeper and his dog."
VERIFY_TOKENS = 5
PARTS = ("attention", "norms and routers", "shared experts", "routed experts", "output layer")
OTHER = ("sampling", "waiting", "framework")
KINDS = (("decode", 1, False), ("draft", 1, True), ("verify5", VERIFY_TOKENS, False))
"""Name, tokens and whether it is a draft's step."""


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
        self._started: dict[int, float] = {}
        for name, module in model.named_modules():
            part = part_of(name)
            if part is None:
                continue
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
        timer: Times the parts of a step.
    """

    def __init__(self, engine: Engine, timer: PartTimer | OperatorTimer) -> None:
        self.engine = engine
        self.timer = timer
        self.sampler = Sampler(SamplingConfig())
        self.samples: dict[str, list[dict[str, float]]] = defaultdict(list)
        prompt = engine.render([ChatMessage(role="user", content=PROMPT)])
        self.history = list(prompt)
        # Words of all kinds, so that every expert is resident before anything is timed.
        engine.passes.forward(list(range(100, 2500, 5)), Phase.PREFILL)
        engine.state.reset()
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

    def add_dense_products(self, rounds: int) -> None:
        """Moves the dense products' time, measured apart, from `framework` to its parts."""
        for kind, num_rows, is_draft in KINDS:
            seconds = dense_seconds(self.engine, num_rows, is_draft, rounds)
            for sample in self.samples[kind]:
                for part, taken in seconds.items():
                    sample[part] += taken
                    sample["framework"] -= taken

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
        for (kind, _, is_draft), routed in zip(
            KINDS, (touched * whole, touched * draft, distinct * whole), strict=True
        ):
            num_bytes = dense_bytes(engine.model, is_draft)
            num_bytes["attention"] += kv
            num_bytes["routed experts"] = routed
            bounds[kind] = {part: 1e3 * num_bytes[part] / rate for part in PARTS}
        return bounds


class OperatorTimer:
    """Adds up the time inside the two operators that a compiled step calls."""

    def __init__(self, engine: Engine) -> None:
        self.seconds: dict[str, float] = defaultdict(float)
        binding = engine.passes._binding
        engine.passes._binding = lambda run: self._timed(binding(run))

    def _timed(self, binding: StepBinding) -> StepBinding:
        return StepBinding(
            self._around(binding.run_experts, "routed experts"),
            binding.layers,
            self._around(binding.attend, "attention"),
        )

    def _around(self, run: Callable[..., torch.Tensor], part: str) -> Callable[..., torch.Tensor]:
        def timed(*arguments: object) -> torch.Tensor:
            started = time.perf_counter()
            result = run(*arguments)
            self.seconds[part] += time.perf_counter() - started
            return result

        return timed


def dense_bytes(model: PreTrainedModel, is_draft: bool) -> dict[str, int]:
    """Bytes of weights that a step reads, by part; a draft's own form of them."""
    num_bytes: dict[str, int] = defaultdict(int)
    for name, module in model.named_modules():
        part = part_of(name)
        if part is None:
            continue
        for inner in module.modules():
            if isinstance(inner, SplitRows):
                num_bytes[part] += inner.high.nbytes + (0 if is_draft else inner.low.nbytes)
            elif isinstance(inner, DenseRows):
                num_bytes[part] += inner.weight.nbytes
            else:
                num_bytes[part] += sum(p.nbytes for p in inner.parameters(recurse=False))
    return num_bytes


@torch.inference_mode()
def dense_seconds(engine: Engine, num_rows: int, is_draft: bool, rounds: int) -> dict[str, float]:
    """Median seconds of all dense products of a step, by part, in the model's order."""
    products = []
    for name, module in engine.model.named_modules():
        part = dense_part_of(name)
        if part is not None and isinstance(module, DenseRows):
            width = (module.high if isinstance(module, SplitRows) else module.weight).shape[1]
            x = torch.randn(num_rows, width, dtype=torch.bfloat16)
            products.append((part, module.forward, x))
    engine.passes._switch.is_drafting = is_draft
    times: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        taken: dict[str, float] = defaultdict(float)
        for part, product, x in products:
            started = time.perf_counter()
            product(x)
            taken[part] += time.perf_counter() - started
        for part, seconds in taken.items():
            times[part].append(seconds)
    return {part: statistics.median(values) for part, values in times.items()}


def dense_part_of(name: str) -> str | None:
    """Returns the part that a linear layer's name, or that of a module around it, tells."""
    while name:
        part = part_of(name)
        if part is not None:
            return part
        name = name.rpartition(".")[0]
    return None


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


def print_table(title: str, bench: StepBench, bounds: dict[str, dict[str, float]]) -> None:
    """Prints milliseconds: measured, and in brackets the bound."""
    names = [kind for kind, _, _ in KINDS]
    print(("{:<28}" + "{:>20}" * 3).format(title, *names))
    for part in (*PARTS, *OTHER, "total"):
        cells = []
        for kind in names:
            measured = f"{bench.median_ms(kind, part):.2f}"
            bound = bounds[kind].get(part)
            if part == "total":
                bound = sum(bounds[kind].values())
            cells.append(measured + (f" ({bound:.2f})" if bound is not None else "       "))
        print(("{:<28}" + "{:>20}" * 3).format(part, *cells))


def measure(
    home: ModelHome, mode: CompileMode, arguments: argparse.Namespace
) -> tuple[StepBench, dict[str, dict[str, float]], float]:
    """Runs the rounds of one engine beside transformers.

    Returns:
        The bench, the bounds of its parts in ms, and transformers' ms a token.
    """
    config = EngineConfig(
        budget=MemoryAmount(share=2.0),
        num_draft_tokens=VERIFY_TOKENS - 1,
        num_threads=arguments.threads,
        compile_mode=mode,
    )
    engine = Engine.load(home, config, cache_dir=arguments.cache_dir, on_notice=print)
    engine.take_compiled()
    is_compiled = mode is not CompileMode.OFF
    bench = StepBench(engine, OperatorTimer(engine) if is_compiled else PartTimer(engine.model))
    theirs = TransformersStep(home.checkpoint_dir, list(bench.history))
    for number in range(-10, arguments.rounds):
        bench.run_round()
        theirs.run_round()
        if number < 0:
            bench.samples.clear()  # until everything is resident and warm
            theirs.seconds.clear()
    if is_compiled:
        bench.add_dense_products(arguments.rounds)
    rate = memory_rate()
    print(f"memory {rate / 1e9:.1f} GB/s, {arguments.threads} threads, {arguments.rounds} rounds")
    bounds = bench.bounds_ms(rate)
    engine.close()
    return bench, bounds, 1e3 * statistics.median(theirs.seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--cache-dir", type=Path, default=None)
    arguments = parser.parse_args()
    arguments.cache_dir = arguments.cache_dir or cache_dir()
    home = ModelLibrary(arguments.data_dir or data_dir()).resolve("builtin")
    prepare(home, Precision.NESTED, on_progress=lambda *_: None, is_cancelled=lambda: False)
    print("built-in model, nested, bfloat16, all experts resident")
    before, before_bounds, _ = measure(home, CompileMode.OFF, arguments)
    print_table("before, ms (bound)", before, before_bounds)
    after, after_bounds, reference_ms = measure(home, CompileMode.WAIT, arguments)
    print_table("after, ms (bound)", after, after_bounds)
    print(f"transformers' generate: {reference_ms:.1f} ms a token")
    names = [kind for kind, _, _ in KINDS]
    total = {kind: after.median_ms(kind, "total") for kind in names}
    print(
        json.dumps(
            {
                "bench": "step",
                "threads": arguments.threads,
                "rounds": arguments.rounds,
                "before_ms": {kind: round(before.median_ms(kind, "total"), 2) for kind in names},
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
