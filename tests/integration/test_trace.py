"""What the engine records, and that the simulator finds the engine's own counts in it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from mira_engine.config import EngineConfig, LinkConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.errors import TraceError
from mira_engine.library import ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.simulator.servers import MachineCosts
from mira_engine.simulator.simulate import CacheShape, simulate
from mira_engine.simulator.systems import System
from mira_engine.simulator.workload import recorded_rounds
from mira_engine.trace import ReplyStart, TracedPass, TracedRound, read_trace
from mira_engine.types import CompileMode, Eviction, Phase, Precision


@pytest.fixture
def load(tiny_checkpoint: Callable[..., Path], tmp_path: Path):
    """Loads a tiny model with a trace, or without one."""
    home = ModelLibrary(tmp_path).resolve(str(tiny_checkpoint("qwen2_moe")))
    prepare(home, Precision.NESTED, on_progress=lambda *_: None)
    engines = []

    def load(*, k: int, share: float, trace: Path | None) -> Engine:
        config = EngineConfig(
            budget=MemoryAmount(share=share),
            num_draft_tokens=k,
            context_length=256,
            link=LinkConfig(latency_s=1e-3),
            compile_mode=CompileMode.OFF,
            trace_path=str(trace) if trace is not None else None,
        )
        engine = Engine.load(home, config)
        engine._end_ids = frozenset()
        engines.append(engine)
        return engine

    yield load
    for engine in engines:
        engine.close()


def ask(engine: Engine, prompt: list[int], num_tokens: int = 16) -> list[int]:
    engine.state.reset()
    reply = engine.reply(prompt, SamplingConfig(max_new_tokens=num_tokens))
    return [step for step in reply if isinstance(step, int)]


def test_engine_records_every_pass_and_round(load, tmp_path):
    path = tmp_path / "a.trace"
    engine = load(k=3, share=0.8, trace=path)
    ask(engine, [3, 5, 7, 11])
    stats = engine.stats()
    trace = read_trace(path)
    assert trace.header.num_slots == engine.plan.num_slots
    assert trace.header.num_draft_tokens == 3
    assert trace.items[0] == ReplyStart(4)
    passes = [item for item in trace.items if isinstance(item, TracedPass)]
    rounds = [item for item in trace.items if isinstance(item, TracedRound)]
    by_phase = {phase: [p for p in passes if p.phase is phase] for phase in Phase}
    assert sum(p.num_tokens for p in by_phase[Phase.PREFILL]) == 4
    assert sum(p.num_tokens for p in by_phase[Phase.DRAFT]) == stats.num_drafted
    assert len(by_phase[Phase.VERIFY]) == stats.num_rounds
    assert sum(item.num_drafted for item in rounds) == stats.num_drafted
    assert sum(item.num_accepted for item in rounds) == stats.num_accepted
    assert sum(item.draft_s for item in rounds) == pytest.approx(stats.draft_s)
    assert sum(item.verify_s for item in rounds) == pytest.approx(stats.verify_s)
    assert stats.stall_s > 0
    assert sum(item.stall_s for item in rounds) == pytest.approx(stats.stall_s)
    assert sum(item.num_accepted + 1 for item in rounds) == stats.num_new_tokens - 1


def test_engine_without_a_trace_records_nothing_and_says_the_same(load, tmp_path):
    quiet = load(k=3, share=0.8, trace=None)
    assert quiet.executor.recorder is None
    before = sorted(tmp_path.iterdir())
    text = ask(quiet, [3, 5, 7, 11])
    assert sorted(tmp_path.iterdir()) == before
    assert ask(load(k=3, share=0.8, trace=tmp_path / "a.trace"), [3, 5, 7, 11]) == text


def test_reply_that_was_cancelled_leaves_a_whole_trace(load, tmp_path):
    path = tmp_path / "a.trace"
    engine = load(k=3, share=0.8, trace=path)
    engine.state.reset()
    reply = engine.reply([4, 6, 8], SamplingConfig(max_new_tokens=16))
    for _ in range(6):
        next(reply)
    engine.cancel()
    assert not [step for step in reply if not isinstance(step, int)]
    engine.clear_cancel()
    ask(engine, [3, 5])
    trace = read_trace(path)
    assert sum(isinstance(item, ReplyStart) for item in trace.items) == 2
    assert sum(item.starts_reply for item in recorded_rounds(trace)) == 2


def test_trace_that_cannot_be_written_fails_the_reply(load, tmp_path):
    engine = load(k=0, share=0.6, trace=tmp_path / "missing" / "a.trace")
    with pytest.raises(TraceError, match="cannot be written"):
        ask(engine, [3, 5])


@pytest.mark.parametrize("share", [0.4, 0.6, 0.9])
def test_simulated_plain_decoding_has_the_engines_hits_and_records(load, tmp_path, share):
    """Without a draft no decision depends on time, so the counts are the engine's own."""
    path = tmp_path / "a.trace"
    engine = load(k=0, share=share, trace=path)
    ask(engine, [3, 5, 7, 11], 40)
    stats = engine.stats()
    trace = read_trace(path)
    head = trace.header
    found = simulate(
        recorded_rounds(trace),
        System(name="engine", about="", eviction=Eviction(head.eviction)),
        CacheShape(
            num_layers=head.num_layers,
            num_experts=head.num_experts,
            num_slots=head.num_slots,
            record_bytes=head.record_bytes,
        ),
        MachineCosts(link_bytes_per_s=1e9, layer_s=1e-4, expert_s=1e-5),
    )
    assert found.num_tokens == stats.num_new_tokens - 1
    assert found.traffic.num_hits == stats.num_hits
    assert found.traffic.num_misses == stats.num_misses
    assert found.traffic.num_records == stats.num_records_loaded
