"""The processor computes no misses of a card in float16, nor of seeded requests of a batch.

As in `test_host_experts_on_card`, rates are given; the kernels are plain calls.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from fake_card import Load, loading, preparing, reply_of
from mira_engine.config import MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import Notice
from mira_engine.library import ModelHome
from mira_engine.policy.host_misses import HostMisses, HostSetup
from mira_engine.runtime import gpu_device
from mira_engine.types import ComputeDtype, Precision
from shortages import FakeCard

pytest.importorskip("triton", reason="triton has no wheel for this system")

from plain_kernels import use_plain_kernels

ALL = HostSetup(expert_s=1e-9, token_s=0.0, record_s=1.0, num_held=0)
"""Every miss of a few tokens is computed on the host."""
PROMPT = [7, 99, 23]
PROMPTS = [PROMPT, [5, 66, 12, 8]]
NUM_TOKENS = 6


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> ModelHome:
    return preparing(tmp_path_factory.mktemp("half"), tiny_checkpoint)("olmoe", Precision.NESTED)


@pytest.fixture(autouse=True)
def card(monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    """A card without bfloat16 for which the host is always faster."""

    def measured(host, transfer, module, shape, dtype, held, *, is_cancelled) -> HostSetup:
        return replace(ALL, num_held=len(held))

    end_pass = HostMisses.end_pass
    monkeypatch.setattr(gpu_device, "measure_host", measured)
    monkeypatch.setattr(HostMisses, "end_pass", lambda self, _: end_pass(self, self._expected_s))
    use_plain_kernels(monkeypatch)
    made = FakeCard(monkeypatch)
    made.capability = (7, 5)
    return made


@pytest.fixture
def load(home: ModelHome) -> Iterator[Load]:
    with loading() as load_any:

        def on_card(notices: list[Notice] | None = None, **changes: object) -> Engine:
            fields = {"gpu": 0, "budget": MemoryAmount(share=0.6), "precision": Precision.NESTED}
            return load_any(home, notices, **(fields | {"context_length": 256} | changes))

        yield on_card


def test_misses_in_float16_are_left_to_the_card(load: Load) -> None:
    notices: list[Notice] = []
    engine = load(notices, dtype=None)
    assert engine.model.dtype is torch.float16

    assert len(reply_of(engine, NUM_TOKENS, PROMPT)) == NUM_TOKENS

    assert engine.executor.host is None
    assert engine.cache_setup.host is None
    assert engine.stats().num_misses > 0 == engine.stats().num_on_host
    assert "host-experts" not in {notice.code for notice in notices}


def test_misses_in_float32_on_the_same_card_are_not(load: Load) -> None:
    engine = load(dtype=ComputeDtype.FLOAT32)

    reply_of(engine, NUM_TOKENS, PROMPT)

    assert engine.stats().num_on_host > 0


def _num_on_host(engine: Engine, *samplings: SamplingConfig) -> int:
    """Misses of a batch that the processor computes."""
    list(engine.generate(PROMPTS, samplings))
    assert engine.stats().num_misses > 0
    return engine.stats().num_on_host


def test_one_seeded_request_of_a_batch_leaves_all_misses_to_the_card(load: Load) -> None:
    engine = load()
    greedy = SamplingConfig(max_new_tokens=NUM_TOKENS)
    seeded = replace(greedy, temperature=0.8, seed=3)
    drawn = replace(greedy, temperature=0.8)

    assert _num_on_host(engine, greedy, seeded) == 0
    assert _num_on_host(engine, greedy, drawn) > 0, "it is allowed anew for each batch"
    assert _num_on_host(engine, seeded, greedy) == 0


def test_search_after_a_seeded_reply_has_the_processor_again(load: Load) -> None:
    engine = load()
    seeded = SamplingConfig(max_new_tokens=2, temperature=0.8, seed=3)
    list(engine.reply(PROMPT, seeded))
    assert engine.stats().num_on_host == 0

    engine.beam_search(PROMPT, num_beams=2, max_new_tokens=4)

    assert engine.stats().num_on_host > 0
