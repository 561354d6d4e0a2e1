"""How close do the C++ kernels come to the memory rate, and to torch's own?

Question: with weights that no cache holds, how many bytes of weights a second does each
kernel read for one row and for five, beside torch's kernel for the same weights and beside
the rate of a plain sum?

Method: one process, one thread. For each shape so many matrices that together they exceed
`--megabytes`; each sample goes once over all of them. Native kernel, torch's kernel and the
memory's sum take turns; the second-lowest time of `--rounds` counts, because others may
share the machine. `ratio` is native's rate over the memory's, `five` the time for five rows
over that for one. Dense matrices split in two planes (`split` reads both, `draft` the high
one) take turns with the native dense kernel instead of torch's; `of_dense_1` and `_5` are
their times over its own.

Left out: many rows, more threads, experts and attention as a whole.

Run: python tests/bench/kernels.py [--rounds 12] [--megabytes 96] [--cache FOLDER]
The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import torch
from mira_kernels import cpu, native
from mira_kernels.split import split
from mira_kernels.weights import Int4Layout, Int4Weight, NestedWeight
from torch import Tensor
from torch.nn import functional

SHAPES = ((1536, 576), (576, 1536), (49152, 576), (2048, 2048))
EXPERT_SHAPE, EXPERT_GROUP = (1024, 576), 64
ROWS = (1, 5)

Product = Callable[[Tensor, tuple], Tensor]


def seconds(run: Callable[[], object]) -> float:
    """Time of one call."""
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def over_all(product: Product, x: Tensor, matrices: list[tuple]) -> Callable[[], None]:
    """Returns a run that multiplies x with every matrix once."""

    def run() -> None:
        for matrix in matrices:
            product(x, matrix)

    return run


def dense_case(num_outputs: int, num_inputs: int, count: int) -> tuple:
    """Dense matrices, the native and torch's product."""
    matrices = [(torch.randn(num_outputs, num_inputs).bfloat16(),) for _ in range(count)]
    return (
        matrices,
        lambda x, m: torch.ops.mira.dense_linear(x, m[0], None),
        lambda x, m: functional.linear(x, m[0]),
    )


def int8_case(num_outputs: int, num_inputs: int, count: int) -> tuple:
    """INT8 matrices with a scale per output."""
    shape, scales = (num_outputs, num_inputs), torch.rand(num_outputs)
    matrices = [
        (torch.randint(-127, 128, shape, dtype=torch.int8), scales, scales.bfloat16())
        for _ in range(count)
    ]
    return (
        matrices,
        lambda x, m: torch.ops.mira.int8_linear(x, m[0], m[1], None),
        lambda x, m: torch._weight_int8pack_mm(x, m[0], m[2]),
    )


def split_case(num_outputs: int, num_inputs: int, count: int, has_low: bool) -> tuple:
    """Dense matrices, the product with their planes, and the native product with themselves."""
    ops, matrices = torch.ops.mira, []
    for _ in range(count):
        dense = torch.randn(num_outputs, num_inputs).bfloat16()
        w = split(dense)
        low = w.low if has_low else None
        matrices.append((dense, w.high, low, w.bases, w.exceptions, w.exception_values))
    return (
        matrices,
        lambda x, m: ops.split_linear(x, *m[1:], None),
        lambda x, m: ops.dense_linear(x, m[0], None),
    )


def packed_case(num_outputs: int, num_inputs: int, count: int, has_low: bool) -> tuple:
    """INT4 or nested matrices in the layout that torch's kernel reads here, else 64 rows."""
    layout = cpu.native_int4_layout()
    stored = layout or Int4Layout.CPU_PACKED_AVX512
    shape, group = (num_outputs, num_inputs), EXPERT_GROUP
    matrices = []
    for _ in range(count):
        hi, lo = (
            torch.randint(0, 256, (num_outputs, num_inputs // 2), dtype=torch.uint8)
            for _ in range(2)
        )
        scales = torch.rand(num_inputs // group, num_outputs, 2).bfloat16()
        weight = Int4Weight(hi, scales, group, shape, stored)
        matrices.append((weight, NestedWeight(weight, lo)) if has_low else (weight,))
    rows, ops = stored.block_rows, torch.ops.mira
    if has_low:
        mine = lambda x, m: ops.nested_linear(x, m[0].packed, m[0].scales, m[1].lo, group, rows)
        theirs = lambda x, m: cpu.nested_linear(x, m[1])
    else:
        mine = lambda x, m: ops.int4_linear(x, m[0].packed, m[0].scales, group, rows)
        theirs = lambda x, m: cpu.int4_linear(x, m[0])
    return matrices, mine, theirs if layout is not None else None


KINDS = (
    ("dense", dense_case, 2),
    ("split", functools.partial(split_case, has_low=True), 2),
    ("draft", functools.partial(split_case, has_low=False), 1),
    ("int8", int8_case, 1),
)
"""Name, maker and bytes of an entry that the kernel reads."""


def measure(name: str, case: tuple, matrix_bytes: float, memory: Tensor, rounds: int) -> dict:
    """Rates of one kind and shape, bytes a second."""
    matrices, mine, theirs = case
    other = "dense" if name.startswith(("split", "draft")) else "torch"
    num_inputs = int(name.split("x")[-1])
    total = matrix_bytes * len(matrices)
    runs = {"memory": lambda: memory.sum()}
    for num_rows in ROWS:
        x = torch.randn(num_rows, num_inputs).bfloat16()
        runs[f"native {num_rows}"] = over_all(mine, x, matrices)
        if theirs is not None:
            runs[f"{other} {num_rows}"] = over_all(theirs, x, matrices)
    times: dict[str, list[float]] = {what: [] for what in runs}
    for _ in range(rounds):
        for what, run in runs.items():
            times[what].append(seconds(run))
    low = {what: sorted(taken)[min(1, rounds - 1)] for what, taken in times.items()}
    rate = {
        what: (memory.nbytes if what == "memory" else total) / taken
        for what, taken in low.items()
        if not what.startswith("dense")
    }
    result = {f"{what.replace(' ', '_')}_bytes_per_s": round(value) for what, value in rate.items()}
    result["ratio"] = round(rate["native 1"] / rate["memory"], 3)
    result["five"] = round(low["native 5"] / low["native 1"], 2)
    if other == "dense":
        for num_rows in ROWS:
            share = low[f"native {num_rows}"] / low[f"dense {num_rows}"]
            result[f"of_dense_{num_rows}"] = round(share, 3)
    shown = "  ".join(f"{what} {value / 1e9:5.1f}" for what, value in rate.items())
    beside = "".join(f"  {what} {result[what]:.2f}" for what in result if "of_dense" in what)
    print(
        f"{name:18s} {shown} GB/s  ratio {result['ratio']:.2f}  five {result['five']:.2f}{beside}"
    )
    return result


def main() -> None:
    """Builds, measures and prints."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--megabytes", type=int, default=96)
    parser.add_argument("--cache", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        cache = options.cache or Path(folder)
        start = time.perf_counter()
        status = native.NativeStatus(True) if native.is_built(cache) else native.build(cache)
        build_s = time.perf_counter() - start
        if status.is_available:
            status = native.load(cache)
    if not status.is_available:
        raise SystemExit(status.reason)
    budget = options.megabytes * 1_000_000
    memory = torch.ones(budget // 4)
    results = {}
    with torch.inference_mode():
        for num_outputs, num_inputs in SHAPES:
            entries = num_outputs * num_inputs
            for kind, make, item in KINDS:
                count = max(2, -(-budget // (entries * item)))
                name = f"{kind} {num_outputs}x{num_inputs}"
                case = make(num_outputs, num_inputs, count)
                results[name] = measure(name, case, entries * item, memory, options.rounds)
        entries = EXPERT_SHAPE[0] * EXPERT_SHAPE[1]
        for kind, has_low in (("int4", False), ("nested", True)):
            size = entries * (1 if has_low else 0.5) + entries / EXPERT_GROUP * 4
            case = packed_case(*EXPERT_SHAPE, int(budget / size) + 1, has_low)
            name = f"{kind} {EXPERT_SHAPE[0]}x{EXPERT_SHAPE[1]}"
            results[name] = measure(name, case, size, memory, options.rounds)
    capability = torch.backends.cpu.get_cpu_capability()
    print(json.dumps({"build_s": round(build_s, 1), "capability": capability, "kernels": results}))


if __name__ == "__main__":
    main()
