"""What policies return: actions, each with its reason.

Pure. A policy decides and does nothing; `mira_engine.runtime` carries actions out and
`mira_engine.simulator` counts them on a virtual clock.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from ..types import ExpertId, ServedBy


class FetchReason(enum.StrEnum):
    """Why a record is moved to the device."""

    MISS = "miss"
    LOOKAHEAD = "lookahead"
    PREDICTED = "predicted"
    REBALANCE = "rebalance"
    RECURRING = "recurring"
    """Computed on the host now, and for the second time lately: brought for the next time."""


AHEAD = frozenset((FetchReason.LOOKAHEAD, FetchReason.PREDICTED))
"""Reasons of what is moved before its layer asks for it."""


class SkipReason(enum.StrEnum):
    """Why a record that was asked for is not moved."""

    RESIDENT = "resident"
    NO_ROOM = "no-room"
    LATER = "later"
    BYTE_CAP = "byte-cap"


class EvictReason(enum.StrEnum):
    """Why a slot is freed without another expert asking for it."""

    LAYER_BEHIND = "layer-behind"


class PromoteReason(enum.StrEnum):
    """Why a STAGE resident becomes HOT."""

    DEMAND = "demand"
    ROOM = "room"


class DemoteReason(enum.StrEnum):
    """Why a HOT resident becomes a STAGE entry."""

    LOW_DEMAND = "low-demand"


class DeclineReason(enum.StrEnum):
    """Why a predicted expert is not staged."""

    STAGE_FULL = "stage-full"


@dataclass(frozen=True, slots=True)
class Fetch:
    """Move an expert's records into a slot, whose contents (`evicted`) are given up."""

    expert: ExpertId
    slot: int
    reason: FetchReason
    evicted: ExpertId | None = None


@dataclass(frozen=True, slots=True)
class Skip:
    """Leave an expert where it is."""

    expert: ExpertId
    reason: SkipReason


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute an expert, which is in its slot, for the tokens that chose it.

    Attributes:
        num_tokens: Tokens.
        served_by: What served them.
        is_prefetched: Whether this is the first use of what a prefetch brought.
    """

    expert: ExpertId
    slot: int
    num_tokens: int
    served_by: ServedBy
    is_prefetched: bool


@dataclass(frozen=True, slots=True)
class ComputeOnHost:
    """Compute an expert that has no slot on the processor, for the tokens that chose it."""

    expert: ExpertId
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Await:
    """Compute an expert as soon as it lands, which is on its way by a prefetch: now it hurries."""

    expert: ExpertId
    slot: int


@dataclass(frozen=True, slots=True)
class DraftOn:
    """Draft this many tokens more, then come back: that is the next boundary."""

    num_tokens: int


@dataclass(frozen=True, slots=True)
class Evict:
    """Free a slot; nothing is moved."""

    expert: ExpertId
    slot: int
    reason: EvictReason


@dataclass(frozen=True, slots=True)
class Promote:
    """Label a slot HOT; nothing is moved."""

    expert: ExpertId
    slot: int
    reason: PromoteReason


@dataclass(frozen=True, slots=True)
class Demote:
    """Label a slot STAGE; nothing is moved."""

    expert: ExpertId
    slot: int
    reason: DemoteReason


@dataclass(frozen=True, slots=True)
class Decline:
    """Do not stage a predicted expert; the miss path serves it if it is needed."""

    expert: ExpertId
    reason: DeclineReason


Action = (
    Fetch | Skip | Compute | ComputeOnHost | Await | DraftOn | Evict | Promote | Demote | Decline
)


def next_boundary(num_drafted: int, actions: Sequence[Action]) -> int | None:
    """Returns the drafted tokens at the next boundary, `None` where there is none."""
    chunks = [action.num_tokens for action in actions if isinstance(action, DraftOn)]
    return num_drafted + chunks[0] if chunks else None
