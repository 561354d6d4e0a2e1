"""Beams are transformers' own: the oracle is transformers on the same tiny checkpoint.

float32, unquantised store, its eager experts.
"""

from __future__ import annotations

import pytest
import torch
from batch_scenes import PROMPTS, Load, Prepared, replies_alone, some_tokens
from mira_engine.config import SamplingConfig
from mira_engine.errors import BudgetError, CancelledError, ConfigError, ContextLengthError
from mira_engine.types import Phase
from transformers import AutoModelForCausalLM

BEAM_FAMILIES = ("qwen2_moe", "deepseek_v2", "olmoe", "gpt_oss", "jamba")


@pytest.mark.parametrize("family", BEAM_FAMILIES)
def test_beam_search_equals_transformers(load: Load, prepared: Prepared, family: str) -> None:
    prompt = some_tokens(21, 7)
    model = AutoModelForCausalLM.from_pretrained(
        prepared(family).checkpoint_dir, dtype=torch.float32, experts_implementation="eager"
    ).eval()
    engine = load(family)
    texts = []
    for width in (1, 4):
        expected = model.generate(
            torch.tensor([prompt]), num_beams=width, max_new_tokens=16, do_sample=False
        )
        found = engine.beam_search(prompt, num_beams=width, max_new_tokens=16)
        assert list(found.tokens) == expected[0, len(prompt) :].tolist()
        assert found.num_passes == 16
        texts.append(found.tokens)
    assert texts[0] != texts[1], "beams that find the greedy text prove little"


def test_beam_search_counts_its_prompt_as_prefill_and_keeps_the_conversation(load: Load) -> None:
    engine = load(num_draft_tokens=3, prefill_chunk_tokens=8)
    prompt = some_tokens(21, 7)
    reply = replies_alone(engine, [prompt], [SamplingConfig(max_new_tokens=9)])[0]
    longer = [*prompt, *reply, 17, 30, 4]
    cached = list(engine.state.tokens)
    engine.executor.phase = Phase.DRAFT
    # Four beams of 21 tokens in chunks of 8 tokens: two columns a pass.
    engine.beam_search(prompt, num_beams=4, max_new_tokens=3)
    meter = engine.executor.meter
    per_token = engine._top_k * engine.executor.driver.lookahead.num_layers
    assert meter.prefill.num_hits + meter.prefill.num_misses == 4 * 21 * per_token
    assert meter.decode.num_hits + meter.decode.num_misses == 4 * 2 * per_token
    assert engine.state.tokens == cached
    continued = [
        t for t in engine.reply(longer, SamplingConfig(max_new_tokens=9)) if isinstance(t, int)
    ]
    assert engine.stats().num_cached_tokens == len(cached)
    assert continued == replies_alone(engine, [longer], [SamplingConfig(max_new_tokens=9)])[0]


def test_beam_search_ends_at_the_engines_ends_only(load: Load) -> None:
    engine = load()
    free = engine.beam_search(PROMPTS[1], num_beams=1, max_new_tokens=12).tokens
    end, place = free[5], free.index(free[5])
    engine._end_ids = frozenset({end})
    ended = engine.beam_search(PROMPTS[1], num_beams=1, max_new_tokens=12)
    assert ended.tokens == free[: place + 1]
    engine.model.generation_config.eos_token_id = end
    engine._end_ids = frozenset()
    assert engine.beam_search(PROMPTS[1], num_beams=1, max_new_tokens=12).tokens == free


def test_cancelled_beam_search_leaves_a_working_engine(load: Load) -> None:
    engine = load()
    expected = engine.beam_search(PROMPTS[1], num_beams=3, max_new_tokens=8).tokens
    engine.cancel()
    with pytest.raises(CancelledError):
        engine.beam_search(PROMPTS[1], num_beams=3, max_new_tokens=8)
    engine.clear_cancel()
    assert engine.beam_search(PROMPTS[1], num_beams=3, max_new_tokens=8).tokens == expected
    assert not engine.model._forward_pre_hooks


def test_beams_beyond_context_or_plan_are_refused(load: Load) -> None:
    engine = load(context_length=64)
    with pytest.raises(ConfigError, match="beams cannot be 0"):
        engine.beam_search(PROMPTS[0], num_beams=0, max_new_tokens=4)
    with pytest.raises(ConfigError, match="needs a prompt"):
        engine.beam_search([], num_beams=2, max_new_tokens=4)
    with pytest.raises(ContextLengthError):
        engine.beam_search(PROMPTS[0], num_beams=1, max_new_tokens=60)
    with pytest.raises(BudgetError, match="short"):
        engine.beam_search(PROMPTS[0], num_beams=8, max_new_tokens=50)


def test_beams_begin_on_the_models_device(load: Load, monkeypatch: pytest.MonkeyPatch) -> None:
    engine, given = load(), []
    elsewhere = torch.device("meta")  # Not the host, and needs no hardware.

    def generate(ids: torch.Tensor, *, attention_mask: torch.Tensor, **_: object) -> torch.Tensor:
        given.extend((ids.device, attention_mask.device))
        return torch.zeros(1, 9, dtype=torch.int64)

    monkeypatch.setattr(type(engine.model), "device", elsewhere)
    monkeypatch.setattr(engine.model, "generate", generate)
    engine.beam_search(PROMPTS[0], num_beams=2, max_new_tokens=4)

    assert given == [elsewhere] * 2
