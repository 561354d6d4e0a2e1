"""The command line as a person meets it: a process, its streams and its exit code."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from mira_app import wiring
from mira_app.commands import chat, run
from programs import begun

PROGRAM = Path(__file__).parents[1] / "app_fakes.py"
TIMEOUT_S = 300
"""Only a failure takes so long; less than an engine is given to start or to end."""


@pytest.fixture
def command(tmp_path):
    def make(*args: str, modes: str = "") -> list[str]:
        return [sys.executable, str(PROGRAM), str(tmp_path / "marker"), modes, *args]

    return make


@pytest.fixture
def mira(command):
    def run(*args: str, modes: str = "", stdin: str = ""):
        return subprocess.run(
            command(*args, modes=modes),
            input=stdin,
            capture_output=True,
            text=True,
            timeout=TIMEOUT_S,
        )

    return run


def test_run_prepares_and_prints_reply_alone_on_stdout(mira):
    done = mira("run", "what is a cache?")
    assert done.returncode == 0
    assert done.stdout == "A cache keeps **hot** things near.\n"
    *before, last = done.stderr.splitlines()
    told = [line for line in before if line.startswith("prepare: ")]
    assert before[: len(told)] == told  # nothing comes before or between them
    steps = [re.fullmatch(r"prepare: convert, ([1-9]) of 10 layers · layer", line) for line in told]
    counts = [int(step.group(1)) for step in steps]
    # A report that comes before the last one was read replaces it, so any may be left out.
    assert counts == sorted(set(counts))
    assert counts[-1] == 9
    assert "note: The budget is 75 % of the experts." in before
    for figure in (
        "8.0 tok/s", "TTFT 0.25 s", "hits 90.0%", "moved 10.0 MiB", "1.0 MiB per miss",
        "stalls 2.0 ms/token", "accepted 3.00 per round", "800.0 MiB of 900.0 MiB planned",
        "experts 300.0 MiB of 360.0 MiB",
    ):  # fmt: skip
        assert figure in last
    assert "prepare:" not in mira("run", "again").stderr


def test_run_json_is_one_object_with_everything(mira):
    done = mira("run", "--json", "hi")
    answer = json.loads(done.stdout)
    assert answer["text"] == "A cache keeps **hot** things near."
    assert answer["reason"] == "stop"
    assert answer["stats"]["num_hits"] == 90
    assert answer["stats"]["tokens_per_s"] == 8.0
    assert answer["plan"]["num_slots"] == 240
    assert answer["notices"][0]["code"] == "budget-default"


@pytest.mark.parametrize(
    ("args", "modes", "code", "name", "text"),
    [
        (("-k", "99", "x"), "", 2, "ConfigError", ""),
        ((" ",), "", 2, "ConfigError", ""),
        (("--model", "nope", "x"), "", 1, "UnknownModelError", ""),
        (("x",), "fail-load", 2, "BudgetError", ""),
        (("x",), "fail-reply", 1, "ContextLengthError", "A cache keeps "),
        (("x",), "die-at-start", 1, "EngineProcessError", ""),
    ],
)
def test_run_json_tells_errors_as_one_object(mira, args, modes, code, name, text):
    done = mira("run", "--json", *args, modes=modes)
    answer = json.loads(done.stdout)
    assert done.returncode == code
    assert (answer["reason"], answer["text"]) == ("error", text)
    assert answer["error"]["code"] == name
    assert answer["error"]["message"]
    assert "hint" in answer["error"]
    assert "error: " in done.stderr


def test_run_json_without_error_says_so(mira):
    assert json.loads(mira("run", "--json", "hi").stdout)["error"] is None


@pytest.mark.parametrize("args", [("run", "-"), ("run",)])
def test_prompt_that_is_not_utf8_is_wrong_usage(command, args):
    done = subprocess.run(command(*args), input=b"caf\xe9", capture_output=True, timeout=TIMEOUT_S)
    assert done.returncode == 2
    assert b"error: The prompt is not UTF-8 text." in done.stderr
    assert b"Traceback" not in done.stderr


def test_prompt_that_is_utf8_is_read_whatever_the_locale(command):
    done = subprocess.run(
        command("run"), input="café".encode(), capture_output=True, timeout=TIMEOUT_S,
        env=os.environ | {"PYTHONIOENCODING": "latin-1"},
    )  # fmt: skip
    assert done.returncode == 0


@pytest.mark.skipif(not os.path.exists("/dev/full"), reason="needs /dev/full")
@pytest.mark.parametrize(
    "args", [("run", "x"), ("run", "--json", "x"), ("models",), ("--help",), ("--version",)]
)
def test_output_that_cannot_be_written_is_one_line_of_error(command, args):
    with open("/dev/full", "w") as full:
        done = subprocess.run(
            command(*args), stdout=full, stderr=subprocess.PIPE, text=True, timeout=TIMEOUT_S
        )
    assert done.returncode == 1
    assert "error: The output cannot be used: No space left on device." in done.stderr
    assert "Traceback" not in done.stderr
    assert "Exception ignored" not in done.stderr


def test_empty_reply_is_explained(mira):
    done = mira("run", "x", modes="empty")
    assert (done.returncode, done.stdout) == (0, "")
    assert "note: the model ended the reply at once." in done.stderr


@pytest.mark.parametrize("args", [(), ("-",)])
def test_run_reads_prompt_from_standard_input(mira, args):
    assert mira("run", *args, stdin="hello").returncode == 0


@pytest.mark.parametrize(
    ("args", "modes", "code", "said"),
    [
        (("run", " "), "", 2, "prompt is empty"),
        (("run", "-k", "99", "x"), "", 2, "0 to 32"),
        (("run", "--budget", "lots", "x"), "", 2, "300MiB"),
        (("run", "--precision", "int3", "x"), "", 2, "nested"),
        (("run", "--seed", "-1", "x"), "", 2, "0 to 9223372036854775807"),
        (("run", "--no-such-option", "x"), "", 2, "No such option"),
        (("--model", "m", "run", "x"), "", 2, "options come after"),
        (("run", "--model", "nope", "x"), "", 1, "no model 'nope'"),
        (("run", "x"), "fail-load", 2, "20.0 MiB"),
        (("run", "x"), "fail-reply", 1, "hint: Less."),
        (("run", "x"), "die-mid-reply", 1, "SIGKILL"),
        (("run", "x"), "die-at-start", 1, "boom: no such library"),
        (("run", "x"), "wrong-version", 1, "protocol 999"),
        (("prepare", "nope"), "", 1, "no model 'nope'"),
        (("prepare", "builtin", "--no-predictors", "--calibration", "f"), "", 2, "makes none"),
    ],
)
def test_failures_have_message_and_exit_code_and_no_traceback(mira, args, modes, code, said):
    done = mira(*args, modes=modes)
    assert done.returncode == code
    assert said in done.stderr
    assert "Traceback" not in done.stderr


def test_run_keeps_partial_text_when_reply_fails(mira):
    assert mira("run", "x", modes="fail-reply").stdout == "A cache keeps \n"


def test_run_strips_terminal_control_from_reply_but_not_from_json(mira):
    assert mira("run", "x", modes="escapes").stdout == "safe red done\n\tend\n"
    assert "\x1b[31m" in json.loads(mira("run", "--json", "x", modes="escapes").stdout)["text"]


def test_interrupt_keeps_text_states_figures_and_exits_130(command):
    with begun(command("run", "x", modes="slow"), bufsize=0) as process:
        first = process.stdout.read(5)
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert (first + rest).startswith(b"A cache ")
    assert (first + rest).endswith(b"\n")
    assert b"tok/s" in err
    assert b"Traceback" not in err


def test_interrupt_while_preparing_exits_130(command):
    with begun(command("run", "x", modes="slow-prepare"), bufsize=0) as process:
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, rest) == (130, b"")
    assert b"Traceback" not in err


def test_interrupt_while_evaluating_exits_130(command):
    with begun(command("eval", "builtin", modes="slow-evaluate"), bufsize=0) as process:
        process.stderr.readline()
        process.send_signal(signal.SIGINT)
        rest, err = process.communicate(timeout=TIMEOUT_S)
    assert (process.returncode, rest) == (130, b"")
    assert b"Traceback" not in err


def test_interrupt_while_the_engine_starts_waits_for_nothing(command, tmp_path):
    """Neither for the start (180 s) nor for the end (600 s here) that it gives the engine."""
    log = tmp_path / "logs"
    with begun(command("run", "x", modes="mute-start")) as process:
        while process.poll() is None and not any(p.stat().st_size for p in log.glob("*.log")):
            os.sched_yield()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=TIMEOUT_S)
    assert process.returncode == 130
    assert b"Traceback" not in err


def test_reader_that_goes_away_ends_run_quietly(command):
    with begun(command("run", "x", modes="slow"), text=True) as process:
        process.stdout.read(10)
        process.stdout.close()
        err = process.stderr.read()
        process.wait(timeout=TIMEOUT_S)
    assert process.returncode == 1
    assert "Traceback" not in err
    assert "Exception ignored" not in err


def test_no_arguments_without_terminal_answers_one_fixed_question(mira):
    done = mira()
    assert done.returncode == 0
    assert done.stdout == "A cache keeps **hot** things near.\n"
    assert "> In one sentence: what is a cache?" in done.stderr


@pytest.mark.parametrize(("given", "limit"), [(None, chat.FIXED_MAX_TOKENS), (7, 7), (500, 500)])
def test_fixed_question_has_a_short_limit_unless_one_is_given(monkeypatch, given, limit):
    asked = []
    monkeypatch.setattr(
        run, "answer_prompt", lambda prompt, settings, *rest, **kinds: asked.append(settings)
    )
    settings = wiring.read_settings({"max_tokens": given})
    chat.ask_fixed_question(settings, has_own_limit=given is not None)
    assert asked[0].sampling.max_new_tokens == limit


def test_dumb_terminal_counts_as_none(monkeypatch):
    class Screen:
        def isatty(self):
            return True

    monkeypatch.setenv("TERM", "xterm")
    assert wiring.is_terminal(Screen())
    monkeypatch.setenv("TERM", "dumb")
    assert not wiring.is_terminal(Screen())
    assert not wiring.is_terminal(None)


def test_prepare_models_and_version(mira):
    assert "not prepared" in mira("models").stdout
    assert mira("prepare", "builtin").returncode == 0
    assert json.loads(mira("models", "--json").stdout)[0]["is_ready"]
    assert mira("--version").stdout.startswith("mira-chat ")


def test_plan_prints_the_division_and_the_alternatives(mira):
    done = mira("plan")
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[0] == "Fake MoE on fake machine"
    for figure in (
        "memory for the engine: 7.0 GiB", "KV cache, 2048 tokens", "240 of 480 experts",
        "mode: large", "note: Something was assumed.",
    ):  # fmt: skip
        assert figure in done.stdout
    (chosen,) = [line for line in lines if line.startswith("*")]
    assert chosen.split()[1:9] == [
        "speculative,",
        "nested",
        "4",
        "240",
        "90%",
        "12.3",
        "ms",
        "0.50",
    ]
    (short,) = [line for line in lines if line.startswith("x")]
    assert "5.0 MiB short" in short
    assert not any("prepare" in line for line in done.stderr.splitlines())


def test_plan_sends_what_was_asked_for(mira):
    done = mira("plan", "--memory", "6GiB", "--machine", "rtx-4070", "--json")
    assert done.returncode == 0, done.stderr
    made = json.loads(done.stdout)
    assert made["error"] is None
    assert made["memory_bytes"] == 6 * 2**30
    assert made["machine"]["name"] == "NVIDIA GeForce RTX 4070"
    assert made["machine"]["device_memory_bytes"] == 12 * 2**30
    assert [each["strategy"] for each in made["alternatives"]] == ["speculative", "on-demand"]
    assert made["alternatives"][1]["missing_bytes"] == 5 * 2**20


def test_plan_that_is_refused_prints_the_table_and_exits_2(mira):
    done = mira("plan", modes="plan-refused")
    assert done.returncode == 2
    assert "x  on-demand, nested" in done.stdout
    assert "error: This model needs 1.0 GiB: 5.0 MiB short." in done.stderr
    assert "hint: Give at least --memory 1024MiB." in done.stderr
    told = json.loads(mira("plan", "--json", modes="plan-refused").stdout)
    assert told["error"]["code"] == "BudgetError"
    assert told["alternatives"][0]["plan"] is None


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (("--machine", "rtx-4071"), "rtx-4070"),
        (("--machine", "nothing like it"), "Known cards: "),
        (("--memory", "40%"), "8GiB"),
        (("--memory", "0MiB"), "8GiB"),
        (("-k", "99"), "0 to 32"),
    ],
)
def test_plan_with_wrong_usage_exits_2_and_starts_no_engine(mira, tmp_path, args, said):
    done = mira("plan", *args)
    assert done.returncode == 2
    assert said in done.stderr
    assert not done.stdout
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "logs").exists()


def test_plan_json_tells_wrong_usage_as_one_object(mira):
    told = json.loads(mira("plan", "--json", "--memory", "40%").stdout)
    assert told["error"]["code"] == "ConfigError"
