"""The program without what Windows lacks: Unix' modules and calls, /proc, links, g++, triton.

A real Windows has its own ways on top of that, which only it can show.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

PREAMBLE = Path(__file__).parents[1] / "without_posix"
TIMEOUT_S = 300

OPTIONAL = {"lm_eval", "gptqmodel", "starlette", "uvicorn"}
"""What need not be installed, on any system."""

BUSY = {"memory", "disk"}
"""Facts that are a problem on a machine that is full, on any system."""

CARD = "gpu"
"""How codes of facts about a card begin: there may be one that torch is not let see."""

IMPORT_ALL = """
import importlib, json, os, pkgutil
found, missing = [], {}
for name in ("mira_app", "mira_engine", "mira_kernels", "mira_assets"):
    package = importlib.import_module(name)
    for each in pkgutil.walk_packages(package.__path__, f"{name}."):
        found.append(each.name)
        try:
            importlib.import_module(each.name)
        except ModuleNotFoundError as error:
            missing[each.name] = error.name
print(json.dumps([found, missing]))
"""


@pytest.fixture
def environ(data_dir: Path) -> dict[str, str]:
    """An environment in which every Python begins with the preamble, and torch sees no card."""
    paths = [str(PREAMBLE), os.environ.get("PYTHONPATH", "")]
    return os.environ | {
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONPATH": os.pathsep.join(path for path in paths if path),
        "MIRA_CHAT_COMPILE": "auto",
    }


@pytest.fixture
def python(environ):
    """Runs Python there; returns what it wrote."""

    def run(*arguments: str) -> str:
        done = subprocess.run(
            [sys.executable, *arguments],
            capture_output=True, text=True, timeout=TIMEOUT_S, env=environ, check=False,
        )  # fmt: skip
        assert "Traceback" not in done.stderr, done.stderr
        assert done.returncode == 0, done.stderr
        return done.stdout

    return run


def test_preamble_takes_away_what_it_names(python):
    code = """
import os, signal
ours = {"__name__": "mira_engine.planted"}
exec("import os, signal, sys", ours)
assert hasattr(os, "preadv") and not hasattr(ours["os"], "preadv")
assert not hasattr(ours["os"], "O_DIRECT") and not hasattr(ours["signal"], "SIGKILL")
assert ours["sys"].platform == "win32" and ours["os"].environ is os.environ
for name in ("fcntl", "resource", "termios", "triton"):
    try:
        exec(f"import {name}", ours)
    except ModuleNotFoundError:
        print(name)
"""
    assert python("-c", code).split() == ["fcntl", "resource", "termios", "triton"]


def test_every_module_is_imported_but_the_cards_kernels(python):
    found, missing = json.loads(python("-c", IMPORT_ALL).splitlines()[-1])
    assert len(found) > 150
    ours = {name for name in missing if name.startswith("mira_kernels.")}
    assert ours == {f"mira_kernels.triton_{part}" for part in ("experts", "kernels", "tiles")}
    assert {missing.pop(name) for name in ours} == {"triton"}
    assert set(missing.values()) <= OPTIONAL


def test_reply_is_made_and_every_slower_path_is_told(python, tiny_checkpoint):
    model = str(tiny_checkpoint("olmoe", tokenizer=True))
    program = ("-m", "mira_app.cli")
    reply = ("run", "--model", model, "--budget", "200%", "--max-tokens", "12", "--json")
    # Waiting: a compiler that is not there is else told at some moment of the reply, or after.
    answer = json.loads(python(*program, *reply, "--compile", "wait", "hello"))
    assert answer["reason"] == "length"
    assert answer["stats"]["num_new_tokens"] == 12
    assert answer["stats"]["num_misses"] > 0
    codes = {notice["code"] for notice in answer["notices"]}
    assert {"no-direct-io", "no-native-kernels", "sampled-memory"} <= codes

    assert json.loads(python(*program, "plan", model, "--json"))
    assert "builtin" in python(*program, "models")
    assert "settings" in python(*program, "config")
    assert python(*program, "--version").startswith("mira-chat ")


def test_doctor_describes_the_machine(environ):
    done = subprocess.run(
        [sys.executable, "-m", "mira_app.cli", "doctor", "--json"],
        capture_output=True, text=True, timeout=TIMEOUT_S, env=environ, check=False,
    )  # fmt: skip
    assert "Traceback" not in done.stderr, done.stderr
    facts = {fact["code"]: fact for fact in json.loads(done.stdout)["facts"]}
    assert facts["engine"]["mark"] == "ok"
    assert facts["link"]["value"] > 0
    assert facts["memory-peak"]["mark"] == facts["native-kernels"]["mark"] == "note"
    assert "not to be had" in facts["direct-io"]["text"]
    problems = {code for code, fact in facts.items() if fact["mark"] == "problem"}
    assert {code for code in problems if not code.startswith(CARD)} <= BUSY
