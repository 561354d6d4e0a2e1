"""The script for a card also runs where there is none, as far as that goes."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton", reason="triton has no wheel for this system")

SECTIONS = {
    "kernels",
    "kernel times",
    "link",
    "captured draft",
    "truths",
    "decoding",
    "transformers with accelerate",
}
CARD_SECTIONS = {"kernel times", "link", "captured draft"}


@dataclass(frozen=True)
class Checked:
    """A run of the script."""

    printed: str
    document: dict[str, Any]
    written: dict[str, Any]

    def results(self, section: str) -> dict[str, Any]:
        return self.document["results"][section]


@pytest.fixture(scope="module")
def checked(tmp_path_factory: pytest.TempPathFactory) -> Checked:
    """Runs the script once; tests have the interpreter chosen, so it sees no card."""
    path = tmp_path_factory.mktemp("check") / "out.json"
    script = Path(__file__).with_name("check.py")
    done = subprocess.run(
        [sys.executable, str(script), "--tokens", "2", "--json", str(path)],
        capture_output=True,
        text=True,
        check=False,
        env=os.environ | {"TRITON_INTERPRET": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    document = json.loads(done.stdout.splitlines()[-1])
    return Checked(done.stdout, document, json.loads(path.read_text(encoding="utf-8")))


def test_check_without_a_card_has_every_section(checked: Checked) -> None:
    states = {name: about["state"] for name, about in checked.document["sections"].items()}

    assert checked.document == checked.written
    assert checked.document["card"] is None
    assert "interpreter" in checked.printed
    assert set(states) == SECTIONS
    assert {name for name, state in states.items() if state == "needs a card"} == CARD_SECTIONS
    assert {states[name] for name in SECTIONS - CARD_SECTIONS} == {"done"}
    assert all(name in checked.printed for name in SECTIONS)


def test_check_compares_every_format_and_form(checked: Checked) -> None:
    errors = checked.results("kernels")

    assert set(errors) == {
        "bf16", "int8", "int4", "nested", "clamped_gate", "squared_relu", "draft",
    }  # fmt: skip
    assert 0 < errors["int4"] < 2e-2


def test_check_finds_every_truth_true(checked: Checked) -> None:
    truths = checked.results("truths")

    assert len(truths) == 5
    assert [found["holds"] for found in truths.values()] == [True, True, True, True, None]
    assert checked.printed.count(" true ") >= 4
    drafts = [found for name, found in truths.items() if name.startswith("K = 3")]
    # Where everything stands, or nothing, a fault in accepting would not show.
    assert all(0 < found["num_accepted"] < found["num_drafted"] for found in drafts)


def test_check_decodes_every_row_under_every_budget_and_link(checked: Checked) -> None:
    found = checked.results("decoding")
    runs = found["runs"]

    assert len(runs) == 2 * 4 + 1
    for name, figures in runs.items():
        assert figures["num_tokens"] >= 2, name
        assert 0 < figures["hit_rate"] < 1, name
        assert figures["mb_per_token"] > 0, name
        assert figures["ms_per_token"] is None, name  # Nothing is timed in the interpreter.
    kinds = {(figures["k"], figures["draft"]) for figures in runs.values()}
    assert kinds == {(0, None), (2, "cached"), (3, "all")}
    assert all("set" in found["set"][what] for what in ("acceptance", "fidelity"))
    assert "routing" in found["set"]
    assert found["computes"]


def test_check_shows_a_timeline_of_lanes(checked: Checked) -> None:
    timelines = checked.results("decoding")["timelines"]

    assert [name.rpartition(", ")[2] for name in timelines] == ["lru", "+planner"]
    for made in timelines.values():
        assert made["num_copies"] > 0
        assert {span[0] for span in made["spans"]} >= {"compute", "demand"}
        assert all(start < end for _, _, start, end in made["spans"])
        assert made["drawing"][1] in checked.printed
    assert "draft" in {span[1] for span in timelines[list(timelines)[1]]["spans"]}


def test_check_divides_the_model_as_accelerate_does(checked: Checked) -> None:
    found = checked.results("transformers with accelerate")

    assert (found["num_resident"], found["num_offloaded"]) == (0, 2)
    assert found["ms_per_token"] is None


def test_check_names_every_target_as_not_measured(checked: Checked) -> None:
    targets = checked.document["targets"]

    assert len(targets) == 6 + 1 + 1 + 4 + 1
    assert all(target["is_met"] is None for target in targets)
    assert checked.printed.count("not measured") == len(targets)
    assert {target["limit"] for target in targets} == {0.7, 0.4, 0.9, 2.0, 0.6, 10.0}
