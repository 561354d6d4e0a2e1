"""Recorded routing brought to other shapes: distinct, within range, and said what it is."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from gpu.trace_routing import FIDELITY, make_routing

NUM_TOKENS, NUM_LAYERS, TOP_K, NUM_EXPERTS = 40, 4, 3, 16


@pytest.fixture
def recorded(tmp_path: Path) -> Path:
    """Two texts of a model with 16 experts, 3 of them a token."""
    rng = np.random.default_rng(5)
    for name in ("law", "summary"):
        ids = np.argsort(rng.random((NUM_TOKENS, NUM_LAYERS, NUM_EXPERTS)))[..., :TOP_K]
        ids[0, 0, 0] = NUM_EXPERTS - 1  # How many there are is seen from the largest.
        ids[0, 0, 1:] = (0, 1)
        np.savez(tmp_path / f"{name}.npz", ids=ids.astype(np.int16), seq_len=[NUM_TOKENS])
    return tmp_path


def ids_of(folder: Path, name: str) -> np.ndarray:
    with np.load(folder / f"{name}.npz") as arrays:
        return arrays["ids"]


def is_distinct(ids: np.ndarray) -> bool:
    ordered = np.sort(ids, axis=-1)
    return bool((ordered[..., 1:] != ordered[..., :-1]).all())


def test_routing_of_the_recorded_shape_is_the_recorded_one(recorded: Path) -> None:
    made = make_routing(
        num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, top_k=TOP_K, num_tokens=30, folder=recorded
    )

    assert np.array_equal(made.target, ids_of(recorded, "law")[:30])
    assert "recorded (law" in made.source


def test_routing_of_more_experts_takes_texts_side_by_side(recorded: Path) -> None:
    made = make_routing(
        num_layers=6, num_experts=2 * NUM_EXPERTS, top_k=4, num_tokens=50, folder=recorded
    )

    assert made.target.shape == (50, 6, 4)
    assert is_distinct(made.target)
    lower = made.target < NUM_EXPERTS
    assert (lower.sum(-1) == 2).all()  # Half of a token's choices from each text.
    assert np.array_equal(made.target[:, 4, :2][:40], ids_of(recorded, "law")[:, 0, :2])
    assert np.array_equal(
        made.target[:40, 0, 2:], ids_of(recorded, "summary")[:, 0, :2] + NUM_EXPERTS
    )
    assert "law and summary" in made.source


def test_routing_of_fewer_experts_stays_distinct_and_within_them(recorded: Path) -> None:
    made = make_routing(num_layers=2, num_experts=5, top_k=4, num_tokens=20, folder=recorded)

    assert made.target.max() < 5
    assert is_distinct(made.target)


def test_draft_routing_names_most_of_the_targets_experts(recorded: Path) -> None:
    made = make_routing(
        num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, top_k=TOP_K, num_tokens=40, folder=recorded
    )

    is_named = (made.draft[..., :, None] == made.target[..., None, :]).any(-1)
    assert is_distinct(made.draft)
    assert is_named.mean() == pytest.approx(FIDELITY, abs=0.06)
    assert not is_named.all()


def test_narrowed_routing_uses_so_many_experts_and_says_so(recorded: Path) -> None:
    made = make_routing(
        num_layers=NUM_LAYERS, num_experts=NUM_EXPERTS, top_k=TOP_K, num_tokens=30, folder=recorded
    )

    narrow = made.narrowed(4)

    assert narrow.target.max() == narrow.draft.max() == 3
    assert is_distinct(narrow.target)
    assert is_distinct(narrow.draft)
    assert "4 experts of a layer" in narrow.source
    assert made.narrowed(NUM_EXPERTS) is made


def test_routing_without_a_record_is_drawn_and_says_so(tmp_path: Path) -> None:
    made = make_routing(num_layers=2, num_experts=6, top_k=2, num_tokens=8, folder=tmp_path)

    assert made.target.shape == (8, 2, 2)
    assert "drawn" in made.source
