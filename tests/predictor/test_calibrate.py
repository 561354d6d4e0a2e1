"""Predictors of a tiny model: made, kept, gone on with, made anew, done without."""

import json

import pytest
from mira_assets.calibration import calibration_prompts
from mira_engine import calibrate as calibrate_module
from mira_engine.calibrate import STEP, calibrate, read_prompts
from mira_engine.engine import Engine
from mira_engine.errors import CancelledError, ConfigError, StoreError
from mira_engine.library import ModelLibrary
from mira_engine.predictor.bank import MANIFEST_FILE, PredictorBank
from mira_engine.predictor.train import TrainingSettings
from mira_engine.prepare import prepare
from mira_engine.runtime.recording import RecordingSettings
from mira_engine.types import Precision

PROMPTS = tuple(f"prompt number {n} of a few" for n in range(6))
QUICK = {
    "recording": RecordingSettings(max_reply_tokens=4, max_batch_prompts=2),
    "training": TrainingSettings(max_epochs=2),
}


def ignore(*args):
    """Takes progress and drops it."""


@pytest.fixture
def home(tiny_checkpoint, tmp_path):
    found = ModelLibrary(tmp_path).resolve(str(tiny_checkpoint("gpt_oss", tokenizer=True)))
    prepare(found, Precision.NESTED, on_progress=ignore)
    return found


def make(home, **changes):
    options = {"prompts": PROMPTS, "on_progress": ignore} | QUICK | changes
    return calibrate(home, Precision.NESTED, **options)


@pytest.fixture
def engines(monkeypatch):
    """Counts how often a model is loaded."""
    loaded = []
    load = Engine.load
    monkeypatch.setattr(
        Engine,
        "load",
        lambda *args, **kwargs: loaded.append(1) or load(*args, **kwargs),
    )
    return loaded


def test_calibrate_leaves_a_bank_and_nothing_else(home):
    seen = []
    bank = make(home, on_progress=lambda *args: seen.append(args))
    assert sorted(bank.choices) == [0, 1]  # Four layers, the last two predict nothing.
    assert {args[0] for args in seen} == {STEP}
    assert all(done <= total for _, done, total, _, _ in seen if total)
    assert {path.name for path in home.predictors_dir.iterdir()} == {
        MANIFEST_FILE,
        "predictors.safetensors",
    }
    assert PredictorBank.load(home.predictors_dir, bank.facts.revision).facts == bank.facts


def test_calibrate_again_loads_no_model(home, engines):
    first = make(home)
    assert make(home).facts == first.facts
    assert calibrate(home, Precision.NESTED, on_progress=ignore).facts == first.facts
    assert len(engines) == 1


def test_calibrate_with_other_prompts_makes_another_bank(home):
    first = make(home)
    assert make(home, prompts=PROMPTS[:4]).facts.recipe != first.facts.recipe


def test_calibrate_makes_stale_predictors_anew(home, engines):
    first = make(home)
    manifest = home.predictors_dir / MANIFEST_FILE
    content = json.loads(manifest.read_text())
    content["facts"]["revision"] = "other weights"
    manifest.write_text(json.dumps(content))
    assert make(home).facts == first.facts
    assert len(engines) == 2


def test_calibrate_twice_from_nothing_gives_the_same_files(home):
    hashes = []
    for _ in range(2):
        make(home)
        manifest = json.loads((home.predictors_dir / MANIFEST_FILE).read_text())
        hashes.append(manifest["sha256"])
        (home.predictors_dir / MANIFEST_FILE).unlink()
    assert hashes[0] == hashes[1]


@pytest.fixture
def trained(monkeypatch):
    """Counts how many layers are trained."""
    done = []
    train = calibrate_module.train_layer
    monkeypatch.setattr(
        calibrate_module, "train_layer", lambda *args, **kw: done.append(1) or train(*args, **kw)
    )
    return done


def details_until(stop_at):
    """A progress and a cancel flag that is raised where a detail begins with `stop_at`."""
    seen = []

    def tell(step, done, total, unit, detail):
        seen.append(detail)

    return seen, tell, lambda: bool(seen) and seen[-1].startswith(stop_at)


@pytest.mark.parametrize("stop_at", ["recording, batch 2", "training, layer 2"])
def test_cancelled_calibration_goes_on_where_it_stopped(home, engines, trained, stop_at):
    _, tell, is_cancelled = details_until(stop_at)
    with pytest.raises(CancelledError):
        make(home, on_progress=tell, is_cancelled=is_cancelled)
    assert home.is_ready(Precision.NESTED)
    work = home.predictors_dir / "work"
    kept = {path.name: path.stat().st_mtime_ns for path in work.iterdir()}
    assert "trace-000.safetensors" in kept
    assert ("layer-0000.safetensors" in kept) == stop_at.startswith("training")

    seen, tell, _ = details_until("never")
    make(home, on_progress=tell)
    assert not any(detail.startswith("recording, batch 1") for detail in seen)
    assert len(engines) == (2 if stop_at.startswith("recording") else 1)
    assert len(trained) == 2
    assert not work.exists()


def test_calibration_that_was_stopped_begins_anew_with_other_prompts(home):
    _, tell, is_cancelled = details_until("recording, batch 2")
    with pytest.raises(CancelledError):
        make(home, on_progress=tell, is_cancelled=is_cancelled)
    seen, tell, _ = details_until("never")
    make(home, prompts=PROMPTS[:5], on_progress=tell)
    assert any(detail.startswith("recording, batch 1") for detail in seen)


def test_model_that_is_not_prepared_is_refused(tiny_checkpoint, tmp_path):
    found = ModelLibrary(tmp_path).resolve(str(tiny_checkpoint("gpt_oss", tokenizer=True)))
    with pytest.raises(StoreError, match="not prepared"):
        make(found)


def test_model_with_two_moe_layers_gets_an_empty_bank(tiny_checkpoint, tmp_path):
    found = ModelLibrary(tmp_path).resolve(str(tiny_checkpoint("mixtral", tokenizer=True)))
    prepare(found, Precision.NESTED, on_progress=ignore)
    assert make(found).choices == {}


# -- prompts -------------------------------------------------------------------------------


def test_shipped_prompts_are_many_of_five_kinds_that_take_turns():
    prompts = calibration_prompts()
    assert len(prompts) >= 40
    assert len({prompt.kind for prompt in prompts}) == 5
    assert len({prompt.kind for prompt in prompts[:5]}) == 5
    assert len({prompt.text for prompt in prompts}) == len(prompts)
    assert all(prompt.text.strip() for prompt in prompts)


def test_prompt_file_is_paragraphs(tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("\n\nfirst\n  goes on\n \n\nsecond\n", encoding="utf-8")
    assert read_prompts(file) == ("first\n  goes on", "second")


@pytest.mark.parametrize(
    ("data", "hint"),
    [(b"", "0 prompts"), (b"only one\n", "1 prompts"), (b"\xff\xfe\n\nx", "UTF-8"), (None, "read")],
)
def test_prompt_file_that_cannot_be_used_is_refused(tmp_path, data, hint):
    file = tmp_path / "prompts.txt"
    if data is not None:
        file.write_bytes(data)
    with pytest.raises(ConfigError) as refused:
        read_prompts(file)
    assert str(file) in refused.value.message
    assert hint in refused.value.hint
