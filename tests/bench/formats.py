"""Which expert format keeps most of the model, at which bytes, and with which draft?

Question: for experts in bf16, Mira's shared-scale INT8, INT8 with a scale for each row, INT8
and `nested` with groups of several sizes, and INT4: perplexity, mean KL divergence from the
bf16 experts, share of equal choices, tokens of greedy continuations before the first
difference, bytes of an expert and of a token, and the acceptance of the draft that belongs to
the format, at K = 4 and 8. Mira's Table I, and what the default format and group size follow
from.

Method: the built-in model, the texts of `mira-chat eval`, arithmetic in float32, all experts
resident; drafts are counted as a chat runs, in bfloat16 with compiled steps. Formats of the
engine are its own stores. INT8 by rows or groups is only an experiment: its experts are
quantised and dequantised into a float32 store, which the engine runs. Groups of 128 do not
divide this model's 576 inputs: the last one has 64, and a store with groups of 64 holds each
scale twice. Bytes are counted as in `format_variants.py`. The draft is INT4 rounded to nearest
in groups of 64, or the high plane of `nested`. A draft token counts as judged up to the first
rejection of a round. Where a `nested` store is found whose high plane GPTQ chose, it is a row
too.

Left out: time, which `--times` measures alone (`format_times.py`): that needs an idle machine,
the figures here do not.

Run: python tests/bench/formats.py [--rows bf16,nested-64] [--prompts 1] [--tokens 32] [--times]
The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import json
import shutil
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from unittest import mock

import torch
from format_times import run_times
from format_variants import SHAPES, VARIANTS, int8_by_groups, quantise_wide
from mira_app.paths import cache_dir, data_dir
from mira_assets.evaluation import evaluation_texts
from mira_engine import types
from mira_engine.checkpoint import quantise
from mira_engine.checkpoint.convert import checkpoint_revision
from mira_engine.checkpoint.experts import CheckpointExperts
from mira_engine.checkpoint.files import MANIFEST_FILE
from mira_engine.checkpoint.formats import (
    ExpertFormat,
    ExpertTensors,
    NestedFormat,
    make_format,
)
from mira_engine.checkpoint.store import ExpertStore, StoreManifest, StoreWriter
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.evaluation import NUM_GREEDY_TOKENS, continue_greedily, open_scorer
from mira_engine.events import ChatMessage
from mira_engine.fidelity.comparing import judge, read_texts
from mira_engine.fidelity.kept_logits import KeptLogits
from mira_engine.fidelity.measures import FidelitySums
from mira_engine.fidelity.texts import WINDOW_TOKENS, Evaluated, Text, make_evaluated
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.model.chat import load_tokenizer
from mira_engine.policy.speculation import RoundObservation
from mira_engine.prepare import prepare
from mira_engine.profiling import load_prompts
from mira_engine.types import CompileMode, ComputeDtype, DraftExperts, Plane, Precision
from torch import Tensor

DEPTHS = (4, 8)

Encode = Callable[[ExpertTensors], dict[Plane, Tensor]]


class WideNestedFormat(NestedFormat):
    """`nested` whose codes have groups of 128, in records with groups of half that size."""

    def _quantise(self, tensors: ExpertTensors) -> dict[Plane, dict[str, Tensor]]:
        with mock.patch.object(quantise, "quantise_nested", self._quantise_wide):
            return super()._quantise(tensors)

    @staticmethod
    def _quantise_wide(weight: Tensor, group_size: int) -> quantise.GroupCodes:
        most = quantise.NESTED_MAX
        codes, scales = quantise_wide(weight, 2 * group_size, most, -most)
        spread = scales.repeat_interleave(2, dim=1)[:, : weight.shape[1] // group_size]
        return quantise.GroupCodes(codes, spread.contiguous())


@dataclass
class Counts:
    """What became of the drafted tokens at one K."""

    num_rounds: int = 0
    num_accepted: int = 0
    num_judged: int = 0

    def add(self, observation: RoundObservation) -> None:
        """Counts a round that drafted."""
        accepted, drafted = observation.num_accepted, observation.num_draft
        if drafted:
            self.num_rounds += 1
            self.num_accepted += accepted
            self.num_judged += accepted + (accepted < drafted)

    @property
    def acceptance(self) -> float:
        return self.num_accepted / self.num_judged

    @property
    def accepted_per_round(self) -> float:
        return self.num_accepted / self.num_rounds


@dataclass(frozen=True)
class Row:
    """One format that is measured.

    Attributes:
        variant: Its name in `format_variants`.
        precision: What the engine is told that it is.
        make: Makes the format whose store is written in a home of its own, and what encodes
            an expert; `None` where the model's own home has the store.
        group_size: Of the engine's INT4 groups meanwhile, `None` for the usual one.
    """

    variant: str
    precision: Precision
    make: Callable[[CheckpointExperts], tuple[ExpertFormat, Encode]] | None = None
    group_size: int | None = None


def _int8_store(
    group_size: int | None, checkpoint: CheckpointExperts
) -> tuple[ExpertFormat, Encode]:
    fmt = make_format(Precision.FLOAT32, checkpoint.shape)
    return fmt, lambda tensors: fmt.encode(int8_by_groups(tensors, group_size))


def _nested_store(checkpoint: CheckpointExperts) -> tuple[ExpertFormat, Encode]:
    fmt = make_format(Precision.NESTED, checkpoint.shape)
    return fmt, fmt.encode


def _wide_store(checkpoint: CheckpointExperts) -> tuple[ExpertFormat, Encode]:
    narrow = make_format(Precision.NESTED, checkpoint.shape)
    assert isinstance(narrow, NestedFormat)
    wide = WideNestedFormat(narrow.shape, narrow._layout, narrow.group_size)
    return wide, wide.encode


ROWS = {
    "bf16": Row("bf16", Precision.BF16),
    "int8-shared": Row("int8-shared", Precision.INT8),
    "int8-row": Row("int8-row", Precision.FLOAT32, partial(_int8_store, None)),
    "int8-128": Row("int8-128", Precision.FLOAT32, partial(_int8_store, 128)),
    "int8-64": Row("int8-64", Precision.FLOAT32, partial(_int8_store, 64)),
    "int8-32": Row("int8-32", Precision.FLOAT32, partial(_int8_store, 32)),
    "nested-128": Row("nested-128", Precision.NESTED, _wide_store),
    "nested-64": Row("nested-64", Precision.NESTED),
    "nested-32": Row("nested-32", Precision.NESTED, _nested_store, group_size=32),
    "int4-64": Row("int4-64", Precision.INT4),
}
GPTQ_ROW = "nested-64, GPTQ"


@contextlib.contextmanager
def groups_of(size: int | None) -> Iterator[None]:
    """Has the engine's formats use this group size alone."""
    if size is None:
        yield
        return
    with mock.patch.object(types, "INT4_GROUP_SIZES", (size,)):
        yield


class Bench:
    """Loads engines of rows and counts."""

    def __init__(self, home: ModelHome, arguments: argparse.Namespace) -> None:
        self.home = home
        self._arguments = arguments
        self._checkpoint = CheckpointExperts(home.checkpoint_dir)
        self._prompts = load_prompts(arguments.prompts)
        self.evaluated: Evaluated = make_evaluated(
            load_tokenizer(home.backbone_dir),
            [Text(*each) for each in evaluation_texts()],
            max_tokens=arguments.text_tokens,
        )

    @property
    def expert_shape(self) -> types.ExpertShape:
        return self._checkpoint.shape

    @contextlib.contextmanager
    def home_of(self, name: str, row: Row) -> Iterator[ModelHome]:
        """The home with the row's store; one that was made for it goes afterwards."""
        if row.make is None:
            yield self.home
            return
        folder = self._arguments.work / name
        home = ModelLibrary(folder).resolve("builtin")
        (home.root / "stores").mkdir(parents=True, exist_ok=True)
        for path in (self.home.backbone_dir, self.home.checkpoint_dir):
            _link(home.root / path.name, path)
        _link(home.store_dir(Precision.INT4), self.home.store_dir(Precision.INT4))
        fmt, encode = row.make(self._checkpoint)
        self._write(home, fmt, encode)
        try:
            yield home
        finally:
            shutil.rmtree(folder)

    def _write(self, home: ModelHome, fmt: ExpertFormat, encode: Encode) -> None:
        checkpoint = self._checkpoint
        num_layers, num_experts = len(checkpoint.modules), checkpoint.num_experts
        manifest = StoreManifest.of_format(
            fmt,
            num_layers=num_layers,
            num_experts=num_experts,
            source="bench",
            revision=checkpoint_revision(checkpoint),
        )
        writer = StoreWriter(home.store_dir(fmt.precision), manifest)
        for layer in range(num_layers):
            if not writer.is_layer_done(layer):
                writer.write_layer(
                    layer, (encode(checkpoint.load(layer, one)) for one in range(num_experts))
                )
        writer.finish()

    @contextlib.contextmanager
    def engine(self, home: ModelHome, precision: Precision, k: int = 0) -> Iterator[Engine]:
        """An engine with all experts resident; exact arithmetic where it does not draft."""
        config = EngineConfig(
            precision=precision,
            dtype=ComputeDtype.BFLOAT16 if k else ComputeDtype.FLOAT32,
            budget=MemoryAmount(share=8.0),
            num_draft_tokens=k,
            context_length=2048,
            prefill_chunk_tokens=WINDOW_TOKENS,
            is_predicting=False,
            draft_experts=DraftExperts.ALL,
            num_threads=self._arguments.threads,
            compile_mode=CompileMode.WAIT if k else CompileMode.OFF,
        )
        cache = self._arguments.cache_dir or cache_dir()
        engine = Engine.load(home, config, cache_dir=cache if k else None)
        try:
            yield engine
        finally:
            engine.close()
            gc.collect()

    def read(self, engine: Engine, kept: KeptLogits, *, is_reference: bool) -> FidelitySums:
        """Reads the texts."""
        sums = read_texts(
            open_scorer(engine, WINDOW_TOKENS),
            self.evaluated.windows,
            kept,
            is_reference=is_reference,
            on_tokens=lambda done: None,
        )
        return sum(sums.values(), FidelitySums())

    def count(self, home: ModelHome, precision: Precision, k: int) -> Counts:
        """Answers the prompts with a draft of K tokens."""
        counts = Counts()
        with self.engine(home, precision, k) as engine:
            engine._end_ids = frozenset()  # every reply has the same number of tokens
            engine.on_round = counts.add
            for prompt in self._prompts:
                engine.state.reset()
                tokens = engine.render([ChatMessage(role="user", content=prompt)])
                sampling = SamplingConfig(max_new_tokens=self._arguments.tokens)
                for _ in engine.reply(tokens, sampling):
                    pass
        return counts


def _link(path: Path, target: Path) -> None:
    path.unlink(missing_ok=True)
    path.symlink_to(target, target_is_directory=True)


def gptq_home(arguments: argparse.Namespace, checkpoint_dir: Path) -> ModelHome | None:
    """Returns a home of the model whose `nested` store has a high plane that GPTQ chose."""
    home = ModelLibrary(arguments.gptq_dir).resolve(str(checkpoint_dir))
    try:
        manifest = json.loads((home.store_dir(Precision.NESTED) / MANIFEST_FILE).read_text())
    except (OSError, ValueError):
        return None
    return home if manifest.get("rounding") == "gptq" else None


def measure_row(
    bench: Bench, home: ModelHome, row: Row, kept: KeptLogits
) -> tuple[dict[str, object], list[tuple[int, ...]]]:
    """Measures one row. Returns its figures, and its continuations, which are judged later."""
    variant = next(one for one in VARIANTS if one.name == row.variant)
    num_layers = ExpertStore.open(bench.home.store_dir(Precision.INT4)).manifest.num_layers
    size = variant.expert_bytes(bench.expert_shape)
    figures: dict[str, object] = {"expert_bytes": size, "token_bytes": 2 * num_layers * size}
    if row.precision is not Precision.FLOAT32:
        manifest = ExpertStore.open(home.store_dir(row.precision)).manifest
        figures["record_bytes"] = dict(manifest.planes)
    with bench.engine(home, row.precision) as engine:
        sums = bench.read(engine, kept, is_reference=False)
        made = continue_greedily(engine, bench.evaluated.prompts, NUM_GREEDY_TOKENS)
    figures |= {
        "perplexity": round(sums.perplexity, 4),
        "kl": round(sums.mean_kl, 6),
        "top1": round(sums.top1_agreement, 4),
    }
    for k in DEPTHS if row.precision is not Precision.INT4 else ():
        counts = bench.count(home, row.precision, k)
        figures[f"acceptance_{k}"] = round(counts.acceptance, 4)
        figures[f"accepted_per_round_{k}"] = round(counts.accepted_per_round, 3)
        figures[f"judged_{k}"] = counts.num_judged
    return figures, made


def print_table(rows: dict[str, dict[str, object]]) -> None:
    """Prints what was found."""
    head = ("perplexity", "KL", "top-1", "greedy", "KiB", "MB/token", "K=4", "a round", "K=8", "")
    print(("{:<18}" + "{:>11}" * 10).format("", *head))
    for name, row in rows.items():
        cells = [
            f"{row['perplexity']:.3f}",
            f"{row['kl']:.5f}",
            f"{row['top1']:.1%}",
            f"{row['greedy_tokens']:.1f}",
            f"{row['expert_bytes'] / 1024:.1f}",
            f"{row['token_bytes'] / 1e6:.1f}",
        ]
        for k in DEPTHS:
            if f"acceptance_{k}" in row:
                cells += [f"{row[f'acceptance_{k}']:.3f}", f"{row[f'accepted_per_round_{k}']:.2f}"]
            else:
                cells += ["-", "-"]
        print(("{:<18}" + "{:>11}" * 10).format(name, *cells))


def run_rows(bench: Bench, names: list[str], gptq: ModelHome | None) -> dict[str, dict]:
    """Measures all rows, and has the reference judge their continuations."""
    rows: dict[str, dict[str, object]] = {}
    made: dict[str, list[tuple[int, ...]]] = {}
    lengths = [window.num_predicted for window in bench.evaluated.windows]
    with KeptLogits(bench.home.root, lengths) as kept:
        with bench.engine(bench.home, Precision.BF16) as engine:
            bench.read(engine, kept, is_reference=True)
        for name in names:
            row = ROWS[name]
            with groups_of(row.group_size), bench.home_of(name, row) as home:
                rows[name], made[name] = measure_row(bench, home, row, kept)
            print(f"{name}: {rows[name]}", flush=True)
        if gptq is not None:
            rows[GPTQ_ROW], made[GPTQ_ROW] = measure_row(bench, gptq, ROWS["nested-64"], kept)
    with bench.engine(bench.home, Precision.BF16) as engine:
        greedy = judge(
            open_scorer(engine, WINDOW_TOKENS),
            bench.evaluated.prompts,
            made,
            limit=NUM_GREEDY_TOKENS,
            on_tokens=lambda done: None,
        )
    for name, mean in greedy.items():
        rows[name]["greedy_tokens"] = round(mean, 2)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--prompts", type=int, default=1, help="of each of the five kinds")
    parser.add_argument("--tokens", type=int, default=32, help="of each reply with a draft")
    parser.add_argument("--text-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--times", action="store_true", help="transfer times only")
    parser.add_argument("--rounds", type=int, default=30, help="of --times")
    parser.add_argument("--data-dir", type=Path, default=None)
    parser.add_argument("--cache-dir", type=Path, default=None)
    parser.add_argument("--work", type=Path, default=None, help="takes a store at a time")
    parser.add_argument("--gptq-dir", type=Path, default=None, help="data folder of GPTQ drafts")
    arguments = parser.parse_args()
    root = arguments.data_dir or data_dir()
    arguments.work = arguments.work or root / "bench-formats"
    arguments.gptq_dir = arguments.gptq_dir or root / "bench-drafts"
    if arguments.times:
        times = run_times(root, rounds=arguments.rounds, megabytes=512)
        print(json.dumps({"bench": "formats", "us": times}))
        return
    home = ModelLibrary(root).resolve("builtin")
    for precision in (Precision.BF16, Precision.INT8, Precision.NESTED):
        prepare(home, precision, on_progress=lambda *_: None)
    bench = Bench(home, arguments)
    assert bench.expert_shape == SHAPES["builtin"]
    rows = run_rows(bench, arguments.rows.split(","), gptq_home(arguments, home.checkpoint_dir))
    print_table(rows)
    result = {
        "bench": "formats",
        "text_tokens": bench.evaluated.num_predicted,
        "continuations": len(bench.evaluated.prompts),
        "greedy_tokens": NUM_GREEDY_TOKENS,
        "prompts": 5 * arguments.prompts,
        "tokens": arguments.tokens,
        "rows": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
