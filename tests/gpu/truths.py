"""What has to be true on every machine (DESIGN, "Truths"), on the card at hand.

Tiny models with random weights, written here and prepared into a temporary folder, go through
the whole engine. Greedy text and logits in float32 are compared: the card's with the
processor's, a small budget's with that of all slots, and drafting's with plain decoding's.
Without a card the engine runs in the interpreter, on lanes whose order is checked.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from fake_queues import FakeQueues
from gpu.captured import is_same_captured, make_captured_draft
from gpu.card import DEVICE, GIB, HAS_CARD
from gpu.sections import Deadline
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.runtime import gpu_device
from mira_engine.runtime.gpu_device import GpuHandle
from mira_engine.runtime.host_memory import pageable
from mira_engine.types import CompileMode, ComputeDtype, DraftExperts, Phase, Precision
from tiny_models import save_tiny
from torch import Tensor

FAMILIES = ("mixtral", "qwen2_moe", "gpt_oss") if HAS_CARD else ("mixtral",)
NUM_NEW_TOKENS = 24 if HAS_CARD else 5
PROMPT = (240, 12, 66, 8)
"""Of both drafts some tokens stand after it, and some do not."""

MAX_LOGIT_ERROR = 1e-4
"""Of the largest logit, card against processor, float32."""

BASE = EngineConfig(
    precision=Precision.NESTED,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=8.0),
    num_draft_tokens=0,
    context_length=64,
    num_threads=1,
    compile_mode=CompileMode.OFF,
)
CARD = replace(BASE, gpu=0)


@contextmanager
def card_for_engines() -> Iterator[None]:
    """Lets an engine open card 0; host memory and checked lanes stand for it if need be."""
    if HAS_CARD:
        yield
        return
    with ExitStack() as stack:
        for name, answer in (
            ("open_card", _stand_in),
            ("free_device_bytes", lambda index: 8 * GIB),
            ("peak_device_bytes", lambda index: 0),
        ):
            stack.enter_context(mock.patch.object(gpu_device, name, answer))
        yield


def _stand_in(index: int) -> GpuHandle:
    """Host memory and checked lanes in a card's place."""
    return GpuHandle(device=DEVICE, queues=FakeQueues(), allocate=pageable)


class Outcome:
    """What an engine says, and how it got there.

    Attributes:
        text: Greedy tokens.
        logits: Of a prompt with the text behind it, `[N, V]` float32.
        num_misses: Expert uses of the text that waited for a load.
        num_drafted: Tokens that were drafted for it.
        num_accepted: Those of them that stood.
    """

    def __init__(self, home: ModelHome, config: EngineConfig) -> None:
        threads = torch.get_num_threads()
        engine = Engine.load(home, config)
        try:
            engine._end_ids = frozenset()  # Every reply has the same length.
            sampling = SamplingConfig(max_new_tokens=NUM_NEW_TOKENS)
            steps = engine.reply(list(PROMPT), sampling)
            self.text = [step for step in steps if isinstance(step, int)]
            self.num_misses = engine.executor.meter.decode.num_misses
            self.num_drafted = engine.executor.meter.num_drafted
            self.num_accepted = engine.executor.meter.num_accepted
            self.num_slots = engine.plan.num_slots
            self.logits = _logits(engine, [*PROMPT, *self.text])
        finally:
            engine.close()
            torch.set_num_threads(threads)


def _logits(engine: Engine, tokens: list[int]) -> Tensor:
    engine.state.reset()
    return engine.passes.forward(tokens, Phase.PREFILL, num_logits=len(tokens)).float().cpu()


def check_truths(results: dict[str, Any], deadline: Deadline) -> None:
    """Checks every truth; all that do not hold are named at the end."""
    with tempfile.TemporaryDirectory() as folder, card_for_engines():
        models = _Models(Path(folder))
        plain: list[Outcome] = []

        def nested() -> tuple[ModelHome, Outcome]:
            """A nested model and what it says plainly, with all slots."""
            home = models.home(FAMILIES[0], Precision.NESTED)
            if not plain:
                plain.append(Outcome(home, CARD))
            return home, plain[0]

        truths: dict[str, Callable[[], dict[str, Any]]] = {
            f"card = processor, {family}": lambda family=family: card_is_processor(
                models.home(family, Precision.BF16)
            )
            for family in FAMILIES
        }
        truths["any budget = all slots, bit for bit"] = lambda: budget_changes_nothing(*nested())
        for experts in (DraftExperts.ALL, DraftExperts.CACHED):
            truths[f"K = 3 = plain, draft of {experts} experts"] = lambda experts=experts: (
                draft_changes_nothing(*nested(), experts)
            )
        truths["captured = launched, bit for bit"] = captured_is_launched
        for name in deadline.each(truths):
            results[name] = truths[name]()
    false = [name for name, found in results.items() if found["holds"] is False]
    assert not false, f"not true: {'; '.join(false)}"


class _Models:
    """Tiny models, prepared when they are first asked for.

    Args:
        folder: Where they are written.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._library = ModelLibrary(folder / "data")

    def home(self, family: str, precision: Precision) -> ModelHome:
        """Returns a model that is ready in a precision."""
        checkpoint = self._folder / family
        if not checkpoint.exists():
            save_tiny(family, checkpoint)
        home = self._library.resolve(str(checkpoint))
        if not home.is_ready(precision):
            prepare(home, precision, on_progress=lambda *_: None)
        return home


# -- truths --------------------------------------------------------------------------------


def card_is_processor(home: ModelHome) -> dict[str, Any]:
    """Text is the same, logits nearly: unquantised experts, float32."""
    expected = Outcome(home, replace(BASE, precision=Precision.BF16))
    found = Outcome(home, replace(CARD, precision=Precision.BF16))
    error = float((found.logits - expected.logits).abs().max() / expected.logits.abs().max())
    is_same = found.text == expected.text
    return {"holds": is_same and error <= MAX_LOGIT_ERROR, "same_text": is_same, "error": error}


def budget_changes_nothing(home: ModelHome, expected: Outcome) -> dict[str, Any]:
    """Few slots give the text and the logits of a slot for every expert."""
    found = Outcome(home, replace(CARD, budget=MemoryAmount(share=0.6)))
    assert found.num_slots < expected.num_slots, "the small budget is not small"
    is_same = found.text == expected.text and torch.equal(found.logits, expected.logits)
    return {"holds": is_same and found.num_misses > 0, "num_misses": found.num_misses}


def draft_changes_nothing(
    home: ModelHome, expected: Outcome, experts: DraftExperts
) -> dict[str, Any]:
    """A draft of 3 tokens at a time gives the text of plain decoding."""
    share = 1.0 if experts is DraftExperts.ALL else 0.7  # Some misses, and not all at once.
    found = Outcome(
        home,
        replace(CARD, num_draft_tokens=3, draft_experts=experts, budget=MemoryAmount(share=share)),
    )
    is_same = found.text == expected.text
    return {
        "holds": is_same and found.num_drafted > 0,
        "num_drafted": found.num_drafted,
        "num_accepted": found.num_accepted,
    }


def captured_is_launched() -> dict[str, Any]:
    """A captured step writes what launching it writes; without a card nothing is captured."""
    if not HAS_CARD:
        return {"holds": None, "why": "needs a card"}
    step = make_captured_draft()
    return {"holds": is_same_captured(step), "what": step.name}


def describe_truths(results: dict[str, Any]) -> Iterable[str]:
    """Lines for people."""
    words = {True: "true", False: "NOT TRUE", None: "not checked"}
    for name, found in results.items():
        about = ", ".join(f"{key} {value}" for key, value in found.items() if key != "holds")
        yield f"  {words[found['holds']]:12} {name} ({about})"
