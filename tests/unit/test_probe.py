"""What is measured once stays; a damaged profile is begun anew."""

from __future__ import annotations

from pathlib import Path

from mira_engine.runtime.probe import MachineProfile


def test_number_is_measured_once_and_kept(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    measured = []

    def measure() -> int:
        measured.append(1)
        return 24

    assert MachineProfile(path).get("nested", measure) == 24
    assert MachineProfile(path).get("nested", measure) == 24
    assert MachineProfile(path).get("int8", lambda: 8) == 8
    assert MachineProfile(path).get("nested", measure) == 24
    assert len(measured) == 1


def test_damaged_profile_is_begun_anew(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    for text in ("{", "[1]", '{"nested": "many"}'):
        path.write_text(text)
        assert MachineProfile(path).get("nested", lambda: 16) == 16
        assert MachineProfile(path).get("nested", lambda: 0) == 16


def test_profile_that_cannot_be_written_still_answers(tmp_path: Path) -> None:
    assert MachineProfile(tmp_path / "no" / "machine.json").get("nested", lambda: 16) == 16
