"""`mira-chat eval` from outside, on the built-in model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = [sys.executable, "-m", "mira_app.cli"]
TIMEOUT_S = 300


def mira_chat(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


@pytest.mark.builtin
def test_eval_of_the_built_in_model_tells_how_near_nested_is(builtin_data_dir, monkeypatch):
    monkeypatch.setenv("MIRA_CHAT_DATA_DIR", str(builtin_data_dir))
    done = mira_chat(
        "eval", "builtin", "--precision", "nested", "--tokens", "200", "--dtype", "bfloat16",
        "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert (report["num_texts"], report["num_tokens"]) == (3, 197)
    reference, nested = report["results"]
    assert (reference["precision"], nested["precision"]) == ("bf16", "nested")
    assert 3 < reference["perplexity"] < 150
    assert nested["perplexity"] == pytest.approx(reference["perplexity"], rel=0.05)
    assert 1e-6 < nested["kl"] < 0.02
    assert nested["top1_agreement"] > 0.9
    assert nested["greedy_tokens"] > 8
    assert "nested continues" in done.stderr


def test_eval_refuses_a_file_that_is_no_text(tiny_checkpoint, data_dir, tmp_path):
    model = tiny_checkpoint("olmoe", tokenizer=True)
    assert mira_chat("prepare", model, "--no-predictors").returncode == 0
    (tmp_path / "picture.txt").write_bytes(b"\x89PNG\x00\xff")
    done = mira_chat("eval", model, "--file", tmp_path / "picture.txt")
    assert done.returncode == 2
    assert "picture.txt" in done.stderr
    assert "not UTF-8" in done.stderr
    assert not done.stdout
    assert "Traceback" not in done.stderr
