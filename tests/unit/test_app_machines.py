"""Machines by card and by file, and what is said of a file with a fault."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from mira_app.machines import find_machine, rates_of_card
from mira_assets.gpus import load_gpus
from mira_engine.api import ConfigError

GOOD = {
    "device_memory_bytes": "12GiB",
    "device_bytes_per_s": "400GB/s",
    "link_bytes_per_s": 2.5e10,
}


def written(tmp_path: Path, fields: object, name: str = "box.json") -> str:
    path = tmp_path / name
    path.write_text(json.dumps(fields))
    return str(path)


def test_table_has_cards_of_8_to_48_gigabytes():
    gpus = load_gpus()
    assert len(gpus) > 30
    assert {8, 12, 16, 24, 48} <= {gpu.memory_gib for gpu in gpus.values()}
    for gpu in gpus.values():
        assert 8 <= gpu.memory_gib <= 48
        assert 200 <= gpu.bandwidth_gb_per_s <= 2000
        assert gpu.pcie_generation in (3, 4, 5)
        assert gpu.pcie_lanes in (8, 16)


def test_card_is_found_by_any_spelling_and_is_slower_than_specified():
    machine = find_machine(" RTX 4070 ")
    assert machine == find_machine("rtx-4070") == rates_of_card(load_gpus()["rtx-4070"])
    assert machine.device_memory_bytes == 12 * 2**30
    assert machine.is_gpu
    assert 0.5 * 504e9 < machine.device_bytes_per_s < 504e9
    assert 0.5 * 31.5e9 < machine.link_bytes_per_s < 31.5e9


def test_lanes_and_generation_set_the_link():
    half, full = find_machine("rtx-4060"), find_machine("rtx-4070")
    assert half.link_bytes_per_s == full.link_bytes_per_s / 2
    assert find_machine("rtx-5090").link_bytes_per_s > 1.9 * full.link_bytes_per_s


def test_file_is_read_as_json_and_as_toml(tmp_path):
    machine = find_machine(written(tmp_path, GOOD))
    assert machine.name == "box"
    assert machine.device_memory_bytes == 12 * 2**30
    assert machine.device_bytes_per_s == 400e9
    toml = tmp_path / "card.toml"
    lines = ('name = "mine"', 'device_memory_bytes = "12GiB"', "device_bytes_per_s = 4e11",
             'link_bytes_per_s = "25GB"', "is_gpu = true")  # fmt: skip
    toml.write_text("\n".join(lines))
    machine = find_machine(str(toml))
    assert (machine.name, machine.is_gpu, machine.link_bytes_per_s) == ("mine", True, 25e9)


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (GOOD | {"link_byte_per_s": 1}, "Did you mean link_bytes_per_s?"),
        (GOOD | {"colour": "red"}, "Fields: name, device_memory_bytes"),
        ({"device_memory_bytes": "12GiB"}, "device_bytes_per_s, link_bytes_per_s must be given"),
        (GOOD | {"device_memory_bytes": "12"}, "12GiB"),
        (GOOD | {"link_bytes_per_s": "40%"}, "25GB/s"),
        (GOOD | {"link_bytes_per_s": "fast"}, "25GB/s"),
        (GOOD | {"link_bytes_per_s": 0}, "above 0"),
        (GOOD | {"link_bytes_per_s": True}, "Give a number"),
        (GOOD | {"link_latency_s": "1ms"}, "Give a number"),
        (GOOD | {"link_latency_s": -1}, "0 or more"),
        (GOOD | {"is_gpu": "yes"}, "true or false"),
        ([1], "no table of fields"),
    ],
)
def test_fault_in_a_file_is_named(tmp_path, fields, said):
    with pytest.raises(ConfigError) as caught:
        find_machine(written(tmp_path, fields))
    assert said in str(caught.value)


@pytest.mark.parametrize("name", ["box.json", "box.toml"])
def test_file_that_cannot_be_read_is_refused(tmp_path, name):
    path = tmp_path / name
    path.write_bytes(b"\xff{= nothing")
    with pytest.raises(ConfigError, match="cannot be read"):
        find_machine(str(path))


def test_home_of_nobody_is_no_file():
    with pytest.raises(ConfigError, match="no card and no file"):
        find_machine("~nobody-of-this-name/box.json")


def test_unknown_card_names_the_nearest_ones():
    with pytest.raises(ConfigError, match=r"rtx-4070-super.*\?"):
        find_machine("rtx-4070-supr")
