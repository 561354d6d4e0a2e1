"""`--connect` from outside: what it prints, how it ends, and what it never loads or tells."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from fake_server import REPLY, FakeServer, cuts, refuses, says

PROGRAM = [sys.executable, "-m", "mira_app.cli"]
TIMEOUT_S = 300
KEY = "sk-secret-of-the-tests"


@pytest.fixture
def server():
    with FakeServer() as running:
        yield running


@pytest.fixture
def mira(data_dir):
    def run(*arguments: str, stdin: str = "", **environment: str):
        return subprocess.run(
            [*PROGRAM, *arguments],
            input=stdin, capture_output=True, text=True, timeout=TIMEOUT_S,
            env=os.environ | environment,
        )  # fmt: skip

    return run


def test_run_prints_the_reply_and_the_servers_figures_only(mira, server):
    done = mira("run", "--connect", server.root, "hello")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"{REPLY}\n"
    figures = done.stderr.splitlines()[-1]
    assert figures.startswith("5 tokens | ")
    assert figures.endswith("prompt 20 tokens (8 cached)")
    for absent in ("hits", "stalls", "memory", "speculation"):
        assert absent not in figures


def test_server_is_taken_from_the_environment_and_the_key_with_it(mira, server):
    done = mira("run", "--json", "hello", MIRA_CONNECT=server.address, OPENAI_API_KEY=KEY)
    told = json.loads(done.stdout)
    assert (told["text"], told["model"], told["plan"]) == (REPLY, "fake-moe", None)
    assert told["stats"]["num_new_tokens"] == 5
    assert "num_hits" not in told["stats"]  # nothing that no server reports
    assert {headers["Authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    assert KEY not in done.stdout + done.stderr


def test_plain_chat_goes_through_the_server(mira, server):
    server.scripts += [says("One."), says("Two.")]
    done = mira("chat", "--plain", "--connect", server.root, stdin="first\nsecond\n/retry\n")
    assert done.returncode == 0, done.stderr
    assert done.stdout == f"One.\nTwo.\n{REPLY}\n"
    assert [m["content"] for m in server.requests[1]["messages"]] == ["first", "One.", "second"]
    assert server.requests[1]["messages"] == server.requests[2]["messages"]


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("--connect", "http://127.0.0.1:1"), 1, "Nothing can be reached at 127.0.0.1:1."),
        (("--connect", "ftp://x"), 2, "connect cannot be 'ftp://x'"),
        (("--connect", "{root}", "--model", "other"), 1, "has no model 'other'"),
    ],
)
def test_failure_before_the_reply_is_one_sentence(mira, server, arguments, code, said):
    done = mira("run", *(each.format(root=server.root) for each in arguments), "hello")
    assert done.returncode == code, done.stderr
    assert said in done.stderr
    assert "hint: " in done.stderr
    assert "Traceback" not in done.stderr
    assert not done.stdout


def test_reply_that_breaks_off_is_printed_as_far_as_it_came(mira, server):
    server.scripts += [cuts("A cache ", is_clean=True), refuses(401)]
    done = mira("run", "--connect", server.root, "hello")
    assert (done.returncode, done.stdout) == (1, "A cache \n")
    assert "in the middle of the reply" in done.stderr
    done = mira("run", "--connect", server.root, "--json", "hello")
    assert json.loads(done.stdout)["error"]["code"] == "ServerError"


def test_several_models_have_to_be_chosen_from(mira, server):
    server.models = ("one", "two")
    done = mira("run", "--connect", server.root, "hello")
    assert done.returncode == 2
    assert "several models: one, two" in done.stderr
    assert mira("run", "--connect", server.root, "--model", "two", "hello").stdout == f"{REPLY}\n"
    assert server.requests[-1]["model"] == "two"


def test_connected_program_loads_no_torch(server, data_dir):
    code = (
        "import sys; from mira_app import cli\n"
        f"sys.argv = ['mira-chat', 'run', '--connect', {server.root!r}, 'hello']\n"
        "try:\n    cli.main()\n"
        "finally:\n    print({'torch', 'transformers', 'textual'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert done.stdout.splitlines() == [REPLY, "set()"], done.stderr


def test_settings_file_has_a_place_for_the_server_and_none_for_its_key():
    from mira_app.settings_file import default_document

    text = default_document()
    assert "# connect = " in text
    assert "api_key =" not in text.lower()
