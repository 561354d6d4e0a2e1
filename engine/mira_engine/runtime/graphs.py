"""What a device that can record its work offers: launch once, then replay as a whole.

`Graphs` is what captured steps see. The real one is torch's CUDA graphs; tests put one in its
place that replays recorded operators. A recording holds addresses and numbers, no Python: work
that is recorded must not wait for the device, ask it anything or take memory from the system,
and reads and writes the same places at each replay.

Source: Specter, Overlap-Oriented Parallelism Optimizer (graph capture).
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Protocol

import torch

Cut = Callable[[], None]
"""Called by work that is recorded: ends a piece and begins the next."""

Work = Callable[[Cut], None]


class Recording(Protocol):
    """Recorded work."""

    def replay(self) -> None:
        """Puts it into the compute lane once more; returns at once."""


class Graphs(Protocol):
    """Records what is put into the compute lane.

    Memory that recorded work takes comes from one pool. What nobody refers to any more when
    work goes on is taken again by what follows, so it does not last from one piece to a later
    one: whoever replays pieces out of order has to keep a reference to what they read.
    """

    num_bytes: int
    """Device memory that the recordings have taken so far."""

    def capture(self, work: Work) -> list[Recording]:
        """Runs `work` once as it is, so that all that is built at first use is, then records it.

        Recording computes nothing. Pieces are in the order in which they ended; without a
        call of `cut` there is one.

        Raises:
            RuntimeError: The device cannot record this.
        """

    def renew(self) -> None:
        """Gives the pool's memory back. No recording may be left."""


class CudaGraphs:
    """torch's CUDA graphs, in a pool of their own.

    Args:
        device: The card.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()
        self._stream = torch.cuda.Stream(device)  # The default one cannot be recorded.
        self.num_bytes = 0

    def capture(self, work: Work) -> list[Recording]:
        """Runs `work` once as it is, then records it."""
        compute = torch.cuda.current_stream(self._device)
        self._stream.wait_stream(compute)
        before, _ = torch.cuda.mem_get_info(self._device)
        try:
            with torch.cuda.stream(self._stream):
                work(_go_on)
                self._stream.synchronize()
                pieces = self._record(work)
        finally:  # A trial that failed may have left launches, too.
            compute.wait_stream(self._stream)
        after, _ = torch.cuda.mem_get_info(self._device)
        # With what the trial took on this stream, and the recordings' own nodes.
        self.num_bytes += max(0, before - after)
        return pieces

    def renew(self) -> None:
        """Gives the pool's memory back. A pool that has lost its last graph takes no other."""
        self._pool = torch.cuda.graph_pool_handle()
        self.num_bytes = 0
        torch.cuda.empty_cache()

    def _record(self, work: Work) -> list[Recording]:
        pieces = [self._begin()]

        def cut() -> None:
            pieces[-1].capture_end()
            pieces.append(self._begin())

        try:
            work(cut)
        except BaseException:
            with suppress(RuntimeError):  # The device says once more what went wrong.
                pieces[-1].capture_end()
            raise
        pieces[-1].capture_end()
        return pieces

    def _begin(self) -> torch.cuda.CUDAGraph:
        graph = torch.cuda.CUDAGraph()
        # Other threads may go on calling the device meanwhile.
        graph.capture_begin(pool=self._pool, capture_error_mode="thread_local")
        return graph


def _go_on() -> None:
    """Where nothing is recorded there is nothing to cut."""
