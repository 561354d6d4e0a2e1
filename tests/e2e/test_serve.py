"""The built-in model served, and the program connected to it: the same text as without."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest
from app_homes import link_models
from served import serving

PROGRAM = [sys.executable, "-m", "mira_app.cli"]
TIMEOUT_S = 300
QUESTION = "In one sentence: what is a cache?"
# float32 and nothing drafted: no near-tie may fall otherwise in one process or the other.
LOCAL = ("--dtype", "float32", "-k", "0", "--temperature", "0", "--max-tokens", "24")

pytestmark = [pytest.mark.builtin, pytest.mark.slow]


def run_json(*arguments: str) -> dict:
    done = subprocess.run(
        [*PROGRAM, "run", "--json", *arguments, QUESTION],
        capture_output=True, text=True, timeout=TIMEOUT_S,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.fixture(scope="module")
def home(builtin_data_dir, tmp_path_factory):
    """A data folder of our own with the prepared model."""
    folder = tmp_path_factory.mktemp("serve-home")
    link_models(builtin_data_dir, folder)
    (folder / "config.toml").touch()
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MIRA_CHAT_DATA_DIR", str(folder))
        patch.setenv("MIRA_CHAT_CONFIG", str(folder / "config.toml"))
        patch.setenv("MIRA_CHAT_COMPILE", "off")
        yield folder


@pytest.fixture(scope="module")
def served(home):
    with serving([*PROGRAM, "serve", "--port", "0", "--plain", *LOCAL]) as running:
        yield running


@pytest.fixture(scope="module")
def local(home) -> dict:
    """What the model says without a server."""
    answer = run_json(*LOCAL)
    assert answer["stats"]["num_new_tokens"] > 5
    return answer


def test_official_client_gets_the_text_of_run(served, local):
    messages = [{"role": "user", "content": QUESTION}]
    with served.client() as client:
        answer = client.chat.completions.create(model="builtin", messages=messages, temperature=0)
        stream = client.chat.completions.create(
            model="builtin", messages=messages, temperature=0, stream=True
        )
        streamed = "".join(chunk.choices[0].delta.content or "" for chunk in stream)
    assert answer.choices[0].message.content == streamed == local["text"]
    assert answer.usage.completion_tokens == local["stats"]["num_new_tokens"]
    assert answer.usage.prompt_tokens == local["stats"]["num_prompt_tokens"]


def test_connected_program_gets_the_text_of_run(served, local):
    answer = run_json("--connect", served.address, "--temperature", "0", "--max-tokens", "24")
    assert answer["text"] == local["text"]
    assert answer["reason"] == local["reason"]
    for figure in ("num_new_tokens", "num_prompt_tokens"):
        assert answer["stats"][figure] == local["stats"][figure]
    assert answer["context_length"] == local["context_length"]


def test_client_that_leaves_costs_the_next_one_nothing(served, local):
    messages = [{"role": "user", "content": "Count to a thousand."}]
    with served.client() as client:
        stream = client.chat.completions.create(
            model="builtin", messages=messages, max_tokens=1500, stream=True
        )
        next(iter(stream))
        stream.close()
    answer = run_json("--connect", served.address, "--temperature", "0", "--max-tokens", "24")
    assert answer["text"] == local["text"]
