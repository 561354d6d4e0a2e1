"""`mira-chat plan` from outside, with the real engine process."""

from __future__ import annotations

import json
import subprocess
import sys

TIMEOUT_S = 300


def plan(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "mira_app.cli", "plan", *map(str, arguments)],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


def test_plan_of_the_builtin_model_needs_no_model_and_keeps_the_rates(data_dir):
    done = plan("--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert sum(row["is_chosen"] for row in made["alternatives"]) == 1
    assert not (data_dir / "models").exists()
    kept = json.loads((data_dir / "cache/machine.json").read_text())
    assert any(name.startswith("link_bytes_per_s") for name in kept)
    assert [path.name for path in data_dir.iterdir() if path.name.startswith(".link")] == []


def test_plan_of_a_folder_with_only_its_configuration(tiny_checkpoint, tmp_path, data_dir):
    folder = tmp_path / "only-config"
    folder.mkdir()
    config = (tiny_checkpoint("olmoe") / "config.json").read_text()
    (folder / "config.json").write_text(config)
    done = plan(folder, "--machine", "rtx-3070")
    assert done.returncode == 0, done.stderr
    assert "only-config on NVIDIA GeForce RTX 3070" in done.stdout
    assert "mode: resident" in done.stdout


def test_plan_that_fits_nothing_prints_the_table_and_exits_2(data_dir):
    done = plan("--machine", "rtx-3070", "--memory", "64MiB")
    assert done.returncode == 2
    assert "on-demand, nested" in done.stdout
    assert "MiB short" in done.stderr
    assert "hint: Give at least --memory" in done.stderr
    assert "Traceback" not in done.stderr


def test_simulation_on_cards_plans_with_the_engine_and_needs_no_model(data_dir):
    cards = ("--card", "rtx-3070", "--card", "rtx-4090", "--memory", "1GiB")
    budgets = ("--budget", "50MiB", "--budget", "40%", "--max-tokens", "4")
    policies = ("--policy", "lru", "--policy", "mira+lookahead", "--json")
    done = subprocess.run(
        [sys.executable, "-m", "mira_app.cli", "simulate", *cards, *budgets, *policies],
        capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    assert (told["num_layers"], told["num_experts"], told["top_k"]) == (30, 16, 2)
    assert "SmolLM2" in told["model"]
    places = dict.fromkeys((row["machine"], row["memory"]) for row in told["rows"])
    assert [memory for _, memory in places] == 2 * [
        "1.0 GiB of memory, 50.0 MiB for experts", "1.0 GiB of memory, 40% for experts",
    ]  # fmt: skip
    for row in told["rows"]:
        if row["memory"].endswith("40% for experts"):
            # A record of both planes is a little more than the expert in INT8.
            assert 0.36 < row["slots_per_layer"] / 16 <= row["memory_share"] <= 0.4
    assert not (data_dir / "models").exists()
