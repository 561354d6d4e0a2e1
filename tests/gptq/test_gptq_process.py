"""The process that quantises: what it says, and that it never outlives who waits for it."""

import os
import select
import subprocess
import sys
from pathlib import Path

import pytest
from mira_engine import gptq
from mira_engine.checkpoint import gptq_process, gptq_store
from mira_engine.checkpoint.files import MANIFEST_FILE
from mira_engine.checkpoint.gptq_child import do_job
from mira_engine.checkpoint.gptq_process import GptqJob, run_job
from mira_engine.checkpoint.progress import Progress
from mira_engine.checkpoint.store import StoreManifest
from mira_engine.errors import CancelledError, PrepareError
from mira_engine.types import Precision, Rounding

CHILD = Path(__file__).parent / "job_child.py"
EXIT_TIMEOUT_S = 120
"""Only a failure takes so long."""


def job_of(tmp_path, **changes):
    fields = {
        "checkpoint_dir": str(tmp_path / "no-model"),
        "traces_dir": str(tmp_path),
        "store_dir": str(tmp_path / "store"),
        "precision": Precision.INT4,
        "source": "s",
        "revision": "r",
        "calibration": "c",
        "num_threads": 1,
    }
    return GptqJob(**fields | changes)


def test_draft_is_made_in_a_process_of_its_own(fake_library, home_of, make):
    home = home_of()
    seen = []
    make(home, on_progress=lambda *args: seen.append(args))
    manifest = StoreManifest.from_file(home.store_dir(Precision.NESTED) / MANIFEST_FILE)
    assert manifest.rounding is Rounding.GPTQ
    assert [args[1] for args in seen if args[3] == "experts"] == list(range(16))
    assert "mira_engine.checkpoint.gptq_core" not in sys.modules


def test_error_there_is_raised_here(fake_library, tmp_path, monkeypatch):
    """The one that comes first: the library is there, and what it imports is not."""
    broken = tmp_path / "broken" / "gptqmodel"
    broken.mkdir(parents=True)
    (broken / "__init__.py").write_text("import no_such_dependency")
    path = os.pathsep.join([str(broken.parent), os.environ["PYTHONPATH"]])
    monkeypatch.setenv("PYTHONPATH", path)
    with pytest.raises(PrepareError, match="gptqmodel cannot be used: .*no_such_dependency"):
        run_job(job_of(tmp_path), Progress())


def test_process_that_dies_leaves_the_model_ready_and_goes_on(
    fake_library, home_of, make, monkeypatch
):
    home = home_of()
    monkeypatch.setenv("FAKE_GPTQ", "die")
    with pytest.raises(PrepareError, match="ended with status 9"):
        make(home)
    assert home.is_ready(Precision.NESTED)
    assert list(gptq_store.unfinished_dir(home, Precision.NESTED).glob("*.partial")) == []
    monkeypatch.delenv("FAKE_GPTQ")
    monkeypatch.setattr(gptq, "run_job", do_job)
    seen = []
    make(home, on_progress=lambda *args: seen.append(args))
    assert {args[3] for args in seen} == {"experts"}  # The recording was kept.


def test_cancel_ends_a_process_that_says_nothing(
    fake_library, home_of, make, monkeypatch, tmp_path
):
    home = home_of()
    pid_file = tmp_path / "pid"
    monkeypatch.setenv("FAKE_GPTQ", "wait")
    monkeypatch.setenv("FAKE_GPTQ_PID", str(pid_file))
    with pytest.raises(CancelledError):
        make(home, is_cancelled=pid_file.exists)
    with pytest.raises(ProcessLookupError):
        os.kill(int(pid_file.read_text()), 0)


@pytest.mark.skipif(not hasattr(os, "pidfd_open"), reason="no pidfd_open here")
def test_process_ends_when_the_one_that_waits_is_killed(
    fake_library, home_of, make, monkeypatch, tmp_path
):
    home = home_of()
    pid_file = tmp_path / "pid"
    jobs = []
    monkeypatch.setattr(gptq, "run_job", lambda job, progress: jobs.append(job))
    with pytest.raises(PrepareError):
        make(home)  # Up to the process: there is no finished store then.
    parent = subprocess.Popen(
        [sys.executable, str(CHILD)],
        env=os.environ | {"FAKE_GPTQ": "wait", "FAKE_GPTQ_PID": str(pid_file)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with parent:
        parent.stdin.write(jobs[0].to_line())
        parent.stdin.flush()
        assert parent.stdout.readline() == "waiting\n"
        process = os.pidfd_open(int(pid_file.read_text()))
        parent.kill()
    try:
        assert select.select([process], [], [], EXIT_TIMEOUT_S)[0] == [process]
    finally:
        os.close(process)


def test_environment_has_the_workers_that_two_cores_need():
    assert gptq_process._ENVIRONMENT["GPTQMODEL_CPU_WORKERS"] == "2"
