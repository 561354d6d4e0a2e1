"""What the engine says of this machine and of a model on it."""

from __future__ import annotations

import io
import json
import os
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mira_engine import machine_report, wire
from mira_engine.config import EngineConfig, LinkConfig, MemoryAmount
from mira_engine.errors import StoreError
from mira_engine.events import DescribeMachine, MachineDescribed, MachineFact
from mira_engine.library import ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.runtime.host_system import HostKind, HostSystem
from mira_engine.system_memory import SystemMemory
from mira_engine.types import FactMark, Precision
from mira_engine.worker import EventWriter, Worker
from mira_kernels import native

ROOMY = EngineConfig(budget=MemoryAmount(share=4.0))


@pytest.fixture(scope="module")
def prepared(tiny_checkpoint, tmp_path_factory) -> tuple[Path, str]:
    """A data folder, and the tiny model that is prepared in it. Read only."""
    folder = tmp_path_factory.mktemp("described")
    model = str(tiny_checkpoint("qwen3_moe", tokenizer=True))
    prepare(
        ModelLibrary(folder).resolve(model),
        Precision.NESTED,
        on_progress=lambda *_: None,
        is_cancelled=lambda: False,
    )
    return folder, model


def described(folder: Path, model: str, cache: Path | None, config=ROOMY) -> dict[str, MachineFact]:
    request = DescribeMachine(request_id="r", model=model, config=config)
    facts = machine_report.describe_machine(ModelLibrary(folder), request, cache_dir=cache)
    assert all(fact.hint for fact in facts if fact.mark is not FactMark.OK), facts
    assert len({fact.code for fact in facts}) == len(facts)
    return {fact.code: fact for fact in facts}


def test_prepared_model_has_every_fact_and_nothing_is_left_behind(prepared, tmp_path):
    folder, model = prepared
    before = sorted(path for path in folder.rglob("*"))
    threads = torch.get_num_threads()
    facts = described(folder, model, tmp_path)
    assert {
        "torch", "transformers", "device", "gpu", "cores", "cpu-features", "memory",
        "pinned-memory", "native-kernels", "compiled-steps", "disk", "direct-io", "link",
        "memory-rate", "arithmetic", "model", "predictors", "plan", "profile",
    } <= set(facts)  # fmt: skip
    assert facts["link"].value > 0
    assert facts["memory"].value > 0
    assert facts["model"].mark is FactMark.OK
    assert "none" in facts["predictors"].text
    assert sorted(path for path in folder.rglob("*")) == before
    assert torch.get_num_threads() == threads


def test_model_that_is_not_prepared_says_what_to_run(tiny_checkpoint, tmp_path):
    model = str(tiny_checkpoint("qwen3_moe", tokenizer=True))
    fact = described(tmp_path, model, None)["model"]
    assert fact.mark is FactMark.NOTE
    assert fact.hint == f"Run: mira-chat prepare {model}"


def test_unknown_model_is_a_problem_among_facts(tmp_path):
    facts = described(tmp_path, "/nowhere/at/all", None)
    assert facts["model"].mark is FactMark.PROBLEM
    assert "plan" not in facts


def test_budget_that_is_too_small_is_a_problem_of_the_plan(prepared):
    folder, model = prepared
    facts = described(folder, model, None, EngineConfig(budget=MemoryAmount(num_bytes=1024)))
    assert facts["model"].mark is FactMark.OK
    assert facts["plan"].mark is FactMark.PROBLEM
    assert "budget" in facts["plan"].text.lower()


def test_damaged_predictors_are_a_problem(prepared, tmp_path, monkeypatch):
    folder, model = prepared
    home = ModelLibrary(folder).resolve(model)
    home.predictors_dir.mkdir()
    manifest = home.predictors_dir / "predictors.json"
    manifest.write_text(json.dumps({"version": 1}))
    try:
        fact = described(folder, model, None)["predictors"]
    finally:
        manifest.unlink()
        home.predictors_dir.rmdir()
    assert fact.mark is FactMark.PROBLEM
    assert "prepare" in fact.hint


def test_folder_that_cannot_be_written_is_a_problem_of_disk_and_link(tmp_path):
    (tmp_path / "file").write_text("")
    facts = described(tmp_path / "file" / "data", "builtin", None)
    assert facts["disk"].mark is FactMark.PROBLEM
    assert facts["link"].mark is FactMark.PROBLEM
    assert "direct-io" not in facts


def test_file_system_without_direct_reading_is_noted(tmp_path, monkeypatch):
    monkeypatch.setattr(
        machine_report,
        "open_for_records",
        lambda path, is_direct: (os.open(path, os.O_RDONLY), False),
    )
    fact = described(tmp_path, "builtin", None)["direct-io"]
    assert fact.mark is FactMark.NOTE


def test_link_that_cannot_be_read_is_a_problem(tmp_path, monkeypatch):
    def fail(*_, **__):
        raise StoreError("Reading failed.")

    monkeypatch.setattr(machine_report, "measure_rates", fail)
    facts = described(tmp_path, "builtin", None)
    assert facts["link"].mark is FactMark.PROBLEM
    assert "Reading failed." in facts["link"].text


def test_slow_and_emulated_links_are_noted(tmp_path, monkeypatch):
    slow = machine_report.SLOW_LINK_BYTES_PER_S
    monkeypatch.setattr(machine_report, "SLOW_LINK_BYTES_PER_S", 1e15)
    config = EngineConfig(link=LinkConfig(bytes_per_s=slow))
    facts = described(tmp_path, "builtin", None, config)
    assert facts["link"].mark is FactMark.NOTE
    assert facts["emulated-link"].mark is FactMark.NOTE


def test_missing_compiler_is_a_problem_and_a_built_library_is_not(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    fact = described(tmp_path, "builtin", tmp_path / "cache")["native-kernels"]
    assert fact.mark is FactMark.PROBLEM
    assert "$CXX names no-such-compiler" in fact.text
    monkeypatch.setattr(native, "is_built", lambda folder: True)
    assert described(tmp_path, "builtin", tmp_path)["native-kernels"].mark is FactMark.OK


def test_wsl_and_its_slow_drives_are_told(tmp_path, monkeypatch):
    host = HostSystem(kind=HostKind.WSL)
    monkeypatch.setattr(machine_report, "look_at_host", lambda: host)
    memory = SystemMemory(total_bytes=2**33, available_bytes=2**32)
    monkeypatch.setattr(machine_report, "system_memory", lambda: memory)
    mounts = [SimpleNamespace(mountpoint=str(tmp_path), fstype="9p")]
    monkeypatch.setattr("psutil.disk_partitions", lambda all: mounts)
    facts = described(tmp_path, "builtin", None)
    assert facts["wsl"].mark is FactMark.NOTE
    assert facts["windows-drive"].mark is FactMark.PROBLEM
    assert facts["gpu"].mark is FactMark.NOTE


def test_containers_limit_is_the_memory_that_is_told(tmp_path, monkeypatch):
    little = SystemMemory(total_bytes=2**31, available_bytes=2**30, container_bytes=2**31)
    monkeypatch.setattr(machine_report, "system_memory", lambda: little)
    monkeypatch.setattr(machine_report, "look_at_host", lambda: HostSystem(kind=HostKind.WSL))
    facts = described(tmp_path, "builtin", None)
    assert facts["memory"].text == "1.0 GiB free of 2.0 GiB"
    assert "wsl" not in facts, "it would be told as the virtual machine's memory"


def test_little_memory_is_a_problem(tmp_path, monkeypatch):
    monkeypatch.setattr(machine_report, "_LITTLE_MEMORY_BYTES", 2**60)
    assert described(tmp_path, "builtin", None)["memory"].mark is FactMark.PROBLEM


@pytest.mark.parametrize(("full", "mark"), [(0, FactMark.NOTE), (2**60, FactMark.PROBLEM)])
def test_little_disk_is_noted_and_a_full_one_is_a_problem(tmp_path, monkeypatch, full, mark):
    monkeypatch.setattr(machine_report, "_LITTLE_DISK_BYTES", 2**61)
    monkeypatch.setattr(machine_report, "_FULL_DISK_BYTES", full)
    assert described(tmp_path, "builtin", None)["disk"].mark is mark


def test_engine_process_answers_the_request(tmp_path):
    stream = io.StringIO()
    worker = Worker(ModelLibrary(tmp_path), EventWriter(stream))
    worker._run_job(DescribeMachine(request_id="r", model="builtin"))
    (event,) = [wire.decode(line) for line in stream.getvalue().splitlines()]
    assert isinstance(event, MachineDescribed)
    assert event.request_id == "r"
