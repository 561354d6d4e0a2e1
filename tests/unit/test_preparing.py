"""A preparation tells how far it is often enough, and refuses what excludes itself."""

from __future__ import annotations

from pathlib import Path

import pytest
from mira_engine.errors import ConfigError
from mira_engine.events import Event, PrepareModel, PrepareProgress
from mira_engine.library import ModelLibrary
from mira_engine.preparing import Preparation, _SparseProgress
from mira_engine.running_job import RunningJob


class FakeClock:
    """Stands still until it is set."""

    def __init__(self) -> None:
        self.now_s = 100.0

    def __call__(self) -> float:
        return self.now_s


@pytest.fixture
def told() -> list[Event]:
    return []


@pytest.fixture
def clock() -> FakeClock:
    return FakeClock()


@pytest.fixture
def report(told: list[Event], clock: FakeClock) -> _SparseProgress:
    return _SparseProgress("r", told.append, clock)


def test_progress_that_comes_too_soon_is_left_out(
    report: _SparseProgress, told: list[Event], clock: FakeClock
) -> None:
    report("fetch", 1, 100, "bytes", "a")
    report("fetch", 2, 100, "bytes", "a")
    clock.now_s += 0.25
    report("fetch", 3, 100, "bytes", "a")
    assert [event.done for event in told] == [1, 3]
    assert told[-1] == PrepareProgress(
        request_id="r", step="fetch", done=3, total=100, unit="bytes", detail="a"
    )


def test_first_and_last_of_every_step_are_told_at_once(
    report: _SparseProgress, told: list[Event]
) -> None:
    report("fetch", 1, 2, "files", "a")
    report("fetch", 2, 2, "files", "b")
    report("convert", 0, 4, "layers", "")
    report("convert", 1, 4, "layers", "")
    assert [(event.step, event.done) for event in told] == [
        ("fetch", 1),
        ("fetch", 2),
        ("convert", 0),
    ]


def test_draft_from_a_download_that_is_deleted_is_refused_before_anything_is_made(
    tmp_path: Path, told: list[Event]
) -> None:
    job = PrepareModel(
        request_id="r", model="none", draft_from=str(tmp_path), is_download_deleted=True
    )
    preparation = Preparation(job, ModelLibrary(tmp_path), told.append, RunningJob())
    with pytest.raises(ConfigError, match="cannot be deleted"):
        preparation.run()
    assert not told
    assert not list(tmp_path.iterdir())
