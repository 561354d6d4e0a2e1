"""The engine process and the command line make a GPTQ draft where that is asked."""

import contextlib
import io
import sys

import pytest
from mira_app import cli, wiring
from mira_engine import gptq, wire
from mira_engine.checkpoint import gptq_process
from mira_engine.events import Notice, PrepareDone, PrepareModel, PrepareProgress, RequestFailed
from mira_engine.library import ModelLibrary
from mira_engine.preparing import Preparation
from mira_engine.runtime.recording import RecordingSettings
from mira_engine.types import Precision, Rounding
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


def test_worker_makes_the_draft_from_the_prompts_given(ask, here, tmp_path, model, monkeypatch):
    short = RecordingSettings(max_reply_tokens=2)
    monkeypatch.setitem(gptq.make_gptq_draft.__kwdefaults__, "recording", short)
    file = tmp_path / "prompts.txt"
    file.write_text("one prompt\n\nanother\n")
    events = ask(draft=Rounding.GPTQ, calibration=str(file))
    assert isinstance(events[-1], PrepareDone)
    steps = [event.step for event in events if isinstance(event, PrepareProgress)]
    assert steps[-1] == "draft"
    assert "predictors" not in steps
    assert any(event.code == "gptq-memory" for event in events if isinstance(event, Notice))
    home = ModelLibrary(tmp_path).resolve(model)
    assert home.store_dir(Precision.NESTED) == home.gptq_store_dir(Precision.NESTED)
    events = ask(draft=Rounding.NEAREST)
    assert isinstance(events[-1], PrepareDone)
    assert home.store_dir(Precision.NESTED) == home.nearest_store_dir(Precision.NESTED)


def test_worker_without_the_library_refuses_before_anything_is_made(
    ask, tmp_path, model, monkeypatch
):
    monkeypatch.setattr(gptq_process, "PACKAGE", "no_such_package_here")
    (failed,) = ask(draft=Rounding.GPTQ)
    assert isinstance(failed, RequestFailed)
    assert failed.code == "PrepareError"
    assert "mira-chat[gptq]" in failed.hint
    assert not ModelLibrary(tmp_path).resolve(model).root.exists()


@pytest.mark.parametrize("fields", [{"draft": Rounding.GPTQ}, {"draft_from": "some folder"}])
def test_worker_refuses_deletion_before_a_draft_of_the_same_weights(
    ask, fake_library, tmp_path, model, fields
):
    (failed,) = ask(is_download_deleted=True, **fields)
    assert isinstance(failed, RequestFailed)
    assert failed.code == "ConfigError"
    assert "cannot be deleted" in failed.message
    assert "--delete-download" in failed.hint
    assert not ModelLibrary(tmp_path).resolve(model).root.exists()


@pytest.mark.parametrize(
    ("fields", "is_deleted"),
    [
        ({"draft": Rounding.GPTQ}, False),
        ({"draft_from": "some folder"}, False),
        ({"draft": Rounding.NEAREST}, None),
        ({"draft": Rounding.NEAREST, "is_download_deleted": True}, True),
        ({}, None),
    ],
)
def test_worker_keeps_the_download_of_itself_only_where_a_draft_is_made_of_it(
    ask, fake_library, monkeypatch, fields, is_deleted
):
    asked = []
    monkeypatch.setattr(
        "mira_engine.prepare.prepare", lambda home, precision, **options: asked.append(options)
    )
    monkeypatch.setattr(Preparation, "_make_draft", lambda *args: None)
    assert isinstance(ask(**fields)[-1], PrepareDone)
    assert [options["is_download_deleted"] for options in asked] == [is_deleted]


class FakeAnswerer:
    """Takes what a command asks for."""

    def __init__(self):
        self.asked = []

    def prepare(self, **options):
        self.asked.append(options)


@pytest.fixture
def answerer(monkeypatch, data_dir):
    fake = FakeAnswerer()
    monkeypatch.setattr(wiring, "make_client", contextlib.nullcontext)
    monkeypatch.setattr(wiring, "make_answerer", lambda *args, **kwargs: fake)
    return fake


@pytest.mark.parametrize(
    ("flags", "draft"),
    [
        ([], None),
        (["--draft", "gptq"], Rounding.GPTQ),
        (["--draft", "nearest"], Rounding.NEAREST),
        (["--draft", "gptq", "--no-predictors", "--calibration", "some.txt"], Rounding.GPTQ),
    ],
)
def test_command_passes_the_draft_on(answerer, monkeypatch, flags, draft):
    monkeypatch.setattr(sys, "argv", ["mira-chat", "prepare", "builtin", *flags])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    (asked,) = answerer.asked
    assert asked["draft"] is draft


def test_command_passes_the_folder_of_given_codes_on(answerer, monkeypatch, tmp_path):
    monkeypatch.setattr(
        sys, "argv", ["mira-chat", "prepare", "builtin", "--draft-from", str(tmp_path)]
    )
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert not ended.value.code
    assert answerer.asked[0]["draft_from"] == str(tmp_path)
    monkeypatch.setattr(sys, "argv", [*sys.argv, "--draft", "gptq"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert len(answerer.asked) == 1


def test_command_refuses_another_draft(answerer, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", ["mira-chat", "prepare", "builtin", "--draft", "awq"])
    with pytest.raises(SystemExit) as ended:
        cli.main()
    assert ended.value.code == 2
    assert answerer.asked == []
