"""A download that is cancelled or killed, and finished by the next one."""

import os
import random
import signal
import threading
import time
from pathlib import Path

import hub_server
import pytest
from hub_checks import check_finished, ignore, make
from hub_scenes import REPO, SHARD, SHARDS, forking_child
from mira_engine.checkpoint import hub, hub_download
from mira_engine.checkpoint.hub import Patience
from mira_engine.errors import CancelledError
from mira_engine.prepare import prepare
from mira_engine.types import Precision

CHILD = Path(__file__).parent / "hub_child.py"


@pytest.fixture
def server(hub_with_model):
    return hub_with_model


@pytest.fixture
def library(hub_library):
    return hub_library


def kept_bytes():
    """Bytes of the files that have not come whole."""
    partials = hub.cached_repo_dir(REPO).rglob(f"*{hub_download.PARTIAL_SUFFIX}")
    return sum(path.stat().st_size for path in partials)


def test_cancel_during_a_stall_ends_at_once_and_keeps_what_came(library, server, published, whole):
    server.faults[SHARD] = [hub_server.stall(0.5)]
    others = {name for name in SHARDS if name != SHARD}
    patience = Patience(read_timeout_s=60, first_wait_s=60)
    cancelled_at = []

    def is_cancelled():
        blobs = list(hub.cached_repo_dir(REPO).glob("snapshots/*/model-*"))
        if others <= {path.name for path in blobs} and kept_bytes() and not cancelled_at:
            cancelled_at.append(time.monotonic())
        return bool(cancelled_at)

    with pytest.raises(CancelledError):
        prepare(
            library.resolve(REPO), Precision.NESTED,
            on_progress=ignore, is_cancelled=is_cancelled, patience=patience,
        )  # fmt: skip
    assert time.monotonic() - cancelled_at[0] < 30
    left = [each for each in threading.enumerate() if each.name.startswith("mira-hub")]
    for thread in left:
        thread.join(timeout=60.0)  # Told to end; how soon it does is the scheduler's.
    assert not any(thread.is_alive() for thread in left)
    assert kept_bytes() > 0
    make(library)
    assert server.bodies(SHARD)[-1].startswith("bytes=")
    check_finished(library, published, whole)


def test_cancel_while_the_hub_does_not_answer_ends_at_once(library, server):
    server.faults["api"] = [hub_server.stall(0)]
    cancelled_at = []

    def is_cancelled():
        if server.stalled.is_set():
            cancelled_at.append(time.monotonic())
        return bool(cancelled_at)

    with pytest.raises(CancelledError):
        make(library, is_cancelled=is_cancelled)
    assert time.monotonic() - cancelled_at[0] < 30, "not only when its patience ends"


@pytest.fixture
def child(server, tmp_path):
    with forking_child(CHILD, server, tmp_path) as process:
        yield process


def start(child, data_dir, stop_at=-1):
    child.stdin.write(f"{data_dir} {REPO} {stop_at}\n")
    child.stdin.flush()
    word, pid = child.stdout.readline().split()
    assert word == "pid"
    return int(pid)


def kill(child, pid):
    os.kill(pid, signal.SIGKILL)
    assert child.stdout.readline().split() == ["ended", str(-signal.SIGKILL)]


def test_killed_at_ten_moments_and_run_again_ends_with_the_same_bytes(
    child, server, library, published, whole, tmp_path
):
    moments = random.Random(6)
    shards = SHARDS
    num_converted = 16
    data_dir, repo_dir = tmp_path / "data", hub.cached_repo_dir(REPO)
    for _ in range(5):
        server.stalled.clear()
        missing = [
            name
            for name in shards
            if not (
                repo_dir / "blobs" / hub_server.etag_of((published / name).read_bytes())
            ).exists()
        ]
        passes = moments.choice(missing)
        for name in missing:
            if name != passes:
                server.faults[name] = [hub_server.stall(moments.random())]
        pid = start(child, data_dir)
        assert server.stalled.wait(60)
        kill(child, pid)
        server.released.set()
        server.released = threading.Event()
        server.faults.clear()
        assert not library.resolve(REPO).ready_precisions
        for path in repo_dir.glob("snapshots/*/model-*"):
            assert path.read_bytes() == (published / path.name).read_bytes()
    for _ in range(5):
        pid = start(child, data_dir, moments.randrange(num_converted))
        assert child.stdout.readline() == "stopped\n"
        kill(child, pid)
        assert not library.resolve(REPO).ready_precisions
    start(child, data_dir)
    assert child.stdout.readline() == "done\n"
    assert child.stdout.readline() == "ended 0\n"
    check_finished(library, published, whole)
