"""Speculation where the cache does not simply crop: running state, and sliding windows.

Oracle: the same engine without a draft. The draft computes with INT4 experts of random
weights. Where a test needs it to be wrong in every family, its tokens are steered.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import Notice
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.model.sampling import DraftToken, Sampler
from mira_engine.policy.speculation import FixedDepth
from mira_engine.prepare import prepare
from mira_engine.types import ComputeDtype, DraftExperts, FinishReason, Phase, Precision
from tiny_running import OTHER_FAMILIES, save_other

RUNNING = ("jamba", "qwen3_next", "qwen3_5_moe_text", "nemotron_h", "granitemoehybrid", "lfm2_moe")
WINDOWED = ("mixtral", "qwen2_moe", "gpt_oss")
DEPTHS = (1, 2, 4, 8)
NEW_TOKENS = 112

BASE = EngineConfig(
    precision=Precision.FLOAT32,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=8.0),
    num_draft_tokens=max(DEPTHS),
    draft_experts=DraftExperts.ALL,
    context_length=192,
    prefill_chunk_tokens=16,
    num_threads=1,
)


def _prompt(num_tokens: int = 21) -> list[int]:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(3, 250, (num_tokens,), generator=generator).tolist()


@pytest.fixture(scope="module")
def homes(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> Callable[[str], ModelHome]:
    """Prepares a family's tiny checkpoint once."""
    root = tmp_path_factory.mktemp("recurrent")
    library = ModelLibrary(root / "models")
    made: dict[str, ModelHome] = {}

    def make(family: str) -> ModelHome:
        if family not in made:
            is_other = family in OTHER_FAMILIES
            folder = save_other(family, root / family) if is_other else tiny_checkpoint(family)
            made[family] = library.resolve(str(folder))
            prepare(
                made[family],
                Precision.FLOAT32,
                on_progress=lambda *_: None,
                is_cancelled=lambda: False,
            )
        return made[family]

    return make


class Speculating:
    """One engine of a family, which drafts as many tokens as a test says."""

    def __init__(self, home: ModelHome) -> None:
        self.notices: list[Notice] = []
        self.engine = Engine.load(home, BASE, on_notice=self.notices.append)
        self.engine._end_ids = frozenset()
        self._plain: dict[tuple[int, ...], list[int]] = {}

    def reply(
        self, prompt: list[int], num_tokens: int, k: int, sampling: SamplingConfig | None = None
    ) -> list[int]:
        """Answers with K draft tokens, to the end."""
        self.engine._fixed_depth = FixedDepth(k, "a test")
        sampling = replace(sampling or SamplingConfig(), max_new_tokens=num_tokens)
        return [s for s in self.engine.reply(prompt, sampling) if isinstance(s, int)]

    def plain(self, prompt: list[int], num_tokens: int) -> list[int]:
        """The oracle: a fresh state and no draft."""
        key = tuple(prompt)
        if len(self._plain.get(key, ())) < num_tokens:
            self.engine.state.reset()
            self._plain[key] = self.reply(prompt, num_tokens, 0)
            assert self.engine.stats().num_drafted == 0
        return self._plain[key][:num_tokens]


@pytest.fixture(scope="module")
def engines(homes: Callable[[str], ModelHome]) -> Iterator[Callable[[str], Speculating]]:
    """Loads a family's engine once."""
    loaded: dict[str, Speculating] = {}

    def load(family: str) -> Speculating:
        if family not in loaded:
            loaded[family] = Speculating(homes(family))
        return loaded[family]

    yield load
    for speculating in loaded.values():
        speculating.engine.close()


@pytest.fixture
def running(request: pytest.FixtureRequest, engines: Callable[[str], Speculating]) -> Speculating:
    """An engine of the family that the test names, with no state."""
    speculating = engines(request.param)
    speculating.engine.state.reset()
    return speculating


every_family = pytest.mark.parametrize("running", RUNNING, indirect=True)


@pytest.mark.parametrize("running", RUNNING + WINDOWED, indirect=True)
def test_greedy_text_is_the_same_at_every_depth(
    running: Speculating, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = _prompt()
    plain = running.plain(prompt, NEW_TOKENS)
    assert len(set(plain)) > 2, "a constant text proves nothing"
    _prompt_drafts(running, monkeypatch, [*prompt, *plain])
    for k in DEPTHS:
        running.engine.state.reset()
        assert running.reply(prompt, NEW_TOKENS, k) == plain, f"K {k}"
        stats = running.engine.stats()
        assert 0 < stats.num_accepted < stats.num_drafted, f"K {k} accepts and rejects"
    engine = running.engine
    assert engine.state.can_roll_back
    assert 0 < engine.state.num_bytes() <= engine.plan.kv_bytes + engine.plan.workspace_bytes
    assert not [n for n in running.notices if n.code == "speculation-off"]


def _prompt_drafts(running: Speculating, monkeypatch: pytest.MonkeyPatch, text: list[int]) -> None:
    """Makes six of seven drafted tokens right, however good the family's draft is.

    Rounds of all lengths come of it, and few of them: a test of seconds.
    """
    draw, chance = Sampler.draw, random.Random(5)

    def draw_often_right(self: Sampler, history: list[int], logits: torch.Tensor) -> DraftToken:
        is_drafting = running.engine.executor.phase is Phase.DRAFT
        if is_drafting and history == text[: len(history)]:
            right = text[len(history)]
            return DraftToken(right if chance.random() < 6 / 7 else (right + 1) % 250, None)
        return draw(self, history, logits)

    monkeypatch.setattr(Sampler, "draw", draw_often_right)


@every_family
def test_second_turn_reuses_the_state_and_equals_a_fresh_conversation(
    running: Speculating,
) -> None:
    prompt = _prompt()
    for k in (2, 8):
        first = running.reply(prompt, 12, k)
        second = [*prompt, *first, 17, 30, 4]
        continued = running.reply(second, 16, k)
        assert running.engine.stats().num_cached_tokens >= len(prompt) + len(first) - 1
        assert continued == running.plain(second, 16)
        running.engine.state.reset()


@every_family
def test_reply_broken_off_anywhere_goes_on_from_where_the_round_began(
    running: Speculating,
) -> None:
    engine, prompt = running.engine, _prompt(40)
    plain = running.plain(prompt, 16)
    num_calls = _count_checks(running, lambda: running.reply(prompt, 6, 4))
    is_kept = set()
    for break_at in range(2, num_calls, num_calls // 6):
        engine.state.reset()
        said = _broken_off(running, prompt, break_at)
        assert said == plain[: len(said)]
        kept = engine.state.num_cached
        rest = running.reply([*prompt, *said], 16 - len(said), 4)
        assert rest == plain[len(said) :]
        assert engine.stats().num_cached_tokens == kept
        is_kept.add(kept > 0)
    assert True in is_kept


@pytest.mark.parametrize("running", ["jamba", "qwen3_next"], indirect=True)
def test_prompt_broken_off_keeps_the_chunks_that_were_read(running: Speculating) -> None:
    engine, prompt = running.engine, _prompt(40)
    plain, first = running.plain(prompt, 4), prompt[: BASE.prefill_chunk_tokens]
    num_calls = _count_checks(running, lambda: running.reply(first, 1, 0))
    engine.state.reset()
    assert _broken_off(running, prompt, num_calls + 2) == []
    assert engine.state.tokens == first
    assert running.reply(prompt, 4, 0) == plain
    assert engine.stats().num_cached_tokens == len(first)


def _count_checks(running: Speculating, act: Callable[[], object]) -> int:
    """How often the engine asks whether it is cancelled."""
    calls = 0

    def is_cancelled() -> bool:
        nonlocal calls
        calls += 1
        return False

    running.engine.state.reset()
    running.engine.executor.is_cancelled = is_cancelled
    act()
    running.engine.executor.is_cancelled = lambda: False
    return calls


def _broken_off(running: Speculating, prompt: list[int], break_at: int) -> list[int]:
    """Starts a reply with K 4 and cancels it at a question; what it had said by then."""
    calls = 0

    def is_cancelled() -> bool:
        nonlocal calls
        calls += 1
        return calls >= break_at

    engine = running.engine
    engine._fixed_depth = FixedDepth(4, "a test")
    engine.executor.is_cancelled = is_cancelled
    reasons: list[FinishReason] = []

    def outer() -> Iterator[object]:
        reasons.append((yield from engine.reply(prompt, SamplingConfig(max_new_tokens=6))))

    said = [step for step in outer() if isinstance(step, int)]
    engine.executor.is_cancelled = lambda: False
    assert reasons == [FinishReason.CANCELLED]
    return said


@every_family
def test_sampling_judges_by_the_logits_of_the_text_so_far(
    running: Speculating, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What `Sampler.accept` is given decides the distribution: the target's own logits.

    The draft's are made flatter, so that it is often wrong in every family.
    """
    seen: dict[tuple[int, ...], torch.Tensor] = {}
    accept, draw = Sampler.accept, Sampler.draw
    executor = running.engine.executor

    def draw_flatter(self: Sampler, history: list[int], logits: torch.Tensor) -> DraftToken:
        is_drafting = executor.phase is Phase.DRAFT
        return draw(self, history, logits * 0.6 if is_drafting else logits)

    def spy(
        self: Sampler, history: list[int], drafted: list[DraftToken], logits: torch.Tensor
    ) -> tuple[int, int]:
        tokens = [d.token for d in drafted]
        for position, row in enumerate(logits):
            seen[(*history, *tokens[:position])] = row.clone()
        return accept(self, history, drafted, logits)

    monkeypatch.setattr(Sampler, "accept", spy)
    monkeypatch.setattr(Sampler, "draw", draw_flatter)
    prompt = _prompt()
    sampling = SamplingConfig(temperature=0.8, seed=3)
    text = running.reply(prompt, 24, 4, sampling)
    stats = running.engine.stats()
    assert 0 < stats.num_accepted < stats.num_drafted
    running.engine.state.reset()
    assert running.reply(prompt, 24, 4, sampling) == text, "a seed repeats the text"
    running.engine.state.reset()
    whole = [*prompt, *text]
    expected = running.engine.passes.forward(whole, Phase.PREFILL, num_logits=len(whole))
    compared = 0
    for end in range(len(prompt) + 1, len(whole)):
        if (row := seen.get(tuple(whole[:end]))) is not None:
            error = (row - expected[end - 1]).abs().max() / expected[end - 1].abs().max()
            assert error <= 1e-4
            compared += 1
    assert compared == len(text) - 1, "every token but the prompt's own was judged"


@pytest.mark.parametrize("running", ["jamba"], indirect=True)
def test_long_prompt_is_read_in_chunks(running: Speculating) -> None:
    running.reply(_prompt(40), 1, 0)
    meter = running.engine.executor.meter
    assert meter.num_eager_passes == 3, "chunks of 16, whatever the family"
