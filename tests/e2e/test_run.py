"""`mira-chat run` from outside: streams, exit codes, figures, interruption.

On a tiny random model, whose text means nothing but is the same each time.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from programs import begun

PROGRAM = [sys.executable, "-m", "mira_app.cli"]
TIMEOUT_S = 300


def mira_chat(*arguments: str | Path, stdin: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*PROGRAM, *map(str, arguments)],
        input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S, check=False,
    )  # fmt: skip


@pytest.fixture
def model(tiny_checkpoint, data_dir) -> Path:
    """A tiny model's folder; nothing is prepared yet."""
    return tiny_checkpoint("olmoe", tokenizer=True)


def run_json(model: Path, *arguments: str) -> dict:
    done = mira_chat("run", "--model", model, "--max-tokens", "12", "--json", *arguments, "hello")
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


def test_run_prints_reply_on_stdout_and_figures_on_stderr(model):
    done = mira_chat("run", "--model", model, "--max-tokens", "12", "--plain", "hello")
    assert done.returncode == 0, done.stderr
    assert done.stdout.endswith("\n")
    assert done.stdout.strip()
    assert "tok/s" in done.stderr.splitlines()[-1]
    assert "tok/s" not in done.stdout


def test_run_reads_prompt_from_stdin_and_gives_the_same_reply(model):
    options = ("run", "--model", model, "--max-tokens", "12", "--plain")
    as_argument, piped = mira_chat(*options, "hello"), mira_chat(*options, "-", stdin="hello")
    assert as_argument.returncode == piped.returncode == 0, piped.stderr
    assert as_argument.stdout == piped.stdout


def test_compiled_once_and_used_by_the_next_start_unasked(model):
    # One step, of one token, takes the least to compile; those of drafts are test_compiled's.
    first = run_json(model, "-k", "0", "--compile", "wait")
    second = run_json(model, "-k", "0", "--compile", "auto")
    for answer in (first, second):
        assert answer["stats"]["num_compiled_passes"] > 0
    assert first["text"] == second["text"]
    assert any("steps were compiled" in notice["text"] for notice in first["notices"])
    assert not any(notice["code"] == "steps" for notice in second["notices"])


def test_json_counts_the_tokens_and_keeps_the_plan(model):
    answer = run_json(model)
    stats, plan = answer["stats"], answer["plan"]
    assert answer["reason"] == "length"
    assert stats["num_new_tokens"] == 12
    assert 0 < stats["expert_peak_bytes"] <= plan["budget_bytes"]


def test_budget_and_draft_change_bytes_but_not_the_text(model):
    exact = ("--precision", "float32", "--dtype", "float32")
    replies = [
        run_json(model, *exact, "--budget", "400%", "-k", "0"),
        run_json(model, *exact, "--budget", "200%", "-k", "0"),
        run_json(model, *exact, "--budget", "300%", "-k", "4"),
    ]
    assert len({reply["text"] for reply in replies}) == 1
    roomy, tight, _ = replies
    assert roomy["stats"]["num_misses"] <= tight["stats"]["num_misses"]
    assert roomy["stats"]["bytes_moved"] < tight["stats"]["bytes_moved"]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["-k", "33"], "32"),
        (["-k", "-1"], "32"),
        (["--budget", "a lot"], "budget"),
        (["--budget", "1KiB"], "iB"),
        (["--dtype", "float16"], "dtype"),
        (["--no-such-option"], "no-such-option"),
    ],
)
def test_wrong_usage_exits_2_and_says_what_is_wrong(model, arguments, named):
    done = mira_chat("run", "--model", model, *arguments, "hello")
    assert done.returncode == 2, done.stderr
    assert named in done.stderr
    assert not done.stdout
    assert "Traceback" not in done.stderr


def test_unknown_model_exits_1_and_names_it(data_dir):
    done = mira_chat("run", "--model", "nobody/nothing", "hello")
    assert done.returncode == 1
    assert "nobody/nothing" in done.stderr
    assert not done.stdout
    assert "Traceback" not in done.stderr


def test_interrupt_keeps_what_was_said_and_exits_130(model):
    # A link so slow that the reply takes half a minute, or it might end before the interrupt.
    slow = ("--budget", "50%", "-k", "0", "--no-prefetch", "--link-latency", "50")
    options = ("--model", str(model), "--max-tokens", "400", "--plain", *slow)
    with begun(
        [*PROGRAM, "run", *options, "hello"],
        env=os.environ | {"PYTHONUNBUFFERED": "1"},
        bufsize=0,  # communicate() would lose what a buffer has read ahead
    ) as child:
        first = child.stdout.read(1)
        child.send_signal(signal.SIGINT)
        rest, errors = child.communicate(timeout=TIMEOUT_S)
    assert child.returncode == 130, errors.decode()
    assert (first + rest).decode().strip()
    assert b"Traceback" not in errors


@pytest.mark.builtin
@pytest.mark.slow
def test_program_without_terminal_answers_one_question(builtin_data_dir, monkeypatch):
    monkeypatch.setenv("MIRA_CHAT_DATA_DIR", str(builtin_data_dir))
    done = mira_chat()
    assert done.returncode == 0, done.stderr
    assert "cache" in done.stdout
    assert "tok/s" in done.stderr.splitlines()[-1]
