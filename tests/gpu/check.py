"""Proves the GPU path on the card at hand, and measures it: one command, at most 5 minutes.

Without a card it goes as far as that goes: kernels in triton's interpreter, copies on queues
that check their order, no times. Nothing is fetched; weights are random and made here.

What it does:
1. every kernel against float64, every format, odd and empty groups, and the same token alone
   and among others, bit for bit;
2. with a card: time of the expert kernels against the time that copying their bytes takes
   (the card's measured bandwidth): Mixtral's expert at one token, and one layer of
   Qwen3-30B-A3B (8 of 128 experts);
3. with a card: the rate of the pinned link alone, and while kernels run;
4. with a card: the draft's layer as a captured graph against its kernels' own time;
5. the expert layers of one real shape token after token, under two device budgets: routing
   drawn as `mira_engine.simulator.synthetic` draws it, through the engine's own driver,
   executor and link, on demand with LRU and as the engine does it; the link as it is and
   held to PCIe 4. Attention is not part of it.

Run: python tests/gpu/check.py [--shape qwen3|deepseek|qwen1.5] [--tokens 48] [--json FILE]
Prints a table; the last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

import torch

HAS_CARD = torch.cuda.is_available()
if not HAS_CARD:
    os.environ["TRITON_INTERPRET"] = "1"

from fake_queues import FakeQueues
from mira_engine.checkpoint.formats import make_format
from mira_engine.policy.driver import CacheSetup, ExpertCacheDriver
from mira_engine.runtime.cuda_transfer import CudaTransfer
from mira_engine.runtime.executor import ExpertExecutor
from mira_engine.runtime.gpu_experts import GpuArena, GpuExperts, GpuForm, never_bound
from mira_engine.runtime.host_memory import PinnedSource, allocate_chunks, pageable, pinned
from mira_engine.runtime.streams import CudaQueues, Lane
from mira_engine.simulator.synthetic import synthetic_trace
from mira_engine.types import Eviction, ExpertId, ExpertShape, Phase, Plane, Precision
from mira_kernels.triton_experts import (
    Between,
    combine,
    draft_layer,
    expert_outputs,
    group_by_expert,
)
from random_experts import NUM_EXPERTS, STORED, Layer, hidden_states, routing, worst_error

DEVICE = "cuda" if HAS_CARD else "cpu"
PCIE4_BYTES_PER_S = 25e9
"""What a card of generation 4 with 16 lanes gives at best."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """Routed experts of a real model."""

    name: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_experts: int
    top_k: int


SHAPES = {
    "qwen3": Shape(
        name="Qwen3-30B-A3B", num_layers=48, hidden_size=2048, intermediate_size=768,
        num_experts=128, top_k=8,
    ),
    "deepseek": Shape(
        name="DeepSeek-V2-Lite", num_layers=26, hidden_size=2048, intermediate_size=1408,
        num_experts=64, top_k=6,
    ),
    "qwen1.5": Shape(
        name="Qwen1.5-MoE-A2.7B", num_layers=24, hidden_size=2048, intermediate_size=1408,
        num_experts=60, top_k=4,
    ),
}  # fmt: skip
SMALL = Shape(
    name="small", num_layers=3, hidden_size=64, intermediate_size=32, num_experts=8, top_k=2
)
"""What is run without a card."""


def check_kernels() -> dict[str, float]:
    """Compares every format with float64. Returns the largest relative errors."""
    errors = {}
    for precision in STORED:
        worst = 0.0
        for num_tokens in (1, 7, 40) if not HAS_CARD else (1, 7, 40, 200):
            layer = Layer(precision, missing=(1,), device=DEVICE)
            hidden = hidden_states(num_tokens, 96, torch.bfloat16).to(DEVICE)
            chosen = routing(num_tokens).to(DEVICE)
            rows = group_by_expert(chosen, NUM_EXPERTS)
            found = expert_outputs(hidden, layer.experts, rows)
            worst = max(worst, worst_error(found, layer.outputs(hidden, chosen)))
            alone = expert_outputs(
                hidden[:1], layer.experts, group_by_expert(chosen[:1], NUM_EXPERTS)
            )
            assert torch.equal(alone, found[:2]), f"{precision}: a token depends on the others"
        assert worst < 2e-2, f"{precision}: error {worst}"
        errors[precision.value] = worst
    for between, bias in ((Between.CLAMPED_GATE, True), (Between.SQUARED_RELU, False)):
        layer = Layer(
            Precision.NESTED, between=between, has_bias=bias, is_interleaved=bias, device=DEVICE
        )
        hidden, chosen = hidden_states(5, 96).to(DEVICE), routing(5).to(DEVICE)
        found = expert_outputs(hidden, layer.experts, group_by_expert(chosen, NUM_EXPERTS))
        errors[between.name.lower()] = worst_error(found, layer.outputs(hidden, chosen))
        assert errors[between.name.lower()] < 1e-4
    return errors


def median_ms(work: Callable[[], object], repeats: int = 30) -> float:
    """Median of a device's milliseconds for `work`, each measured between two events."""
    for _ in range(3):
        work()
    times = []
    for _ in range(repeats):
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        begin.record()
        work()
        end.record()
        end.synchronize()
        times.append(begin.elapsed_time(end))
    return statistics.median(times)


def copy_bytes_per_s() -> float:
    """The card's bandwidth: bytes read and written by a large copy, per second."""
    source = torch.randint(0, 255, (1 << 30,), dtype=torch.uint8, device=DEVICE)
    target = torch.empty_like(source)
    return 2 * source.numel() / median_ms(lambda: target.copy_(source)) * 1e3


class RandomExperts:
    """Random records on the card, enough of them that no cache holds what is read."""

    def __init__(self, precision: Precision, shape: Shape, num_records: int) -> None:
        self.format = make_format(
            precision,
            ExpertShape(
                hidden_size=shape.hidden_size,
                intermediate_size=shape.intermediate_size,
                has_gate=True,
                has_bias=False,
                is_interleaved=False,
            ),
            layout="rows",
        )
        device = torch.device(DEVICE)
        self.arena = GpuArena(num_records, self.format.planes, self.format, device)
        for plane in self.format.planes:
            fill_random(self.arena.data[plane], self.format, plane)
        transfer = CudaTransfer(FakeQueues(), NoSource(), self.arena.records)
        self.experts = GpuExperts(
            self.format, GpuForm(between=Between.SILU_GATE), self.arena, transfer,
            num_layers=1, num_experts=shape.num_experts, draft=None, device=device,
        )  # fmt: skip

    @property
    def bytes_each(self) -> int:
        """Payload of one expert."""
        return sum(self.format.payload_bytes(plane) for plane in self.format.planes)


class NoSource:
    """A link from which nothing is asked."""

    def close(self) -> None:
        """Nothing to stop."""


def fill_random(data: torch.Tensor, fmt, plane: Plane) -> None:
    """Fills records with random codes and scales near those of real weights."""
    data.random_(0, 256)
    size, sections = fmt.record_bytes(plane), fmt.section_offsets(plane)
    records = data.view(-1, size)
    ends = sorted([*sections.values(), size])
    for name, start in sections.items():
        stop = ends[ends.index(start) + 1]
        if name in ("up", "down") and fmt.precision is not Precision.BF16:
            continue
        part = records[:, start : stop - stop % 2]
        values = torch.rand(part.shape[0], part.shape[1] // 2, device=data.device) * 0.01
        part.copy_(values.to(torch.bfloat16).view(torch.uint8).view(part.shape))


def time_kernels(bandwidth: float) -> dict[str, dict[str, float]]:
    """Times one token's experts; share of the bandwidth that their bytes were read at."""
    mixtral = Shape(
        name="Mixtral's expert", num_layers=1, hidden_size=4096, intermediate_size=14336,
        num_experts=8, top_k=1,
    )  # fmt: skip
    table = {}
    for shape, num_records in ((mixtral, 8), (SHAPES["qwen3"], 128)):
        for precision in (Precision.INT8, Precision.NESTED, Precision.INT4):
            made = RandomExperts(precision, shape, num_records)
            hidden = torch.randn(1, shape.hidden_size, device=DEVICE, dtype=torch.bfloat16)
            turns = [
                torch.arange(start, start + shape.top_k, device=DEVICE)[None]
                for start in range(0, num_records - shape.top_k + 1, shape.top_k)
            ]
            slots = [(ExpertId(0, e), e) for e in range(shape.num_experts)]
            described = made.experts.layer(0, slots)
            rows = [group_by_expert(turn, shape.num_experts) for turn in turns]
            inner = hidden.new_empty(shape.top_k, shape.intermediate_size)
            result = hidden.new_empty(shape.top_k, shape.hidden_size)

            def all_turns() -> None:
                for each in rows:
                    expert_outputs(hidden, described, each, inner=inner, result=result)

            ms = median_ms(all_turns) / len(turns)
            num_bytes = made.bytes_each * shape.top_k
            table[f"{shape.name}, {precision.value}"] = {
                "us": 1e3 * ms,
                "mb": num_bytes / 1e6,
                # A copy reads and writes; a product only reads.
                "share_of_copy_bandwidth": num_bytes / (ms / 1e3) / bandwidth,
            }
            del made
            torch.cuda.empty_cache()
    return table


def time_link() -> dict[str, float]:
    """Rate of pinned copies alone, and while products keep the card busy."""
    source = pinned(1 << 30)
    target = torch.empty(1 << 30, dtype=torch.uint8, device=DEVICE)
    queues = CudaQueues(torch.device(DEVICE))
    a = torch.randn(8192, 8192, device=DEVICE, dtype=torch.bfloat16)

    def rate(*, is_busy: bool) -> float:
        event = queues.make_event()
        torch.cuda.synchronize()
        started = time.perf_counter()
        for _ in range(4):
            queues.copy(target, source, Lane.DEMAND)
        queues.record(event, Lane.DEMAND)
        if is_busy:
            for _ in range(40):
                a @ a
        event.wait()
        elapsed = time.perf_counter() - started
        torch.cuda.synchronize()
        return 4 * source.numel() / elapsed

    rate(is_busy=False)
    alone = statistics.median(rate(is_busy=False) for _ in range(5))
    busy = statistics.median(rate(is_busy=True) for _ in range(5))
    return {"alone_gb_per_s": alone / 1e9, "overlapped_gb_per_s": busy / 1e9, "kept": busy / alone}


def time_captured_draft() -> dict[str, float]:
    """A draft's layers as one captured graph, against launching them one by one."""
    shape = SHAPES["qwen3"]
    made = RandomExperts(Precision.INT4, shape, shape.num_experts)
    described = made.experts.layer(0, [(ExpertId(0, e), e) for e in range(shape.num_experts)])
    hidden = torch.randn(1, shape.hidden_size, device=DEVICE, dtype=torch.bfloat16)
    index = torch.randperm(shape.num_experts, device=DEVICE)[: shape.top_k][None]
    weights = torch.rand(1, shape.top_k, device=DEVICE)
    counts = torch.zeros(shape.num_experts, dtype=torch.int32, device=DEVICE)
    inner = hidden.new_empty(shape.top_k, shape.intermediate_size)
    result = torch.empty_like(hidden)

    def layers() -> None:
        for _ in range(shape.num_layers):
            draft_layer(hidden, described, index, weights, counts, inner, result)

    launched = median_ms(layers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        layers()
    replayed = median_ms(graph.replay)
    return {"launched_ms": launched, "captured_ms": replayed}


class Decoding:
    """The expert layers of one shape, token after token, through driver, executor and link."""

    def __init__(
        self, shape: Shape, budget_bytes: int, *, is_managed: bool, bytes_per_s: float | None
    ) -> None:
        self.shape = shape
        device = torch.device(DEVICE)
        self.format = make_format(
            Precision.INT8,
            ExpertShape(
                hidden_size=shape.hidden_size,
                intermediate_size=shape.intermediate_size,
                has_gate=True,
                has_bias=False,
                is_interleaved=False,
            ),
        )
        record_bytes = self.format.record_bytes(Plane.WHOLE)
        num_all = shape.num_layers * shape.num_experts
        num_slots = max(4 * shape.top_k, min(num_all, budget_bytes // record_bytes))
        self.share = num_slots / num_all
        slots = GpuArena(num_slots, self.format.planes, self.format, device)
        queues = CudaQueues(device) if HAS_CARD else FakeQueues()
        chunks = _host_chunks(num_all, record_bytes, self.format)
        experts = [
            ExpertId(layer, expert)
            for layer in range(shape.num_layers)
            for expert in range(shape.num_experts)
        ]
        source = PinnedSource(chunks, experts, slots.plane_bytes, lambda *_: None)
        self.transfer = CudaTransfer(queues, source, slots.records, bytes_per_s=bytes_per_s)
        regions = {"num_hot_slots": (num_slots - 2) // 2} if is_managed else {}
        setup = CacheSetup(
            num_layers=shape.num_layers,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            num_slots=num_slots,
            eviction=Eviction.LRU,
            record_bytes=record_bytes,
            **regions,
        )
        self.executor = ExpertExecutor(
            driver=ExpertCacheDriver(setup), transfer=self.transfer, bind=never_bound, draft=None
        )
        self.executor.use_fused(
            GpuExperts(
                self.format,
                GpuForm(between=Between.SILU_GATE),
                slots,
                self.transfer,
                num_layers=shape.num_layers,
                num_experts=shape.num_experts,
                draft=None,
                device=device,
            )  # fmt: skip
        )
        self.executor.phase = Phase.DECODE

    def run(self, num_tokens: int) -> dict[str, float]:
        """Decodes; the first half warms the cache up. Returns the second half's figures."""
        shape = self.shape
        trace = synthetic_trace(
            num_layers=shape.num_layers, num_experts=shape.num_experts, top_k=shape.top_k,
            num_tokens=num_tokens,
        )  # fmt: skip
        ids = torch.from_numpy(trace.ids).long().to(DEVICE)
        hidden = torch.randn(1, shape.hidden_size, device=DEVICE).to(torch.bfloat16)
        weights = torch.full((1, shape.top_k), 1 / shape.top_k, device=DEVICE)
        traffic = self.executor.meter.decode
        before, times = (0, 0, 0.0, 0.0), []
        for token in range(num_tokens):
            if token == num_tokens // 2:
                before = (traffic.num_hits, traffic.num_misses, traffic.stall_s, traffic.num_bytes)
            started = time.perf_counter()
            for layer in range(shape.num_layers):
                self.executor(None, layer, hidden, ids[token, layer][None], weights)
            if HAS_CARD:
                torch.cuda.synchronize()
            self.executor.end_pass(1)
            times.append(time.perf_counter() - started)
        now = (traffic.num_hits, traffic.num_misses, traffic.stall_s, traffic.num_bytes)
        hits, misses, stall_s, num_bytes = (n - b for n, b in zip(now, before, strict=True))
        counted = num_tokens - num_tokens // 2
        return {
            "ms_per_token": 1e3 * statistics.median(times[num_tokens // 2 :]),
            "hit_rate": hits / max(1, hits + misses),
            "stall_ms": 1e3 * stall_s / counted,
            "mb_per_token": num_bytes / counted / 1e6,
            "resident": self.share,
        }


_CHUNKS: dict[int, list[torch.Tensor]] = {}


def _host_chunks(num_records: int, record_bytes: int, fmt) -> list[torch.Tensor]:
    """Random records in host memory, made once a size."""
    wanted = num_records * record_bytes
    if wanted not in _CHUNKS:
        chunks = allocate_chunks(wanted, record_bytes, pinned if HAS_CARD else pageable)
        assert sum(chunk.numel() for chunk in chunks) == wanted, "too little host memory to pin"
        for chunk in chunks:
            made = torch.empty(chunk.numel(), dtype=torch.uint8, device=DEVICE)
            fill_random(made, fmt, Plane.WHOLE)
            chunk.copy_(made)
        _CHUNKS[wanted] = chunks
    return _CHUNKS[wanted]


def time_decoding(shape: Shape, num_tokens: int) -> dict[str, dict[str, float]]:
    """Decodes under two budgets and two links, on demand and managed."""
    table = {}
    budgets = (8 << 30, 12 << 30) if HAS_CARD else (30_000, 90_000)
    links = {"link as it is": None, "held to PCIe 4": PCIE4_BYTES_PER_S if HAS_CARD else 1e9}
    for budget in budgets:
        for link, rate in links.items():
            for name, is_managed in (("on demand, LRU", False), ("HOT and STAGE", True)):
                decoding = Decoding(shape, budget, is_managed=is_managed, bytes_per_s=rate)
                size = f"{budget / 2**30:.0f} GiB" if HAS_CARD else f"{budget} bytes"
                table[f"{size}, {link}, {name}"] = decoding.run(num_tokens)
                decoding.transfer.close()
                del decoding
                if HAS_CARD:
                    torch.cuda.empty_cache()
    return table


def main() -> None:
    """Runs everything and prints tables."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--shape", choices=sorted(SHAPES), default="qwen3")
    parser.add_argument("--tokens", type=int, default=48 if HAS_CARD else 6)
    parser.add_argument("--json", type=Path)
    args = parser.parse_args()
    import triton

    report: dict[str, object] = {
        "bench": "gpu-check",
        "card": torch.cuda.get_device_name(0) if HAS_CARD else None,
        "torch": torch.__version__,
        "triton": triton.__version__,
        "python": platform.python_version(),
    }
    print(f"card: {report['card'] or 'none; kernels run in the interpreter, nothing is timed'}")
    report["errors"] = check_kernels()
    for name, error in report["errors"].items():
        print(f"{name:16} largest error {error:.1e}")
    outputs, weights = torch.randn(6, 300, device=DEVICE), torch.rand(3, 2, device=DEVICE)
    expected = (outputs.view(3, 2, 300) * weights[:, :, None]).sum(1)
    torch.testing.assert_close(combine(outputs, weights), expected)
    if HAS_CARD:
        bandwidth = copy_bytes_per_s()
        report["copy_gb_per_s"] = bandwidth / 1e9
        print(f"copying: {bandwidth / 1e9:.0f} GB/s")
        report["kernels"] = time_kernels(bandwidth)
        for name, figures in report["kernels"].items():
            print(f"{name:32} {figures['us']:8.1f} us {figures['share_of_copy_bandwidth']:6.1%}")
        report["link"] = time_link()
        print("link: {alone_gb_per_s:.1f} GB/s, overlapped {kept:.0%}".format(**report["link"]))
        report["draft"] = time_captured_draft()
        print("draft: {launched_ms:.2f} ms launched, {captured_ms:.2f} captured".format(
            **report["draft"]
        ))  # fmt: skip
    shape = SHAPES[args.shape] if HAS_CARD else SMALL
    report["shape"] = shape.name
    report["decoding"] = time_decoding(shape, args.tokens)
    for name, figures in report["decoding"].items():
        print(
            f"{name:44} {figures['ms_per_token']:8.2f} ms  hits {figures['hit_rate']:.0%}  "
            f"stall {figures['stall_ms']:.2f} ms  {figures['mb_per_token']:.1f} MB"
            + ("" if HAS_CARD else "  (interpreter: no time)")
        )
    text = json.dumps(report)
    if args.json:
        args.json.write_text(text + "\n", encoding="utf-8")
    print(text)


if __name__ == "__main__":
    main()
