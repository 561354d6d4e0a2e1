"""The padded cache of a batch: what is hidden, what is given back, what a compaction moves."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from mira_engine.model.batch_state import BatchState, PaddedLayer
from tiny_models import tiny_config


def _state(num_rows: int = 2, num_columns: int = 12) -> BatchState:
    return BatchState(tiny_config("olmoe"), num_rows=num_rows, num_columns=num_columns)


def _write(state: BatchState, tokens: Sequence[Sequence[int]]) -> None:
    """Makes each entry's key and value its token, padding -1, as a pass would do."""
    inputs = state.extend(tokens)
    width = inputs.ids.shape[1]
    own = inputs.mask[:, -width:]
    states = torch.where(own, inputs.ids, -1)[:, None, :, None].expand(-1, 2, -1, 3).float()
    for layer in state.cache.layers:
        layer.update(states, states)


def _visible(state: BatchState) -> list[list[float]]:
    """Each row's tokens by what a next query of it would see."""
    inputs = state.extend([[]] * (len(state.lengths) - 1) + [[0]])
    keys = state.cache.layers[-1].keys[:, 0, :, 0]
    return [
        keys[row, : inputs.mask.shape[1] - 1][inputs.mask[row, :-1]].tolist()
        for row in range(len(state.lengths))
    ]


def test_state_rejected_entries_are_hidden_and_compaction_keeps_the_others() -> None:
    state = _state()
    _write(state, [[1, 2, 3], [11]])
    _write(state, [[4, 5, 6], [12, 13, 14]])
    state.keep(3, [1, 3])
    assert (state.num_columns, state.lengths) == (6, [4, 4])
    _write(state, [[7], [15]])
    assert state.removable_share([0, 1]) == pytest.approx(1 - 5 / 7)
    state.compact([0, 1])
    assert (state.num_columns, state.lengths, state.num_compactions) == (5, [5, 5], 1)
    assert _visible(state) == [[1, 2, 3, 4, 7], [11, 12, 13, 14, 15]]


def test_state_columns_that_all_rows_reject_are_given_back() -> None:
    state = _state()
    _write(state, [[1, 2, 3], [11]])
    _write(state, [[4, 5, 6], [12, 13]])
    state.keep(3, [1, 0])
    assert (state.num_columns, state.lengths) == (4, [4, 1])
    assert state.removable_share([0, 1]) == 0


def test_state_dropped_row_gives_its_place_to_the_next() -> None:
    state = _state(3)
    _write(state, [[1, 2], [11, 12, 13, 14], [21, 22, 23]])
    assert state.removable_share([0, 2]) == pytest.approx(1 - 2 * 3 / 12)
    state.compact([0, 2])
    assert state.num_columns == 3
    assert state.cache.layers[0].keys.shape[0] == 2
    assert _visible(state) == [[1, 2], [21, 22, 23]]


def test_state_positions_count_tokens_not_columns() -> None:
    state = _state()
    _write(state, [[1, 2, 3], [11]])
    state.keep(3, [2, 1])
    inputs = state.extend([[4, 5], [12]])
    assert inputs.positions.tolist() == [[2, 3], [1, 1]]
    assert inputs.mask.tolist() == [[True] * 4, [True, False, True, False]]
    assert inputs.real.tolist() == [0, 1, 2]


def test_state_inputs_of_a_pass_stay_as_they_were_when_entries_are_rejected() -> None:
    state = _state()
    _write(state, [[1, 2, 3], [11]])
    inputs = state.extend([[4, 5], [12, 13]])
    state.keep(2, [1, 0])
    assert inputs.mask.tolist() == [[True] * 5, [True, False, False, True, True]]


ELSEWHERE = torch.device("meta")
"""A device that is not the host and needs no hardware; it holds no values."""


def test_compaction_moves_entries_where_they_are(monkeypatch: pytest.MonkeyPatch) -> None:
    state, places = _state(), []
    inputs = state.extend([[1, 2, 3], [11]])
    keys = torch.empty((2, 2, inputs.ids.shape[1], 3), device=ELSEWHERE)
    for layer in state.cache.layers:
        layer.update(keys, keys)
    gather = PaddedLayer.gather

    def noting_gather(
        self: PaddedLayer, rows: Sequence[int], columns: Sequence[torch.Tensor]
    ) -> None:
        places.extend(own.device for own in columns)
        gather(self, rows, columns)

    monkeypatch.setattr(PaddedLayer, "gather", noting_gather)
    state.compact([1])

    assert places == [ELSEWHERE] * len(state.cache.layers)
    assert {layer.keys.device for layer in state.cache.layers} == {ELSEWHERE}
