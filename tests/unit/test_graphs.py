"""What is recorded on a card is ordered with what computes there, also where recording fails.

Without a card: torch's streams and graphs are replaced by such as note what came before what.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import pytest
import torch
from mira_engine.runtime.graphs import CudaGraphs, Cut

DEVICE = torch.device("cpu")


class FakeStream:
    """A queue that knows how much of the others' work comes before its own."""

    def __init__(self, device: object = None) -> None:
        self.num_launched = 0
        self.known: dict[FakeStream, int] = {}

    def launch(self) -> None:
        """Puts work in."""
        self.num_launched += 1

    def wait_stream(self, other: FakeStream) -> None:
        """What comes from now on runs after what is in the other one."""
        self.known[other] = other.num_launched

    def synchronize(self) -> None:
        """Holds the host until all is done."""

    def is_behind(self, other: FakeStream) -> bool:
        """Whether all that is in the other one comes before what is put in here now."""
        return self.known.get(other, 0) == other.num_launched


class FakeCuda:
    """The part of `torch.cuda` that recording takes.

    Attributes:
        compute: The stream that is current outside of recordings.
        current: The one that is current now.
        free_bytes: What `mem_get_info` tells.
        num_open: Graphs that have begun to record and not ended.
        pools: Those that graphs recorded into, in order.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.compute = self.current = FakeStream()
        self.free_bytes = 1000
        self.num_open = self._num_pools = 0
        self.pools: list[object] = []
        cuda = self

        class FakeGraph:
            def capture_begin(self, *, pool: object, capture_error_mode: str) -> None:
                del capture_error_mode
                cuda.num_open += 1
                cuda.pools.append(pool)

            def capture_end(self) -> None:
                cuda.num_open -= 1

        for name, value in {
            "Stream": FakeStream,
            "CUDAGraph": FakeGraph,
            "current_stream": lambda device: self.current,
            "stream": self._use,
            "graph_pool_handle": self._new_pool,
            "mem_get_info": lambda device: (self.free_bytes, 8000),
            "empty_cache": lambda: None,
        }.items():
            monkeypatch.setattr(torch.cuda, name, value)

    @contextmanager
    def _use(self, stream: FakeStream) -> Iterator[None]:
        before, self.current = self.current, stream
        try:
            yield
        finally:
            self.current = before

    def _new_pool(self) -> int:
        self._num_pools += 1
        return self._num_pools


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


class Work:
    """Two pieces of one launch each; the try numbered `fails_at`, from 0, ends in an error."""

    def __init__(self, cuda: FakeCuda, fails_at: int | None = None) -> None:
        self._cuda = cuda
        self._fails_at = fails_at
        self._num_tries = 0
        self.streams: list[FakeStream] = []
        """Where it was run."""

    def __call__(self, cut: Cut) -> None:
        number, self._num_tries = self._num_tries, self._num_tries + 1
        self.streams.append(self._cuda.current)
        self._cuda.current.launch()
        if number == self._fails_at:
            raise RuntimeError("this cannot be recorded")
        cut()
        self._cuda.current.launch()
        self._cuda.free_bytes -= 10


@pytest.mark.parametrize("fails_at", [None, 0, 1], ids=["none", "trial", "recording"])
def test_compute_comes_after_all_launches_of_a_recording_also_of_one_that_failed(
    cuda: FakeCuda, fails_at: int | None
) -> None:
    graphs, work = CudaGraphs(DEVICE), Work(cuda, fails_at)
    cuda.compute.launch()

    if fails_at is None:
        assert len(graphs.capture(work)) == 2
    else:
        with pytest.raises(RuntimeError, match="cannot be recorded"):
            graphs.capture(work)

    [stream] = set(work.streams)
    assert stream is not cuda.compute, "the current stream cannot be recorded"
    assert cuda.compute.is_behind(stream), "what computes next may read what a trial still writes"
    assert stream.is_behind(cuda.compute)


def test_recording_that_failed_leaves_no_graph_open_and_the_stream_as_it_was(
    cuda: FakeCuda,
) -> None:
    graphs = CudaGraphs(DEVICE)
    with pytest.raises(RuntimeError, match="cannot be recorded"):
        graphs.capture(Work(cuda, fails_at=1))

    assert cuda.num_open == 0, "the device would take all that follows for recorded work"
    assert cuda.current is cuda.compute
    assert len(graphs.capture(Work(cuda))) == 2


def test_error_of_a_graph_that_cannot_even_end_does_not_hide_the_cause(
    cuda: FakeCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(graph: object) -> None:
        raise RuntimeError("operation failed due to a previous error during capture")

    graphs, work = CudaGraphs(DEVICE), Work(cuda, fails_at=1)
    monkeypatch.setattr(torch.cuda.CUDAGraph, "capture_end", refuse)

    with pytest.raises(RuntimeError, match="this cannot be recorded"):
        graphs.capture(work)


def test_memory_of_recordings_is_counted_and_begins_anew_in_another_pool(cuda: FakeCuda) -> None:
    graphs = CudaGraphs(DEVICE)
    graphs.capture(Work(cuda))
    graphs.capture(Work(cuda))
    assert graphs.num_bytes == 40
    assert len(set(cuda.pools)) == 1

    graphs.renew()
    assert graphs.num_bytes == 0
    graphs.capture(Work(cuda))

    assert cuda.pools[-1] != cuda.pools[0]
