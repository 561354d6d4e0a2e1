"""What lasts from one recorded piece to the next, and what the fake that replays them sees."""

from __future__ import annotations

import pytest
import torch
from mira_engine.errors import UnsupportedModelError
from mira_engine.runtime.captured_memory import BoundaryMemory
from torch import Tensor

pytest.importorskip("triton", reason="triton has no wheel for this system")

from fake_graphs import FakeGraphs, RecordingError


class _TwoPieces:
    """`y = (2 x + 1) ** 2` cut in the middle, and what is kept of it."""

    def __init__(self, graphs: FakeGraphs) -> None:
        self.x, self.memory = torch.tensor([3.0]), BoundaryMemory()
        self.y: Tensor
        self.pieces = graphs.capture(self._work)

    def _work(self, cut) -> None:
        self.memory = BoundaryMemory()
        with self.memory:
            doubled = self.x * 2
            unused = doubled * 0
            del unused
            middle = doubled + 1
            del doubled
            self.memory.cut()
            cut()
            self.y = middle * middle


def test_piece_is_replayed_again_after_later_ones() -> None:
    made = _TwoPieces(FakeGraphs())
    first, second = made.pieces
    made.x[:] = 4

    first.replay()
    second.replay()
    assert made.y.tolist() == [81]
    second.replay()
    assert made.y.tolist() == [81]


def test_only_what_is_alive_at_the_cut_is_kept() -> None:
    made = _TwoPieces(FakeGraphs())

    assert made.memory.num_bytes == 4
    assert len(made.memory.kept) == 1


def test_recording_computes_nothing() -> None:
    made = _TwoPieces(FakeGraphs())

    assert torch.isnan(made.y).all()


def test_memory_that_nobody_keeps_is_nan_at_the_next_piece() -> None:
    made = _TwoPieces(FakeGraphs())
    made.memory.kept.clear()
    for piece in made.pieces:
        piece.replay()

    assert torch.isnan(made.y).all()


def test_writes_of_a_recording_are_undone_and_those_of_a_replay_stay() -> None:
    graphs, total = FakeGraphs(), torch.zeros(1)

    [piece] = graphs.capture(lambda cut: total.add_(1))
    assert total.tolist() == [1], "once, when it was tried"

    piece.replay()
    assert total.tolist() == [2]


def test_number_of_the_host_stays_as_it_was() -> None:
    graphs, x, step = FakeGraphs(), torch.zeros(1), [1.0]

    [piece] = graphs.capture(lambda cut: x.add_(step[0]))
    step[0] = 5.0
    piece.replay()

    assert x.tolist() == [2]


@pytest.mark.parametrize(
    "ask",
    [
        lambda x: int(x),
        lambda x: bool(x),
        lambda x: x.tolist(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.tensor([1.0]) + x,
    ],
    ids=["int", "bool", "tolist", "cpu", "nonzero", "boolean-index", "host-constant"],
)
@pytest.mark.parametrize("is_inference", [False, True], ids=["plain", "inference"])
def test_work_that_waits_for_the_device_is_not_recorded(ask, is_inference: bool) -> None:
    with torch.inference_mode(is_inference):
        x = torch.ones(1)

        with pytest.raises(RecordingError):
            FakeGraphs().capture(lambda cut: ask(x))


def test_change_in_place_of_what_an_earlier_piece_made_is_refused() -> None:
    memory, x = BoundaryMemory(), torch.ones(2)

    with memory:
        made = x + 1
        made.add_(1)  # In the same piece it does no harm.
        memory.cut()
        with pytest.raises(UnsupportedModelError, match="in place"):
            made[:1].add_(1)


def test_change_in_place_of_memory_from_outside_is_no_matter() -> None:
    memory, x = BoundaryMemory(), torch.ones(2)

    with memory:
        x.add_(1)
        memory.cut()
        x.add_(1)

    assert x.tolist() == [3, 3]
