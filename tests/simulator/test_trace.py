"""Traces as files: what is written is read, and what is damaged is said."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from mira_engine.errors import TraceError
from mira_engine.simulator.workload import read_token_trace, recorded_rounds, token_trace
from mira_engine.trace import (
    ReplyStart,
    TracedPass,
    TracedRound,
    TraceHeader,
    TraceRecorder,
    read_trace,
)
from mira_engine.types import Phase

HEADER = TraceHeader(
    model="tiny", precision="nested", num_layers=2, num_experts=4, top_k=2,
    num_draft_tokens=2, num_slots=3, record_bytes=4096, budget_bytes=99999, eviction="lfu",
)  # fmt: skip

PROMPT = [[[0, 1], [1, 2], [0, 3]], [[2, 3], [0, 1], [1, 2]]]
DRAFT_A = [[[0, 1]], [[2, 3]]]
DRAFT_B = [[[1, 2]], [[0, 2]]]
VERIFY = [[[0, 1], [1, 3], [2, 3]], [[2, 3], [0, 2], [0, 1]]]
OUTCOME = TracedRound(num_drafted=2, num_accepted=1, draft_s=0.5, verify_s=0.25, stall_s=0.125)


def told(recorder: TraceRecorder, phase: Phase, ids: list) -> None:
    for layer, rows in enumerate(ids):
        recorder.record_layer(phase, layer, rows)


def recorded(path: Path) -> Path:
    recorder = TraceRecorder(HEADER)
    recorder.start_reply(3)
    told(recorder, Phase.PREFILL, PROMPT)
    told(recorder, Phase.DRAFT, DRAFT_A)
    told(recorder, Phase.DRAFT, DRAFT_B)
    told(recorder, Phase.VERIFY, VERIFY)
    recorder.end_round(OUTCOME)
    recorder.record_layer(Phase.DRAFT, 0, [[0, 1]])  # Broken off in the middle.
    recorder.write(path)
    return path


def test_trace_that_was_written_is_read_as_it_was(tmp_path):
    trace = read_trace(recorded(tmp_path / "a.trace"))
    assert trace.header == HEADER
    assert trace.is_whole
    assert trace.items == (
        ReplyStart(3),
        TracedPass(Phase.PREFILL, PROMPT),
        TracedPass(Phase.DRAFT, DRAFT_A),
        TracedPass(Phase.DRAFT, DRAFT_B),
        TracedPass(Phase.VERIFY, VERIFY),
        OUTCOME,
    )
    assert [path.name for path in tmp_path.iterdir()] == ["a.trace"]


def test_trace_written_again_holds_everything_since_the_start(tmp_path):
    recorder = TraceRecorder(HEADER)
    for number in range(2):
        recorder.start_reply(number)
        recorder.write(tmp_path / "a.trace")
    assert read_trace(tmp_path / "a.trace").items == (ReplyStart(0), ReplyStart(1))


def test_rounds_of_a_trace_are_those_that_were_recorded(tmp_path):
    prompt, round_ = recorded_rounds(read_trace(recorded(tmp_path / "a.trace")))
    assert prompt.is_prefill
    assert prompt.starts_reply
    assert prompt.num_new_tokens == 0
    assert (round_.num_accepted, round_.num_new_tokens, round_.starts_reply) == (1, 2, False)
    assert round_.draft == [[[0, 1], [2, 3]], [[1, 2], [0, 2]]]
    assert round_.target == VERIFY


def test_tokens_of_a_trace_are_those_that_stayed(tmp_path):
    trace = token_trace(read_trace(recorded(tmp_path / "a.trace")), "a")
    assert trace.lengths == [5]
    kept = np.concatenate([np.array(PROMPT), np.array(VERIFY)[:, :2]], axis=1)
    assert (trace.ids == kept.transpose(1, 0, 2)).all()
    assert trace.acceptance == 0.5
    assert trace.fidelity == pytest.approx(7 / 8)  # of 8 choices, (1, 3) was drafted as (1, 2)


@pytest.mark.parametrize("num_lines", [2, 5, 7])
def test_trace_cut_short_is_refused_but_can_be_read_in_part(tmp_path, num_lines):
    path = recorded(tmp_path / "a.trace")
    lines = path.read_text().splitlines()
    path.write_text("\n".join(lines[:num_lines]) + "\n")
    with pytest.raises(TraceError, match=f"ends after line {num_lines}"):
        read_trace(path)
    part = read_trace(path, is_partial_allowed=True)
    assert not part.is_whole
    assert len(part.items) == num_lines - 1


@pytest.mark.parametrize(
    ("number", "change"),
    [
        (3, lambda line: line[: len(line) // 2]),
        (3, lambda line: line.replace('"prefill"', '"dreaming"')),
        (3, lambda line: line.replace("[0,3]", "[0,4]")),
        (3, lambda line: line.replace("[0,3]", "[0]")),
        (6, lambda line: '{"nonsense":1}'),
        (7, lambda line: line.replace("num_accepted", "num_excepted")),
        (8, lambda line: '{"end":5}'),
    ],
)
def test_damaged_line_is_named_and_what_stands_before_it_can_be_read(tmp_path, number, change):
    path = recorded(tmp_path / "a.trace")
    lines = path.read_text().splitlines()
    lines[number - 1] = change(lines[number - 1])
    path.write_text("\n".join(lines))
    with pytest.raises(TraceError, match=f"line {number}") as caught:
        read_trace(path)
    assert caught.value.hint
    assert len(read_trace(path, is_partial_allowed=True).items) == number - 2


def test_trace_of_another_version_is_refused_even_in_part(tmp_path):
    path = recorded(tmp_path / "a.trace")
    head, _, rest = path.read_text().partition("\n")
    path.write_text(json.dumps(json.loads(head) | {"version": 2}) + "\n" + rest)
    with pytest.raises(TraceError, match="version 2"):
        read_trace(path, is_partial_allowed=True)


@pytest.mark.parametrize("content", ["", "hello", '{"format": "other", "version": 1}', "[1]"])
def test_file_that_is_no_trace_is_refused(tmp_path, content):
    path = tmp_path / "a.trace"
    path.write_text(content)
    with pytest.raises(TraceError, match="no routing trace"):
        read_trace(path)
    with pytest.raises(TraceError, match="cannot be read"):
        read_trace(tmp_path / "missing.trace")


def test_trace_that_cannot_be_written_says_so_and_leaves_nothing(tmp_path):
    with pytest.raises(TraceError, match="cannot be written"):
        TraceRecorder(HEADER).write(tmp_path / "missing" / "a.trace")
    (tmp_path / "folder").mkdir()
    with pytest.raises(TraceError, match="cannot be written"):
        TraceRecorder(HEADER).write(tmp_path / "folder")
    assert [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_arrays_of_another_shape_are_refused(tmp_path):
    path = tmp_path / "a.npz"
    np.savez(path, ids=np.zeros((4, 2, 1), dtype=np.uint8), seq_len=np.array([3]))
    with pytest.raises(TraceError, match="3 tokens"):
        read_token_trace(path)
    np.savez(path, ids=np.zeros((4, 2, 1), dtype=np.uint8))
    with pytest.raises(TraceError, match="seq_len"):
        read_token_trace(path)


def test_recorded_trace_is_read_whatever_its_name_ends_in(tmp_path):
    named = read_token_trace(recorded(tmp_path / "a.npz"))
    plain = read_token_trace(recorded(tmp_path / "a.trace"))
    assert (named.ids == plain.ids).all()
