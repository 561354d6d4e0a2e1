"""Captured steps give the text of a pass module by module, wherever the host stands.

Without a card: recordings are replayed operator by operator, in memory that is nan where a
device would have used it for something else (`fake_graphs`), kernels run in triton's
interpreter, and every copy is checked against every launch (`fake_queues`).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fake_card import (
    FakeCard,
    Load,
    Prepared,
    loading,
    plug_in_recording_card,
    preparing,
)
from mira_engine.config import MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import Notice
from mira_engine.library import ModelHome
from mira_engine.policy.speculation import KChoice, RoundObservation
from mira_engine.types import CompileMode, DraftExperts, FinishReason, Precision
from torch import Tensor

pytest.importorskip("triton", reason="triton has no wheel for this system")

from mira_engine.model import bucketed
from mira_engine.policy.launching import Launch, LaunchAhead
from mira_engine.runtime import captured, captured_model
from mira_engine.runtime.captured import DraftStep
from mira_engine.runtime.captured_memory import BoundaryMemory
from mira_engine.runtime.captured_target import TargetStep
from mira_engine.runtime.gpu_experts import GpuExperts

NEW_TOKENS = 6
PROMPT = [7, 99, 23, 180]
DRAFTING = {
    "precision": Precision.NESTED,
    "num_draft_tokens": 3,
    "draft_experts": DraftExperts.ALL,
}


@pytest.fixture(scope="module")
def prepared(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> Prepared:
    """Prepares a family's tiny checkpoint, without sliding windows, in a precision, once."""
    prepare = preparing(tmp_path_factory.mktemp("captured"), tiny_checkpoint)

    def make(family: str, precision: Precision, *, has_windows: bool = False) -> ModelHome:
        return prepare(family, precision, has_windows=has_windows)

    return make


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    """A card that records what it does."""
    return plug_in_recording_card(monkeypatch)


@pytest.fixture
def load() -> Iterator[Load]:
    """Loads engines and closes them."""
    with loading() as load:
        yield load


def _text(engine: Engine, prompt: list[int] = PROMPT, num_tokens: int = NEW_TOKENS) -> list[int]:
    steps = engine.reply(prompt, SamplingConfig(max_new_tokens=num_tokens))
    return [step for step in steps if isinstance(step, int)]


def _steps(engine: Engine, kind: type) -> list:
    assert engine.captured is not None
    return [step for step in engine.captured.steps if type(step) is kind]


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "olmoe"])
def test_text_of_captured_steps_with_misses_is_the_processors(
    family: str, prepared, load, card: FakeCard
) -> None:
    home = prepared(family, Precision.BF16)
    expected = _text(load(home))

    engine = load(home, gpu=0, budget=MemoryAmount(share=1.0))

    assert _text(engine) == expected
    meter = engine.executor.meter
    assert meter.decode.num_misses > 0
    assert meter.num_compiled_passes == NEW_TOKENS - 1
    assert meter.num_eager_passes == 1, "the prompt"
    assert len(_steps(engine, TargetStep)) == 1


@pytest.mark.parametrize("experts", [DraftExperts.ALL, DraftExperts.CACHED])
def test_text_of_captured_drafts_and_verifications_is_the_processors(
    experts: DraftExperts, prepared, load, card: FakeCard
) -> None:
    home = prepared("qwen2_moe", Precision.NESTED)
    expected = _text(load(home, precision=Precision.NESTED))
    changes = DRAFTING | {"draft_experts": experts, "budget": MemoryAmount(share=0.75)}

    engine = load(home, gpu=0, **changes)

    assert _text(engine) == expected
    assert _steps(engine, DraftStep)
    assert _steps(engine, TargetStep)
    meter = engine.executor.meter
    assert meter.num_drafted > 0
    assert meter.decode.num_prefetched > 0 or experts is DraftExperts.CACHED
    assert meter.num_compiled_passes > meter.num_eager_passes


def test_logits_of_captured_steps_do_not_depend_on_misses_bit_by_bit(
    prepared, load, card: FakeCard
) -> None:
    home = prepared("qwen2_moe", Precision.BF16)
    found = []
    for share in (8.0, 1.0):
        engine = load(home, gpu=0, budget=MemoryAmount(share=share))
        logits: list[Tensor] = []
        run = engine.captured.run

        def listening(tokens, phase, *, _run=run, _logits=logits):
            made = _run(tokens, phase)
            if made is not None:
                _logits.append(made.clone())
            return made

        engine.captured.run = listening
        _text(engine)
        found.append(logits)
    assert engine.executor.meter.decode.num_misses > 0
    assert len(found[0]) == len(found[1]) == NEW_TOKENS - 1
    for whole, small in zip(*found, strict=True):
        assert torch.equal(whole, small)


def test_verification_launched_ahead_with_fewer_slots_than_it_needs_rolls_through_them(
    prepared, load, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = prepared("qwen2_moe", Precision.NESTED)
    expected = _text(load(home, precision=Precision.NESTED))
    monkeypatch.setattr(LaunchAhead, "choose", _always)

    engine = load(home, gpu=0, budget=MemoryAmount(share=0.6), **DRAFTING)
    assert engine.plan.num_slots < 8, "four tokens can choose eight experts of a layer"

    assert _text(engine) == expected
    [step] = [step for step in _steps(engine, TargetStep) if step._inputs.num_tokens == 4]
    assert step.num_repaired > 0


def test_text_goes_on_beyond_the_end_of_a_bucket(
    prepared, load, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucketed, "MIN_BUCKET_TOKENS", 8)
    home = prepared("mixtral", Precision.BF16)
    expected = _text(load(home), num_tokens=8)

    engine = load(home, gpu=0)

    assert _text(engine, num_tokens=8) == expected
    assert len(_steps(engine, TargetStep)) == 2, "8 and 16 places"


def test_second_chat_and_a_chat_after_a_reset_use_the_same_recordings(
    prepared, load, card: FakeCard
) -> None:
    home = prepared("mixtral", Precision.BF16)
    plain, engine = load(home), load(home, gpu=0)
    other = [200, 3, 77]
    first = _text(engine)
    room = [layer.keys.data_ptr() for layer in engine.state.cache.layers]
    num_captures = card.graphs.num_captures

    texts = [_text(engine, other, 3)]
    engine.state.reset()
    texts.append(_text(engine, num_tokens=3))

    assert texts == [_text(plain, other, 3), first[:3]]
    assert [layer.keys.data_ptr() for layer in engine.state.cache.layers] == room
    assert card.graphs.num_captures == num_captures


def test_room_that_was_given_back_is_recorded_anew(prepared, load, card: FakeCard) -> None:
    engine = load(prepared("olmoe", Precision.BF16), gpu=0)
    expected = _text(engine)
    assert engine.captured.steps

    engine.give_room_back()  # As a batch, a search and a shortage of memory do.

    assert not engine.captured.steps
    assert card.graphs.num_bytes == 0
    assert _text(engine) == expected
    assert engine.executor.meter.num_compiled_passes == NEW_TOKENS - 1


def test_shortage_ends_recording_only_until_memory_is_given_back(
    prepared, load, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = load(prepared("olmoe", Precision.BF16), gpu=0)
    with monkeypatch.context() as patch:
        patch.setattr(card.graphs, "capture", _refuse_for_memory)
        expected = _text(engine)
    assert _text(engine) == expected
    assert engine.executor.meter.num_compiled_passes == 0

    engine.free_temporaries()

    assert _text(engine) == expected
    assert engine.executor.meter.num_compiled_passes == NEW_TOKENS - 1


def _refuse_for_memory(work: object) -> list:
    raise torch.OutOfMemoryError("CUDA out of memory.")


def test_drafts_are_not_recorded_where_a_trace_wants_their_routing(
    prepared, load, card: FakeCard, tmp_path: Path
) -> None:
    home = prepared("qwen2_moe", Precision.NESTED)

    engine = load(home, gpu=0, trace_path=str(tmp_path / "trace.json"), **DRAFTING)
    _text(engine)

    assert engine.executor.meter.num_drafted > 0
    assert not _steps(engine, DraftStep)
    assert _steps(engine, TargetStep)


def test_chat_after_nan_in_the_room_is_what_it_was(prepared, load, card: FakeCard) -> None:
    engine = load(prepared("mixtral", Precision.BF16), gpu=0)
    expected = _text(engine, num_tokens=3)
    with torch.inference_mode():
        for layer in engine.state.cache.layers:
            layer.values.fill_(float("nan"))

    engine.state.reset()

    assert _text(engine, num_tokens=3) == expected


def test_reply_cancelled_inside_a_captured_pass_leaves_a_chat_that_goes_on(
    prepared, load, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = prepared("qwen2_moe", Precision.BF16)
    expected = _text(load(home))
    engine = load(home, gpu=0, budget=MemoryAmount(share=1.0))
    launch, num_launches = TargetStep.launch, 0

    def cancelling(self: TargetStep, piece: int) -> None:
        nonlocal num_launches
        num_launches += 1
        if num_launches == 6:
            engine.cancel()
        launch(self, piece)

    monkeypatch.setattr(TargetStep, "launch", cancelling)
    reply = engine.reply(PROMPT, SamplingConfig(max_new_tokens=NEW_TOKENS))
    made, reason = [], None
    while reason is None:
        try:
            made.append(next(reply))
        except StopIteration as stop:
            reason = stop.value
    assert reason is FinishReason.CANCELLED
    engine.clear_cancel()
    kept = [token for token in made if isinstance(token, int)]

    assert kept + _text(engine, PROMPT + kept, NEW_TOKENS - len(kept)) == expected


# -- without waiting -----------------------------------------------------------------------


def _always(self: LaunchAhead, layer: int, **what: object) -> Launch:
    return Launch.EXPECTED


def test_pieces_launched_ahead_without_their_experts_are_repaired(
    prepared, load, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = prepared("qwen2_moe", Precision.BF16)
    expected = _text(load(home))
    monkeypatch.setattr(LaunchAhead, "choose", _always)

    engine = load(home, gpu=0, budget=MemoryAmount(share=1.0))

    assert _text(engine) == expected
    steps = _steps(engine, TargetStep)
    assert sum(step.num_repaired for step in steps) > 0
    assert sum(step.num_ahead for step in steps) > sum(step.num_repaired for step in steps)


def test_nothing_is_waited_for_where_all_experts_are_resident(
    prepared, load, card: FakeCard
) -> None:
    engine = load(prepared("olmoe", Precision.BF16), gpu=0)
    engine.fill_hot([(layer, expert) for layer in range(2) for expert in range(8)])

    _text(engine)

    [step] = _steps(engine, TargetStep)
    assert step.num_ahead == 2 * (NEW_TOKENS - 1)
    assert step.num_repaired == 0


def test_driver_is_told_the_same_whether_pieces_are_launched_ahead_or_not(
    prepared, load, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = prepared("qwen2_moe", Precision.BF16)
    told = []
    for is_ahead in (False, True):
        monkeypatch.setattr(
            LaunchAhead, "choose", _always if is_ahead else lambda *_, **__: Launch.WAIT
        )
        engine = load(home, gpu=0, budget=MemoryAmount(share=1.0))
        calls: list[tuple[str, list]] = []
        engine.executor.driver.on_decision = lambda name, given, _, calls=calls: calls.append(
            (name, list(given))
        )
        _text(engine)
        told.append([call for call in calls if call[0] == "enter_layer"])
    assert told[0] == told[1]
    assert engine.executor.meter.decode.num_misses > 0
    assert engine.captured.steps[0].num_repaired > 0


# -- faults that have to be seen -----------------------------------------------------------


def _is_wrong(engine: Engine, expected: list[int]) -> bool:
    """Whether a planted fault changed the text or broke the reply."""
    try:
        return _text(engine) != expected
    except Exception:  # noqa: BLE001 - nan, an index out of range: whatever poison leads to
        return True


def test_count_of_misses_that_is_ignored_is_seen(
    prepared, load, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = prepared("qwen2_moe", Precision.BF16)
    expected = _text(load(home))
    monkeypatch.setattr(LaunchAhead, "choose", _always)
    record = GpuExperts.record_layer

    def uncounted(self: GpuExperts, layer, hidden, rows, result, misses) -> None:
        record(self, layer, hidden, rows, result, misses.clone())

    monkeypatch.setattr(GpuExperts, "record_layer", uncounted)

    assert _is_wrong(load(home, gpu=0, budget=MemoryAmount(share=1.0)), expected)


def test_memory_that_is_not_kept_between_pieces_is_seen(
    prepared, load, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = prepared("qwen2_moe", Precision.BF16)
    expected = _text(load(home))
    monkeypatch.setattr(BoundaryMemory, "cut", lambda self: None)

    assert _is_wrong(load(home, gpu=0), expected)


def test_position_that_is_a_number_is_seen(
    prepared, load, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = prepared("mixtral", Precision.BF16)
    expected = _text(load(home))

    def update(self, key_states, value_states, layer_idx, *args, **kwargs):
        layer, start = self.layers[layer_idx], len(PROMPT)
        layer.keys[:, :, start : start + 1] = key_states
        layer.values[:, :, start : start + 1] = value_states
        return layer.keys[:, :, : self._bucket], layer.values[:, :, : self._bucket]

    monkeypatch.setattr(bucketed.BucketCache, "update", update)

    assert _is_wrong(load(home, gpu=0), expected)


def test_slot_given_away_under_a_launch_is_seen(
    prepared, load, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LaunchAhead, "choose", _always)
    home = prepared("qwen2_moe", Precision.BF16)
    engine = load(home, gpu=0, budget=MemoryAmount(share=1.0))
    monkeypatch.setattr(engine.transfer, "release_all", lambda: None)

    with pytest.raises(AssertionError, match="written while it may be read"):
        _text(engine)


# -- what cannot be captured ---------------------------------------------------------------


def test_family_with_windows_runs_module_by_module_and_says_so(
    prepared, load, card: FakeCard
) -> None:
    home = prepared("mixtral", Precision.BF16, has_windows=True)
    expected, notices = _text(load(home)), []

    engine = load(home, notices, gpu=0)

    assert _text(engine) == expected
    assert engine.captured is None
    assert "uncaptured" in {notice.code for notice in notices}


def test_pass_that_asks_the_device_runs_module_by_module_and_says_so(
    prepared, load, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = prepared("mixtral", Precision.BF16)
    expected, notices = _text(load(home)), []
    mask = bucketed.bucket_mask

    def asking(positions: Tensor, bucket: int) -> Tensor:
        assert int(positions[0]) >= 0
        return mask(positions, bucket)

    monkeypatch.setattr(captured_model, "bucket_mask", asking)

    engine = load(home, notices, gpu=0)

    assert _text(engine) == expected
    assert engine.executor.meter.num_compiled_passes == 0
    [told] = [notice for notice in notices if notice.code == "uncaptured"]
    assert "cannot be recorded" in told.text


def test_no_more_is_captured_than_the_plan_has_memory_for(
    prepared, load, card: FakeCard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bucketed, "MIN_BUCKET_TOKENS", 8)
    monkeypatch.setattr(captured, "MAX_BYTES", 0)
    home = prepared("mixtral", Precision.BF16)
    expected, notices = _text(load(home)), []

    engine = load(home, notices, gpu=0)

    assert _text(engine) == expected
    assert card.graphs.num_captures == 1, "of 8 places, none of 16"
    assert "captured-memory" in {notice.code for notice in notices}


def test_no_step_is_captured_where_compiling_is_off(prepared, load, card: FakeCard) -> None:
    notices: list[Notice] = []
    engine = load(prepared("mixtral", Precision.BF16), notices, gpu=0, compile_mode=CompileMode.OFF)

    _text(engine)

    assert card.graphs.num_captures == 0
    assert engine.executor.meter.num_compiled_passes == 0
    assert "uncompiled" in {notice.code for notice in notices}


class _FakeGovernor:
    """Wants no draft, and writes down what it is told."""

    candidates = (0,)

    def __init__(self) -> None:
        self.num_observed = self.num_forgotten = 0

    def choose(self) -> KChoice:
        return KChoice(0, "no draft")

    def observe(self, observation: RoundObservation) -> None:
        self.num_observed += 1

    def forget_costs(self) -> None:
        self.num_forgotten += 1


def test_steps_are_captured_without_a_word_and_the_governor_is_spared_that_round(
    prepared, load, card: FakeCard
) -> None:
    notices: list[Notice] = []
    engine = load(prepared("mixtral", Precision.BF16), notices, gpu=0)
    engine.governor = governor = _FakeGovernor()

    _text(engine)

    assert not {notice.code for notice in notices} & {"uncompiled", "uncaptured"}
    assert governor.num_forgotten == 1
    assert governor.num_observed == NEW_TOKENS - 2, "all rounds but the first"
