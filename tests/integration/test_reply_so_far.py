"""Figures of a reply that goes on in another engine: those of both, each counted once.

Oracle: what is counted here from outside, over all engines, while the reply is made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.model.sampling import Sampler
from mira_engine.policy.driver import ExpertCacheDriver
from mira_engine.prepare import prepare
from mira_engine.runtime import reply_so_far
from mira_engine.runtime.draft import DraftWindow
from mira_engine.runtime.executor import ExpertExecutor
from mira_engine.runtime.passes import ModelPasses
from mira_engine.runtime.telemetry import ReplyMeter
from mira_engine.types import ComputeDtype, DraftExperts, Phase, Precision
from shortages import Session, failing_passes, new_objects_only

K = 3
CONFIG = EngineConfig(
    precision=Precision.NESTED,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=0.9),
    num_draft_tokens=K,
    draft_experts=DraftExperts.ALL,
    context_length=256,
    num_threads=1,
    prefill_chunk_tokens=32,
)
QUESTION = "Two and two, and then two more of those that were there before: how many?"
NEW_TOKENS = 14
BRIEF = SamplingConfig(max_new_tokens=NEW_TOKENS)
RELOAD_S = 100.0


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> ModelHome:
    """A tiny chat model, prepared."""
    library = ModelLibrary(tmp_path_factory.mktemp("so-far"))
    made = library.resolve(str(tiny_checkpoint("olmoe", tokenizer=True)))
    prepare(made, Precision.NESTED, on_progress=lambda *_: None, is_cancelled=lambda: False)
    return made


@pytest.fixture(autouse=True, scope="module")
def _fast_collections() -> Iterator[None]:
    with new_objects_only():
        yield


@pytest.fixture
def start(home: ModelHome) -> Iterator[Callable[..., Session]]:
    sessions: list[Session] = []

    def make(**changes: object) -> Session:
        sessions.append(Session(home, replace(CONFIG, **changes)))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


class Witness:
    """Counts what all engines do, and has each pass take a second and each load a hundred.

    Attributes:
        now: Seconds.
        counts: By name.
        passes: Phases of all passes, those that failed included.
        told: What each driver was told at the end of each pass: tokens, bytes, seconds.
        drivers: Those drivers, in the order in which they came.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._patch = monkeypatch
        self.now = 0.0
        self.counts: Counter[str] = Counter()
        self.passes: list[Phase] = []
        self.told: list[tuple[int, tuple[float, ...]]] = []
        self.drivers: list[int] = []
        self._watch(ModelPasses, "forward", self._before_pass, lambda *_: None)
        self._watch(ExpertExecutor, "__call__", None, self._after_layer)
        self._watch(ExpertExecutor, "collect", self._before_collect, lambda *_: None)
        self._watch(Sampler, "accept", None, self._after_accept)
        self._watch(DraftWindow, "end", self._before_draft_end, lambda *_: None)
        self._watch(ExpertCacheDriver, "end_pass", self._before_end_pass, lambda *_: None)
        self._clock = lambda: self.now
        monkeypatch.setattr(reply_so_far, "ReplyMeter", partial(ReplyMeter, clock=self._clock))
        load = Engine.load

        def loading(*args: object, **kwargs: object) -> Engine:
            self.now += RELOAD_S
            return load(*args, **kwargs)

        monkeypatch.setattr(Engine, "load", loading)

    def _watch(
        self,
        owner: type,
        name: str,
        before: Callable[..., None] | None,
        after: Callable[..., None],
    ) -> None:
        original = getattr(owner, name)

        def call(it: object, *args: object, **kwargs: object) -> object:
            if before is not None:
                before(it, *args)
            result = original(it, *args, **kwargs)
            after(it, result, *args)
            return result

        self._patch.setattr(owner, name, call)

    def _before_pass(self, passes: ModelPasses, tokens: Sequence[int], phase: Phase) -> None:
        self.now += 1.0
        self.passes.append(phase)

    def _after_layer(
        self, executor: ExpertExecutor, result: object, module: object, layer: int, *routing: object
    ) -> None:
        if executor.phase in (Phase.DECODE, Phase.VERIFY):
            index = routing[1]
            assert isinstance(index, torch.Tensor)
            self.counts["routed"] += index.numel()

    def _before_collect(self, executor: ExpertExecutor, landed: Sequence) -> None:
        if executor.meter.clock is not self._clock:
            return  # What a load brings back is no reply's.
        kind = "prefill" if executor.phase is Phase.PREFILL else "decode"
        self.counts[f"{kind} records"] += len(landed)
        self.counts[f"{kind} bytes"] += sum(item.num_bytes for item in landed)

    def _after_accept(
        self,
        sampler: Sampler,
        result: tuple[int, int],
        history: object,
        drafted: Sequence,
        *_: object,
    ) -> None:
        self.counts["rounds"] += bool(drafted)
        self.counts["accepted"] += result[0]

    def _before_draft_end(self, window: DraftWindow, num_passes: int, num_drafted: int) -> None:
        self.counts["drafted"] += num_drafted

    def _before_end_pass(self, driver: ExpertCacheDriver, *told: float) -> None:
        if id(driver) not in self.drivers:
            self.drivers.append(id(driver))
        self.told.append((self.drivers.index(id(driver)), told))


@pytest.mark.parametrize(("phase", "number"), [(Phase.VERIFY, 6), (Phase.DRAFT, 13)])
def test_figures_of_a_reply_in_two_engines_are_what_both_did(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch, phase: Phase, number: int
) -> None:
    session = start()
    first = session.engine
    witness = Witness(monkeypatch)

    with failing_passes(monkeypatch, lambda now, calls: now is phase and calls == number):
        stats = session.answer(QUESTION, BRIEF).stats

    assert session.engine is not first
    assert len(witness.drivers) == 2, "each engine ended passes"
    counts = witness.counts
    assert stats.num_new_tokens == NEW_TOKENS
    assert (stats.num_rounds, stats.num_accepted) == (counts["rounds"], counts["accepted"])
    assert stats.num_drafted == counts["drafted"]
    assert stats.num_eager_passes == len(witness.passes)
    assert stats.num_hits + stats.num_misses == counts["routed"]
    assert stats.num_records_loaded == counts["decode records"] > 0
    assert stats.bytes_moved == counts["decode bytes"]
    assert stats.prefill_bytes_moved == counts["prefill bytes"] > 0


def test_seconds_of_a_reply_in_two_engines_begin_with_the_first(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start()
    witness = Witness(monkeypatch)

    with failing_passes(monkeypatch, lambda phase, calls: phase is Phase.VERIFY and calls == 6):
        stats = session.answer(QUESTION, BRIEF).stats

    num_before = next(n for n, phase in enumerate(witness.passes) if phase is not Phase.PREFILL)
    assert Phase.PREFILL in witness.passes[num_before:], "the other engine reads what was told"
    assert stats.ttft_s == num_before
    assert stats.decode_s == len(witness.passes) - num_before + RELOAD_S
    assert stats.elapsed_s == stats.ttft_s + stats.decode_s


def test_prompt_k_and_reason_of_a_reply_in_two_engines_are_those_of_an_unbroken_one(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start()
    session.answer(QUESTION, BRIEF)
    unbroken = session.answer(QUESTION, BRIEF).stats
    assert unbroken.num_cached_tokens == unbroken.num_prompt_tokens - 1

    with failing_passes(monkeypatch, lambda phase, calls: phase is Phase.VERIFY and calls == 6):
        stats = session.answer(QUESTION, BRIEF).stats

    assert stats.num_prompt_tokens == unbroken.num_prompt_tokens, "not what was told besides"
    assert stats.num_cached_tokens == unbroken.num_cached_tokens, "as the reply found it"
    assert stats.num_draft_tokens == unbroken.num_draft_tokens == K
    assert stats.governor_reason == unbroken.governor_reason


def test_driver_of_the_other_engine_is_told_only_what_came_after_the_change(
    start: Callable[..., Session], monkeypatch: pytest.MonkeyPatch
) -> None:
    session = start()
    witness = Witness(monkeypatch)
    go_on, carried = ExpertExecutor.go_on_with, []

    def going_on(executor: ExpertExecutor, meter: ReplyMeter) -> None:
        carried.append((meter.decode.num_bytes, meter.decode.transfer_s))
        go_on(executor, meter)

    monkeypatch.setattr(ExpertExecutor, "go_on_with", going_on)
    with failing_passes(monkeypatch, lambda phase, calls: phase is Phase.VERIFY and calls == 6):
        session.answer(QUESTION, BRIEF)

    assert carried[0] == (0, 0.0)
    assert min(carried[1]) > 0, "nothing that could be told twice"
    decode = session.engine.executor.meter.decode
    now = (decode.num_bytes, decode.transfer_s)
    told = [told for driver, told in witness.told if driver == 1 and told[0]]
    after = [sum(part) for part in zip(*told, strict=True)]
    expected = [end - start for end, start in zip(now, carried[1], strict=True)]
    assert after[1:3] == pytest.approx(expected)
    assert told[0][5] == 0, "the seconds of a round that began elsewhere"
