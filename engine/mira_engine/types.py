"""The engine's vocabulary: ids, enums and shapes that every part shares.

Owns names only; knows no tensor library, no file and no clock. Imported by every
floor of the engine and, through `mira_engine.api`, by the app.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass
from typing import NamedTuple

RECORD_ALIGNMENT = 4096
"""Bytes. Record sizes and offsets are multiples of it, so that O_DIRECT can move them."""

INT4_GROUP_SIZES = (128, 64, 32)
"""Candidate quantisation group sizes along the input dimension, preferred first."""


class ExpertId(NamedTuple):
    """One routed expert: `layer` counts the MoE layers from 0, `expert` the experts in it."""

    layer: int
    expert: int


class Precision(enum.StrEnum):
    """Expert format of the target model; `INT4` is the draft's, or the compact target."""

    BF16 = "bf16"
    FLOAT32 = "float32"
    INT8 = "int8"
    INT4 = "int4"
    NESTED = "nested"


class ComputeDtype(enum.StrEnum):
    """Arithmetic of everything that is not stored quantised."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class DraftDense(enum.StrEnum):
    """What a draft multiplies with outside of the routed experts."""

    AUTO = "auto"
    TARGET = "target"
    SPLIT = "split"
    INT8 = "int8"


class DraftExperts(enum.StrEnum):
    """Which experts a draft computes with: all in INT4, or those in the slots at the time."""

    AUTO = "auto"
    ALL = "all"
    CACHED = "cached"


class CompileMode(enum.StrEnum):
    """Whether steps are compiled: never, in the background, or before the first reply."""

    OFF = "off"
    AUTO = "auto"
    WAIT = "wait"


class Eviction(enum.StrEnum):
    """Which resident experts are given up first: by frequency, by recency, or by both."""

    LFU = "lfu"
    LRU = "lru"
    LFRU = "lfru"


class CachePolicy(enum.StrEnum):
    """How slots are shared out: one pool, HOT and STAGE, or a HOT set that never changes."""

    AUTO = "auto"
    POOL = "pool"
    REGIONS = "regions"
    STATIC = "static"


class Lookahead(enum.StrEnum):
    """When what a draft's routers choose is fetched: at once, or in batches at boundaries."""

    AUTO = "auto"
    AT_ONCE = "at-once"
    BATCHES = "batches"


class Rounding(enum.StrEnum):
    """How INT4 codes were chosen: each the nearest, or by GPTQ on calibration prompts."""

    NEAREST = "nearest"
    GPTQ = "gptq"


class Plane(enum.StrEnum):
    """A part of an expert that moves by itself."""

    WHOLE = "whole"
    HI = "hi"
    LO = "lo"


class Tier(enum.StrEnum):
    """Where a record is."""

    DEVICE = "device"
    HOST = "host"
    DISK = "disk"


class Region(enum.StrEnum):
    """Label on a device slot."""

    HOT = "hot"
    STAGE = "stage"


class CacheMode(enum.StrEnum):
    """How much of the experts the slots hold: all, a working stock, or a handful.

    Source: Mira IV-C, large- and small-VRAM mode.
    """

    RESIDENT = "resident"
    LARGE = "large"
    SMALL = "small"


class Strategy(enum.StrEnum):
    """What the memory for experts is used for, and with it how a token is made.

    `SPECULATIVE` keeps the INT4 draft of every expert resident; the others have K = 0 and
    whole experts in the slots: `PREDICTIVE` stages them by heads, `ON_DEMAND` fetches what
    is missing, and `COMPACT` does so with INT4 experts as the target.
    """

    SPECULATIVE = "speculative"
    PREDICTIVE = "predictive"
    ON_DEMAND = "on-demand"
    COMPACT = "compact"


class ServedBy(enum.StrEnum):
    """What served a routed token: a resident expert by its region, or a fetch on demand."""

    HOT = "hot"
    STAGE = "stage"
    MISS = "miss"


class Phase(enum.StrEnum):
    """What the model is doing; selects what the experts function does."""

    PREFILL = "prefill"
    DECODE = "decode"
    DRAFT = "draft"
    VERIFY = "verify"


class FinishReason(enum.StrEnum):
    """Why a reply ended."""

    STOP = "stop"
    LENGTH = "length"
    CANCELLED = "cancelled"
    CONTEXT = "context"
    ERROR = "error"


class PredictionLead(enum.StrEnum):
    """How far ahead heads tell which experts are needed, while tokens are generated."""

    FAR = "far"
    """All later layers from a few, where there are far heads; else near."""

    NEAR = "near"
    """Two layers, each layer's own head. Source: Mira IV-E."""


class FactMark(enum.StrEnum):
    """How a fact about the machine is to be taken."""

    OK = "ok"
    NOTE = "note"
    """It works, slower or otherwise than it could."""
    PROBLEM = "problem"
    """Something does not work, or much slower than it should."""


class ReplyPart(enum.StrEnum):
    """What a piece of a reply belongs to."""

    ANSWER = "answer"
    THINKING = "thinking"


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertShape:
    """Dimensions and structure of every routed expert of a model.

    Attributes:
        hidden_size: C, the width of an expert's input and output.
        intermediate_size: R, the width between its two matrices.
        has_gate: Whether the first matrix is `gate_up_proj` [2R, C], else `up_proj` [R, C].
        has_bias: Whether both matrices have a bias.
        is_interleaved: Whether rows 2r and 2r+1 of the first matrix belong to unit r
            (gpt_oss), instead of rows r and R + r.
    """

    hidden_size: int
    intermediate_size: int
    has_gate: bool = True
    has_bias: bool = False
    is_interleaved: bool = False

    @property
    def up_rows(self) -> int:
        """Rows of the first matrix: 2R with a gate, else R."""
        return self.intermediate_size * (2 if self.has_gate else 1)

    @property
    def num_weights(self) -> int:
        """Matrix entries of one expert, biases left out."""
        return (self.up_rows + self.intermediate_size) * self.hidden_size

    @property
    def int4_group_size(self) -> int | None:
        """Largest group that divides both input dimensions, `None` where none does."""
        for group in INT4_GROUP_SIZES:
            if self.hidden_size % group == 0 and self.intermediate_size % group == 0:
                return group
        return None


def align_up(num_bytes: int, alignment: int = RECORD_ALIGNMENT) -> int:
    """Rounds `num_bytes` up to a multiple of `alignment`."""
    return -(-num_bytes // alignment) * alignment
