"""What is made of runs: bounds, the gap that is closed, the lines that are printed."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="triton has no wheel for this system")

from gpu import replay
from gpu.card import GIB
from gpu.decoding import (
    BUDGETS,
    ROWS,
    Budget,
    Case,
    Decoding,
    add_gaps,
    best_row,
    cases,
    describe_decoding,
    facts_for,
    plan_for,
)
from gpu.shapes import SHAPES, SMALL

LINK = "link as it is"


def run_of(row: str, ms: float, mb: float, k: int) -> dict[str, Any]:
    """Figures as a card gives them."""
    return {
        "ms_per_token": ms, "stall_ms": ms / 2, "hit_rate": 0.5, "mb_per_token": mb,
        "link_gb_per_s": 9.5, "k": k, "accepted_per_round": 1.5, "num_device_allocations": 0,
    }  # fmt: skip


@pytest.fixture
def results() -> dict[str, Any]:
    """Two rows of the first budget: 100 MB a token on a link of 10 GB/s take 10 ms."""
    budget = BUDGETS[0].name
    return {
        "set": {"routing": "replayed"},
        "runs": {
            f"{budget}, {LINK}, lru": run_of("lru", 40.0, 300.0, 0),
            f"{budget}, {LINK}, everything": run_of("everything", 22.0, 100.0, 2),
        },
        "computes": {
            f"{budget}, K 0": {"compute_ms": 5.0, "num_experts_used": 4},
            f"{budget}, K 2": {"compute_ms": 6.0, "num_experts_used": 4},
        },
        "timelines": {
            "one": {"hidden_share_of_copies": 0.4, "num_copies": 7, "drawing": ["a line"]}
        },
    }


def test_gaps_are_between_lru_and_the_bound_of_everything(results: dict[str, Any]) -> None:
    case = Case(budget=BUDGETS[0], link=LINK, row="everything")

    add_gaps(results, case, 10e9)

    lru, everything = results["runs"].values()
    assert (lru["bound_ms"], everything["bound_ms"]) == (30.0, 10.0)
    assert (lru["gap_closed"], everything["gap_closed"]) == (0.0, pytest.approx(0.6))


def test_gaps_on_a_held_link_are_bound_by_the_rate_it_is_held_to(results: dict[str, Any]) -> None:
    results["runs"] = {
        name.replace(LINK, "held to PCIe 4"): figures for name, figures in results["runs"].items()
    }

    add_gaps(results, Case(budget=BUDGETS[0], link="held to PCIe 4", row="lru"), 50e9)

    assert next(iter(results["runs"].values()))["bound_ms"] == pytest.approx(300e6 / 25e9 * 1e3)


def test_gaps_without_what_everything_computes_are_unknown(results: dict[str, Any]) -> None:
    results["computes"].popitem()

    add_gaps(results, Case(budget=BUDGETS[0], link=LINK, row="lru"), 10e9)

    assert all("gap_closed" not in figures for figures in results["runs"].values())


def test_best_row_is_the_fastest(results: dict[str, Any]) -> None:
    found = best_row(results, BUDGETS[0], LINK)

    assert found is not None
    assert found[0] == "everything"
    assert best_row(results, BUDGETS[1], LINK) is None


def test_lines_hold_every_run_and_what_it_is_held_against(results: dict[str, Any]) -> None:
    add_gaps(results, Case(budget=BUDGETS[0], link=LINK, row="lru"), 10e9)

    lines = list(describe_decoding(results))

    (row,) = [line for line in lines if line.endswith("60%")]
    assert row.split(", ")[2].split() == [
        "everything", "22.0", "11.0", "50%", "100.00", "9.5", "2", "1.50", "10.0", "60%",
    ]  # fmt: skip
    assert any("7 copies, 40% of their time" in line for line in lines)
    assert any("computing alone" in line and "6.0 ms" in line for line in lines)


def test_cases_begin_with_the_links_own_rate_and_have_each_row_once() -> None:
    found = list(cases())

    assert [case.row for case in found[:4]] == list(ROWS)
    assert len({case.name for case in found}) == len(found)
    assert [case.link for case in found].index("held to PCIe 4") == 2 * len(ROWS)


@pytest.mark.parametrize("name", SHAPES)
def test_plan_of_a_real_shape_stays_within_the_memory_and_has_slots_for_a_layer(name: str) -> None:
    shape = SHAPES[name]
    facts = facts_for(shape, context_length=256)

    for size in (8, 12):
        budget = Budget(name="", memory_bytes=size * GIB)
        for k in (0, shape.num_draft_tokens):
            plan = plan_for(facts, budget, k)

            assert plan.total_bytes <= size * GIB
            assert shape.num_layers * shape.top_k <= plan.num_slots < facts.num_experts
            # The draft of all experts, where it fits, has the paper's K.
            is_whole = plan.draft_bytes == facts.all_draft_bytes
            assert plan.num_draft_tokens == (k if is_whole or not k else 2)


def test_run_on_a_card_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    setting = Decoding(SMALL, num_tokens=1).setting(Case(budget=BUDGETS[0], link=LINK, row="lru"))
    engine = replay.ReplayedEngine(setting)
    monkeypatch.setattr(replay, "HAS_CARD", True)
    engine.read_prompt(1)

    figures = engine.run(1, num_warm_tokens=0)

    engine.close()
    assert figures["ms_per_token"] > 0
    assert 0 < figures["target_ms"] <= figures["ms_per_token"]
    assert figures["draft_ms"] == 0
