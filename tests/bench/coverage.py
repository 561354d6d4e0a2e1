"""How much of a later layer's routed tokens do the predictors find?

Question: mass-weighted Coverage@k of the trained heads against popularity, the count
table and the target layer's own router asked early; two layers ahead and one; and what
the bank that `prepare` would write covers, where the best on validation wins.

Method, built-in model: recorded on the calibration prompts that ship, tested on prompts
that are in none of them, on the tokens of greedy replies, one situation a token, mean
over all layers. Method, shared traces (DeepSeek-V2-Lite, 64 experts, top-6, no hidden
states): the heads' history branch, the table and popularity, trained on one domain and
tested on held-out sequences of it, and on the other domain. k is top-k, 2, 3 and 4 times
that. Every routed token has mass 1; the JSON has gate weights as mass as well.

Left out: what coverage is worth in time. Recordings are kept in the data folder's
`bench-coverage`; `--again` makes them anew.

Run: python tests/bench/coverage.py [--again] [--data-dir DIR]. The last line is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy
import torch
from mira_app.paths import data_dir
from mira_assets.calibration import calibration_prompts
from mira_engine.checkpoint.progress import Progress
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.predictor.baselines import Predictor, PredictorKind
from mira_engine.predictor.coverage import coverage
from mira_engine.predictor.traces import RoutingTrace
from mira_engine.predictor.train import (
    LayerSamples,
    TrainingSettings,
    choose,
    fit_baselines,
    layer_samples,
    train_head,
)
from mira_engine.prepare import prepare
from mira_engine.routing_recording import RoutingRecording
from mira_engine.runtime.recording import RecordingSettings
from mira_engine.types import Precision

HELD_OUT = (
    "Why is the sky blue?",
    "Who painted the Mona Lisa, and where does it hang?",
    "How do bees make honey?",
    "Give three reasons to learn a second language.",
    "Rewrite in the past tense: I walk to the shop and buy some bread.",
    "Write a short thank-you note to a neighbour.",
    "Write a Python function that returns the factorial of n.",
    "What does the command git pull do?",
    "Explain what a hash table is, with a small example.",
    "A car uses 6 litres of fuel for 100 km. How much does it use for 350 km?",
    "What is 7 times 48? Show the steps.",
    "Lisa saves 15 dollars a week. How long until she has 240 dollars?",
    "I cannot decide what to cook tonight. Any ideas with potatoes?",
    "hey, do you think aliens exist? serious question",
    "My neighbour plays loud music at night. What should I say to him?",
)

TRACE_EXPERTS = 64
_SHARED = Path(__file__).resolve().parents[3] / "shared"

Cells = dict[str, list[tuple[float, ...]]]
"""Coverage at each k, one entry a layer, by candidate."""


def recorded(
    home: ModelHome, folder: Path, texts: list[str], max_reply_tokens: int
) -> RoutingRecording:
    """Records prompts into a folder, unless they are there."""
    settings = RecordingSettings(max_reply_tokens=max_reply_tokens)
    recording = RoutingRecording(home, Precision.NESTED, folder, Progress(), step="coverage")
    recording.open(f"{max_reply_tokens} {texts}")
    if not recording.is_finished:
        recording.record(texts, settings, None)
    return recording


def measure(
    cells: Cells,
    weighted: Cells,
    candidates: Iterable[tuple[str, Predictor]],
    test: LayerSamples,
    rows: torch.Tensor,
    mass: torch.Tensor,
) -> None:
    """Adds one layer's coverage of every candidate, by count and by gate weight."""
    features, target_ids = test.features.select(rows), test.target_ids[rows]
    ks = [factor * target_ids.shape[1] for factor in (1, 2, 3, 4)]
    for name, candidate in candidates:
        logits = candidate.logits(features)
        cells[name].append(coverage(logits, target_ids, ks))
        weighted[name].append(coverage(logits, target_ids, ks, mass[rows]))


def fit(samples: LayerSamples, settings: TrainingSettings) -> list[tuple[str, Predictor]]:
    """Fits all candidates of a layer, and the one that the bank would take."""
    candidates = fit_baselines(samples)
    candidates[PredictorKind.HEAD] = train_head(samples, settings)
    winner = choose(candidates, samples).predictor
    named = [(kind.value, candidate) for kind, candidate in candidates.items()]
    return [*named, ("bank", winner)]


def bench_builtin(home: ModelHome, folder: Path, report: dict[str, object]) -> None:
    """Heads and baselines on prompts that were not recorded for training."""
    train = recorded(home, folder / "train", [p.text for p in calibration_prompts()], 48)
    test = recorded(home, folder / "test", list(HELD_OUT), 48)
    settings = TrainingSettings()
    train_trace, test_trace = train.traces.routing(), test.traces.routing()
    shape, routers = train.shape(), train.routers()
    for offset in (2, 1):
        cells, weighted = defaultdict(list), defaultdict(list)
        kinds: dict[str, int] = defaultdict(int)
        by_layer = []
        for layer in range(shape["num_layers"] - offset):

            def samples_of(
                recording: RoutingRecording,
                trace: RoutingTrace,
                layer: int = layer,
                offset: int = offset,
            ) -> LayerSamples:
                return layer_samples(
                    trace,
                    recording.traces.hidden(layer),
                    layer,
                    num_experts=shape["num_experts"],
                    routers=routers,
                    settings=settings,
                    offset=offset,
                )

            candidates = fit(samples_of(train, train_trace), settings)
            kinds[candidates[-1][1].kind.value] += 1
            measure(
                cells,
                weighted,
                candidates,
                samples_of(test, test_trace),
                test_trace.is_reply,
                test_trace.weights[:, layer + offset],
            )
            by_layer.append({name: round(values[-1][1], 3) for name, values in cells.items()})
        title = f"built-in model, i+{offset}, {int(test_trace.is_reply.sum())} tokens"
        print_table(title, cells, shape["top_k"])
        print("   the bank took:", ", ".join(f"{kind} {n}" for kind, n in sorted(kinds.items())))
        report[f"builtin_i+{offset}"] = {
            "coverage": means(cells),
            "gate_weighted": means(weighted),
            "winners": dict(kinds),
            "coverage_at_2k_by_layer": by_layer,
            "num_train_tokens": len(train_trace),
            "num_test_tokens": int(test_trace.is_reply.sum()),
        }


def load_npz(path: Path) -> RoutingTrace:
    """Reads a published routing trace; it has no hidden states."""
    with numpy.load(path) as arrays:
        lengths = arrays["seq_len"]
        sequence = numpy.repeat(numpy.arange(len(lengths), dtype=numpy.int32), lengths)
        return RoutingTrace(
            ids=torch.from_numpy(arrays["ids"].astype(numpy.int16)),
            weights=torch.from_numpy(arrays["gate"]),
            sequence=torch.from_numpy(sequence),
            is_reply=torch.zeros(len(sequence), dtype=torch.bool),
        )


def bench_traces(folder: Path, report: dict[str, object]) -> None:
    """The history branch and its baselines, in their own domain and in the other."""
    traces = {name: load_npz(folder / f"{name}.npz") for name in ("law", "summary")}
    settings = TrainingSettings()
    for source, other in (("law", "summary"), ("summary", "law")):
        same, same_weighted = defaultdict(list), defaultdict(list)
        cross, cross_weighted = defaultdict(list), defaultdict(list)
        is_test = is_test_sequence(traces[source].sequence)
        train = select(traces[source], ~is_test)
        for layer in range(train.num_layers - 2):

            def samples_of(trace: RoutingTrace, layer: int = layer) -> LayerSamples:
                return layer_samples(
                    trace,
                    None,
                    layer,
                    num_experts=TRACE_EXPERTS,
                    routers=(),
                    settings=settings,
                )

            candidates = fit(samples_of(train), settings)[:-1]
            for trace, rows, cells, weighted in (
                (traces[source], is_test, same, same_weighted),
                (traces[other], torch.ones(len(traces[other])).bool(), cross, cross_weighted),
            ):
                measure(
                    cells,
                    weighted,
                    candidates,
                    samples_of(trace),
                    rows,
                    trace.weights[:, layer + 2],
                )
        top_k = train.ids.shape[2]
        print_table(f"{source} -> {source}, held-out sequences, i+2", same, top_k)
        print_table(f"{source} -> {other}, i+2", cross, top_k)
        report[f"{source}->{source}"] = {
            "coverage": means(same), "gate_weighted": means(same_weighted)
        }  # fmt: skip
        report[f"{source}->{other}"] = {
            "coverage": means(cross), "gate_weighted": means(cross_weighted)
        }  # fmt: skip


def is_test_sequence(sequence: torch.Tensor) -> torch.Tensor:
    """Marks every fifth sequence."""
    return sequence % 5 == 2


def select(trace: RoutingTrace, rows: torch.Tensor) -> RoutingTrace:
    """Returns the tokens at `rows`."""
    return RoutingTrace(
        ids=trace.ids[rows],
        weights=trace.weights[rows],
        sequence=trace.sequence[rows],
        is_reply=trace.is_reply[rows],
    )


def means(cells: Cells) -> dict[str, list[float]]:
    """Returns the mean over layers at each k."""
    return {
        name: [round(statistics.fmean(column), 4) for column in zip(*rows, strict=True)]
        for name, rows in cells.items()
    }


def print_table(title: str, cells: Cells, top_k: int) -> None:
    """Prints candidates by rows and k by columns."""
    print(f"\n{title}: Coverage@k, mean over layers")
    print("   " + "".ljust(12) + "".join(f"@{factor * top_k}".rjust(7) for factor in (1, 2, 3, 4)))
    for name, values in means(cells).items():
        print("   " + name.ljust(12) + "".join(f"{value:7.3f}" for value in values))


def main() -> None:
    """Runs both parts."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--again", action="store_true", help="record again")
    parser.add_argument("--data-dir", type=Path, default=None, help="data folder")
    parser.add_argument("--only", choices=("builtin", "traces"), default=None)
    arguments = parser.parse_args()
    torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS", "1")))
    root = arguments.data_dir or data_dir()
    report: dict[str, object] = {}
    parts: list[tuple[str, Callable[[], None]]] = []
    shared = Path(os.environ.get("MIRA_SHARED", _SHARED)) / "traces"
    if shared.is_dir():
        parts.append(("traces", lambda: bench_traces(shared, report)))
    else:
        print(f"no traces at {shared}; set MIRA_SHARED to their folder's parent")

    def builtin() -> None:
        home = ModelLibrary(root).resolve("builtin")
        prepare(home, Precision.NESTED, on_progress=lambda *_: None)
        if arguments.again:
            shutil.rmtree(root / "bench-coverage", ignore_errors=True)
        bench_builtin(home, root / "bench-coverage", report)

    parts.append(("builtin", builtin))
    for name, run in parts:
        if arguments.only in (None, name):
            run()
    print(json.dumps(report))


if __name__ == "__main__":
    main()
