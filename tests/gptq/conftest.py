"""A tiny model that is prepared, a stand-in for GPTQModel, and a job in this process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from mira_engine import gptq
from mira_engine.checkpoint.gptq_child import do_job
from mira_engine.library import ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.runtime.recording import RecordingSettings
from mira_engine.types import Precision

FAKE_PACKAGE = Path(__file__).parent / "fake_package"
PROMPTS = tuple(f"prompt number {n} of a few" for n in range(4))
RECORDING = RecordingSettings(max_reply_tokens=4, max_batch_prompts=2)


@pytest.fixture
def fake_library(monkeypatch):
    """Puts the stand-in before whatever is installed, here and in child processes."""
    before = os.environ.get("PYTHONPATH", "")
    monkeypatch.syspath_prepend(FAKE_PACKAGE)
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(FAKE_PACKAGE), before])))
    _forget()
    yield
    _forget()


def _forget():
    for name in [name for name in sys.modules if name.partition(".")[0] == "gptqmodel"]:
        del sys.modules[name]
    sys.modules.pop("mira_engine.checkpoint.gptq_core", None)


@pytest.fixture
def here(fake_library, monkeypatch):
    """Has jobs done in this process: the same code, without the seconds that a process takes."""
    jobs = []

    def run(job, progress):
        jobs.append(job)
        do_job(job, progress)

    monkeypatch.setattr(gptq, "run_job", run)
    return jobs


@pytest.fixture
def home_of(tiny_checkpoint, tmp_path):
    """`(family="gpt_oss", precision=NESTED) -> ModelHome`, prepared, rounded to nearest."""

    def make(family="gpt_oss", precision=Precision.NESTED):
        home = ModelLibrary(tmp_path).resolve(str(tiny_checkpoint(family, tokenizer=True)))
        prepare(home, precision, on_progress=lambda *args: None)
        return home

    return make


@pytest.fixture
def make():
    """Makes a draft of a few prompts; returns the notices."""

    def run(home, precision=Precision.NESTED, **changes):
        notices = []
        options = {
            "prompts": PROMPTS,
            "recording": RECORDING,
            "on_progress": lambda *args: None,
            "on_notice": notices.append,
        }
        gptq.make_gptq_draft(home, precision, **options | changes)
        return notices

    return run
