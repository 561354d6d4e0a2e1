"""`mira-chat pull`, `models` and `rm` from outside, with the real engine and a hub here."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Mapping

import hub_server
import pytest
from programs import begun

PROGRAM = [sys.executable, "-m", "mira_app.cli"]
REPO = "owner/tiny"
TIMEOUT_S = 300


@pytest.fixture
def hub(tiny_checkpoint, tmp_path, data_dir) -> Iterator[hub_server.FakeHub]:
    server = hub_server.FakeHub().start()
    server.add(REPO, tiny_checkpoint("qwen3_moe", tokenizer=True, max_shard_size="100KB"))
    yield server
    server.close()


@pytest.fixture
def environment(hub, tmp_path) -> Mapping[str, str]:
    """The variables of a child that meets that hub alone, with an empty cache and no token."""
    kept = {name: value for name, value in os.environ.items() if name != "HF_TOKEN"}
    return kept | {
        "HF_ENDPOINT": hub.endpoint,
        "HF_HOME": str(tmp_path / "hub-home"),
        "HF_HUB_OFFLINE": "0",
    }


@pytest.fixture
def mira_chat(environment):
    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            [*PROGRAM, *arguments],
            env=environment, capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip

    return run


def listed(mira_chat) -> dict[str, dict]:
    done = mira_chat("models", "--json")
    assert done.returncode == 0, done.stderr
    return {each["model"]: each for each in json.loads(done.stdout)}


def test_model_is_pulled_after_an_interrupt_listed_and_removed(
    hub, environment, mira_chat, tmp_path, data_dir
):
    # A shard that stops half-way, so that the interrupt meets the download.
    (shard,) = [name for name in hub.repos[REPO].at("main")[1] if name.startswith("model-00003")]
    hub.faults[shard].append(hub_server.stall(0.5))
    command = [*PROGRAM, "pull", REPO, "--no-predictors", "--plain"]
    with begun(command, env=environment) as child:
        assert hub.stalled.wait(TIMEOUT_S)
        child.send_signal(signal.SIGINT)
        _, errors = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 130, errors.decode()
    assert b"Traceback" not in errors
    entry = listed(mira_chat)[REPO]
    assert (entry["is_ready"], entry["is_removable"]) == (False, True)

    hub.released.set()
    done = mira_chat("pull", REPO, "--no-predictors", "--plain")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    space = next(number for number, line in enumerate(lines) if line.startswith("note: space: "))
    assert "the download is kept" in lines[space]
    assert " free at " in lines[space]
    assert lines[space + 1].startswith("prepare: download, ")
    assert f"{REPO} is ready in nested." in done.stderr.splitlines()[-1]
    entry = listed(mira_chat)[REPO]
    assert entry["is_ready"]
    assert entry["is_size_measured"]
    assert entry["prepared_bytes"] > 0

    removed = mira_chat("rm", REPO, "--yes")
    assert removed.returncode == 0, removed.stderr
    assert removed.stderr.startswith(f"Removed {REPO}: ")
    assert REPO not in listed(mira_chat)
    assert not list((data_dir / "models").glob("owner--tiny*"))
    cached = [path for path in (tmp_path / "hub-home").rglob("*") if path.is_file()]
    assert not [path for path in cached if path.stat().st_size >= hub_server.LFS_BYTES]


def test_model_pulled_with_delete_download_is_ready_and_the_cache_empty(mira_chat, tmp_path, hub):
    done = mira_chat("pull", REPO, "--delete-download", "--no-predictors", "--plain")
    assert done.returncode == 0, done.stderr
    lines = done.stderr.splitlines()
    space = next(number for number, line in enumerate(lines) if line.startswith("note: space: "))
    assert "each downloaded file is deleted as soon as it is converted" in lines[space]
    assert not any(line.startswith("prepare: download, ") for line in lines[:space])
    assert lines[-1] == f"{REPO} is ready in nested."
    assert not list((tmp_path / "hub-home").rglob("model-*"))
