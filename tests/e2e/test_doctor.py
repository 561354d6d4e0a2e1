"""`mira-chat doctor` with the real engine, on a machine where nothing is prepared."""

from __future__ import annotations

import json
import subprocess
import sys

TIMEOUT_S = 300


def test_doctor_tells_program_engine_and_model(tiny_checkpoint, data_dir):
    model = tiny_checkpoint("qwen3_moe", tokenizer=True)
    done = subprocess.run(
        [sys.executable, "-m", "mira_app.cli", "doctor", str(model), "--json"],
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.stdout, done.stderr
    facts = {fact["code"]: fact for fact in json.loads(done.stdout)["facts"]}
    assert {"mira-chat", "python", "engine", "torch", "link", "direct-io", "model"} <= set(facts)
    assert facts["link"]["value"] > 0
    assert facts["model"]["hint"] == f"Run: mira-chat prepare {model}"
    assert all(fact["hint"] for fact in facts.values() if fact["mark"] != "ok")
    assert done.returncode == int(any(fact["mark"] == "problem" for fact in facts.values()))
