"""The engine's answer is the model's own, for every family, whatever is resident.

Oracle: transformers' own eager experts on the same tiny checkpoint, float32, unquantised
store. Each family is written to disk, prepared, and loaded as any model is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import Notice
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.types import ComputeDtype, FinishReason, Phase, Precision
from tiny_models import FAMILIES
from transformers import AutoModelForCausalLM

PROMPT_TOKENS = 21
NEW_TOKENS = 24

BASE = EngineConfig(
    precision=Precision.FLOAT32,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=8.0),
    num_draft_tokens=0,
    context_length=96,
    num_threads=1,
)


def _prompt() -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, 250, (PROMPT_TOKENS,), generator=generator).tolist()


@pytest.fixture(scope="module")
def prepared(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> Callable[[str], ModelHome]:
    """Prepares a family's tiny checkpoint once."""
    library = ModelLibrary(tmp_path_factory.mktemp("exactness"))
    homes: dict[str, ModelHome] = {}

    def make(family: str) -> ModelHome:
        if family not in homes:
            home = library.resolve(str(tiny_checkpoint(family)))
            prepare(
                home,
                Precision.FLOAT32,
                on_progress=lambda *_: None,
                is_cancelled=lambda: False,
            )
            homes[family] = home
        return homes[family]

    return make


class Loaded:
    """Loads engines and closes them when the test ends."""

    def __init__(self, home: ModelHome) -> None:
        self.home = home
        self.engines: list[Engine] = []
        self.notices: list[Notice] = []

    def __call__(self, **changes: object) -> Engine:
        config = replace(BASE, **changes)
        engine = Engine.load(self.home, config, on_notice=self.notices.append)
        engine._end_ids = frozenset()
        self.engines.append(engine)
        return engine


@pytest.fixture(params=FAMILIES)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def load(family: str, prepared: Callable[[str], ModelHome]) -> Iterator[Loaded]:
    loaded = Loaded(prepared(family))
    yield loaded
    for engine in loaded.engines:
        engine.close()


def _greedy(engine: Engine, prompt: list[int], num_tokens: int = NEW_TOKENS) -> list[int]:
    steps = engine.reply(prompt, SamplingConfig(max_new_tokens=num_tokens))
    return [step for step in steps if isinstance(step, int)]


def _finish(reply: Iterator[object]) -> FinishReason:
    """Runs a reply to its end and returns why it ended."""

    def outer() -> Iterator[object]:
        reasons.append((yield from reply))

    reasons: list[FinishReason] = []
    deque(outer(), maxlen=0)
    return reasons[0]


def _minimum(engine: Engine) -> MemoryAmount:
    """A budget of exactly top-k slots, with the draft where the engine has one."""
    plan = engine.plan
    return MemoryAmount(num_bytes=plan.draft_bytes + engine._top_k * plan.slot_bytes)


def _reference(home: ModelHome, family: str) -> torch.nn.Module:
    return AutoModelForCausalLM.from_pretrained(
        home.checkpoint_dir, dtype=torch.float32, experts_implementation="eager"
    ).eval()


@torch.inference_mode()
def test_logits_and_greedy_text_equal_transformers(load: Loaded, family: str) -> None:
    prompt = _prompt()
    model = _reference(load.home, family)
    expected = model(input_ids=torch.tensor([prompt])).logits[0]
    engine = load()
    actual = engine.passes.forward(prompt, Phase.PREFILL, num_logits=len(prompt))
    error = (actual - expected).abs().max() / expected.abs().max()
    assert error <= 1e-5
    engine.state.reset()
    text = model.generate(
        torch.tensor([prompt]),
        max_new_tokens=NEW_TOKENS,
        min_new_tokens=NEW_TOKENS,
        do_sample=False,
        eos_token_id=None,
        pad_token_id=0,
    )[0, len(prompt) :].tolist()
    assert _greedy(engine, prompt) == text
    assert len(set(text)) > 2, "a constant text proves nothing"


def test_prompt_in_chunks_equals_prompt_at_once(load: Loaded) -> None:
    prompt = _prompt()
    whole = _greedy(load(), prompt)
    assert _greedy(load(prefill_chunk_tokens=5), prompt) == whole


@torch.inference_mode()
def test_fewest_slots_equal_all_slots_bitwise(load: Loaded) -> None:
    prompt = _prompt()
    roomy = load()
    tight = load(budget=_minimum(roomy))
    assert roomy.plan.num_slots == roomy.plan.num_experts
    assert tight.plan.num_slots == tight._top_k
    for tokens, phase in ((prompt, Phase.PREFILL), ([5], Phase.DECODE), ([6, 7], Phase.VERIFY)):
        a = roomy.passes.forward(tokens, phase, num_logits=len(tokens))
        b = tight.passes.forward(tokens, phase, num_logits=len(tokens))
        assert torch.equal(a, b)
    assert tight.executor.meter.decode.num_misses > 0


@pytest.mark.parametrize("num_draft_tokens", [2, 5])
def test_speculation_equals_plain(load: Loaded, num_draft_tokens: int) -> None:
    prompt = _prompt()
    plain = _greedy(load(), prompt)
    engine = load(num_draft_tokens=num_draft_tokens)
    tight = load(num_draft_tokens=num_draft_tokens, budget=_minimum(engine))
    for speculating in (engine, tight):
        load.notices.clear()
        assert _greedy(speculating, prompt) == plain
        stats = speculating.stats()
        assert "speculation-off" not in [n.code for n in load.notices]
        assert stats.num_rounds > 0
        if num_draft_tokens == 5:
            assert stats.num_drafted > stats.num_accepted, "no rollback was tested"


def test_second_turn_equals_a_fresh_conversation(load: Loaded) -> None:
    prompt = _prompt()
    engine = load(num_draft_tokens=3)
    reply = _greedy(engine, prompt, 9)
    longer = [*prompt, *reply, 17, 30, 4]
    continued = _greedy(engine, longer)
    fresh = _greedy(load(), longer)
    assert continued == fresh


def test_cancelled_reply_leaves_a_chat_that_continues(load: Loaded) -> None:
    prompt = _prompt()
    engine = load(num_draft_tokens=3)
    num_layers = engine.executor.driver.lookahead.num_layers
    for cancel_at in (1, num_layers + 1, 5 * num_layers - 1, 5 * num_layers + 1):
        calls = 0

        def is_cancelled(limit: int = cancel_at) -> bool:
            nonlocal calls
            calls += 1
            return calls >= limit

        engine.executor.is_cancelled = is_cancelled
        reply = engine.reply(prompt, SamplingConfig(max_new_tokens=NEW_TOKENS))
        assert _finish(reply) is FinishReason.CANCELLED
        engine.executor.is_cancelled = lambda: False
        assert not any(
            map(engine.executor.driver.residency.is_pinned, range(engine.plan.num_slots))
        )
    assert _greedy(engine, prompt) == _greedy(load(), prompt)
