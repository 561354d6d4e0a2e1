"""The engine process makes predictors where that is asked, and never fails for them."""

import io

import pytest
from mira_engine import calibrate as calibrate_module
from mira_engine import wire
from mira_engine.errors import BudgetError, CancelledError
from mira_engine.events import Notice, PrepareDone, PrepareModel, PrepareProgress, RequestFailed
from mira_engine.library import ModelLibrary
from mira_engine.worker import EventWriter, Worker


@pytest.fixture
def model(tiny_checkpoint):
    return str(tiny_checkpoint("gpt_oss", tokenizer=True))


@pytest.fixture
def ask(tmp_path, model):
    def run(**fields):
        stream = io.StringIO()
        worker = Worker(ModelLibrary(tmp_path), EventWriter(stream))
        worker._run_job(PrepareModel(request_id="r", model=model, **fields))
        return [wire.decode(line) for line in stream.getvalue().splitlines()]

    return run


@pytest.fixture
def home(tmp_path, model):
    return ModelLibrary(tmp_path).resolve(model)


def steps(events):
    return {event.step for event in events if isinstance(event, PrepareProgress)}


def test_preparation_makes_predictors_only_where_asked(ask, home, tmp_path):
    file = tmp_path / "prompts.txt"
    file.write_text("one prompt\n\nanother\n\na third\n")
    events = ask()
    assert isinstance(events[-1], PrepareDone)
    assert "predictors" not in steps(events)
    assert not home.predictors_dir.exists()
    events = ask(is_predicting=True, calibration=str(file))
    assert isinstance(events[-1], PrepareDone)
    assert steps(events) == {"predictors"}
    assert not any(isinstance(event, Notice) for event in events)
    assert (home.predictors_dir / "predictors.json").exists()


def test_prompt_file_that_is_missing_is_told_before_anything_is_made(ask, home, tmp_path):
    (failed,) = ask(is_predicting=True, calibration=str(tmp_path / "none.txt"))
    assert isinstance(failed, RequestFailed)
    assert failed.code == "ConfigError"
    assert not home.root.exists()


def test_predictors_that_cannot_be_made_are_a_notice(ask, home, monkeypatch):
    def refuse(*args, **kwargs):
        raise BudgetError("Too little memory.", hint="Close something.")

    monkeypatch.setattr(calibrate_module, "calibrate", refuse)
    events = ask(is_predicting=True)
    assert isinstance(events[-1], PrepareDone)
    (notice,) = (event for event in events if isinstance(event, Notice))
    assert notice.code == "no-predictors"
    assert "Too little memory." in notice.text
    assert home.ready_precisions


def test_cancelled_predictors_end_the_request_as_cancelled(ask, home, monkeypatch):
    def stop(*args, **kwargs):
        raise CancelledError("Stopped.")

    monkeypatch.setattr(calibrate_module, "calibrate", stop)
    failed = ask(is_predicting=True)[-1]
    assert isinstance(failed, RequestFailed)
    assert failed.code == "CancelledError"
    assert home.ready_precisions
