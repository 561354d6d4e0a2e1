"""What policies return: actions, each with its reason.

Pure. A policy decides and does nothing; `mira_engine.runtime` carries actions out and
`mira_engine.simulator` counts them on a virtual clock.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

from ..types import ExpertId


class FetchReason(enum.StrEnum):
    """Why a record is moved to the device."""

    MISS = "miss"
    LOOKAHEAD = "lookahead"
    REBALANCE = "rebalance"


class SkipReason(enum.StrEnum):
    """Why a record that was asked for is not moved."""

    RESIDENT = "resident"
    NO_ROOM = "no-room"


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


Action = Fetch | Skip | Evict | Promote | Demote | Decline
