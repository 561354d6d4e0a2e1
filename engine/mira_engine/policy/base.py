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


class SkipReason(enum.StrEnum):
    """Why a record that was asked for is not moved."""

    RESIDENT = "resident"
    NO_ROOM = "no-room"
    LATER = "later"
    BYTE_CAP = "byte-cap"


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


Action = Fetch | Skip
