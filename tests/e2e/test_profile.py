"""`mira-chat profile` from outside, and what the next reply makes of its result."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = [sys.executable, "-m", "mira_app.cli"]
TIMEOUT_S = 300
ROOMY = ("--budget", "300%")
"""Room for the draft of a tiny model, whose records are mostly padding."""


def mira_chat(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def test_quick_profile_picks_the_fastest_k_and_the_next_reply_uses_it(tiny_checkpoint, data_dir):
    model = tiny_checkpoint("olmoe", tokenizer=True)
    done = mira_chat("profile", model, *ROOMY, "--quick", "--json")
    assert done.returncode == 0, done.stderr
    profile = json.loads(done.stdout)
    assert [result["num_draft_tokens"] for result in profile["results"]] == [0, 2, 4, 8]
    assert all(result["num_replies"] == 5 for result in profile["results"])
    fastest = min(profile["results"], key=lambda result: result["tpot_s"])
    assert profile["best"] == fastest["num_draft_tokens"]
    a = profile["acceptance"]
    assert 0 < a < 1
    assert profile["expected_accepted"] == pytest.approx(a / (1 - a))
    assert "profile: 20 of 20 replies · K 8" in done.stderr

    (path,) = data_dir.glob("models/*/profiles/*")
    raw = json.loads(path.read_text())
    raw["profile"]["best"] = 2  # whatever was fastest, this is what has to be taken up
    path.write_text(json.dumps(raw))
    run = mira_chat("run", "--model", model, "--max-tokens", "12", "--json", *ROOMY, "hello")
    answer = json.loads(run.stdout)
    assert answer["plan"]["num_draft_tokens"] == 2
    assert answer["stats"]["num_drafted"] > 0
    assert answer["stats"]["governor_reason"].startswith("K ")
