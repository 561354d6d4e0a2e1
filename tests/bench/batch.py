"""What do several requests at once cost each other, and what do they gain together?

Question: time per output token of a request (TPOT) and tokens a second of the whole batch
at B = 1, 2, 4, 8, 16, 32 requests, plain (K = 0), speculating (K = 4), and where the governor
chooses K (auto); the same for beam search at several widths. With how many distinct experts
of a layer each pass uses, and the bytes that are moved for a token, which explain them.

Method: one process, all engines loaded on the built-in model at one memory budget, rounds that
alternate between them and go through all sizes, medians over rounds. What the governor learns
it keeps from batch to batch: with one round it is seen learning. K is the mean of all rounds of
a batch or reply. Requests are 16-token prefixes, all different, greedy, ends of text ignored.
TPOT is the mean over the requests of their time from the first token to the last, by the tokens
between; throughput is all tokens by the time until the last request ends, prompts included.
`reply` is one request by the ordinary loop, with compiled steps, which batches do without.
Beams: transformers' own search on our experts, K = 0; a token's time is that of a pass over all
beams. With `--gpu N` all of it is on that card, which then holds all engines.

Left out: detokenising, other engines. The default is a short form of the papers' shapes
(Specter: 16 tokens in, 128 out; Mira: 64 in, 256 out); `--full` runs these.

Run: python tests/bench/batch.py [--full] [--gpu N] [--sizes 1 2 4 8 16 32] [--beams 1 2 4 8]
The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from mira_app.paths import cache_dir, data_dir
from mira_engine.config import EngineConfig, LinkConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.library import ModelLibrary
from mira_engine.model.chat import load_tokenizer
from mira_engine.policy.base import Action
from mira_engine.policy.speculation import RoundObservation
from mira_engine.prepare import prepare
from mira_engine.runtime.requests import RequestResult
from mira_engine.types import CompileMode, Phase, Precision

OPENINGS = (
    "Nobody in the village could remember when {0} had first become the talk of every evening, "
    "but the old baker claimed",
    "Write a short and friendly letter to a neighbour about {0}, in which you explain politely",
    "The committee's report on {0} begins with three findings, of which the second was not",
    "Question: what should a beginner know about {0} before spending any money? Answer: at first",
)
SUBJECTS = (
    "the lighthouse", "compound interest", "sourdough bread", "river floods",
    "chess openings", "solar panels", "bee keeping", "night trains",
)  # fmt: skip
"""With the openings: 32 different prefixes."""


NAMES = {0: "k0", 4: "k4", None: "auto"}
"""Of the engines, by the K that they are given."""


class RoundCounter:
    """Counts the distinct experts of each layer's pass after prefill, and the K of each round.

    Drafts are left out. By what the driver is told anyway: on a card nothing more is read
    from there.
    """

    def __init__(self, engine: Engine) -> None:
        engine.on_round = self._count_round
        self._executor = engine.executor
        self._enter = engine.executor.driver.enter_layer
        self.reset()
        engine.executor.driver.enter_layer = self._enter_counted

    def reset(self) -> None:
        self.num_layer_passes = 0
        self.num_distinct = 0
        self.depths: list[int] = []

    def _count_round(self, observation: RoundObservation) -> None:
        self.depths.append(observation.num_draft)

    def _enter_counted(self, layer: int, demand: Sequence[tuple[int, int]]) -> list[Action]:
        if self._executor.phase in (Phase.DECODE, Phase.VERIFY):
            self.num_layer_passes += 1
            self.num_distinct += len(demand)
        return self._enter(layer, demand)

    @property
    def mean_experts(self) -> float | None:
        """Distinct experts of a layer in a pass; `None` before the first."""
        return self.num_distinct / self.num_layer_passes if self.num_layer_passes else None


@dataclass
class Row:
    """Measurements of one system at one size, one entry a round."""

    tpot_ms: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    mb_per_token: list[float] = field(default_factory=list)
    experts_a_layer: list[float] = field(default_factory=list)
    accepted: list[float] = field(default_factory=list)
    mean_k: list[float] = field(default_factory=list)

    def medians(self) -> dict[str, float]:
        found = {}
        for name, values in vars(self).items():
            if values:
                found[name] = round(statistics.median(values), 3)
        return found


def prefixes(engine: Engine, num_prompts: int, num_tokens: int) -> list[list[int]]:
    """Returns token lists of one length, all different."""
    tokenizer = load_tokenizer(engine.home.backbone_dir)
    made = []
    for number in range(num_prompts):
        opening, subject = OPENINGS[number % len(OPENINGS)], SUBJECTS[number // len(OPENINGS)]
        ids = tokenizer(" ".join([opening.format(subject)] * 4))["input_ids"]
        made.append(ids[:num_tokens])
    return made


def _add_figures(row: Row, engine: Engine, counter: RoundCounter, num_tokens: int) -> None:
    stats = engine.stats()
    row.mb_per_token.append(stats.bytes_moved / num_tokens / 1e6)
    if counter.mean_experts is not None:
        row.experts_a_layer.append(counter.mean_experts)
    if counter.depths:
        row.mean_k.append(statistics.mean(counter.depths))
    if stats.num_rounds:
        row.accepted.append(stats.accepted_per_round)


def run_batch(
    engine: Engine, counter: RoundCounter, row: Row, prompts: Sequence[list[int]], tokens: int
) -> None:
    """Adds one batch's figures to the row."""
    counter.reset()
    started = time.perf_counter()
    events = engine.generate(prompts, SamplingConfig(max_new_tokens=tokens))
    results = [event for event in events if isinstance(event, RequestResult)]
    wall_s = time.perf_counter() - started
    row.tpot_ms.append(1e3 * statistics.mean(result.tpot_s for result in results))
    row.tokens_per_s.append(len(prompts) * tokens / wall_s)
    _add_figures(row, engine, counter, len(prompts) * tokens)


def run_reply(
    engine: Engine, counter: RoundCounter, row: Row, prompt: list[int], tokens: int
) -> None:
    """Adds one ordinary reply's figures to the row."""
    counter.reset()
    engine.state.reset()
    started = time.perf_counter()
    for _ in engine.reply(prompt, SamplingConfig(max_new_tokens=tokens)):
        pass
    wall_s = time.perf_counter() - started
    row.tpot_ms.append(1e3 * engine.stats().decode_s / (tokens - 1))
    row.tokens_per_s.append(tokens / wall_s)
    _add_figures(row, engine, counter, tokens)


def run_beams(
    engine: Engine, counter: RoundCounter, row: Row, prompt: list[int], width: int, tokens: int
) -> None:
    """Adds one beam search's figures to the row."""
    counter.reset()
    found = engine.beam_search(prompt, num_beams=width, max_new_tokens=tokens)
    num_tokens = len(found.tokens)
    row.tpot_ms.append(1e3 * found.decode_s / (num_tokens - 1))
    row.tokens_per_s.append(num_tokens / (found.prompt_s + found.decode_s))
    _add_figures(row, engine, counter, num_tokens)


def print_table(rows: dict[str, Row]) -> None:
    head = ("", "TPOT ms", "tokens/s", "MB/token", "experts/layer", "accepted", "K")
    print(("{:<14}" + "{:>15}" * 6).format(*head))
    for name, row in rows.items():
        medians = row.medians()
        cells = [medians.get(key) for key in vars(row)]
        shown = ["-" if cell is None else f"{cell:.2f}" for cell in cells]
        print(("{:<14}" + "{:>15}" * 6).format(name, *shown))


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--full", action="store_true", help="the papers' lengths")
    parser.add_argument("--rounds", type=int, default=1)
    parser.add_argument("--sizes", type=int, nargs="*", default=[1, 2, 4, 8, 16, 32])
    parser.add_argument("--prefix", type=int, default=16)
    parser.add_argument("--tokens", type=int, default=None, help="new tokens of a request")
    parser.add_argument("--beams", type=int, nargs="*", default=[1, 2, 4, 8])
    parser.add_argument("--beam-prompt", type=int, default=64)
    parser.add_argument("--beam-tokens", type=int, default=None)
    parser.add_argument("--budget", default="75%")
    parser.add_argument("--gpu", type=int, help="a card's number, else the processor")
    parser.add_argument("--link-rate", type=float, help="emulated link, MB/s")
    parser.add_argument("--compile", type=CompileMode, default=CompileMode.WAIT)
    parser.add_argument("--cache-dir", type=Path, default=None)
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--data-dir", type=Path, default=None)
    arguments = parser.parse_args()
    tokens = arguments.tokens or (128 if arguments.full else 24)
    beam_tokens = arguments.beam_tokens or (256 if arguments.full else 32)
    home = ModelLibrary(arguments.data_dir or data_dir()).resolve("builtin")
    prepare(home, Precision.NESTED, on_progress=lambda *_: None, is_cancelled=lambda: False)
    rate = arguments.link_rate * 1e6 if arguments.link_rate else None
    engines: dict[int | None, tuple[Engine, RoundCounter]] = {}
    for k in NAMES:
        config = EngineConfig(
            precision=Precision.NESTED,
            budget=MemoryAmount.parse(arguments.budget),
            num_draft_tokens=k,
            link=LinkConfig(bytes_per_s=rate),
            num_threads=arguments.threads,
            compile_mode=arguments.compile,
            gpu=arguments.gpu,
        )
        engine = Engine.load(home, config, cache_dir=arguments.cache_dir or cache_dir())
        engine._end_ids = frozenset()  # all requests have the same number of tokens
        engines[k] = engine, RoundCounter(engine)
    prompts = prefixes(engines[0][0], 32, arguments.prefix)
    beam_prompt = prefixes(engines[0][0], 1, arguments.beam_prompt)[0]
    rows: dict[str, Row] = {}
    for number in range(-1, arguments.rounds):
        is_warm_up = number < 0
        new = 4 if is_warm_up else tokens
        for k, pair in engines.items():
            run_reply(*pair, rows.setdefault(f"{NAMES[k]} reply", Row()), prompts[0], new)
        for size in arguments.sizes[:2] if is_warm_up else arguments.sizes:
            for k, pair in engines.items():
                row = rows.setdefault(f"{NAMES[k]} B={size}", Row())
                run_batch(*pair, row, prompts[:size], new)
        for width in arguments.beams[:1] if is_warm_up else arguments.beams:
            row = rows.setdefault(f"beams {width}", Row())
            run_beams(*engines[0], row, beam_prompt, width, 4 if is_warm_up else beam_tokens)
        if is_warm_up:
            rows = {}
    rows = dict(sorted(rows.items(), key=lambda item: item[0].split()[0]))
    print(
        f"budget {arguments.budget}, nested, {arguments.prefix} tokens in, {tokens} out; beams "
        f"{arguments.beam_prompt} in, {beam_tokens} out; {arguments.rounds} rounds, "
        + ("" if arguments.gpu is None else f"card {arguments.gpu}, ")
        + f"{torch.get_num_threads()} threads; medians"
        + (f"; link emulated at {rate / 1e6:.0f} MB/s" if rate else "")
    )
    print_table(rows)
    for engine, _ in engines.values():
        engine.close()
    print(
        json.dumps(
            {
                "bench": "batch",
                "budget": arguments.budget,
                "prefix": arguments.prefix,
                "tokens": tokens,
                "beam_prompt": arguments.beam_prompt,
                "beam_tokens": beam_tokens,
                "rounds": arguments.rounds,
                "gpu": arguments.gpu,
                "threads": arguments.threads,
                "link_mb_per_s": round(rate / 1e6) if rate else None,
                "compile": arguments.compile,
                "rows": {name: row.medians() for name, row in rows.items()},
            }
        )
    )


if __name__ == "__main__":
    main()
