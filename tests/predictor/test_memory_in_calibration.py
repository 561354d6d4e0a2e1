"""Memory that runs out while predictors are made: they are, with less, once; what is done stays."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from mira_engine import calibrate as calibrate_module
from mira_engine import routing_recording
from mira_engine.calibrate import calibrate
from mira_engine.checkpoint.progress import Progress
from mira_engine.config import EngineConfig
from mira_engine.engine import Engine
from mira_engine.errors import MemoryShortageError
from mira_engine.events import Notice
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.memory_retry import SHRUNK
from mira_engine.predictor.bank import MANIFEST_FILE, PredictorBank
from mira_engine.predictor.far import FarSamples, train_far_head
from mira_engine.predictor.features import pieces_of
from mira_engine.predictor.train import (
    TrainingSettings,
    layer_samples,
    train_head,
    validation_prompts,
)
from mira_engine.prepare import prepare
from mira_engine.routing_recording import RoutingRecording
from mira_engine.runtime import recording as reader_module
from mira_engine.runtime.recording import BatchRecording, RecordingSettings, groups_of
from mira_engine.types import Phase, Precision
from planted_routing import NUM_EXPERTS, hidden_decides
from shortages import SHORTAGES, Holdings, failing, failing_passes, new_objects_only

PROMPTS = tuple(f"prompt number {n} of a few" for n in range(6))
RECORDING = RecordingSettings(max_reply_tokens=4, max_batch_prompts=3, max_batch_tokens=160)
"""Two batches of three prompts, which are nearly as long as a pass may be."""

TRAINING = TrainingSettings(max_epochs=2)
STAGES = {
    "rendering": (Engine, "render", 3),
    "routers": (routing_recording, "find_routers", 0),
    "writing a batch": (reader_module.TraceFolder, "write_part", 1),
    "samples": (calibrate_module, "layer_samples", 1),
    "training": (calibrate_module, "train_layer", 1),
    "saving": (PredictorBank, "save", 0),
}
"""What fails: where it is looked up, and which call."""


@pytest.fixture(scope="module")
def prepared(
    tiny_checkpoint: Callable[..., Path], tmp_path_factory: pytest.TempPathFactory
) -> ModelHome:
    library = ModelLibrary(tmp_path_factory.mktemp("calibration"))
    home = library.resolve(str(tiny_checkpoint("gpt_oss", tokenizer=True)))
    prepare(home, Precision.NESTED, on_progress=lambda *_: None)
    return home


@pytest.fixture
def home(prepared: ModelHome) -> Iterator[ModelHome]:
    """A prepared model without predictors."""
    yield prepared
    RoutingRecording(
        prepared, Precision.NESTED, prepared.predictors_dir, Progress(), step="test"
    ).clear()


@pytest.fixture(autouse=True, scope="module")
def _fast_collections() -> Iterator[None]:
    with new_objects_only():
        yield


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[tuple[EngineConfig, list[str]]]:
    """What was asked for at each load, and what was held before."""
    holdings, load, made = Holdings(), Engine.load, []

    def watching(home: ModelHome, config: EngineConfig, **options: object) -> Engine:
        made.append((config, holdings.now()))
        return load(home, config, **options)

    monkeypatch.setattr(Engine, "load", watching)
    return made


def make(home: ModelHome, notices: list[Notice] | None = None) -> PredictorBank:
    return calibrate(
        home,
        Precision.NESTED,
        prompts=PROMPTS,
        recording=RECORDING,
        training=TRAINING,
        on_progress=lambda *_: None,
        on_notice=(lambda notice: None) if notices is None else notices.append,
    )


def shrunk(notices: list[Notice]) -> str:
    (notice,) = [notice for notice in notices if notice.code == SHRUNK]
    return notice.text


def work_files(home: ModelHome) -> dict[str, int]:
    work = home.predictors_dir / "work"
    return {path.name: path.stat().st_mtime_ns for path in work.iterdir()}


@pytest.mark.parametrize("stage", STAGES)
def test_shortage_at_any_stage_is_got_over_and_told_once(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch, stage: str
) -> None:
    notices: list[Notice] = []
    owner, name, at = STAGES[stage]

    with failing(monkeypatch, owner, name, SHORTAGES["host"], at=at):
        bank = make(home, notices)

    assert sorted(bank.choices) == [0, 1]
    assert shrunk(notices)
    assert {path.name for path in home.predictors_dir.iterdir()} == {
        MANIFEST_FILE,
        "predictors.safetensors",
    }


@pytest.mark.parametrize(
    ("phase", "call", "is_shorter"),
    [(Phase.PREFILL, 5, True), (Phase.DECODE, 2, False)],
    ids=("prompts", "reply"),
)
def test_shortage_in_a_pass_reads_less_at_once_or_holds_fewer_experts(
    home: ModelHome,
    monkeypatch: pytest.MonkeyPatch,
    loads: list,
    phase: Phase,
    call: int,
    is_shorter: bool,
) -> None:
    notices: list[Notice] = []
    passes: list[tuple[int, ...]] = []
    pass_of = BatchRecording._pass

    def watching(reader: BatchRecording, tokens: torch.Tensor, *rest: object) -> torch.Tensor:
        passes.append(tuple(tokens.shape))
        return pass_of(reader, tokens, *rest)

    monkeypatch.setattr(BatchRecording, "_pass", watching)
    # Layers are calls: four to a pass, so that the second batch's prompts begin at the fifth.
    with failing_passes(monkeypatch, lambda now, number: now is phase and number == call):
        make(home, notices)

    before, after = (config.budget for config, _ in loads)
    assert loads[1][1] == [], "the engine that failed is held"
    prompts = [shape for shape in passes if shape[1] > 1]
    if is_shorter:
        assert "prompt tokens are read at once" in shrunk(notices)
        assert before == after
        assert [rows for rows, _ in prompts] == [3, 3, 1, 1, 1], "the first batch is not read again"
    else:
        assert "experts get" in shrunk(notices)
        assert after != before
        assert [rows for rows, _ in prompts] == [3, 3, 3]


def test_batch_read_in_shorter_passes_records_the_same_tokens(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    folders = []
    for most in (RECORDING.max_batch_tokens, 40):
        recorded = RoutingRecording(
            home, Precision.NESTED, tmp_path / str(most), Progress(), step="test"
        )
        monkeypatch.setattr(
            reader_module, "groups_of", lambda lengths, _, most=most: groups_of(lengths, most)
        )
        recorded.record(PROMPTS, RECORDING, None)
        folders.append(recorded.traces)
    whole, parts = (folder.routing() for folder in folders)
    assert len(whole) == len(parts)
    for number in range(len(PROMPTS)):
        mine = [trace.sequence == number for trace in (whole, parts)]
        assert torch.equal(whole.is_reply[mine[0]], parts.is_reply[mine[1]])
        ids = [
            torch.sort(trace.ids[rows], dim=-1).values
            for trace, rows in zip((whole, parts), mine, strict=True)
        ]
        # bfloat16 rounds rows of another number otherwise, so a near-tie may fall otherwise.
        assert (ids[0] == ids[1]).all(dim=-1).float().mean() > 0.8


def test_load_that_fails_takes_the_next_smaller_budget_once(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch, loads: list
) -> None:
    from mira_engine import loaded

    notices: list[Notice] = []
    with failing(monkeypatch, loaded, "StateManager", SHORTAGES["python"]):
        make(home, notices)

    assert len(loads) == 2
    assert loads[1][1] == []
    assert "experts get" in shrunk(notices)


def test_second_shortage_while_recording_keeps_the_batches_that_are_done(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch, loads: list
) -> None:
    with (
        failing(
            monkeypatch, reader_module.TraceFolder, "write_part", SHORTAGES["system"],
            at=1, num_times=99,
        ),
        pytest.raises(MemoryShortageError) as caught,
    ):  # fmt: skip
        make(home)

    assert len(loads) == 2, "tried again and again"
    assert "while routing was recorded" in caught.value.message
    assert "what was recorded is kept" in caught.value.hint
    before = work_files(home)
    assert "trace-000.safetensors" in before
    assert not any(name.startswith(("trace-001", "recorded")) for name in before)

    assert sorted(make(home).choices) == [0, 1]
    assert len(loads) == 3


def test_second_shortage_while_training_keeps_the_layers_that_are_done(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch, loads: list
) -> None:
    with (
        failing(
            monkeypatch, calibrate_module, "train_layer", SHORTAGES["host"], at=1, num_times=99
        ) as calls,
        pytest.raises(MemoryShortageError) as caught,
    ):
        make(home)

    assert calls[0] == 3, "one layer, and the second one twice"
    assert "32 tokens at once did not help" in caught.value.message
    assert "trained is kept" in caught.value.hint
    assert not (home.predictors_dir / MANIFEST_FILE).exists()
    kept = work_files(home)
    assert "layer-0000.safetensors" in kept
    assert "layer-0001.safetensors" not in kept

    with failing(monkeypatch, calibrate_module, "train_layer", SHORTAGES["host"], at=99) as calls:
        make(home)
    assert calls[0] == 1, "only what was missing"
    assert len(loads) == 1


def test_training_after_a_shortage_computes_fewer_tokens_at_once(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows: list[int | None] = []
    train = calibrate_module.train_layer

    def watching(*arguments: object, rows_at_once: int | None, **options: object) -> object:
        rows.append(rows_at_once)
        if len(rows) == 2:
            raise SHORTAGES["host"]()
        return train(*arguments, rows_at_once=rows_at_once, **options)

    monkeypatch.setattr(calibrate_module, "train_layer", watching)
    make(home)

    assert rows == [None, None, 32]


def test_training_holds_no_engine(home: ModelHome, monkeypatch: pytest.MonkeyPatch) -> None:
    holdings, held = Holdings(), []
    samples_of = calibrate_module.layer_samples

    def watching(*arguments: object, **options: object) -> object:
        held.append(holdings.now())
        return samples_of(*arguments, **options)

    monkeypatch.setattr(calibrate_module, "layer_samples", watching)
    gc.disable()  # Nothing but the job itself may see to that.
    try:
        make(home)
    finally:
        gc.enable()

    assert held == [[], []]


# -- the parts -----------------------------------------------------------------------------


def test_batch_computed_in_pieces_trains_the_same_head_but_for_rounding() -> None:
    trace, hidden = hidden_decides(400)
    settings = TrainingSettings(max_epochs=3)
    samples = layer_samples(
        trace, hidden, 0, num_experts=NUM_EXPERTS, routers=(), settings=settings
    )
    whole, same, pieces = (
        train_head(samples, settings, rows_at_once=rows).tensors() for rows in (None, 128, 24)
    )
    assert all(torch.equal(whole[name], same[name]) for name in whole)
    for name in whole:
        torch.testing.assert_close(pieces[name], whole[name], rtol=1e-2, atol=1e-3)


def test_far_head_trained_in_pieces_is_the_same_but_for_rounding() -> None:
    trace, hidden = hidden_decides(400)
    samples = FarSamples.of_layer(
        trace,
        hidden,
        0,
        num_experts=NUM_EXPERTS,
        is_validation=validation_prompts(trace.sequence, TRAINING),
    )
    whole, same, pieces = (
        train_far_head(samples, seed=0, rows_at_once=rows) for rows in (None, 256, 40)
    )
    assert whole is not None
    assert same is not None
    assert pieces is not None
    assert whole.targets == same.targets == pieces.targets
    assert all(torch.equal(same.tensors()[name], one) for name, one in whole.tensors().items())
    for name, one in whole.tensors().items():
        torch.testing.assert_close(pieces.tensors()[name], one, rtol=2e-2, atol=2e-3)


def test_pieces_are_of_the_size_asked_for_and_add_up() -> None:
    pieces = list(pieces_of(torch.arange(70), 32))
    assert [len(piece) for piece, _ in pieces] == [32, 32, 6]
    assert sum(share for _, share in pieces) == pytest.approx(1.0)
    assert [share for _, share in pieces_of(torch.arange(70), None)] == [1.0]


@pytest.mark.parametrize(
    ("lengths", "most", "groups"),
    [
        ([10, 10, 10], 30, [(0, 3)]),
        ([10, 10, 10], 29, [(0, 2), (2, 3)]),
        ([5, 9, 9, 50], 20, [(0, 2), (2, 3), (3, 4)]),
        ([50, 5, 5], 20, [(0, 1), (1, 3)]),
        ([90], 20, [(0, 1)]),
    ],
)
def test_groups_are_as_large_as_a_pass_may_be(
    lengths: list[int], most: int, groups: list[tuple[int, int]]
) -> None:
    assert [(each.start, each.stop) for each in groups_of(lengths, most)] == groups
