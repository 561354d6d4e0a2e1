"""What is measured once stays; a damaged profile is begun anew."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mira_engine.config import MachineRates
from mira_engine.runtime import probe
from mira_engine.runtime.probe import MachineProfile, measure_rates

RATES = MachineRates(
    name="m",
    device_memory_bytes=2**33,
    device_bytes_per_s=1.5e10,
    flops_per_s=2e11,
    link_bytes_per_s=1.2e9,
    link_latency_s=0.0,
)


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


def test_rates_are_kept_by_number_of_threads_but_not_the_memory(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    assert MachineProfile(path).rates(2, 5) is None
    MachineProfile(path).keep_rates(RATES, 2)
    kept = MachineProfile(path).rates(2, 5)
    assert kept is not None
    assert (kept.device_bytes_per_s, kept.flops_per_s) == (1.5e10, 2e11)
    assert (kept.link_bytes_per_s, kept.link_latency_s) == (1.2e9, 0.0)
    assert kept.device_memory_bytes == 5
    assert MachineProfile(path).rates(1, 5) is None


@pytest.mark.parametrize("damage", ["NaN", "Infinity", "-1.0", "0.0", "true", '"fast"', "null"])
def test_damaged_rate_makes_all_of_them_unknown(tmp_path: Path, damage: str) -> None:
    path = tmp_path / "machine.json"
    MachineProfile(path).keep_rates(RATES, 2)
    name = "device_bytes_per_s, 2 threads"
    numbers = json.loads(path.read_text())
    assert name in numbers
    text = json.dumps({key: value for key, value in numbers.items() if key != name})
    path.write_text(f'{text[:-1]}, "{name}": {damage}}}')
    assert MachineProfile(path).rates(2, 5) is None
    MachineProfile(path).keep_rates(RATES, 2)
    assert MachineProfile(path).rates(2, 5) is not None


def test_count_that_is_no_whole_number_is_measured_anew(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    for text in ('{"nested": 16.5}', '{"nested": true}', '{"nested": -3}'):
        path.write_text(text)
        assert MachineProfile(path).get("nested", lambda: 24) == 24


def test_two_profiles_of_one_file_keep_each_others_numbers(tmp_path: Path) -> None:
    path = tmp_path / "machine.json"
    first, second = MachineProfile(path), MachineProfile(path)
    first.keep_rates(RATES, 2)
    second.get("nested", lambda: 16)
    assert MachineProfile(path).rates(2, 5) is not None
    assert MachineProfile(path).get("nested", lambda: 0) == 16


def test_measured_rates_are_usable_and_leave_no_file(tmp_path: Path) -> None:
    rates = measure_rates(tmp_path, num_threads=1, num_reader_threads=2, device_memory_bytes=2**30)
    assert rates.device_memory_bytes == 2**30
    assert rates.flops_per_s is not None
    assert not rates.is_gpu
    # Wide bounds: they say that the units are right, whatever the machine and its load.
    assert 1e8 < rates.device_bytes_per_s < 1e13
    assert 1e5 < rates.link_bytes_per_s < 1e12
    assert 0 <= rates.link_latency_s < 1
    assert list(tmp_path.iterdir()) == []


def test_link_is_measured_with_every_byte_of_its_records(tmp_path, monkeypatch) -> None:
    """What a reader counts: a record that is not read, or read short, would be too fast."""
    moved: list[int] = []
    read = probe.DiskTransfer._read

    def counted(self, move):
        is_whole = read(self, move)
        moved.append(self.record_bytes)
        assert bytes(self._buffers[move.slot][probe.Plane.WHOLE][:4096]) != bytes(4096)
        return is_whole

    monkeypatch.setattr(probe.DiskTransfer, "_read", counted)
    measure_rates(tmp_path, num_threads=1, num_reader_threads=2, device_memory_bytes=1)
    assert sum(moved) == sum(count * size for count, size in probe._LINK_RECORDS)
