"""The time plan: what is cut and what fails is named, and what was found is kept."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from gpu.sections import Deadline, Sections, State


class FakeClock:
    """Seconds that go on when told."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def make(clock: FakeClock, **changes: Any) -> Sections:
    return Sections(**{"total_s": 100.0, "has_card": True, "clock": clock} | changes)


def nothing(results: dict[str, Any]) -> list[str]:
    return []


def test_deadline_that_passes_names_the_cases_left_out() -> None:
    clock = FakeClock()
    deadline = Deadline(2.0, clock)

    done = []
    for case in deadline.each(range(5), lambda each: f"case {each}"):
        done.append(case)
        clock.now += 1.0

    assert done == [0, 1]
    assert deadline.left_out == ["case 2", "case 3", "case 4"]


def test_section_that_is_cut_says_so_and_keeps_what_it_found(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = FakeClock()
    sections = make(clock)

    def work(results: dict[str, Any], deadline: Deadline) -> None:
        for case in deadline.each("abc"):
            results[case] = 1
            clock.now += 6.0

    found = sections.run("slow", 10.0, work, describe=nothing)

    assert found == {"a": 1, "b": 1}
    assert sections.document["sections"]["slow"] == {
        "state": State.CUT, "seconds": 12.0, "left_out": ["c"],
    }  # fmt: skip
    assert "slow: cut" in capsys.readouterr().out
    assert not sections.has_failed


def test_section_that_fails_keeps_what_it_found_and_the_next_one_runs(
    capsys: pytest.CaptureFixture[str],
) -> None:
    sections = make(FakeClock())

    def work(results: dict[str, Any], deadline: Deadline) -> None:
        results["before"] = 1
        raise AssertionError("not true: something")

    sections.run("wrong", 10.0, work, describe=nothing)
    sections.run("next", 10.0, lambda results, deadline: results.update(a=2), describe=nothing)

    assert sections.has_failed
    assert sections.document["results"] == {"wrong": {"before": 1}, "next": {"a": 2}}
    assert "not true: something" in sections.document["sections"]["wrong"]["error"]
    assert "not true: something" in capsys.readouterr().out


def test_section_after_all_time_is_used_is_cut_whole() -> None:
    clock = FakeClock()
    sections = make(clock)
    clock.now = 101.0

    found = sections.run(
        "late", 10.0, lambda results, deadline: results.update(a=1), describe=nothing
    )

    assert found == {}
    assert sections.document["sections"]["late"]["state"] == State.CUT


def test_section_that_needs_a_card_is_not_run_without_one() -> None:
    sections = make(FakeClock(), has_card=False)

    found = sections.run(
        "card", 10.0, lambda results, deadline: results.update(a=1), describe=nothing,
        needs_card=True,
    )  # fmt: skip

    assert found == {}
    assert sections.document["sections"]["card"]["state"] == State.NEEDS_CARD


def test_sections_write_their_document_after_each(tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    sections = make(FakeClock(), path=path)

    sections.run("one", 10.0, lambda results, deadline: results.update(a=1), describe=nothing)

    assert json.loads(path.read_text(encoding="utf-8"))["results"] == {"one": {"a": 1}}
