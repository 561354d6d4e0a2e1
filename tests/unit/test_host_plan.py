"""What a plan takes the processor beside a card to do, and what it says of that."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from mira_app.machines import find_machine
from mira_app.plan_report import plan_json, plan_lines
from mira_assets.gpus import load_gpus
from mira_engine import api
from mira_engine.config import EngineConfig, MachineRates, MemoryAmount
from mira_engine.errors import ConfigError
from mira_engine.events import PlanAlternative
from mira_engine.host_assumptions import READING_SHARE, USUAL_BYTES_PER_S, host_work
from mira_engine.policy.alternatives import PlanWishes, compare_plans
from mira_engine.policy.budget import ModelFacts
from mira_engine.policy.host_plan import HostWork
from mira_engine.types import ComputeDtype, DraftExperts, Precision, Strategy
from plan_scenes import FACTS, MACHINE, made

BF16 = EngineConfig(precision=Precision.BF16)
OWN = MachineRates(
    name="this machine, 1 thread", device_memory_bytes=2**33, device_bytes_per_s=2e10,
    link_bytes_per_s=1e9,
)  # fmt: skip
FAST = HostWork(plain_bytes_per_s=2e10, packed_bytes_per_s=2e10)
WHOLE = replace(FACTS, target_record_bytes=FACTS.whole_record_bytes)
"""Experts whose draft is no part of theirs."""


def rows_of(
    host: HostWork | None,
    facts: ModelFacts = WHOLE,
    rates: MachineRates = MACHINE,
    **wished: object,
) -> dict[Strategy, PlanAlternative]:
    asked = {"budget": MemoryAmount(share=0.4), "precision": Precision.INT8} | wished
    rows = compare_plans(facts, PlanWishes(**asked), rates, None, host)
    return {row.strategy: row for row in rows}


# -- where the rates are from --------------------------------------------------------------


def test_rate_is_the_machine_files_else_this_machines_else_assumed() -> None:
    told = replace(MACHINE, host_bytes_per_s=3e10)
    found = [
        host_work(BF16, rates, own) for rates, own in ((told, OWN), (MACHINE, OWN), (MACHINE, None))
    ]
    assert [work.plain_bytes_per_s for work, _ in found if work] == [
        3e10, READING_SHARE * 2e10, USUAL_BYTES_PER_S,
    ]  # fmt: skip
    notes = [note for _, note in found]
    assert "27.9 GiB/s of bf16 experts: host_bytes_per_s of the machine file" in notes[0]
    assert "this machine, 1 thread" in notes[1]
    assert "assumed" in notes[2]
    assert all("Prompts are the card's" in note for note in notes)


@pytest.mark.parametrize("precision", [Precision.INT4, Precision.NESTED])
def test_records_that_are_unpacked_count_only_where_that_was_measured(precision) -> None:
    config = EngineConfig(precision=precision)
    work, note = host_work(config, replace(MACHINE, host_bytes_per_s=3e10), OWN)
    assert work is not None
    assert work.bytes_per_s(precision) is None
    assert "unpacks every record" in note
    assert "host_packed_bytes_per_s" in note
    work, note = host_work(config, replace(MACHINE, host_packed_bytes_per_s=4e9), OWN)
    assert work is not None
    assert work.bytes_per_s(precision) == 4e9
    assert "of the machine file" in note


def test_float32_unpacks_records_of_every_kind() -> None:
    config = replace(BF16, dtype=ComputeDtype.FLOAT32)
    work, note = host_work(config, replace(MACHINE, host_bytes_per_s=3e10), OWN)
    assert work is not None
    assert work.bytes_per_s(Precision.BF16) is None
    assert "float32" in note
    work, _ = host_work(config, replace(MACHINE, host_packed_bytes_per_s=4e9), OWN)
    assert work is not None
    assert work.bytes_per_s(Precision.BF16) == 4e9


@pytest.mark.parametrize(
    ("config", "rates", "said"),
    [
        (replace(BF16, is_deterministic=True), MACHINE, "--deterministic"),
        (replace(BF16, dtype=ComputeDtype.FLOAT16), MACHINE, "float16"),
        (BF16, replace(MACHINE, has_bfloat16=False), "float16"),
        (BF16, replace(MACHINE, is_gpu=False), ""),
    ],
    ids=("deterministic", "float16", "card without bfloat16", "no card"),
)
def test_where_the_engine_would_not_ask_it_the_processor_counts_for_nothing(
    config: EngineConfig, rates: MachineRates, said: str
) -> None:
    work, note = host_work(config, replace(rates, host_bytes_per_s=3e10), OWN)
    assert work is None
    assert said in note
    assert bool(note) is bool(said)


# -- in the table --------------------------------------------------------------------------


def test_plans_count_the_processor_and_say_how_much_it_computes() -> None:
    budget = MemoryAmount(share=0.75)
    alone, helped = rows_of(None, budget=budget), rows_of(FAST, budget=budget)
    for strategy in (Strategy.ON_DEMAND, Strategy.PREDICTIVE, Strategy.SPECULATIVE):
        assert helped[strategy].tpot_s < alone[strategy].tpot_s
        assert helped[strategy].ttft_s == alone[strategy].ttft_s
        assert 0 < helped[strategy].host_share < 1
        share = f"the processor computes {helped[strategy].host_share:.0%} of the misses"
        assert helped[strategy].reason.endswith(share)
        assert "processor" not in alone[strategy].reason


def test_processor_changes_which_k_a_draft_should_have() -> None:
    rates = replace(MACHINE, link_bytes_per_s=2e9)
    alone, helped = (
        rows_of(host, rates=rates, budget=MemoryAmount(share=0.55))[Strategy.SPECULATIVE]
        for host in (None, HostWork(plain_bytes_per_s=4e10, packed_bytes_per_s=None))
    )
    assert (alone.num_draft_tokens, helped.num_draft_tokens) == (8, 4)


def test_resident_draft_of_nested_experts_leaves_the_processor_half_of_each() -> None:
    asked = {"precision": Precision.NESTED, "budget": MemoryAmount(share=0.75)}
    asked |= {"num_draft_tokens": 4}
    for source, is_counted in ((DraftExperts.ALL, False), (DraftExperts.CACHED, True)):
        alone, helped = (
            rows_of(host, FACTS, draft_experts=source, **asked)[Strategy.SPECULATIVE]
            for host in (None, FAST)
        )
        assert (helped.tpot_s < alone.tpot_s) is is_counted
        assert ("half of each expert" in helped.reason) is not is_counted
        assert (helped.host_share > 0) is is_counted


def test_slow_processor_is_said_to_be_left_out() -> None:
    slow = HostWork(plain_bytes_per_s=1e6, packed_bytes_per_s=None)
    alone, helped = (rows_of(host)[Strategy.ON_DEMAND] for host in (None, slow))
    assert helped.tpot_s == pytest.approx(alone.tpot_s)
    assert "faster than to compute them on the processor" in helped.reason


def test_host_memory_without_experts_is_said() -> None:
    rates = replace(MACHINE, host_memory_bytes=1)
    reason = rows_of(FAST, rates=rates)[Strategy.ON_DEMAND].reason
    assert reason.endswith("misses are read from the disk, as host memory has room for no expert")


def test_resident_experts_leave_the_processor_unmentioned() -> None:
    rows = rows_of(FAST, budget=MemoryAmount(share=3.0), num_draft_tokens=0)
    assert "processor" not in rows[Strategy.ON_DEMAND].reason


def test_records_on_the_disk_are_not_computed() -> None:
    half = replace(MACHINE, host_memory_bytes=WHOLE.reference_bytes // 2)
    host = HostWork(plain_bytes_per_s=1e11, packed_bytes_per_s=None)
    all_held, some_held = (
        rows_of(host, rates=rates)[Strategy.ON_DEMAND] for rates in (MACHINE, half)
    )
    assert all_held.host_share == pytest.approx(1.0)
    assert some_held.host_share == pytest.approx(0.5)
    assert some_held.tpot_s > all_held.tpot_s


def test_table_and_json_tell_of_the_processor() -> None:
    plan = replace(made(), alternatives=tuple(rows_of(FAST).values()))
    assert any("the processor computes" in line for line in plan_lines(plan))
    told = json.loads(plan_json(plan, None))["alternatives"]
    assert any(row["host_share"] > 0 for row in told)
    assert api.decode(api.encode(plan)) == plan


# -- machines ------------------------------------------------------------------------------


def test_machine_file_may_tell_of_its_processor(tmp_path: Path) -> None:
    fields = {
        "device_memory_bytes": "12GiB", "device_bytes_per_s": "400GB/s", "is_gpu": True,
        "link_bytes_per_s": "25GB/s",
    }  # fmt: skip
    path = tmp_path / "box.json"
    path.write_text(json.dumps(fields))
    before = find_machine(str(path))
    assert before.host_bytes_per_s is before.host_packed_bytes_per_s is None
    assert before.has_bfloat16
    more = {"host_bytes_per_s": "40GB/s", "host_packed_bytes_per_s": 3e9, "has_bfloat16": False}
    path.write_text(json.dumps(fields | more))
    found = find_machine(str(path))
    assert (found.host_bytes_per_s, found.host_packed_bytes_per_s) == (40e9, 3e9)
    assert not found.has_bfloat16
    for wrong in ({"host_bytes_per_s": 0}, {"has_bfloat16": "no"}):
        path.write_text(json.dumps(fields | wrong))
        with pytest.raises(ConfigError):
            find_machine(str(path))


def test_cards_of_before_compute_capability_8_have_no_bfloat16() -> None:
    without = {name for name, card in load_gpus().items() if not card.has_bfloat16}
    assert without == {"rtx-2080-ti", "t4"}
    assert not find_machine("t4").has_bfloat16
