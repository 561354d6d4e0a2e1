"""What a person may choose, as frozen values that validate themselves.

Torch-free. A configuration says what was asked for; what follows from it (slots,
bytes, layers) lives in the plan and is never written back here.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, field, fields

from .errors import ConfigError
from .types import (
    CachePolicy,
    CompileMode,
    ComputeDtype,
    DraftDense,
    DraftExperts,
    Eviction,
    Lookahead,
    Precision,
    PredictionLead,
)

MAX_DRAFT_TOKENS = 32
"""Largest speculation depth K. Source: Specter, selection of K (K_max = 32)."""

LIVE_FIELDS = frozenset({"num_draft_tokens", "is_prefetch_enabled"})
"""Fields of `EngineConfig` that may change while the model stays loaded, its cache too, as long
as the draft that they ask for is there. All others take a reload."""

_SIZE = re.compile(r"^\s*(\d+(?:\.\d+)?)\s*([KMGT]i?B|B|%)?\s*$", re.IGNORECASE)
_UNIT_BYTES = {
    "b": 1, "kb": 10**3, "mb": 10**6, "gb": 10**9, "tb": 10**12,
    "kib": 2**10, "mib": 2**20, "gib": 2**30, "tib": 2**40,
}  # fmt: skip


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryAmount:
    """Bytes, or a share of the bytes of all routed experts in INT8. Exactly one is set."""

    num_bytes: int | None = None
    share: float | None = None

    def __post_init__(self) -> None:
        if (self.num_bytes is None) == (self.share is None):
            raise ConfigError("A memory amount is either bytes or a share.", hint="Give one.")
        if self.num_bytes is not None and self.num_bytes <= 0:
            raise ConfigError.for_field("budget", self.num_bytes, "Give more than 0 bytes.")
        if self.share is not None and not 0 < self.share <= 10:
            raise ConfigError.for_field("budget", self.share, "Give more than 0 %.")

    @classmethod
    def parse(cls, text: str) -> MemoryAmount:
        """Parses `300MiB`, `1.5GB`, `40%`.

        Raises:
            ConfigError: The text is neither a size nor a percentage.
        """
        found = _SIZE.match(text)
        hint = "Write a size such as 300MiB or 2GB, or a percentage such as 40%."
        if not found or found.group(2) is None:
            raise ConfigError.for_field("budget", text, hint)
        number, unit = float(found.group(1)), found.group(2).lower()
        if number <= 0:
            raise ConfigError.for_field("budget", text, hint)
        if unit == "%":
            return cls(share=number / 100)
        return cls(num_bytes=int(number * _UNIT_BYTES[unit]))

    def resolve(self, reference_bytes: int) -> int:
        """Returns bytes; a share is taken of `reference_bytes`."""
        if self.num_bytes is not None:
            return self.num_bytes
        assert self.share is not None
        return int(self.share * reference_bytes)

    def __str__(self) -> str:
        if self.share is not None:
            return f"{self.share * 100:g}%"
        return format_bytes(self.num_bytes or 0)


def format_bytes(num_bytes: float) -> str:
    """Formats bytes for people, in powers of 1024: `53.1 MiB`."""
    value = float(num_bytes)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if abs(value) < 1024:
            return f"{value:.0f} {unit}" if unit == "B" else f"{value:.1f} {unit}"
        value /= 1024
    return f"{value:.1f} TiB"


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkConfig:
    """Emulation of a slower link between the expert store and the device.

    Attributes:
        bytes_per_s: Rate the link is held to, `None` for the machine's own.
        latency_s: Seconds added to each record.
    """

    bytes_per_s: float | None = None
    latency_s: float = 0.0

    def __post_init__(self) -> None:
        if self.bytes_per_s is not None and self.bytes_per_s <= 0:
            raise ConfigError.for_field("link rate", self.bytes_per_s, "Give more than 0 bytes/s.")
        if self.latency_s < 0:
            raise ConfigError.for_field("link latency", self.latency_s, "Give 0 or more seconds.")

    @property
    def is_emulated(self) -> bool:
        """Whether anything is slowed down on purpose."""
        return self.bytes_per_s is not None or self.latency_s > 0


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineRates:
    """What a machine does in a second: measured here, or written down for another one.

    Attributes:
        name: For people.
        device_memory_bytes: Memory that the engine may use on the device.
        device_bytes_per_s: Rate at which one pass reads weights from that memory.
        flops_per_s: Operations per second of products with many rows; `None` where unknown.
        link_bytes_per_s: Rate of the link from the expert store to the device.
        link_latency_s: Seconds that each record takes beside its bytes.
        layer_overhead_s: Seconds that each layer of a pass takes beside bytes and
            operations: launches, small kernels.
        host_memory_bytes: Host memory for experts; what does not fit comes from the disk
            at `disk_bytes_per_s`. `None` where everything fits or the link is the disk.
        disk_bytes_per_s: Rate of the disk below the host memory.
        is_gpu: Whether the device is a graphics card.
        has_bfloat16: Whether a card multiplies bfloat16; else it computes in float16.
        host_bytes_per_s: Rate at which the processor beside a card computes experts for a
            token each, by the bytes of their records, where these are not unpacked (bf16,
            int8). `None` where nobody measured it.
        host_packed_bytes_per_s: The same of records that are unpacked (int4, nested).
    """

    name: str
    device_memory_bytes: int
    device_bytes_per_s: float
    flops_per_s: float | None = None
    link_bytes_per_s: float
    link_latency_s: float = 0.0
    layer_overhead_s: float = 1e-4
    host_memory_bytes: int | None = None
    disk_bytes_per_s: float = 2e9
    is_gpu: bool = False
    has_bfloat16: bool = True
    host_bytes_per_s: float | None = None
    host_packed_bytes_per_s: float | None = None

    def __post_init__(self) -> None:
        for name in (
            "device_memory_bytes", "device_bytes_per_s", "flops_per_s",
            "link_bytes_per_s", "host_memory_bytes", "disk_bytes_per_s",
            "host_bytes_per_s", "host_packed_bytes_per_s",
        ):  # fmt: skip
            value = getattr(self, name)
            if value is not None and not (math.isfinite(value) and value > 0):
                raise ConfigError.for_field(name, value, "Give a number above 0.")
        for name in ("link_latency_s", "layer_overhead_s"):
            value = getattr(self, name)
            if not (math.isfinite(value) and value >= 0):
                raise ConfigError.for_field(name, value, "Give 0 or more seconds.")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineConfig:
    """How a model is loaded and run.

    Attributes:
        precision: Expert format of the target.
        dtype: Arithmetic and type of the non-expert weights; `None` takes bfloat16, or float16
            on a card that has no bfloat16.
        budget: Device bytes for experts, draft and slots together; `None` takes the
            model's default.
        memory_bytes: All that the engine may hold on the device, `None` for what is free.
            Where there is no `budget`, experts get what else leaves of it.
        num_draft_tokens: Speculation depth K; 0 decodes plainly, `None` takes the default
            and falls back to 0 where the budget has no room for the draft.
        context_length: Tokens of KV cache, `None` for the model's own up to 8192.
        link: Emulation of a slower link.
        num_reader_threads: Threads that read records from the disk.
        prefill_chunk_tokens: Most prompt tokens in one forward pass.
        is_prefetch_enabled: Whether the draft's routing loads experts ahead.
        is_direct_io: Whether to ask for O_DIRECT.
        num_threads: Threads of the arithmetic, `None` for all physical cores but one.
        eviction: Which resident experts are given up first; `None` chooses by K.
        cache_policy: How slots are shared out.
        lookahead: When what a draft's routers choose is fetched.
        is_predicting: Whether predictor heads, where there are some, load experts ahead.
        prediction_lead: How far ahead they do.
        compile_mode: Whether native kernels and compiled steps are made and used.
        draft_experts: Which routed experts a draft computes with.
        draft_dense: What a draft multiplies with outside of the routed experts.
        draft_words: Tokens that a draft chooses among, the first of the vocabulary, which in
            byte-pair vocabularies are the most frequent; 0 for all.
        gpu: Number of the card to compute on, `None` for the processor.
        is_deterministic: Whether beside a card the processor computes no experts, whose
            rounding differs there.
        trace_path: File that the routing of every reply is recorded in, `None` for none.
    """

    precision: Precision = Precision.NESTED
    dtype: ComputeDtype | None = None
    budget: MemoryAmount | None = None
    memory_bytes: int | None = None
    num_draft_tokens: int | None = None
    context_length: int | None = None
    link: LinkConfig = field(default_factory=LinkConfig)
    num_reader_threads: int = 2
    prefill_chunk_tokens: int = 256
    is_prefetch_enabled: bool = True
    is_direct_io: bool = True
    num_threads: int | None = None
    eviction: Eviction | None = None
    cache_policy: CachePolicy = CachePolicy.AUTO
    lookahead: Lookahead = Lookahead.AUTO
    is_predicting: bool = True
    prediction_lead: PredictionLead = PredictionLead.NEAR
    compile_mode: CompileMode = CompileMode.AUTO
    draft_experts: DraftExperts = DraftExperts.AUTO
    draft_dense: DraftDense = DraftDense.AUTO
    draft_words: int = 0
    gpu: int | None = None
    is_deterministic: bool = False
    trace_path: str | None = None

    def __post_init__(self) -> None:
        k = self.num_draft_tokens
        if k is not None and not 0 <= k <= MAX_DRAFT_TOKENS:
            raise ConfigError.for_field("K", k, f"Give 0 to {MAX_DRAFT_TOKENS} draft tokens.")
        if k and self.precision is Precision.INT4:
            raise ConfigError.for_field(
                "K", k, "With --precision int4 the target is the draft itself: use -k 0."
            )
        if self.memory_bytes is not None and self.memory_bytes <= 0:
            raise ConfigError.for_field("memory", self.memory_bytes, "Give more than 0 bytes.")
        if self.context_length is not None and self.context_length < 16:
            raise ConfigError.for_field("context", self.context_length, "Give at least 16 tokens.")
        if self.num_reader_threads < 1:
            raise ConfigError.for_field("readers", self.num_reader_threads, "Give at least 1.")
        if self.prefill_chunk_tokens < 1:
            raise ConfigError.for_field("chunk", self.prefill_chunk_tokens, "Give at least 1.")
        if self.draft_words < 0:
            raise ConfigError.for_field("draft words", self.draft_words, "Give 0 (all) or more.")
        if self.gpu is not None and self.gpu < 0:
            raise ConfigError.for_field("gpu", self.gpu, "Give 0 or more.")
        if self.num_threads is not None and self.num_threads < 1:
            raise ConfigError.for_field("threads", self.num_threads, "Give at least 1.")

    @property
    def arithmetic(self) -> ComputeDtype:
        """The arithmetic; bfloat16 where nobody chose and no card has been asked."""
        return self.dtype or ComputeDtype.BFLOAT16

    def changed_fields(self, other: EngineConfig) -> frozenset[str]:
        """Returns the names of the fields in which the other one differs."""
        names = (each.name for each in fields(self))
        return frozenset(n for n in names if getattr(self, n) != getattr(other, n))


LEAST_TEMPERATURE = 1e-4
"""Below, the likeliest token is taken: logits divided by less leave the range of their type."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingConfig:
    """How the next token is chosen.

    Attributes:
        temperature: 0 takes the most likely token (greedy), and so does what is too small to
            divide by.
        top_k: Keep the k most likely tokens, 0 for all.
        top_p: Keep the smallest set with this much probability, 1 for all.
        min_p: Drop tokens below this share of the top probability, 0 for none.
        repetition_penalty: Above 1 makes repeats less likely.
        seed: Seed of the random numbers, `None` for a new one.
        max_new_tokens: Most tokens of one reply, `None` for what the context holds.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0
    seed: int | None = None
    max_new_tokens: int | None = None

    def __post_init__(self) -> None:
        if not 0 <= self.temperature <= 10:
            raise ConfigError.for_field("temperature", self.temperature, "Give 0 to 10.")
        if self.top_k < 0:
            raise ConfigError.for_field("top-k", self.top_k, "Give 0 (off) or more.")
        if not 0 < self.top_p <= 1:
            raise ConfigError.for_field("top-p", self.top_p, "Give more than 0, at most 1.")
        if not 0 <= self.min_p < 1:
            raise ConfigError.for_field("min-p", self.min_p, "Give at least 0, less than 1.")
        if not 0.01 <= self.repetition_penalty <= 100:
            raise ConfigError.for_field(
                "repetition penalty", self.repetition_penalty, "Give 0.01 to 100; 1 is off."
            )
        if self.seed is not None and not 0 <= self.seed < 2**63:
            raise ConfigError.for_field("seed", self.seed, f"Give 0 to {2**63 - 1}.")
        if self.max_new_tokens is not None and self.max_new_tokens < 1:
            raise ConfigError.for_field("max tokens", self.max_new_tokens, "Give at least 1.")

    @property
    def is_greedy(self) -> bool:
        """Whether the most likely token is always taken."""
        return self.temperature < LEAST_TEMPERATURE
