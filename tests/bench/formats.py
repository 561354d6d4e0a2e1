"""Which expert format keeps most of the model, at which bytes, and with which draft?

Question: for experts in bf16, Mira's shared-scale INT8, INT8 with a scale for each row, INT8
and `nested` with groups of several sizes, and INT4: perplexity, mean KL divergence from the
bf16 experts, share of equal choices, tokens of greedy continuations before the first
difference, bytes of an expert and of a token, and the acceptance of the draft that belongs to
the format, at K = 4 and 8. Mira's Table I, and what the default format and group size follow
from.

Method: the built-in model and the texts of `mira-chat eval`. Each expert is quantised and
dequantised, and the model runs on the result in float32, which is exactly what the engine
computes in that arithmetic. INT8 by rows and by groups is only an experiment: the engine has no
such format. Groups of 128 do not divide this model's 576 inputs: the last one has 64, and a
store with groups of 64 holds each scale twice. Bytes are counted as in `format_variants.py`.
Drafts are counted as a chat runs: by the engine, all experts resident, in bfloat16 with
compiled steps, greedy, each draft against its own target. The draft is INT4 rounded to nearest
in groups of 64, or the high plane of `nested`. INT8 by rows or groups would have the draft of
bf16, and its target but for a thousandth: not counted. A draft token counts as judged up to the
first rejection of a round. Where a `nested` store is found whose high plane GPTQ chose, its
draft is counted too, and the store is what is read.

Left out: time, which `--times` measures alone (`format_times.py`): that needs an idle machine,
the figures here do not.

Run: python tests/bench/formats.py [--rows bf16,nested-64] [--drafts nested-64] [--times]
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
from mira_engine.checkpoint.formats import ExpertFormat, ExpertTensors, NestedFormat, make_format
from mira_engine.checkpoint.store import ExpertStore, StoreManifest, StoreWriter
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.evaluation import NUM_GREEDY_TOKENS
from mira_engine.events import ChatMessage
from mira_engine.fidelity.comparing import read_texts
from mira_engine.fidelity.kept_logits import KeptLogits
from mira_engine.fidelity.measures import FidelitySums, agreeing_tokens
from mira_engine.fidelity.scoring import CheckpointScorer
from mira_engine.fidelity.texts import Text, make_evaluated
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.model.chat import load_tokenizer
from mira_engine.model.loader import load_backbone
from mira_engine.policy.speculation import RoundObservation
from mira_engine.prepare import prepare
from mira_engine.profiling import load_prompts
from mira_engine.types import (
    CompileMode,
    ComputeDtype,
    DraftExperts,
    ExpertShape,
    Plane,
    Precision,
)
from torch import Tensor

DEPTHS = (4, 8)

Change = Callable[[ExpertTensors], ExpertTensors]
"""Quantises an expert and back."""

LoadExpert = Callable[[int, int], ExpertTensors]


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


@contextlib.contextmanager
def groups_of(size: int | None) -> Iterator[None]:
    """Has the engine's formats use this group size alone, `None` for the usual one."""
    if size is None:
        yield
        return
    with mock.patch.object(types, "INT4_GROUP_SIZES", (size,)):
        yield


def _format(precision: Precision, size: int | None, shape: ExpertShape) -> ExpertFormat:
    """Makes a format with groups of `size`; 128 as `WideNestedFormat` says."""
    if size == 128:
        narrow = make_format(precision, shape)
        assert isinstance(narrow, NestedFormat)
        return WideNestedFormat(narrow.shape, narrow._layout, narrow.group_size)
    with groups_of(size):
        return make_format(precision, shape)


@dataclass(frozen=True)
class Row:
    """One format that is measured; by its name in `format_variants`.

    Attributes:
        precision: The engine's format, `None` for an experiment.
        group_size: Inputs that share a scale; `None` for the format's own, or for whole rows.
    """

    precision: Precision | None = None
    group_size: int | None = None

    def change(self, shape: ExpertShape) -> Change:
        """Returns what quantises an expert and back."""
        if self.precision is None:
            return partial(int8_by_groups, group_size=self.group_size)
        fmt = _format(self.precision, self.group_size, shape)
        return lambda tensors: fmt.decode(fmt.bind(fmt.encode(tensors)))


ROWS = {
    "bf16": Row(Precision.BF16),
    "int8-shared": Row(Precision.INT8),
    "int8-row": Row(),
    "int8-128": Row(None, 128),
    "int8-64": Row(None, 64),
    "int8-32": Row(None, 32),
    "nested-128": Row(Precision.NESTED, 128),
    "nested-64": Row(Precision.NESTED),
    "nested-32": Row(Precision.NESTED, 32),
    "int4-64": Row(Precision.INT4),
}
DRAFTS = ("bf16", "int8-shared", "nested-128", "nested-64", "nested-32")
GPTQ = "nested-64, GPTQ"


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


class Reading:
    """Reads the texts and continues their beginnings with one form of the experts or another."""

    def __init__(self, home: ModelHome, text_tokens: int) -> None:
        self.model = load_backbone(home.backbone_dir, ComputeDtype.FLOAT32)
        texts = [Text(*each) for each in evaluation_texts()]
        tokenizer = load_tokenizer(home.backbone_dir)
        self.evaluated = make_evaluated(tokenizer, texts, max_tokens=text_tokens)
        self.prompts = torch.tensor(self.evaluated.prompts)

    @torch.inference_mode()
    def read(
        self, load: LoadExpert, kept: KeptLogits, *, is_reference: bool
    ) -> tuple[FidelitySums, list[list[int]]]:
        """Returns the sums over all texts, and the continuations."""
        experts: dict[tuple[int, int], ExpertTensors] = {}

        def load_once(layer: int, expert: int) -> ExpertTensors:
            if (layer, expert) not in experts:
                experts[layer, expert] = load(layer, expert)
            return experts[layer, expert]

        sums = read_texts(
            CheckpointScorer(self.model, load_once),
            self.evaluated.windows,
            kept,
            is_reference=is_reference,
            on_tokens=lambda done: None,
        )
        made = self.model.generate(
            self.prompts,
            attention_mask=torch.ones_like(self.prompts),
            max_new_tokens=NUM_GREEDY_TOKENS,
            min_new_tokens=NUM_GREEDY_TOKENS,
            do_sample=False,
            eos_token_id=None,
            pad_token_id=0,
        )
        return sum(sums.values(), FidelitySums()), made[:, self.prompts.shape[1] :].tolist()


class DraftCounting:
    """Loads engines and counts what they accept."""

    def __init__(
        self, home: ModelHome, checkpoint: CheckpointExperts, arguments: argparse.Namespace
    ) -> None:
        self._home = home
        self._checkpoint = checkpoint
        self._arguments = arguments
        self._prompts = load_prompts(arguments.prompts)

    def measure(self, name: str) -> dict[str, object]:
        """Counts at every depth with the row's own target and draft."""
        row = ROWS[name]
        assert row.precision is not None
        if row.group_size is None:
            return self.count(self._home, row.precision)
        folder = self._arguments.work / name
        home = ModelLibrary(folder).resolve("builtin")
        (home.root / "stores").mkdir(parents=True, exist_ok=True)
        for path in (self._home.backbone_dir, self._home.checkpoint_dir):
            link = home.root / path.name
            link.unlink(missing_ok=True)
            link.symlink_to(path, target_is_directory=True)
        try:
            fmt = _format(row.precision, row.group_size, self._checkpoint.shape)
            self._write(home, fmt)
            with groups_of(None if row.group_size == 128 else row.group_size):
                return self.count(home, row.precision)
        finally:
            shutil.rmtree(folder)

    def _write(self, home: ModelHome, fmt: ExpertFormat) -> None:
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
            tensors = (checkpoint.load(layer, one) for one in range(num_experts))
            writer.write_layer(layer, map(fmt.encode, tensors))
        writer.finish()

    def count(self, home: ModelHome, precision: Precision) -> dict[str, object]:
        """Answers the prompts with drafts of every depth."""
        figures: dict[str, object] = {}
        for k in DEPTHS:
            config = EngineConfig(
                precision=precision,
                budget=MemoryAmount(share=4.0),
                num_draft_tokens=k,
                context_length=1024,
                is_predicting=False,
                draft_experts=DraftExperts.ALL,
                num_threads=self._arguments.threads,
                compile_mode=self._arguments.compile,
            )
            counts, cache = Counts(), self._arguments.cache_dir or cache_dir()
            engine = Engine.load(home, config, cache_dir=cache)
            engine._end_ids = frozenset()  # every reply has the same number of tokens
            engine.on_round = counts.add
            for prompt in self._prompts:
                engine.state.reset()
                tokens = engine.render([ChatMessage(role="user", content=prompt)])
                for _ in engine.reply(
                    tokens, SamplingConfig(max_new_tokens=self._arguments.tokens)
                ):
                    pass
            engine.close()
            gc.collect()
            figures[f"acceptance_{k}"] = round(counts.num_accepted / counts.num_judged, 4)
            figures[f"accepted_per_round_{k}"] = round(counts.num_accepted / counts.num_rounds, 3)
            figures[f"judged_{k}"] = counts.num_judged
        return figures


def gptq_home(folder: Path, checkpoint_dir: Path) -> ModelHome | None:
    """Returns a home of the model whose `nested` store has a high plane that GPTQ chose."""
    home = ModelLibrary(folder).resolve(str(checkpoint_dir))
    try:
        manifest = json.loads((home.store_dir(Precision.NESTED) / MANIFEST_FILE).read_text())
    except (OSError, ValueError):
        return None
    return home if manifest.get("rounding") == "gptq" else None


def stored(home: ModelHome, precision: Precision) -> LoadExpert:
    """Returns what gives a store's experts, dequantised."""
    store = ExpertStore.open(home.store_dir(precision))

    def load(layer: int, expert: int) -> ExpertTensors:
        records = {plane: store.read_record(layer, plane, expert) for plane in store.format.planes}
        return store.format.decode(store.format.bind(records))

    return load


def sizes_of(name: str, num_layers: int) -> dict[str, object]:
    """Returns bytes of an expert and of a token, which uses two in each layer."""
    variant = next(one for one in VARIANTS if one.name == name)
    size = variant.expert_bytes(SHAPES["builtin"])
    return {"expert_bytes": size, "token_bytes": 2 * num_layers * size}


def run_rows(
    home: ModelHome, checkpoint: CheckpointExperts, arguments: argparse.Namespace
) -> tuple[dict[str, dict[str, object]], int]:
    """Reads the texts with every row's experts. Returns the rows, and tokens predicted."""
    reading = Reading(home, arguments.text_tokens)
    num_layers = len(checkpoint.modules)
    loads: dict[str, LoadExpert] = {}
    for name in arguments.rows.split(","):
        change = ROWS[name].change(checkpoint.shape)
        loads[name] = lambda layer, expert, change=change: change(checkpoint.load(layer, expert))
    gptq = gptq_home(arguments.gptq_dir, home.checkpoint_dir)
    if gptq is not None:
        loads[GPTQ] = stored(gptq, Precision.NESTED)
    rows: dict[str, dict[str, object]] = {}
    lengths = [window.num_predicted for window in reading.evaluated.windows]
    with KeptLogits(home.root, lengths) as kept:
        _, own = reading.read(checkpoint.load, kept, is_reference=True)
        for name, load in loads.items():
            sums, made = reading.read(load, kept, is_reference=False)
            agreeing = [
                agreeing_tokens(one, other, NUM_GREEDY_TOKENS)
                for one, other in zip(made, own, strict=True)
            ]
            rows[name] = sizes_of("nested-64" if name == GPTQ else name, num_layers) | {
                "perplexity": round(sums.perplexity, 4),
                "kl": round(sums.mean_kl, 6),
                "top1": round(sums.top1_agreement, 4),
                "greedy_tokens": round(sum(agreeing) / len(agreeing), 2),
            }
            print(name, rows[name], flush=True)
    return rows, reading.evaluated.num_predicted


def print_table(rows: dict[str, dict[str, object]]) -> None:
    """Prints what was found."""
    head = ("perplexity", "KL", "top-1", "greedy", "KiB", "MB/token", "K=4", "a round", "K=8", "")
    print(("{:<18}" + "{:>11}" * 10).format("", *head))
    for name, row in rows.items():
        cells = ["-"] * 6
        if "kl" in row:
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


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--rows", default=",".join(ROWS))
    parser.add_argument("--drafts", default=",".join(DRAFTS), help="rows to count; '' for none")
    parser.add_argument("--prompts", type=int, default=3, help="of each of the five kinds")
    parser.add_argument("--tokens", type=int, default=64, help="of each reply with a draft")
    parser.add_argument("--text-tokens", type=int, default=4096)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compile", type=CompileMode, default=CompileMode.WAIT)
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
    torch.set_num_threads(arguments.threads)
    home = ModelLibrary(root).resolve("builtin")
    for precision in (Precision.BF16, Precision.INT8, Precision.NESTED):
        prepare(home, precision, on_progress=lambda *_: None)
    checkpoint = CheckpointExperts(home.checkpoint_dir)
    assert checkpoint.shape == SHAPES["builtin"]
    rows, num_tokens = {}, 0
    if arguments.rows:
        rows, num_tokens = run_rows(home, checkpoint, arguments)
    counting = DraftCounting(home, checkpoint, arguments)
    for name in filter(None, arguments.drafts.split(",")):
        rows.setdefault(name, {}).update(counting.measure(name))
        print(name, rows[name], flush=True)
    gptq = gptq_home(arguments.gptq_dir, home.checkpoint_dir)
    if gptq is not None and arguments.drafts:
        rows.setdefault(GPTQ, {}).update(counting.count(gptq, Precision.NESTED))
    print_table(rows)
    result = {
        "bench": "formats",
        "text_tokens": num_tokens,
        "greedy_tokens": NUM_GREEDY_TOKENS,
        "prompts": 5 * arguments.prompts,
        "tokens": arguments.tokens,
        "rows": rows,
    }
    print(json.dumps(result))


if __name__ == "__main__":
    main()
