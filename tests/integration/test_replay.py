"""What the engine's driver decided can be repeated, byte for byte, without the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.library import ModelLibrary
from mira_engine.policy.driver import ExpertCacheDriver
from mira_engine.policy.replay import DecisionLog, replay
from mira_engine.predictor.bank import BankFacts, PredictorBank
from mira_engine.predictor.baselines import TargetRouter
from mira_engine.predictor.far import FarHead
from mira_engine.predictor.train import LayerChoice
from mira_engine.prepare import prepare
from mira_engine.types import (
    CachePolicy,
    CompileMode,
    DraftExperts,
    Eviction,
    FinishReason,
    Lookahead,
    Precision,
)

WAYS: dict[str, dict[str, object]] = {
    "batches": {
        "num_draft_tokens": 3,
        "draft_experts": DraftExperts.ALL,
        "lookahead": Lookahead.BATCHES,
    },
    "at once": {"num_draft_tokens": 3, "draft_experts": DraftExperts.CACHED},
    "regions": {"num_draft_tokens": 0, "cache_policy": CachePolicy.REGIONS},
}


@pytest.fixture
def load(tiny_checkpoint: Callable[..., Path], tmp_path: Path):
    """Loads an engine with few slots and a predictor that is right now and then."""
    home = ModelLibrary(tmp_path).resolve(str(tiny_checkpoint("qwen2_moe")))
    prepare(home, Precision.NESTED, on_progress=lambda *_: None)
    engines = []

    def make(way: str) -> Engine:
        config = EngineConfig(
            budget=MemoryAmount(share=0.8),
            context_length=256,
            compile_mode=CompileMode.OFF,
            **WAYS[way],
        )
        engine = Engine.load(home, config)
        engine._end_ids = frozenset()
        setup = engine.cache_setup
        facts = BankFacts(
            revision="",
            recipe="",
            num_layers=setup.num_layers,
            num_experts=setup.num_experts,
            top_k=setup.top_k,
            offset=2,
        )
        router = torch.randn(
            setup.num_experts,
            engine.model.config.hidden_size,
            generator=torch.Generator().manual_seed(1),
        )
        guess = TargetRouter(10 * router, torch.zeros(setup.num_experts))
        choices = {0: LayerChoice(predictor=guess, reason="", scores={})}
        engine.executor.predictor = PredictorBank(facts, choices)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


@pytest.fixture
def engine(load: Callable[[str], Engine]) -> Engine:
    """A speculating engine with a few slots more than its draft leaves it to need."""
    return load("batches")


def recorded(engine: Engine) -> DecisionLog:
    """Logs three replies, one of them broken off."""
    log = engine.executor.driver.on_decision = DecisionLog()
    for number, prompt in enumerate(([3, 5, 7, 11], [4, 6, 8], list(range(20, 60)))):
        engine.state.reset()
        reply = engine.reply(prompt, SamplingConfig(max_new_tokens=16))
        if number == 1:
            for _ in range(6):
                next(reply)
            engine.cancel()
        reasons = []
        while not reasons:
            try:
                next(reply)
            except StopIteration as stop:
                reasons.append(stop.value)
        engine.clear_cancel()
        assert (reasons[0] is FinishReason.CANCELLED) == (number == 1)
    return log


def test_far_heads_are_asked_for_generated_tokens_and_replay_byte_equal(
    load: Callable[[str], Engine],
) -> None:
    engine = load("batches")
    setup, width = engine.cache_setup, engine.model.config.hidden_size
    generator = torch.Generator().manual_seed(2)
    targets = list(range(1, setup.num_layers))
    tensors = {
        "inner": torch.randn(4, width, generator=generator),
        "inner_bias": torch.zeros(4),
        "outer": torch.randn(len(targets) * setup.num_experts, 4, generator=generator),
        "outer_bias": torch.zeros(len(targets) * setup.num_experts),
        "targets": torch.tensor(targets),
    }
    engine.executor.predictor.far_heads[0] = FarHead(tensors, setup.top_k)
    lines = recorded(engine).lines
    text = "\n".join(lines)
    assert '["predict_far"' in text
    assert '["predict"' in text, "prompts are for the heads two layers ahead"
    assert '"predicted"' in text
    assert replay(lines, ExpertCacheDriver(setup)) is None


@pytest.mark.parametrize("way", WAYS)
def test_replay_of_a_recorded_run_is_byte_equal(load: Callable[[str], Engine], way: str) -> None:
    engine = load(way)
    lines = recorded(engine).lines
    text = "\n".join(lines)
    observations = ["enter_layer", "landed", "computed", "end_pass", "end_reply", "predict"]
    actions = ["Compute", "Fetch", "Skip"]
    if way == "regions":
        observations.append("end_prefill")
        actions.append("Promote")
    else:
        observations.append("reach_boundary" if way == "batches" else "draft_routed")
        assert '"lookahead"' in text
    for name in observations:
        assert f'["{name}"' in text
    for action in actions:
        assert f'["{action}"' in text
    assert '"miss"' in text
    assert '"predicted"' in text
    assert replay(lines, ExpertCacheDriver(engine.cache_setup)) is None


def test_replay_by_another_policy_says_where_it_parts(engine: Engine) -> None:
    lines = recorded(engine).lines
    setup = engine.cache_setup
    for other in (
        replace(setup, eviction=Eviction.LRU),
        replace(setup, num_slots=setup.num_slots - 1),
        replace(setup, num_reserved_slots=setup.num_slots - 1),
    ):
        assert replay(lines, ExpertCacheDriver(other)) is not None
    tampered = lines.copy()
    number = next(i for i, line in enumerate(lines) if '"Compute"' in line)
    tampered[number] = tampered[number].replace('"Compute"', '"Await"')
    assert replay(tampered, ExpertCacheDriver(setup)) == number
