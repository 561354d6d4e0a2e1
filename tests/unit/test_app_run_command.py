"""What `run` takes as a prompt, and how it tells events and thinking."""

from __future__ import annotations

import io
import json
import subprocess
import sys
from pathlib import Path

import pytest
from mira_app.answer import ReplyStreams
from mira_app.engine_call import EngineCall
from mira_app.prompts import MAX_FILE_BYTES, read_prompt
from mira_engine import api

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


def stdin_of(monkeypatch, data: bytes, *, is_terminal: bool = False) -> None:
    stream = io.TextIOWrapper(io.BytesIO(data), encoding="ascii")
    stream.isatty = lambda: is_terminal
    monkeypatch.setattr(sys, "stdin", stream)


def test_files_are_appended_under_their_names(tmp_path):
    (tmp_path / "a.txt").write_text("\ufeffalpha\n\n", encoding="utf-8")
    (tmp_path / "b.md").write_text("```\ncode\n```", encoding="utf-8")
    prompt = read_prompt("Compare.", [tmp_path / "a.txt", tmp_path / "b.md"])
    assert prompt == "Compare.\n\na.txt:\n```\nalpha\n```\n\nb.md:\n````\n```\ncode\n```\n````"


def test_files_alone_are_a_prompt_and_leave_standard_input_alone(tmp_path, monkeypatch):
    (tmp_path / "a.txt").write_text("alpha")
    stdin_of(monkeypatch, b"not this")
    assert read_prompt(None, [tmp_path / "a.txt"]) == "a.txt:\n```\nalpha\n```"
    assert read_prompt("-", [tmp_path / "a.txt"]).startswith("not this\n\na.txt:")


@pytest.mark.parametrize(
    ("data", "said"),
    [
        (b"caf\xe9", "is not UTF-8 text"),
        (b"a\0b", "zero bytes"),
        (b"x" * (MAX_FILE_BYTES + 1), "at most 4.0 MiB"),
        (None, "No such file"),
    ],
)
def test_file_that_cannot_be_attached_is_named(tmp_path, data, said):
    path = tmp_path / "some.txt"
    if data is not None:
        path.write_bytes(data)
    with pytest.raises(api.ConfigError, match=said) as caught:
        read_prompt("Read.", [path])
    assert "some.txt" in caught.value.message
    assert caught.value.hint


def test_file_of_the_largest_size_is_taken(tmp_path):
    (tmp_path / "some.txt").write_bytes(b"x" * MAX_FILE_BYTES)
    assert len(read_prompt("Read.", [tmp_path / "some.txt"])) > MAX_FILE_BYTES
    with pytest.raises(api.ConfigError, match="cannot be read"):
        read_prompt("Read.", [tmp_path])


def test_empty_prompt_is_refused(monkeypatch):
    stdin_of(monkeypatch, b" \n")
    with pytest.raises(api.ConfigError, match="empty"):
        read_prompt(None)
    stdin_of(monkeypatch, b"", is_terminal=True)
    with pytest.raises(api.ConfigError, match="no prompt"):
        read_prompt(None)


def test_run_sends_file_and_prompt(mira, tmp_path):
    (tmp_path / "note.txt").write_text("the text")
    done = mira("run", "Read.", "--file", str(tmp_path / "note.txt"), modes="echo")
    assert done.returncode == 0, done.stderr
    assert done.stdout == "user: Read.\n\nnote.txt:\n```\nthe text\n```\n"


def test_json_events_are_the_engines_messages_in_order(mira):
    done = mira("run", "--json-events", "x", modes="thinking")
    assert done.returncode == 0, done.stderr
    events = [api.decode(line) for line in done.stdout.splitlines()]
    kinds = list(dict.fromkeys(type(event) for event in events))
    assert kinds == [
        api.PrepareProgress, api.PrepareDone, api.Notice, api.ModelLoaded, api.TokenDelta,
        api.StatsSample, api.GenerationDone,
    ]  # fmt: skip
    texts = dict.fromkeys(api.ReplyPart, "")
    for event in events:
        if isinstance(event, api.TokenDelta):
            texts[event.part] += event.text
    assert texts[api.ReplyPart.ANSWER] == events[-1].text == "A cache keeps **hot** things near."
    assert texts[api.ReplyPart.THINKING] == events[-1].thinking


@pytest.mark.parametrize(
    ("args", "modes", "code", "name"),
    [
        (("-k", "99", "x"), "", 2, "ConfigError"),
        (("x",), "fail-reply", 1, "ContextLengthError"),
        (("x",), "die-at-start", 1, "EngineProcessError"),
    ],
)
def test_json_events_end_with_the_failure(mira, args, modes, code, name):
    done = mira("run", "--json-events", *args, modes=modes)
    assert done.returncode == code
    last = api.decode(done.stdout.splitlines()[-1])
    assert isinstance(last, api.RequestFailed)
    assert (last.code, bool(last.message)) == (name, True)


def test_thinking_goes_to_stderr_where_asked_and_never_raw(mira):
    shown = mira("run", "--think", "x", modes="thinking")
    assert shown.stdout == "A cache keeps **hot** things near.\n"
    assert "The person wants it short.\n" in shown.stderr
    hidden = mira("run", "--no-think", "x", modes="thinking")
    assert hidden.stdout == shown.stdout
    assert "The person" not in hidden.stderr
    assert "The person" not in mira("run", "x", modes="thinking").stderr  # stderr is no terminal
    told = json.loads(mira("run", "--json", "x", modes="thinking").stdout)
    assert told["thinking"] == "The person wants it \x1b[31mshort."


def test_pieces_are_joined_within_a_part_only():
    call = EngineCall("r")
    for text, part in (("a", "thinking"), ("b", "thinking"), ("c", "answer"), ("d", "answer")):
        call.deliver(
            api.TokenDelta(request_id="r", text=text, num_tokens=1, part=api.ReplyPart(part))
        )
    told = [(event.text, event.num_tokens, event.part.value) for event in call.drain()]
    assert told == [("ab", 2, "thinking"), ("cd", 2, "answer")]


def test_interrupt_while_writing_still_ends_the_line():
    class InterruptedStream(io.StringIO):
        def flush(self) -> None:
            if not self.getvalue().endswith("\n"):
                raise KeyboardInterrupt

    out = InterruptedStream()
    streams = ReplyStreams(out)
    with pytest.raises(KeyboardInterrupt):
        streams.write(api.TokenDelta(request_id="r", text="A cache", num_tokens=1))
    streams.close()
    assert out.getvalue() == "A cache\n"
