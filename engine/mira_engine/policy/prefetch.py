"""Prefetch planning: which experts to move while the draft runs.

Pure. `plan_batch` is the one-batch planner: one snapshot of the lookahead counters,
one batch of fetches. It never evicts an expert that the counters say the coming
verification needs.

Source: Specter, Layer-Aware Prefetch Planner, whose phases build on this batch.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..types import ExpertId
from .base import Action, Fetch, FetchReason, Skip, SkipReason
from .lookahead import ExpertLookaheadBuffer
from .residency import ResidencyTable


def first_boundary(num_draft_tokens: int) -> int:
    """Draft tokens of the cold start, after which the first batch is planned.

    A fifth of them, at least one: until then too little of the routing is known.

    Source: Specter, Layer-Aware Prefetch Planner, phase 1.
    """
    return max(1, round(num_draft_tokens / 5))


def plan_batch(
    lookahead: ExpertLookaheadBuffer, residency: ResidencyTable, *, num_reserved_slots: int
) -> list[Action]:
    """Plans one batch from the counters and gives its experts their slots.

    Experts are taken in the order verification meets them (layer by layer) and inside a
    layer by count, so that the link works on what is needed first.

    Args:
        lookahead: Counters of the running draft window.
        residency: Slots; admitted experts are LOADING afterwards.
        num_reserved_slots: Slots kept out of the batch for misses.

    Returns:
        Fetches to submit in this order, and skips for what stays.
    """
    wanted: list[ExpertId] = []
    actions: list[Action] = []
    for layer in range(lookahead.num_layers):
        for expert, _ in lookahead.ranking(layer):
            if residency.slot_of(expert) is None:
                wanted.append(expert)
            else:
                actions.append(Skip(expert, SkipReason.RESIDENT))
    protected = _needed(lookahead)
    room = max(0, residency.num_slots - num_reserved_slots)
    for expert in wanted:
        fetch: Fetch | None = None
        if room > 0:
            fetch = residency.admit(expert, FetchReason.LOOKAHEAD, protected=protected)
        if fetch is None:
            actions.append(Skip(expert, SkipReason.NO_ROOM))
            continue
        room -= 1
        actions.append(fetch)
    return actions


def _needed(lookahead: ExpertLookaheadBuffer) -> frozenset[ExpertId]:
    layers: Iterable[int] = range(lookahead.num_layers)
    return frozenset(e for layer in layers for e, _ in lookahead.ranking(layer))
