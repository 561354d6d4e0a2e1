"""The commands that measure: what `bench` and `eval` hand on, print and refuse."""

from __future__ import annotations

import dataclasses
import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from fake_engine import PLAN
from mira_engine import api
from mira_engine.events import DepthResult

PROGRAM = Path(__file__).parents[1] / "app_fakes.py"
TIMEOUT_S = 300


@pytest.fixture
def mira(tmp_path):
    """The program as a process, against the fake engine."""

    def run(*args: str, modes: str = "", stdin: str = ""):
        return subprocess.run(
            [sys.executable, str(PROGRAM), str(tmp_path / "marker"), modes, *args],
            input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S,
        )  # fmt: skip

    return run


# -- bench ------------------------------------------------------------------------------------


def test_bench_reports_medians_of_shipped_prompts(mira):
    done = mira("bench", "--quick", "--json")
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert [each["kind"] for each in report["replies"]] == ["continuation", "chat", "code"]
    assert report["medians"] == {
        "ttft_s": 0.25, "tokens_per_s": 8.0, "hit_rate": 0.9, "stall_ms_per_token": 2.0,
        "acceptance_rate": 0.75,
    }  # fmt: skip
    table = mira("bench", "--quick").stdout.splitlines()
    assert table[0].startswith("Fake MoE, loaded in")
    assert len(table) == 2 + 3 + 1
    assert table[-1].split() == ["median", "0.25", "8.00", "90.0%", "2.00", "75.0%"]


def test_bench_medians_leave_out_replies_without_a_draft():
    from mira_app.benchmark import BenchReply, BenchReport

    def reply(drafted: int, accepted: int) -> BenchReply:
        stats = api.ReplyStats(num_new_tokens=2, num_drafted=drafted, num_accepted=accepted)
        return BenchReply(kind="chat", prompt="p", stats=stats)

    def median(*replies: BenchReply) -> float | None:
        return BenchReport(loaded=None, replies=replies).medians["acceptance_rate"]

    assert median(reply(0, 0), reply(4, 3), reply(4, 1)) == 0.5
    assert median(reply(0, 0)) is None
    loaded = api.ModelLoaded(
        request_id="r", model="m", title="M", context_length=1, plan=PLAN, load_s=0.0
    )
    report = BenchReport(loaded=loaded, replies=(reply(0, 0),))
    assert [line.endswith("no draft") for line in report.lines()[2:]] == [True, True]
    plain = json.loads(report.to_json())
    assert plain["medians"]["acceptance_rate"] is plain["replies"][0]["acceptance_rate"] is None


def test_reply_that_drafted_nothing_has_no_acceptance_anywhere():
    from mira_app.figures import derived, profile_figures, profile_lines, stats_line

    stats = api.ReplyStats(num_new_tokens=9, decode_s=1.0)
    assert derived(stats)["acceptance_rate"] is derived(stats)["accepted_per_round"] is None
    assert "| no draft |" in stats_line(stats, budget_bytes=1)
    drafted = dataclasses.replace(stats, num_rounds=3, num_drafted=6)
    assert derived(drafted)["acceptance_rate"] == derived(drafted)["accepted_per_round"] == 0.0
    assert "| accepted 0.00 per round |" in stats_line(drafted, budget_bytes=1)
    result = DepthResult(num_draft_tokens=0, tpot_s=0.1, num_replies=1)
    profile = api.KProfile(best=0, acceptance=0.0, results=(result,))
    assert profile_figures(profile) == {"acceptance": None, "expected_accepted": None}
    assert not any("acceptance" in line for line in profile_lines(profile))


# -- eval -------------------------------------------------------------------------------------


def test_eval_prints_the_table_and_its_progress(mira, tmp_path):
    done = mira("eval", "builtin")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Fake MoE: 400 tokens of 5 texts, arithmetic in float32"
    assert lines[1] == "reference: bf16 experts, read from the checkpoint"
    rows = [line.split() for line in lines[3:6]]
    assert rows == [
        ["precision", "perplexity", "KL", "top-1", "greedy", "expert"],
        ["bf16", "9.500", "-", "-", "-", "2.0", "MiB"],
        ["int8", "9.750", "0.01250", "95.5%", "20.2/32", "1.0", "MiB"],
    ]
    assert lines[-1] == "note: 4096 tokens"
    assert "eval: 9 of 10 tokens \u00b7 int8 reads" in done.stderr


def test_eval_hands_on_what_was_asked_and_prints_one_object(mira, tmp_path):
    (tmp_path / "mine.txt").write_text("text")
    done = mira(
        "eval", "builtin", "--precision", "int8", "--precision", "NESTED", "--dtype", "bfloat16",
        "--tokens", "200", "--file", str(tmp_path / "mine.txt"), "--json",
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    report = json.loads(done.stdout)
    assert report["notes"] == ["200 tokens", "int8", "nested", str(tmp_path / "mine.txt")]
    assert report["dtype"] == "bfloat16"
    assert [result["precision"] for result in report["results"]] == ["bf16", "int8"]
    assert report["results"][1]["kinds"][0]["kind"] == "code"


def test_eval_refuses_an_unknown_precision_and_tells_what_failed(mira):
    unknown = mira("eval", "builtin", "--precision", "int3")
    assert unknown.returncode == 2
    assert "precision cannot be 'int3'" in unknown.stderr
    failed = mira("eval", "builtin", modes="fail-evaluate")
    assert failed.returncode == 1
    assert "not prepared in int8" in failed.stderr
    assert "hint: Run: mira-chat prepare" in failed.stderr
    assert not failed.stdout


def test_eval_tells_the_time_that_is_left():
    from mira_app.evaluation_report import EvaluationLines

    out, clock = io.StringIO(), iter([0.0, 1.0, 10.0, 20.0]).__next__
    lines = EvaluationLines(out, clock)
    for done, detail in ((0, "a"), (5, "a"), (6, "a"), (10, "b"), (100, "b")):
        progress = api.EvaluationProgress(request_id="r", done=done, total=100, detail=detail)
        lines.show(progress)
    assert out.getvalue().splitlines() == [
        "eval: 0 of 100 tokens \u00b7 a",
        "eval: 10 of 100 tokens \u00b7 b \u00b7 90 s left".replace("90 s", "2 min"),
        "eval: 100 of 100 tokens \u00b7 b",
    ]
