"""Figures beside what is asked of them, and the gap that a row closes."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton has no wheel for this system")

from gap import bound_ms, gap_closed
from gpu.targets import Target, targets


def test_bound_is_the_slower_of_computing_and_the_link() -> None:
    assert bound_ms(5.0, 1e6, 1e9) == 5.0
    assert bound_ms(0.5, 1e6, 1e9) == 1.0
    assert bound_ms(0.5, 1e6, None) == 0.5


def test_gap_closed_is_the_share_won_back() -> None:
    assert gap_closed(10.0, 6.0, 2.0) == pytest.approx(0.5)
    assert gap_closed(10.0, 11.0, 2.0) == pytest.approx(-0.125)
    assert gap_closed(2.0, 1.0, 2.0) is None


@pytest.mark.parametrize(
    ("value", "is_most", "word"),
    [(0.8, False, "met"), (0.6, False, "MISSED"), (0.6, True, "met"), (None, True, "not measured")],
)
def test_target_says_whether_it_is_met(value: float | None, is_most: bool, word: str) -> None:
    target = Target(name="a figure", value=value, limit=0.7, is_most=is_most)

    assert str(target).split("a figure")[0].strip() == word
    assert target.as_dict()["is_met"] is {"met": True, "MISSED": False}.get(word)


def test_targets_take_their_figures_from_the_sections() -> None:
    results = {
        "kernel times": {"cases": {"Mixtral's expert, nested": {"share_of_copy_bandwidth": 0.75}}},
        "link": {"kept": 0.5},
        "captured draft": {"ratio": 1.5, "what": "a step"},
        "decoding": {
            "runs": {
                "100%, link as it is, lru": {"ms_per_token": 40.0, "gap_closed": 0.0},
                "100%, link as it is, everything": {"ms_per_token": 20.0, "gap_closed": 0.7},
            }
        },
        "transformers with accelerate": {"ms_per_token": 150.0},
    }

    found = {target.name: target for target in targets(results) if target.value is not None}

    assert {name: (t.value, t.is_met) for name, t in found.items()} == {
        "share of a copy's rate, Mixtral's expert, nested": (0.75, True),
        "link while products run, share of the link alone": (0.5, False),
        "captured draft step, times its kernels": (1.5, True),
        "share of the gap closed, 100%, link as it is": (0.7, True),
        "times faster than transformers' offload, 100%": (7.5, False),
    }
