"""What the engine's driver decided can be repeated, byte for byte, without the engine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.library import ModelLibrary
from mira_engine.policy.driver import ExpertCacheDriver
from mira_engine.policy.replay import DecisionLog, replay
from mira_engine.prepare import prepare
from mira_engine.types import CompileMode, Eviction, FinishReason, Precision


@pytest.fixture
def engine(tiny_checkpoint: Callable[..., Path], tmp_path: Path):
    """A speculating engine with a few slots more than its draft leaves it to need."""
    home = ModelLibrary(tmp_path).resolve(str(tiny_checkpoint("qwen2_moe")))
    prepare(home, Precision.NESTED, on_progress=lambda *_: None)
    config = EngineConfig(
        budget=MemoryAmount(share=0.8),
        num_draft_tokens=3,
        context_length=256,
        compile_mode=CompileMode.OFF,
    )
    engine = Engine.load(home, config)
    engine._end_ids = frozenset()
    yield engine
    engine.close()


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


def test_replay_of_a_recorded_run_is_byte_equal(engine: Engine) -> None:
    lines = recorded(engine).lines
    text = "\n".join(lines)
    for name in ("enter_layer", "landed", "computed", "reach_boundary", "end_pass", "end_reply"):
        assert f'["{name}"' in text
    for action in ("Compute", "Fetch", "Skip"):
        assert f'["{action}"' in text
    assert '"lookahead"' in text
    assert '"miss"' in text
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
