"""Recorded draft steps stop where somebody says so, and give back what a failed trial read.

Without a card, as in `test_captured_steps`; the kernels are plain calls (`recorded_kernels`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from fake_card import FakeCard, Load, loading, plug_in_recording_card, preparing
from mira_engine.config import MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import Notice
from mira_engine.library import ModelHome
from mira_engine.runtime.captured_target import TargetStep
from mira_engine.types import DraftExperts, FinishReason, Precision
from torch import Tensor

pytest.importorskip("triton", reason="triton has no wheel for this system")

from fake_graphs import RecordingError
from mira_engine.runtime import captured
from mira_engine.runtime.captured import DraftStep
from recorded_kernels import use_recorded_plain_kernels

K = 3
NEW_TOKENS = 10
PROMPT = [7, 99, 23, 180, 41]
DRAFTING = {
    "precision": Precision.NESTED,
    "num_draft_tokens": K,
    "budget": MemoryAmount(share=0.9),
    "is_prefetch_enabled": False,
}


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> ModelHome:
    """A family whose steps are recorded, in two INT4 planes."""
    prepared = preparing(tmp_path_factory.mktemp("drafts"), tiny_checkpoint)
    return prepared("olmoe", Precision.NESTED, has_windows=False)


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    """A card that records what it does."""
    made = plug_in_recording_card(monkeypatch)
    use_recorded_plain_kernels(monkeypatch, made)
    return made


@pytest.fixture
def load(card: FakeCard) -> Iterator[Load]:
    """Loads engines on the card, and closes them."""
    with loading() as load_any:

        def on_card(home: ModelHome, *args: object, **changes: object) -> Engine:
            return load_any(home, *args, **({"gpu": 0} | changes))

        yield on_card


@pytest.fixture
def expected(home: ModelHome) -> list[int]:
    """The text by the processor, without a draft."""
    with loading() as load_any:
        return _text(load_any(home, precision=Precision.NESTED))


def _text(engine: Engine, prompt: list[int] = PROMPT, num_tokens: int = NEW_TOKENS) -> list[int]:
    steps = engine.reply(prompt, SamplingConfig(max_new_tokens=num_tokens))
    return [step for step in steps if isinstance(step, int)]


def _stopped(engine: Engine, prompt: list[int] = PROMPT) -> list[int]:
    """Asks for a reply that is stopped. Returns its tokens."""
    reply, kept = engine.reply(prompt, SamplingConfig(max_new_tokens=NEW_TOKENS)), []
    reason = None
    while reason is None:
        try:
            step = next(reply)
        except StopIteration as stop:
            reason = stop.value
        else:
            kept += [step] if isinstance(step, int) else []
    assert reason is FinishReason.CANCELLED
    return kept


@pytest.mark.parametrize(
    ("experts", "num_drafted"),
    [(DraftExperts.ALL, 1), (DraftExperts.ALL, K + 1), (DraftExperts.CACHED, 2)],
)
def test_stop_between_recorded_draft_steps_leaves_what_was_emitted(
    home: ModelHome,
    load: Load,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
    experts: DraftExperts,
    num_drafted: int,
) -> None:
    engine = load(home, draft_experts=experts, **DRAFTING)
    assert _text(engine) == expected
    engine.state.reset()
    num_runs, later_verifications, run, verify = 0, [], DraftStep.run, TargetStep.run

    def run_and_stop(self: DraftStep, *args: object) -> Tensor:
        nonlocal num_runs
        num_runs += 1
        logits = run(self, *args)
        if num_runs == num_drafted:
            engine.cancel()
        return logits

    def verify_noting(self: TargetStep, *args: object) -> Tensor:
        if num_runs >= num_drafted:
            later_verifications.append(args)
        return verify(self, *args)

    monkeypatch.setattr(DraftStep, "run", run_and_stop)
    monkeypatch.setattr(TargetStep, "run", verify_noting)

    kept = _stopped(engine)

    assert num_runs == num_drafted, "drafting went on"
    assert not later_verifications
    assert kept == expected[: len(kept)]
    assert engine.state.tokens == [*PROMPT, *kept][:-1], "the draft's tokens are no state"
    lengths = {layer.get_seq_length() for layer in engine.state.cache.layers}
    assert lengths == {len(PROMPT) + len(kept) - 1}
    engine.clear_cancel()
    rest = _text(engine, [*PROMPT, *kept], NEW_TOKENS - len(kept))
    assert kept + rest == expected
    assert engine.stats().num_cached_tokens == len(PROMPT) + len(kept) - 1
    assert engine.stats().num_drafted > 0


def test_slots_read_by_a_recording_that_failed_are_not_written_at_once(
    home: ModelHome,
    load: Load,
    card: FakeCard,
    expected: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The trial's launches read slots; module by module, the pass gives these to others."""
    notices: list[Notice] = []
    whole = load(home, precision=Precision.NESTED)
    fewest = MemoryAmount(num_bytes=whole._top_k * whole.plan.slot_bytes)
    engine = load(home, notices, precision=Precision.NESTED, budget=fewest)

    def capture(work: Callable[[Callable[[], None]], None]) -> list:
        work(lambda: None)
        for parts in engine.transfer._slots:  # Which ones, the device's own table says.
            for part in parts.values():
                card.queues.read(part)
        raise RecordingError("this device records nothing")

    monkeypatch.setattr(card.graphs, "capture", capture)

    assert _text(engine) == expected

    assert engine.executor.meter.decode.num_misses > 0
    assert engine.stats().num_compiled_passes == 0
    [told] = [notice.text for notice in notices if notice.code == "uncaptured"]
    assert "this device records nothing" in told


def test_recording_of_a_draft_step_counts_nothing_for_the_prefetch(
    home: ModelHome, load: Load, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    changes = DRAFTING | {"draft_experts": DraftExperts.ALL, "is_prefetch_enabled": True}
    engine = load(home, **changes)
    make, seen = DraftStep.__init__, []

    def make_and_look(self: DraftStep, **parts: object) -> None:
        before = parts["experts"].keep_counts()
        make(self, **parts)
        seen.append((before, parts["experts"].keep_counts()))

    monkeypatch.setattr(DraftStep, "__init__", make_and_look)

    assert _text(engine) == expected

    assert seen
    assert all(before.equal(after) for before, after in seen)


def test_no_more_recordings_are_held_than_the_most_and_the_text_is_the_same(
    home: ModelHome, load: Load, expected: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(captured, "MAX_STEPS", 1)
    engine = load(home, draft_experts=DraftExperts.ALL, **DRAFTING)

    assert _text(engine) == expected

    assert engine.captured is not None
    assert [type(step) for step in engine.captured.steps] == [TargetStep], "the one used last"
    assert engine.stats().num_compiled_passes > 0
