"""What a running draft's routers choose, and what of it is fetched: at once or in batches.

Pure. In batches, the draft comes back at boundaries, at which the window's counters are
ranked and a batch is planned. At once, each choice is told as it is made. Whether anything
may be fetched is for whoever begins the window to say.

Source: Specter, Incremental Routing Pattern Analyzer and Layer-Aware Prefetch Planner. What
is fetched at once is ours, for machines where the host sees each choice anyway.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..types import ExpertId
from .base import Action, DraftOn, FetchReason, Skip, SkipReason
from .cache_setup import CacheSetup
from .lookahead import ExpertLookaheadBuffer, IncrementalRoutingPatternAnalyzer
from .prefetch import LayerAwarePrefetchPlanner
from .residency import ResidencyTable


class DraftLookahead:
    """Fetches for one draft window after another.

    Args:
        setup: Sizes, and which of both ways.
        residency: Gives slots.

    Attributes:
        buffer: What the routers chose in this window.
        planner: Plans a window's batches.
        is_listening: Whether `routed` is to be told of each choice of the running draft.
    """

    def __init__(self, setup: CacheSetup, residency: ResidencyTable) -> None:
        self.buffer = ExpertLookaheadBuffer(setup.num_layers, setup.num_experts)
        self.planner = LayerAwarePrefetchPlanner(
            setup.record_bytes,
            num_reserved_slots=setup.num_reserved_slots,
            max_window_bytes=setup.max_window_bytes,
        )
        self.is_listening = False
        self._residency = residency
        self._analyzer = IncrementalRoutingPatternAnalyzer(self.buffer)
        self._is_immediate = setup.is_lookahead_immediate
        self._max_loading = setup.num_giveable_slots
        if setup.max_drafted_loading is not None:
            self._max_loading = min(self._max_loading, setup.max_drafted_loading)
        self._window: set[ExpertId] = set()
        """What the running draft's routers chose, where that is fetched at once."""

    def begin(self, num_tokens: int, *, is_fetching: bool) -> list[Action]:
        """A window of K tokens begins. Returns `DraftOn` up to the first boundary, if any."""
        self._analyzer.clear()
        self._window.clear()
        self.is_listening = is_fetching and self._is_immediate
        if not is_fetching or self._is_immediate:
            return []
        return [DraftOn(self.planner.begin(num_tokens))]

    def routed(self, layer: int, experts: Sequence[int]) -> list[Action]:
        """A router has chosen. Returns fetches of what is missing, skips where there is no room."""
        residency = self._residency
        chosen = [ExpertId(layer, expert) for expert in experts]
        self._window.update(chosen)
        actions: list[Action] = []
        for expert in chosen:
            if residency.slot_of(expert) is None:
                fetch = None
                # A miss must find a slot whose record it need not wait for.
                if residency.num_loading < self._max_loading:
                    fetch = residency.admit(expert, FetchReason.LOOKAHEAD, protected=self._window)
                actions.append(fetch or Skip(expert, SkipReason.NO_ROOM))
        return actions

    def reach_boundary(
        self, num_drafted: int, counts: Sequence[Sequence[tuple[int, int]]]
    ) -> list[Action]:
        """Plans a boundary's batch.

        Args:
            num_drafted: Tokens of this window so far.
            counts: What `buffer` holds.

        Returns:
            The batch, and `DraftOn` up to the next boundary, if there is one.
        """
        self.buffer.restore(counts)
        batch = self.planner.plan(
            self._analyzer.snapshot(), self._residency, num_drafted=num_drafted
        )
        if not batch.next_chunk:
            return list(batch.actions)
        return [*batch.actions, DraftOn(batch.next_chunk)]

    def end(self, num_drafted: int, draft_s: float) -> None:
        """The draft is over, after `draft_s` seconds, planning left out."""
        self._analyzer.clear()
        self.is_listening = False
        self.planner.observe_draft(num_drafted, draft_s)

    def break_off(self) -> None:
        """The reply has ended in any way: nothing more is asked of its draft."""
        self.is_listening = False
