"""Plans for cards of the table count the processor beside them where a load would ask it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from mira_app.machines import find_machine
from mira_engine.config import EngineConfig, MachineRates, MemoryAmount
from mira_engine.events import PlanMade, PlanModel
from mira_engine.library import ModelLibrary
from mira_engine.planning import plan_model
from mira_engine.runtime.probe import PROFILE_FILE, MachineProfile, default_num_threads
from mira_engine.types import Precision, Strategy

ASKED = EngineConfig(precision=Precision.INT8, budget=MemoryAmount(share=0.3), num_draft_tokens=0)
TOLD = {"host_bytes_per_s": 5e10, "host_packed_bytes_per_s": 5e10}


def plan_on(
    tmp_path: Path, card: str, config: EngineConfig = ASKED, **machine: float
) -> tuple[PlanMade, list[str]]:
    """Plans the built-in model; returns the plan and its notes on misses."""
    home = ModelLibrary(tmp_path / "data").resolve("builtin")
    rates = replace(find_machine(card), **machine)
    request = PlanModel(request_id="r", model="builtin", config=config, machine=rates)
    made = plan_model(home, request, data_dir=tmp_path, cache_dir=tmp_path / "cache")
    return made, [note for note in made.notes if "isses" in note]


def tpot_of(made: PlanMade) -> float:
    (row,) = [row for row in made.alternatives if row.strategy is Strategy.ON_DEMAND]
    assert row.tpot_s is not None
    return row.tpot_s


@pytest.mark.parametrize("card", ["rtx-3070", "rtx-4060", "rtx-5090"])
def test_plan_for_a_card_counts_the_processor_that_its_file_tells_of(
    tmp_path: Path, card: str
) -> None:
    made, notes = plan_on(tmp_path, card, **TOLD)
    left_out, told = plan_on(tmp_path, card, replace(ASKED, is_deterministic=True), **TOLD)
    assert tpot_of(made) < tpot_of(left_out)
    assert ["of the machine file" in note for note in notes] == [True]
    assert ["--deterministic" in note for note in told] == [True]


def test_card_that_computes_in_float16_copies_all_misses(tmp_path: Path) -> None:
    made, notes = plan_on(tmp_path, "t4", **TOLD)
    assert ["float16" in note for note in notes] == [True]
    assert all(row.host_share == 0 for row in made.alternatives)
    assert "processor" not in " ".join(row.reason for row in made.alternatives)


def test_unknown_processor_is_assumed_or_taken_from_this_machine(tmp_path: Path) -> None:
    _, (assumed,) = plan_on(tmp_path, "rtx-3070")
    assert "assumed" in assumed
    own = MachineRates(
        name="own", device_memory_bytes=2**30, device_bytes_per_s=4 * 2**32, link_bytes_per_s=1e9,
        flops_per_s=1e11,
    )  # fmt: skip
    cache = tmp_path / "cache"
    cache.mkdir()
    MachineProfile(cache / PROFILE_FILE).keep_rates(own, default_num_threads())
    made, (kept,) = plan_on(tmp_path, "rtx-3070")
    assert "4.0 GiB/s of int8 experts: taken from this machine" in kept
    assert made.machine.host_bytes_per_s is None, "the machine is told as it was given"


def test_nested_experts_are_copied_unless_unpacking_was_measured(tmp_path: Path) -> None:
    nested = replace(ASKED, precision=Precision.NESTED)
    known, _ = plan_on(tmp_path, "rtx-3070", nested, **TOLD)
    unknown, (note,) = plan_on(tmp_path, "rtx-3070", nested, host_bytes_per_s=5e10)
    assert "unpacks every record" in note
    assert tpot_of(known) < tpot_of(unknown)
