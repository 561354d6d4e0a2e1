"""The engine's answer is the model's own, for every family, whatever is resident.

Oracle: transformers' own eager experts on the same tiny checkpoint, float32, unquantised
store. Each family is written to disk, prepared, and loaded as any model is. All families are
measured once (`families.support`); what does not depend on a family's attention or experts is
tested on one family of each kind.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from families.support import (
    BASE,
    MAX_ERROR,
    NEW_TOKENS,
    Support,
    TakesBack,
    fewest_slots,
    greedy,
    measure,
    prepared,
    prompt_tokens,
    readme_rows,
)
from mira_engine.config import SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import Notice
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.types import FinishReason, Phase
from tiny_hybrids import UNCROPPED_FAMILIES
from tiny_models import FAMILIES

KINDS = (
    "qwen2_moe",
    "deepseek_v3",
    "gpt_oss",
    "lfm2_moe",
    "jamba",
    "nemotron_h",
    "qwen3_5_moe",
    "glm_moe_dsa",
    "gemma4_text",
)
"""Windows and shared experts, latent attention with a dense layer first, biases and sinks,
convolutions, running states with and without gates, a text model inside of another, chosen
keys, and layers of two head sizes."""


@pytest.fixture(scope="module")
def home_of(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> Callable[[str], ModelHome]:
    """Prepares a family's tiny checkpoint once."""
    library = ModelLibrary(tmp_path_factory.mktemp("exactness"))
    homes: dict[str, ModelHome] = {}

    def make(family: str) -> ModelHome:
        if family not in homes:
            homes[family] = prepared(tiny_checkpoint(family), library)
        return homes[family]

    return make


@pytest.fixture(scope="module")
def measured(home_of: Callable[[str], ModelHome]) -> Callable[[str], Support]:
    """Measures a family once."""
    found: dict[str, Support] = {}

    def run(family: str) -> Support:
        if family not in found:
            found[family] = measure(family, home_of(family))
        return found[family]

    return run


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


@pytest.fixture(params=KINDS)
def family(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture
def load(family: str, home_of: Callable[[str], ModelHome]) -> Iterator[Loaded]:
    loaded = Loaded(home_of(family))
    yield loaded
    for engine in loaded.engines:
        engine.close()


def _finish(reply: Iterator[object]) -> FinishReason:
    """Runs a reply to its end and returns why it ended."""

    def outer() -> Iterator[object]:
        reasons.append((yield from reply))

    reasons: list[FinishReason] = []
    deque(outer(), maxlen=0)
    return reasons[0]


# -- every family -------------------------------------------------------------------------


@pytest.mark.parametrize("name", FAMILIES)
def test_logits_and_greedy_text_equal_transformers(
    name: str, measured: Callable[[str], Support]
) -> None:
    found = measured(name)
    assert found.error <= MAX_ERROR
    assert found.plain == found.text
    assert len(set(found.text)) > 2, "a constant text proves nothing"


@pytest.mark.parametrize("name", FAMILIES)
def test_drafts_in_fewest_slots_do_not_change_the_text(
    name: str, measured: Callable[[str], Support]
) -> None:
    found = measured(name)
    assert found.drafted == found.text
    assert (found.num_drafted > 0) == (found.takes_back is not TakesBack.NOTHING)
    assert found.num_drafted > 0 or name in UNCROPPED_FAMILIES


@pytest.mark.parametrize("name", FAMILIES)
def test_readme_says_of_a_family_what_was_measured(
    name: str, measured: Callable[[str], Support]
) -> None:
    family, _, *verdicts = measured(name).row
    assert [family, *verdicts] == [
        cell for column, cell in enumerate(readme_rows()[name]) if column != 1
    ], "run: python tests/families/support.py --write"


# -- one family of each kind --------------------------------------------------------------


def test_prompt_in_chunks_equals_prompt_at_once(
    load: Loaded, family: str, measured: Callable[[str], Support]
) -> None:
    engine = load(prefill_chunk_tokens=5)
    assert greedy(engine, prompt_tokens()) == list(measured(family).text)


@torch.inference_mode()
def test_fewest_slots_equal_all_slots_bitwise(load: Loaded) -> None:
    prompt = prompt_tokens()
    roomy = load()
    tight = load(budget=fewest_slots(roomy))
    assert roomy.plan.num_slots == roomy.plan.num_experts
    assert tight.plan.num_slots == tight._top_k
    for tokens, phase in ((prompt, Phase.PREFILL), ([5], Phase.DECODE), ([6, 7], Phase.VERIFY)):
        a = roomy.passes.forward(tokens, phase, num_logits=len(tokens))
        b = tight.passes.forward(tokens, phase, num_logits=len(tokens))
        assert torch.equal(a, b)
    assert tight.executor.meter.decode.num_misses > 0


@pytest.mark.parametrize("num_draft_tokens", [2, 5])
def test_speculation_equals_plain_or_is_visibly_off(
    load: Loaded, family: str, num_draft_tokens: int, measured: Callable[[str], Support]
) -> None:
    engine = load(num_draft_tokens=num_draft_tokens)
    assert greedy(engine, prompt_tokens()) == list(measured(family).text)
    stats = engine.stats()
    is_off = "speculation-off" in [notice.code for notice in load.notices]
    assert is_off == (measured(family).takes_back is TakesBack.NOTHING)
    if is_off:
        assert stats.num_drafted == 0
    else:
        assert stats.num_rounds > 0
        if num_draft_tokens == 5:
            assert stats.num_drafted > stats.num_accepted, "no rollback was tested"


def test_second_turn_equals_a_fresh_conversation(load: Loaded) -> None:
    prompt = prompt_tokens()
    engine = load(num_draft_tokens=3)
    reply = greedy(engine, prompt, 9)
    longer = [*prompt, *reply, 17, 30, 4]
    continued = greedy(engine, longer)
    fresh = greedy(load(), longer)
    assert continued == fresh


def test_cancelled_reply_leaves_a_chat_that_continues(
    load: Loaded, family: str, measured: Callable[[str], Support]
) -> None:
    prompt = prompt_tokens()
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
    assert greedy(engine, prompt) == list(measured(family).text)
