"""What of a plan's misses the processor beside a card is expected to compute, and why. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from ..config import MachineRates
from ..events import MemoryPlan, PlanAlternative
from ..types import Precision
from .budget import ModelFacts
from .host_misses import HostSetup

FURTHER_TOKEN_SHARE = 0.1
"""Of an expert's time, each further token: as `tests/bench/host_misses.py` takes it."""

PACKED = frozenset({Precision.INT4, Precision.NESTED})
"""Records that lie in plain rows beside a card, and are unpacked for every product."""

_LEAST_SHARE = 0.005
"""Of the misses, below which the processor is said to compute none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HostWork:
    """How fast the processor beside a card computes experts, by the bytes of their records.

    Attributes:
        plain_bytes_per_s: Of records that it multiplies with as they are; `None` where its
            arithmetic is not theirs and nobody knows.
        packed_bytes_per_s: Of those that are unpacked first, likewise.
    """

    plain_bytes_per_s: float | None
    packed_bytes_per_s: float | None

    def bytes_per_s(self, precision: Precision) -> float | None:
        """Returns the rate for experts of a precision, `None` where it is not known."""
        return self.packed_bytes_per_s if precision in PACKED else self.plain_bytes_per_s

    def setup(
        self, facts: ModelFacts, plan: MemoryPlan, precision: Precision, rates: MachineRates
    ) -> HostSetup | None:
        """Returns what a load would measure; `None` where all misses are copied.

        Args:
            facts: Sizes of the model in this precision.
            plan: Where its bytes go.
            precision: Of the target.
            rates: The machine.
        """
        bytes_per_s = self.bytes_per_s(precision)
        if bytes_per_s is None or _is_half(facts, plan):
            return None
        num_held, record_bytes = facts.num_experts, plan.slot_bytes
        if rates.host_memory_bytes is not None:
            num_held = min(num_held, rates.host_memory_bytes // record_bytes)
        expert_s = record_bytes / bytes_per_s
        return HostSetup(
            expert_s=expert_s,
            token_s=FURTHER_TOKEN_SHARE * expert_s,
            record_s=rates.link_latency_s + record_bytes / rates.link_bytes_per_s,
            num_held=num_held,
        )

    def remark(self, facts: ModelFacts, row: PlanAlternative, rates: MachineRates) -> str:
        """What the processor has to do with a row's misses, empty where nobody asks."""
        if row.plan is None or row.hit_rate is None or row.hit_rate >= 1.0:
            return ""
        if self.bytes_per_s(row.precision) is None:
            return ""
        if _is_half(facts, row.plan):
            return "; misses are copied, as host memory holds half of each expert"
        setup = self.setup(facts, row.plan, row.precision, rates)
        if setup is not None and not setup.num_held:
            return "; misses are read from the disk, as host memory has room for no expert"
        if row.host_share < _LEAST_SHARE:
            return "; misses are copied, which is faster than to compute them on the processor"
        return f"; the processor computes {row.host_share:.0%} of the misses"


def _is_half(facts: ModelFacts, plan: MemoryPlan) -> bool:
    """Whether host memory holds a part of each expert only, the rest being the draft's."""
    return plan.slot_bytes != facts.whole_record_bytes
