"""Layer-Aware Prefetch Planner: which experts to move while the draft runs, and when.

Pure: times come in as arguments. A draft window has three phases. Cold start drafts a
first chunk and moves nothing, since too little of the routing is known. In the overlap a
batch is submitted at each boundary, and the next chunk is as long as the batch takes to
move. The final cleanup fills what room is left. A batch never evicts an expert that the
counters say the coming verification needs.

Source: Specter, Layer-Aware Prefetch Planner. We differ in two points. A batch that the
rest of the draft cannot hide is cut and goes on at a later boundary, which knows more; and
the last boundary is at the end of the draft, where the paper discards what the final
chunk's routers said: here the first layers' verification hides what the later layers wait
for, and with K = 1 there is no other chunk.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..types import ExpertId
from .averages import MovingAverage
from .base import Action, Fetch, FetchReason, Skip, SkipReason
from .lookahead import RoutingSnapshot
from .residency import ResidencyTable
from .slot_table import SlotState

_MIN_SECONDS = 1e-9
"""Of a token or a record: a clock too coarse to see one must not make it free."""

_Ranked = tuple[int, ExpertId]
"""An expert behind its count."""


class PrefetchPhase(enum.StrEnum):
    """Where in a draft window the planner is."""

    COLD_START = "cold-start"
    PREFETCH_OVERLAP = "prefetch-overlap"
    FINAL_CLEANUP = "final-cleanup"


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedBatch:
    """What one boundary decides.

    Attributes:
        actions: Fetches to submit in this order, and skips for what stays.
        next_chunk: Draft tokens until the next boundary, 0 where there is none.
        phase: Phase that this batch belongs to. After `FINAL_CLEANUP` comes no boundary.
    """

    actions: tuple[Action, ...]
    next_chunk: int
    phase: PrefetchPhase

    @property
    def fetches(self) -> tuple[Fetch, ...]:
        """The fetches among the actions."""
        return tuple(action for action in self.actions if isinstance(action, Fetch))


def first_boundary(num_draft_tokens: int) -> int:
    """Draft tokens of the cold start, after which the first batch is planned.

    A fifth of them, at least one: until then too little of the routing is known.

    Source: Specter, Layer-Aware Prefetch Planner, phase 1.
    """
    return max(1, round(num_draft_tokens / 5))


class LayerAwarePrefetchPlanner:
    """Plans the batches of one draft window after another.

    Args:
        record_bytes: Bytes moved for one expert.
        num_reserved_slots: Slots that batches leave for misses.
        max_window_bytes: Most bytes submitted in one window, `None` for no cap.
    """

    max_batches: int | None = None
    """Most batches of a window, the last of which fills what room is left; for comparisons."""

    def __init__(
        self,
        record_bytes: int,
        *,
        num_reserved_slots: int,
        max_window_bytes: int | None = None,
    ) -> None:
        self._record_bytes = record_bytes
        self._num_reserved_slots = num_reserved_slots
        self._max_window_records = (
            None if max_window_bytes is None else max_window_bytes // record_bytes
        )
        self._draft_s = MovingAverage()
        self._record_s = MovingAverage()
        self._num_draft_tokens = 0
        self._num_batches = 0
        self._num_submitted = 0
        self._outstanding: set[ExpertId] = set()
        self.phase = PrefetchPhase.COLD_START

    @property
    def draft_token_s(self) -> float | None:
        """Seconds to draft a token, `None` before the first observation."""
        return self._draft_s.value

    @property
    def record_s(self) -> float | None:
        """Seconds of the link for one record, `None` before the first observation."""
        return self._record_s.value

    def observe_draft(self, num_tokens: int, seconds: float) -> None:
        """Takes in how long drafting took, planning left out."""
        if num_tokens > 0:
            self._draft_s.add(max(_MIN_SECONDS, seconds / num_tokens))

    def observe_transfer(self, num_bytes: int, seconds: float) -> None:
        """Takes in how long the link was busy with these bytes."""
        if num_bytes > 0:
            self._record_s.add(max(_MIN_SECONDS, seconds * self._record_bytes / num_bytes))

    def begin(self, num_draft_tokens: int) -> int:
        """Begins a window of K tokens. Returns the tokens of the cold start."""
        self._num_draft_tokens = num_draft_tokens
        self._num_submitted = 0
        self._num_batches = 0
        self.phase = PrefetchPhase.COLD_START
        return min(first_boundary(num_draft_tokens), num_draft_tokens)

    def plan(
        self, snapshot: RoutingSnapshot, residency: ResidencyTable, *, num_drafted: int
    ) -> PlannedBatch:
        """Plans one boundary's batch and gives its experts their slots.

        Args:
            snapshot: The window's routing so far.
            residency: Slots; admitted experts are LOADING afterwards.
            num_drafted: Tokens drafted so far, K at most.
        """
        remaining = self._num_draft_tokens - num_drafted
        self._drop_landed(residency)
        needed = snapshot.needed
        actions: list[Action] = []
        wanted: list[_Ranked] = []
        for layer, ranking in enumerate(snapshot.rankings):
            for index, count in ranking:
                expert = ExpertId(layer, index)
                if residency.slot_of(expert) is None:
                    wanted.append((count, expert))
                else:
                    actions.append(Skip(expert, SkipReason.RESIDENT))
        room = max(0, _num_giveable(residency, needed) - self._num_reserved_slots)
        self._num_batches += 1
        is_last = self._num_batches == self.max_batches
        is_final = remaining <= 0 or len(wanted) >= room or is_last
        self.phase = PrefetchPhase.FINAL_CLEANUP if is_final else PrefetchPhase.PREFETCH_OVERLAP
        chosen, left = self._select(wanted, room, None if is_final else remaining)
        for _, expert in chosen:
            fetch = residency.admit(expert, FetchReason.LOOKAHEAD, protected=needed)
            if fetch is None:
                actions.append(Skip(expert, SkipReason.NO_ROOM))
                continue
            actions.append(fetch)
            self._outstanding.add(expert)
            self._num_submitted += 1
        actions += left
        next_chunk = 0 if is_final else self._next_chunk(remaining)
        return PlannedBatch(actions=tuple(actions), next_chunk=next_chunk, phase=self.phase)

    def _select(
        self, wanted: list[_Ranked], room: int, remaining: int | None
    ) -> tuple[list[_Ranked], list[Skip]]:
        """Shares the slots that can be given out over the layers.

        By count over all layers, so that each layer's M follows from what its routers asked
        for; at equal counts the earlier layer comes first, since verification meets it first.
        In that order of layers they are submitted, too.

        Args:
            wanted: Experts without a slot.
            room: Slots that can be given.
            remaining: Draft tokens that can hide the batch, `None` where nothing must.
        """
        limits = {SkipReason.NO_ROOM: room}
        if self._max_window_records is not None:
            limits[SkipReason.BYTE_CAP] = max(0, self._max_window_records - self._num_submitted)
        hidden = None if remaining is None else self._num_hidden(remaining)
        if hidden is not None:
            limits[SkipReason.LATER] = hidden
        reason = min(limits, key=lambda each: limits[each])
        ranked = sorted(wanted, key=lambda item: (-item[0], item[1]))
        chosen, left = ranked[: limits[reason]], ranked[limits[reason] :]
        chosen.sort(key=lambda item: (item[1].layer, -item[0], item[1].expert))
        return chosen, [Skip(expert, reason) for _, expert in left]

    def _num_hidden(self, remaining: int) -> int | None:
        """Records that move while `remaining` tokens are drafted, behind those under way.

        At least one where the link would stand idle; `None` where nothing was measured yet.
        """
        draft_s, record_s = self._draft_s.value, self._record_s.value
        if draft_s is None or record_s is None:
            return None
        num_outstanding = len(self._outstanding)
        hidden = int(remaining * draft_s / record_s) - num_outstanding
        return max(hidden, 0 if num_outstanding else 1)

    def _next_chunk(self, remaining: int) -> int:
        """Tokens whose drafting lasts about as long as what is under way takes to land."""
        draft_s, record_s = self._draft_s.value, self._record_s.value
        if draft_s is None or record_s is None:
            return 1
        num_tokens = round(len(self._outstanding) * record_s / draft_s)
        return max(1, min(num_tokens, remaining))

    def _drop_landed(self, residency: ResidencyTable) -> None:
        self._outstanding = {
            expert
            for expert in self._outstanding
            if residency.slot_of(expert) is not None and not residency.is_ready(expert)
        }


def _num_giveable(residency: ResidencyTable, needed: frozenset[ExpertId]) -> int:
    """Slots that are free, or hold an expert that may go: not pinned, loading or needed."""
    num_held = sum(
        expert in needed or residency.state(slot) is SlotState.LOADING or residency.is_pinned(slot)
        for expert, slot in residency.residents()
    )
    return residency.num_slots - num_held
