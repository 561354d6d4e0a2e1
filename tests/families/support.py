"""What runs, family by family: measured on tiny models, and written into the README.

Each family's tiny checkpoint is prepared and loaded as any model is, and compared with
transformers' own eager experts in float32: logits, greedy text, and greedy text with drafts and
the prompt in chunks, in as few slots as there can be. What its cache can take back, whether the
engine drafts, and whether the routers found explain the routing are read from the loaded engine.

Run: python tests/families/support.py [--write] [FAMILY ...]. Without `--write` the table is
printed; the README's own is what the tests hold the engine to.
"""

from __future__ import annotations

import argparse
import enum
import math
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from mira_engine.checkpoint.architecture import load_config, model_class
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.model.experts import stamp
from mira_engine.model.kv import StateManager
from mira_engine.model.routers import find_routers
from mira_engine.predictor.coverage import coverage
from mira_engine.predictor.train import MIN_ROUTER_AGREEMENT
from mira_engine.prepare import prepare
from mira_engine.runtime.recording import RoutingRecorder
from mira_engine.types import ComputeDtype, Phase, Precision
from transformers import PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[1]))
from families.refused import refusals
from tiny_models import FAMILIES, save_tiny

PROMPT_TOKENS = 21
NEW_TOKENS = 24
NUM_DRAFT_TOKENS = 4
CHUNK_TOKENS = 5
MAX_ERROR = 1e-5

BASE = EngineConfig(
    precision=Precision.FLOAT32,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=8.0),
    num_draft_tokens=0,
    context_length=96,
    num_threads=1,
)

THINKING = {
    "deepseek_v3": "tags",
    "glm4_moe": "tags",
    "gpt_oss": "channels",
    "granitemoe": "tags",
    "lfm2_moe": "none",
    "nemotron_h": "tags",
    "phimoe": "none",
    "qwen3_5_moe": "tags",
    "qwen3_5_moe_text": "tags",
    "qwen3_moe": "none",
}
"""How the chat template that a family usually has tells thinking from answers, where one is
among the shared inputs."""

README = Path(__file__).parents[2] / "README.md"
BEGIN, END = "<!-- support:begin -->", "<!-- support:end -->"
HEADER = ("family", "largest error", "drafts", "takes back", "own router", "thinking")


class TakesBack(enum.StrEnum):
    """What of the cached text a family's state can give up without a trace."""

    ANY = "any tokens"
    RECORDED = "a draft's tokens"
    NOTHING = "nothing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Support:
    """What was measured of one family.

    Attributes:
        family: transformers' `model_type`.
        error: Largest difference of a logit, relative to the largest logit.
        text: transformers' greedy tokens after the prompt.
        plain: The engine's, without drafts.
        drafted: The engine's, with drafts, the prompt in chunks, in top-k slots.
        num_drafted: Tokens drafted for `drafted`.
        takes_back: What the cache can take back.
        num_routers: MoE layers whose routing the router found explains.
        num_layers: MoE layers.
    """

    family: str
    error: float
    text: tuple[int, ...]
    plain: tuple[int, ...]
    drafted: tuple[int, ...]
    num_drafted: int
    takes_back: TakesBack
    num_routers: int
    num_layers: int

    @property
    def row(self) -> tuple[str, ...]:
        """The family's line of the table."""
        routers = {0: "no", self.num_layers: "yes"}.get(self.num_routers, "in part")
        return (
            self.family,
            _rounded_up(self.error),
            "yes" if self.num_drafted else "no",
            self.takes_back,
            routers,
            THINKING.get(self.family, "not known"),
        )


def _rounded_up(error: float) -> str:
    """Returns the next power of ten: on another machine the digits are others."""
    return f"{10.0 ** math.ceil(math.log10(error)):.0e}" if error > 0 else "0"


def prompt_tokens(num_tokens: int = PROMPT_TOKENS) -> list[int]:
    """Returns the same random bytes each time, none of them special."""
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, 250, (num_tokens,), generator=generator).tolist()


def prepared(checkpoint: Path, library: ModelLibrary) -> ModelHome:
    """Prepares a checkpoint unquantised."""
    home = library.resolve(str(checkpoint))
    prepare(home, Precision.FLOAT32, on_progress=lambda *_: None, is_cancelled=lambda: False)
    return home


@contextmanager
def engine_of(home: ModelHome, **changes: object) -> Iterator[Engine]:
    """Loads an engine that ends no text early, and closes it."""
    engine = Engine.load(home, replace(BASE, **changes))
    engine._end_ids = frozenset()
    try:
        yield engine
    finally:
        engine.close()


def reference(checkpoint: Path) -> PreTrainedModel:
    """Loads the whole model with transformers' own eager experts."""
    config = load_config(checkpoint)
    return (
        model_class(config)
        .from_pretrained(
            checkpoint, config=config, dtype=torch.float32, experts_implementation="eager"
        )
        .eval()
    )


def greedy(engine: Engine, prompt: Sequence[int], num_tokens: int = NEW_TOKENS) -> list[int]:
    """Returns the engine's most likely tokens after a prompt."""
    steps = engine.reply(prompt, SamplingConfig(max_new_tokens=num_tokens))
    return [step for step in steps if isinstance(step, int)]


def fewest_slots(engine: Engine) -> MemoryAmount:
    """A budget of exactly top-k slots, with the draft where the engine has one."""
    plan = engine.plan
    return MemoryAmount(num_bytes=plan.draft_bytes + engine._top_k * plan.slot_bytes)


@torch.inference_mode()
def measure(family: str, home: ModelHome) -> Support:
    """Runs one prepared model beside transformers.

    Args:
        family: Name of the row.
        home: Prepared unquantised.
    """
    prompt = prompt_tokens()
    logits, text = _reference_answer(home, prompt)
    with engine_of(home) as engine:
        num_routers, num_layers, found = _read_prompt(engine, prompt)
        error = float((found - logits).abs().max() / logits.abs().max())
        engine.state.reset()
        plain = greedy(engine, prompt)
    with engine_of(home, num_draft_tokens=NUM_DRAFT_TOKENS) as roomy:
        budget = fewest_slots(roomy)
    changes = {"num_draft_tokens": NUM_DRAFT_TOKENS, "budget": budget}
    with engine_of(home, **changes, prefill_chunk_tokens=CHUNK_TOKENS) as tight:
        drafted = greedy(tight, prompt)
        num_drafted, takes_back = tight.stats().num_drafted, what_it_takes_back(tight.state)
    return Support(
        family=family,
        error=error,
        text=tuple(text),
        plain=tuple(plain),
        drafted=tuple(drafted),
        num_drafted=num_drafted,
        takes_back=takes_back,
        num_routers=num_routers,
        num_layers=num_layers,
    )


def _reference_answer(home: ModelHome, prompt: list[int]) -> tuple[torch.Tensor, list[int]]:
    model = reference(home.checkpoint_dir)
    inputs = torch.tensor([prompt])
    logits = model(input_ids=inputs).logits[0]
    tokens = model.generate(
        inputs,
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :]
    return logits, tokens.tolist()


def _read_prompt(engine: Engine, prompt: list[int]) -> tuple[int, int, torch.Tensor]:
    """Returns layers whose routers explain what they routed, all layers, and the logits."""
    num_layers = stamp(engine.model, engine.executor)
    recorder = RoutingRecorder(engine.executor, num_layers)
    recorder.rows = torch.arange(len(prompt))
    stamp(engine.model, recorder)
    logits = engine.passes.forward(prompt, Phase.PREFILL, num_logits=len(prompt))
    stamp(engine.model, engine.executor)
    num_routers = 0
    for layer, router in enumerate(find_routers(engine.model)):
        if router is None:
            continue
        (hidden,), (ids,) = recorder.hidden[layer], recorder.ids[layer]
        scores = router.logits(hidden.float())
        num_routers += coverage(scores, ids, (ids.shape[1],))[0] >= MIN_ROUTER_AGREEMENT
    return num_routers, num_layers, logits


def what_it_takes_back(state: StateManager) -> TakesBack:
    """Reads it from a state that has seen a pass, and was made to roll back."""
    if state.is_static:
        return TakesBack.ANY
    return TakesBack.RECORDED if state.can_roll_back else TakesBack.NOTHING


def table(rows: Sequence[tuple[str, ...]], refused: Mapping[str, str]) -> str:
    """Returns what stands between the README's markers."""
    lines = [
        f"<details><summary>{len(rows)} families that run, {len(refused)} that do not</summary>",
        "",
        *_markdown(HEADER, rows),
        "",
        *_markdown(("does not run", "why"), sorted(refused.items())),
        "",
        "</details>",
    ]
    return "\n".join(lines)


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]]) -> list[str]:
    lines = [header, ["---"] * len(header), *rows]
    return ["| " + " | ".join(cells) + " |" for cells in lines]


def readme_rows(text: str | None = None) -> dict[str, tuple[str, ...]]:
    """Returns the README's lines by their first cell, headers left out."""
    text = README.read_text(encoding="utf-8") if text is None else text
    inside = text.partition(BEGIN)[2].partition(END)[0]
    lines = [line for line in inside.splitlines() if line.startswith("| ")]
    rows = [tuple(cell.strip() for cell in line.strip("|").split(" | ")) for line in lines]
    return {row[0]: row for row in rows if row[0] not in (HEADER[0], "does not run", "---")}


def write(content: str) -> None:
    """Puts the table between the README's markers."""
    text = README.read_text(encoding="utf-8")
    before, _, rest = text.partition(BEGIN)
    _, mark, after = rest.partition(END)
    if not mark:
        raise SystemExit(f"{README} has no place for the table: {BEGIN} and {END}.")
    README.write_text(f"{before}{BEGIN}\n{content}\n{END}{after}", encoding="utf-8")


def main() -> None:
    """Measures all families, or those named, and prints or writes the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("families", nargs="*", metavar="FAMILY", help="all, unless some are named")
    parser.add_argument("--write", action="store_true", help="into the README")
    arguments = parser.parse_args()
    if arguments.write and arguments.families:
        parser.error("--write takes all families.")
    rows = []
    for family in arguments.families or sorted(FAMILIES):
        with tempfile.TemporaryDirectory() as folder:
            checkpoint = save_tiny(family, Path(folder) / "model")
            home = prepared(checkpoint, ModelLibrary(Path(folder) / "data"))
            found = measure(family, home)
        if found.error > MAX_ERROR or not found.text == found.plain == found.drafted:
            raise SystemExit(f"{family} is not exact: {found}")
        rows.append(found.row)
        print(*found.row, sep="\t", file=sys.stderr)
    content = table(rows, refusals())
    if arguments.write:
        write(content)
    else:
        print(content)


if __name__ == "__main__":
    main()
