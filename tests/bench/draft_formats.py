"""Which INT4 draft do targets accept most of, and what does it cost the target?

Question: share of judged draft tokens that are accepted, and tokens accepted a round, at
K = 4 and 8, of four drafts: INT4 rounded to nearest and INT4 by GPTQ beside a bf16 target,
the high plane of `nested`, and that plane chosen by GPTQ. The high plane is half of its
target, so each target's distance to the bf16 one is told too: mean KL divergence of the
next-token distributions, and how often the likeliest token is the same, over the prompts.

Method: the built-in model and the prompts of `mira-chat profile`, greedy, every draft
against its own target. A token counts as judged up to the first rejection of a round. GPTQ
drafts are made of the shipped calibration prompts where they are not there yet (tens of
minutes), in a model home of their own, `bench-drafts` in the data folder. Where GPTQModel
is not installed their rows are left out, and it says so.

Left out: time. Everything counted here is the same on a busy machine.

Run: python tests/bench/draft_formats.py [--prompts 3] [--tokens 64] [--rows 0,1,2,3]
The last line printed is one JSON document.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from mira_app.paths import cache_dir, data_dir
from mira_engine.checkpoint.gptq_process import require_gptqmodel
from mira_engine.checkpoint.gptq_store import read_fallbacks
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.errors import PrepareError
from mira_engine.events import ChatMessage
from mira_engine.gptq import make_gptq_draft
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.policy.speculation import RoundObservation
from mira_engine.prepare import prepare
from mira_engine.profiling import load_prompts
from mira_engine.types import CompileMode, Phase, Precision

DEPTHS = (4, 8)
DRAFTS = {
    "int4, nearest": (Precision.BF16, False),
    "int4, GPTQ": (Precision.BF16, True),
    "nested high plane": (Precision.NESTED, False),
    "nested high plane, GPTQ": (Precision.NESTED, True),
}
"""Target of each draft, and whether GPTQ chose its codes."""


@dataclass
class Counts:
    """What became of the drafted tokens at one K."""

    num_rounds: int = 0
    num_accepted: int = 0
    num_judged: int = 0

    def add(self, observation: RoundObservation) -> None:
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


class Bench:
    """Loads engines of the two homes and counts."""

    def __init__(
        self, homes: dict[bool, ModelHome], prompts: list[str], arguments: argparse.Namespace
    ) -> None:
        self._homes = homes
        self._prompts = prompts
        self._arguments = arguments

    @contextmanager
    def engine(self, draft: str, k: int) -> Iterator[Engine]:
        """The target of a draft, all experts resident."""
        precision, is_gptq = DRAFTS[draft]
        config = EngineConfig(
            precision=precision,
            budget=MemoryAmount(share=4.0),
            num_draft_tokens=k,
            num_threads=self._arguments.threads,
            prefill_chunk_tokens=1024,
            compile_mode=self._arguments.compile,
        )
        cache = self._arguments.cache_dir or cache_dir()
        engine = Engine.load(self._homes[is_gptq], config, cache_dir=cache)
        try:
            yield engine
        finally:
            engine.close()

    def count(self, draft: str, k: int) -> Counts:
        """Answers all prompts with a draft of K tokens."""
        counts = Counts()
        sampling = SamplingConfig(max_new_tokens=self._arguments.tokens)
        with self.engine(draft, k) as engine:
            engine.on_round = counts.add
            for prompt in self._prompts:
                engine.state.reset()
                for _ in engine.reply(_tokens(engine, prompt), sampling):
                    pass
        return counts

    def log_probabilities(self, draft: str) -> list[torch.Tensor]:
        """Returns `[T, V]` for each prompt: what the draft's target expects after each token."""
        found = []
        with self.engine(draft, 0) as engine:
            for prompt in self._prompts:
                tokens = _tokens(engine, prompt)
                engine.state.reset()
                engine.executor.obey(engine.executor.driver.begin_prefill(1))
                logits = engine.passes.forward(tokens, Phase.PREFILL, num_logits=len(tokens))
                engine.executor.obey(engine.executor.driver.end_prefill())
                found.append(logits.float().log_softmax(-1))
        return found


def _tokens(engine: Engine, prompt: str) -> list[int]:
    return engine.render([ChatMessage(role="user", content=prompt)])


def make_homes(arguments: argparse.Namespace) -> dict[bool, ModelHome]:
    """Prepares the built-in model twice: rounded to nearest, and with GPTQ's drafts if it can."""
    root = arguments.data_dir or data_dir()

    def tell(step: str, done: int, total: int, unit: str, detail: str) -> None:
        if done % 64 == 0:
            print(f"  {step}: {done} of {total} {unit} · {detail}", flush=True)

    nearest = ModelLibrary(root).resolve("builtin")
    for precision in (Precision.BF16, Precision.NESTED):
        prepare(nearest, precision, on_progress=lambda *_: None)
    try:
        require_gptqmodel()
    except PrepareError as error:
        print(f"The rows of GPTQ are left out: {error}")
        return {False: nearest}
    chosen = ModelLibrary(root / "bench-drafts").resolve(str(nearest.checkpoint_dir))
    for precision in (Precision.BF16, Precision.NESTED):
        prepare(chosen, precision, on_progress=lambda *_: None)
        make_gptq_draft(
            chosen, precision, on_progress=tell, on_notice=lambda notice: print(f"  {notice.text}")
        )
    return {False: nearest, True: chosen}


def divergence(reference: list[torch.Tensor], other: list[torch.Tensor]) -> tuple[float, float]:
    """Returns the mean KL divergence from the reference, and the share of equal choices."""
    kl, equal, total = 0.0, 0, 0
    for wanted, found in zip(reference, other, strict=True):
        kl += float((wanted.exp() * (wanted - found)).sum())
        equal += int((wanted.argmax(-1) == found.argmax(-1)).sum())
        total += len(wanted)
    return kl / total, equal / total


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--prompts", type=int, default=3, help="of each of the five kinds")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--rows", default="0,1,2,3", help="which drafts, by number")
    parser.add_argument("--threads", type=int, default=torch.get_num_threads())
    parser.add_argument("--compile", type=CompileMode, default=CompileMode.WAIT)
    parser.add_argument("--cache-dir", type=Path, default=None)
    parser.add_argument("--data-dir", type=Path, default=None)
    arguments = parser.parse_args()
    homes = make_homes(arguments)
    bench = Bench(homes, load_prompts(arguments.prompts), arguments)
    reference = bench.log_probabilities("int4, nearest")
    wanted = {list(DRAFTS)[int(number)] for number in arguments.rows.split(",")}
    rows = {}
    head = ("draft", "K", "acceptance", "accepted/round", "target KL", "same choice")
    print("{:<26}{:>3}{:>12}{:>16}{:>12}{:>13}".format(*head))
    for draft, (_, is_gptq) in DRAFTS.items():
        if is_gptq not in homes or draft not in wanted:
            continue
        kl, agreement = divergence(reference, bench.log_probabilities(draft))
        row = {"target_kl": kl, "same_choice": agreement, "depths": {}}
        for k in DEPTHS:
            counts = bench.count(draft, k)
            row["depths"][k] = asdict(counts) | {
                "acceptance": counts.acceptance,
                "accepted_per_round": counts.accepted_per_round,
            }
            print(
                f"{draft:<26}{k:>3}{counts.acceptance:>12.3f}{counts.accepted_per_round:>16.2f}"
                f"{kl:>12.4f}{agreement:>13.3f}",
                flush=True,
            )
        if is_gptq:
            held = homes[True].draft_precision(DRAFTS[draft][0])
            fallbacks = read_fallbacks(homes[True].store_dir(held))
            row["num_fallbacks"] = sum(map(len, fallbacks.values()))
        rows[draft] = row
    print(json.dumps({"prompts": len(bench._prompts), "tokens": arguments.tokens, "rows": rows}))


if __name__ == "__main__":
    main()
