"""`mira-chat simulate` on cards: what is planned, what is printed, and what is refused."""

from __future__ import annotations

import io
import json
import re

import pytest
from app_fakes import FakeCatalog
from mira_app.card_cases import CasePlanner
from mira_app.catalog import LibraryCatalog
from mira_app.catalog_configs import find_entry
from mira_app.machines import find_machine
from mira_app.settings import load_settings
from mira_app.simulation import run_simulation
from mira_app.simulation_report import report_lines
from mira_assets.models import load_models
from mira_engine.api import (
    BudgetError,
    ConfigError,
    Precision,
    SimulationReport,
    SimulationRow,
    UnknownModelError,
)
from plan_scenes import FACTS, MIB, FakePlanningClient

OLMOE = "allenai/OLMoE-1B-7B-0924-Instruct"
CARDS = ("rtx-3070", "rtx-4090")


class Terminal(io.StringIO):
    """A stream that says it is a terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def client():
    return FakePlanningClient()


@pytest.fixture
def planner(client, tmp_path):
    return CasePlanner(
        lambda flags: load_settings(flags, {}), lambda: client, FakeCatalog(), tmp_path
    )


@pytest.fixture
def simulated(planner):
    """Runs the command's work; returns what it printed."""

    def run(*, is_json=False, err=None, **flags):
        out = io.StringIO()
        flags = {"max_tokens": 8, "policy": ["lru", "mira+lookahead", "belady"], **flags}
        run_simulation(flags, is_json=is_json, out=out, err=err or io.StringIO(), planner=planner)
        return json.loads(out.getvalue()) if is_json else out.getvalue()

    return run


# -- what is planned --------------------------------------------------------------------------


def test_every_card_is_planned_with_every_memory_and_budget(planner, client):
    flags = {"card": [*CARDS, CARDS[0]], "memory": ["4GiB", "6GiB"], "budget": ["40%", "2GiB"]}
    planned = planner.plan({**flags, "k": 3, "context": 512, "precision": "int8"})
    asked = [(r.machine.name, r.config.memory_bytes, str(r.config.budget)) for r in client.requests]
    names = [find_machine(card).name for card in CARDS]
    assert asked == [
        (name, memory * 2**30, budget)
        for name in names
        for memory in (4, 6)
        for budget in ("40%", "2.0 GiB")
    ]
    assert client.num_started == 1
    for request in client.requests:
        config = request.config
        chosen = (config.num_draft_tokens, config.context_length, config.precision)
        assert chosen == (3, 512, Precision.INT8)
    assert [(case.machine, case.memory) for case in planned.cases[:2]] == [
        (names[0], "4.0 GiB of memory, 40% for experts"),
        (names[0], "4.0 GiB of memory, 2.0 GiB for experts"),
    ]


def test_without_a_card_this_machine_is_planned(planner, client):
    planned = planner.plan({"budget": ["40%"]})
    assert client.requests[0].machine is None
    assert [(c.machine, c.memory) for c in planned.cases] == [("this machine", "40% for experts")]
    assert planner.plan({"model": "builtin"}).cases[0].memory.endswith("GiB of memory")


def test_more_memory_than_the_card_has_is_simulated_once(planner):
    planned = planner.plan({"card": ["rtx-3070"], "memory": ["9GiB", "12GiB", "4GiB"]})
    assert [case.memory for case in planned.cases] == ["8.0 GiB of memory", "4.0 GiB of memory"]


def test_memories_that_read_alike_are_told_apart(planner):
    flags = {"card": ["rtx-4090"], "memory": ["8GiB", "8212MiB", "6GiB"], "budget": ["2GiB"]}
    assert [case.memory for case in planner.plan(flags).cases] == [
        "8192 MiB of memory, 2048 MiB for experts",
        "8212 MiB of memory, 2048 MiB for experts",
        "6.0 GiB of memory, 2.0 GiB for experts",
    ]


def test_machines_of_one_name_are_told_apart(planner, tmp_path):
    paths = [tmp_path / place / "box.json" for place in "ab"]
    for path, gib in zip(paths, (6, 8), strict=True):
        path.parent.mkdir()
        rates = {"device_bytes_per_s": 4e11, "link_bytes_per_s": 2.5e10}
        path.write_text(json.dumps({"device_memory_bytes": gib * 2**30, **rates}))
    planned = planner.plan({"card": [str(path) for path in paths], "memory": ["4GiB"]})
    assert [case.machine for case in planned.cases] == ["box", "box (2)"]


def test_notes_are_told_once_and_with_the_machines_that_they_are_true_of(planner):
    planned = planner.plan({"card": list(CARDS)})
    names = [find_machine(card).name for card in CARDS]
    assert planned.notes == (
        "True of all.", *(f"{name}: True of {name}." for name in names),
    )  # fmt: skip


def test_memory_that_holds_nothing_is_a_note_beside_others_and_an_error_alone(planner):
    planned = planner.plan({"card": ["rtx-3070"], "memory": ["200MiB", "4GiB"]})
    assert [case.memory for case in planned.cases] == ["4.0 GiB of memory"]
    assert re.search(r"RTX 3070, 200.0 MiB of memory: .*short", planned.notes[-1])
    with pytest.raises(BudgetError, match="200.0 MiB of memory: .*short") as caught:
        planner.plan({"card": ["rtx-3070"], "memory": ["200MiB"]})
    assert "--memory" in caught.value.hint


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"card": ["rtx-4071"]}, "rtx-4070"),
        ({"card": ["rtx-4070"], "memory": ["40%"]}, "8GiB"),
        ({"card": ["rtx-4070"], "budget": ["many"]}, "40%"),
        ({"card": ["rtx-4070"], "policy": ["magic"]}, "mira+lookahead"),
        ({"card": ["rtx-4070"], "k": 0}, "Give >0"),
        ({"model": "olmoe-1b-7b-instruct"}, OLMOE),
    ],
)
def test_mistaken_flag_is_told_before_an_engine_is_started(simulated, client, flags, said):
    with pytest.raises((ConfigError, UnknownModelError)) as caught:
        simulated(**flags)
    assert said in caught.value.hint
    assert client.num_started == 0


# -- models -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "name", [OLMOE, OLMOE.lower(), "OLMoE-1B-7B-0924-Instruct", load_models()[OLMOE].title]
)
def test_model_of_the_catalog_is_planned_by_what_is_known_of_it(client, tmp_path, name):
    planner = CasePlanner(
        lambda flags: load_settings(flags, {}),
        lambda: client,
        LibraryCatalog(tmp_path / "data"),
        tmp_path / "cache",
    )
    (case,) = planner.plan({"model": name, "card": ["rtx-3070"], "memory": ["4GiB"]}).cases
    assert case.model == load_models()[OLMOE].title
    folder = client.requests[0].model
    with open(f"{folder}/config.json", encoding="utf-8") as file:
        assert json.load(file) == dict(load_models()[OLMOE].config)


def test_folder_wins_over_a_name_of_the_catalog(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    name = OLMOE.partition("/")[2]
    (tmp_path / name).mkdir()
    (tmp_path / name / "config.json").write_text("{}")
    catalog = LibraryCatalog(tmp_path / "data")
    assert find_entry(name, catalog, Precision.NESTED).model == str(tmp_path / name)


def test_unknown_model_names_the_nearest_of_the_catalog(tmp_path):
    catalog = LibraryCatalog(tmp_path)
    with pytest.raises(UnknownModelError) as caught:
        find_entry("mixtral-8x7b-instruct", catalog, Precision.NESTED)
    assert "Did you mean mistralai/Mixtral-8x7B-Instruct-v0.1" in caught.value.hint
    with pytest.raises(UnknownModelError) as caught:
        find_entry("zzzz", catalog, Precision.NESTED)
    assert "Did you mean" not in caught.value.hint


# -- what is printed --------------------------------------------------------------------------


def test_table_has_each_card_and_memory_and_then_the_fastest_of_each(simulated):
    text = simulated(card=list(CARDS), memory=["4GiB", "6GiB"])
    lines = text.splitlines()
    assert lines[0].startswith("Built-in model; routing: synthetic: 4 layers, 2 of 16 experts")
    places = [
        f"{find_machine(card).name}, {memory}.0 GiB of memory, link 25.2 GB/s"
        for card in CARDS
        for memory in (4, 6)
    ]
    assert [line for line in lines if line in places] == places
    best = lines[next(i for i, line in enumerate(lines) if line.startswith("at ")) + 1 :][:4]
    assert [line.split(" GB/s")[0] + " GB/s" for line in best] == places
    assert all(re.search(r" (lru|mira\+lookahead) +\d+ +[\d.]+ +[\d.]+ ms$", line) for line in best)
    assert "note: True of all." in lines


def test_fastest_policy_is_one_that_can_be_run():
    def row(policy, memory, tpot_s, **fields):
        return SimulationRow(
            policy=policy, machine="card", memory=memory, slots_per_layer=2.0, memory_share=0.5,
            link_bytes_per_s=2e10, hit_rate=0.5, prefetched_share=0.0, bytes_per_token=1e6,
            stall_s=0.0, tpot_s=tpot_s, tokens_per_round=1.0, **fields,
        )  # fmt: skip

    rows = [
        row(policy, memory, tpot_s, **fields)
        for memory in ("4 GiB", "6 GiB")
        for policy, tpot_s, fields in (
            ("lru", 0.3, {}), ("belady", 0.1, {"is_bound": True}), ("lfu", 0.2, {}),
        )
    ]  # fmt: skip
    report = SimulationReport(
        title="t", num_layers=1, num_experts=8, top_k=2, acceptance=0.8, fidelity=0.9,
        rows=tuple(rows),
    )  # fmt: skip
    assert [line.split() for line in list(report_lines(report))[-2:]] == [
        f"card, {memory} GiB, link 20 GB/s lfu 0 0.500 200.0 ms".split() for memory in (4, 6)
    ]


def test_single_place_needs_no_table_of_the_fastest(simulated):
    text = simulated(card=["rtx-3070"])
    assert not [line for line in text.splitlines() if line.startswith("at ")]


def test_json_has_the_fields_that_the_help_names(simulated, planner):
    told = simulated(is_json=True, card=["rtx-3070"], memory=["4GiB"])
    assert told["model"] == "Built-in model"
    assert told["notes"][0] == "True of all."
    from mira_app.commands.simulate import _JSON_HELP

    named = set(re.findall(r"`(\w+)`", _JSON_HELP))
    row = told["rows"][0]
    assert set(row) | {"model", "title", "notes", "rows"} == named
    assert row["machine"] == find_machine("rtx-3070").name
    assert row["link_bytes_per_s"] == pytest.approx(0.8 * 16 * 1.969e9)


def test_what_is_under_way_is_told_on_a_terminal_only(simulated):
    terminal, pipe = Terminal(), io.StringIO()
    simulated(card=["rtx-3070"], err=terminal)
    simulated(card=["rtx-3070"], err=pipe)
    assert "planning" in terminal.getvalue()
    assert f"lru at {find_machine('rtx-3070').name}, " in terminal.getvalue()
    assert terminal.getvalue().endswith("\r\x1b[K")
    assert not pipe.getvalue()


def test_numbers_alone_need_no_plan(simulated, client):
    text = simulated(slots_per_layer=[2], policy=["lru"], record="1MiB")
    assert "2 of 64 experts a layer, link 25 GB/s" in text
    assert client.num_started == 0


def test_record_by_hand_wins_over_the_plans(simulated):
    flags = {"is_json": True, "card": ["rtx-3070"], "memory": ["4GiB"], "policy": ["lru"]}
    planned, by_hand = simulated(**flags), simulated(**flags, record="1MiB")
    ratio = planned["rows"][0]["bytes_per_token"] / by_hand["rows"][0]["bytes_per_token"]
    assert ratio == pytest.approx(FACTS.whole_record_bytes / MIB)
