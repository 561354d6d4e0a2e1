"""What a step costs on a machine: bytes and operations to seconds.

Pure arithmetic over measured rates; nothing is measured or remembered here. A prediction
is good for choosing between alternatives, and no promise: what it leaves out (contention,
caches of the processor, uneven layers) is left out of all of them alike.

Source: Mira IV-C and IV-E (what a miss costs, what prediction hides), Specter (prefetch
during the draft, cost of verification). The numbers that stand for routing are measured;
each says where.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass, field, replace

from ..config import MachineRates
from .awaited import AwaitedMisses, divided
from .host_misses import HostSetup

FLOPS_PER_BYTE = 70.0
"""Operations that a card does while it reads one byte, where nobody measured them. Cautious:
published bfloat16 figures of consumer cards are 70 to 160 times their memory's rate."""

DEFAULT_ACCEPTANCE = 0.88
"""Chance that a draft token is accepted when all before it were. Measured 2026-11-30 on the
built-in model, K = 4, split dense layers: .733 of the drafted tokens, which is this chance.
Source: Specter has .97 for real models with a GPTQ draft."""

LOOKAHEAD_RECALL = 0.909
"""Share of the target's experts that the draft's routing names. Source: Specter's artifact,
INT4 routing."""

HEAD_RECALL = 0.52
"""Share of layer i+2's experts among as many predicted ones as a token uses. Measured on
the routing of DeepSeek-V2-Lite: a table of counts from layer i to layer i+2, top-k."""

RECORD_HANDLING_S = 2.5e-4
"""Seconds of the computing thread that a record costs beside the wait for it, on a machine
without a card: submitting, collecting, a second call for the late expert. Measured
2026-11-30: a layer with a miss takes .21 to .35 ms more than its wait and its arithmetic."""

COLD_START = 0.2
"""Share of a draft in which nothing is fetched yet. Source: Specter, cold start."""

REUSE_EXPONENT = 0.83
"""Tokens that follow each other use fewer experts than so many independent ones; n of them
use what n ** .83 independent ones would. Fitted to the routing of DeepSeek-V2-Lite: windows
of 1, 3, 5, 8 tokens use 6, 14, 20, 27 of 64 experts; this gives 6, 13.9, 20.0, 27.1."""

_LRU_HITS = ((0.0, 0.0), (0.125, 0.293), (0.25, 0.469), (0.5, 0.721), (1.0, 1.0))
"""Share of a layer's experts in slots, share of routed tokens they serve. Measured: LRU over
the routing of DeepSeek-V2-Lite, two texts, 8, 16 and 32 of 64 slots."""


@dataclass(frozen=True, slots=True, kw_only=True)
class HitCurve:
    """Expected hit rate by the share of experts that have a slot.

    Attributes:
        sharpness: The miss rate is the measured curve's to this power: above 1 for models
            whose routing repeats itself more than DeepSeek-V2-Lite's.
    """

    sharpness: float = 1.0

    @classmethod
    def through(cls, slot_share: float, hit_rate: float) -> HitCurve:
        """Bends the curve so that it meets one measured point inside (0, 1) x (0, 1)."""
        usual = 1.0 - _interpolate(slot_share)
        return cls(sharpness=math.log(1.0 - hit_rate) / math.log(usual))

    def at(self, slot_share: float) -> float:
        """Returns the hit rate, 0 to 1, at a share of slots."""
        return 1.0 - (1.0 - _interpolate(slot_share)) ** self.sharpness


def _interpolate(share: float) -> float:
    share = min(max(share, 0.0), 1.0)
    for (left, low), (right, high) in itertools.pairwise(_LRU_HITS):
        if share <= right:
            return low + (high - low) * (share - left) / (right - left)
    return 1.0


BUILTIN_HITS = HitCurve.through(0.71, 0.95)
"""The built-in model: .95 with 71 % of its experts in slots (LRU, measured 2026-11-30)."""


_ROUNDING = 1e-9
"""By which a whole number of experts may be off."""

CACHED_EXPONENT = 1.0
"""A draft with the cached experts alone is accepted `hit rate ** this` as often as a whole
one. Measured 2026-11-30, built-in model, 75 %: .815 at K = 1, 2 and 4 where the whole draft
has .86, hit rate .943."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Expectations:
    """What routing and drafting are expected to do; measured numbers where there are any."""

    hits: HitCurve = field(default_factory=HitCurve)
    acceptance: float = DEFAULT_ACCEPTANCE
    lookahead_recall: float = LOOKAHEAD_RECALL
    head_recall: float = HEAD_RECALL
    cached_exponent: float = CACHED_EXPONENT


def usual_expectations(*, is_builtin: bool) -> Expectations:
    """Returns what is expected of a model about which nothing else was measured."""
    return Expectations(hits=BUILTIN_HITS) if is_builtin else Expectations()


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelWork:
    """What one token makes a model do.

    Attributes:
        num_layers: MoE layers.
        num_experts: Routed experts of one layer.
        top_k: Experts of one token in one layer.
        dense_read_bytes: Weights beside the routed experts that every pass reads.
        dense_weights: Their number, for operations.
        expert_weights: Weights of one expert.
        kv_token_bytes: Keys and values of one token, all layers.
        chunk_tokens: Most prompt tokens of one pass.
    """

    num_layers: int
    num_experts: int
    top_k: int
    dense_read_bytes: int
    dense_weights: int
    expert_weights: int
    kv_token_bytes: int
    chunk_tokens: int

    def distinct_experts(self, num_tokens: int) -> float:
        """Expected distinct experts of one layer for tokens that follow each other."""
        unused = 1.0 - self.top_k / self.num_experts
        return self.num_experts * (1.0 - unused ** (num_tokens**REUSE_EXPONENT))


@dataclass(frozen=True, slots=True, kw_only=True)
class CacheRoom:
    """What a plan keeps on the device, and what a miss moves.

    Attributes:
        num_slots: Slots, all layers together.
        slot_bytes: Bytes that one miss moves.
        read_bytes: Bytes of one expert that the target's arithmetic reads.
        draft_read_bytes: The same of the draft's expert.
        draft_dense_bytes: Dense weights that a draft step reads.
        is_draft_cached: Whether a draft has the experts in the slots only.
    """

    num_slots: int
    slot_bytes: int
    read_bytes: int
    draft_read_bytes: int
    draft_dense_bytes: int
    is_draft_cached: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepCosts:
    """One pass: seconds of arithmetic, seconds that it waits for records, bytes moved.

    `host_share` is that of the misses that nothing brought before.
    """

    compute_s: float
    stall_s: float = 0.0
    moved_bytes: float = 0.0
    host_share: float = 0.0

    @property
    def total_s(self) -> float:
        """Seconds of the pass."""
        return self.compute_s + self.stall_s


def expected_accepted(num_draft_tokens: int, acceptance: float) -> float:
    """Returns the mean of accepted tokens of a draft, the target's own one not counted.

    Each is accepted with the same chance, given that all before it were.
    """
    return sum(acceptance**n for n in range(1, num_draft_tokens + 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class CostModel:
    """Predicts passes of one model on one machine with one division of its memory.

    Attributes:
        rates: The machine.
        work: The model.
        room: The plan.
        expect: Routing and drafting.
        num_cached_tokens: Tokens in the KV cache that a step reads.
        host: What the processor beside the card computes of its misses, `None` for nothing.
    """

    rates: MachineRates
    work: ModelWork
    room: CacheRoom
    expect: Expectations = field(default_factory=Expectations)
    num_cached_tokens: int = 512
    host: HostSetup | None = None

    @property
    def slot_share(self) -> float:
        """Slots by experts."""
        return self.room.num_slots / (self.work.num_layers * self.work.num_experts)

    @property
    def hit_rate(self) -> float:
        """Expected share of routed tokens served by a resident expert."""
        return self.expect.hits.at(self.slot_share)

    def misses(self, num_tokens: int) -> float:
        """Expected records that one pass of so many tokens is missing, all layers together.

        A miss serves the later tokens of its window too, as with so many single passes.
        """
        distinct = self.work.distinct_experts(num_tokens)
        outside = self.work.num_experts * (1.0 - min(1.0, self.slot_share))
        one_by_one = num_tokens * self.work.top_k * (1.0 - self.hit_rate)
        return self.work.num_layers * min(one_by_one, distinct, outside)

    def link_s(self, num_records: float) -> float:
        """Seconds in which the link moves so many records."""
        rates, slot_bytes = self.rates, self.room.slot_bytes
        all_bytes = self.work.num_layers * self.work.num_experts * slot_bytes
        in_host = 1.0
        if rates.host_memory_bytes is not None:
            in_host = min(1.0, rates.host_memory_bytes / all_bytes)
        per_byte = 1.0 / rates.link_bytes_per_s
        if in_host < 1.0:
            per_byte += (1.0 - in_host) / rates.disk_bytes_per_s
        return num_records * (rates.link_latency_s + slot_bytes * per_byte)

    def awaited(self, num_misses: float, num_tokens: int) -> AwaitedMisses:
        """What a pass of so many tokens waits for, of misses that nothing brought before."""
        record_s, host = self.link_s(1), self.host
        if host is None:
            return AwaitedMisses(wait_s=num_misses * record_s, num_on_link=num_misses)
        work, distinct = self.work, self.work.distinct_experts(num_tokens)
        return divided(
            num_misses,
            host,
            num_layers=work.num_layers,
            num_choices=math.ceil(distinct - _ROUNDING),
            held_share=host.num_held / (work.num_layers * work.num_experts),
            link_record_s=record_s,
            tokens_per_expert=num_tokens * work.top_k / distinct,
        )

    def _expert_read_s(self, num_tokens: int) -> float:
        """Seconds in which the target reads its experts of so many tokens."""
        num_experts = self.work.num_layers * self.work.distinct_experts(num_tokens)
        return num_experts * self.room.read_bytes / self.rates.device_bytes_per_s

    def compute_s(self, num_tokens: int) -> float:
        """Seconds of arithmetic of one target pass: its bytes or its operations."""
        work = self.work
        dense = work.dense_read_bytes + self.num_cached_tokens * work.kv_token_bytes
        reading = dense / self.rates.device_bytes_per_s + self._expert_read_s(num_tokens)
        weights = work.dense_weights + work.num_layers * work.top_k * work.expert_weights
        flops_per_s = self.rates.flops_per_s or FLOPS_PER_BYTE * self.rates.device_bytes_per_s
        multiplying = 2.0 * num_tokens * weights / flops_per_s
        return max(reading, multiplying) + work.num_layers * self.rates.layer_overhead_s

    def plain_step(self) -> StepCosts:
        """One token, misses fetched on demand while the layer's resident experts compute."""
        return self._target_pass(1, prefetch_s=0.0, recall=0.0)

    def predictive_step(self) -> StepCosts:
        """One token, experts staged by heads two layers ahead.

        As many are predicted as a token uses. The right ones move while other layers
        compute, and so do the wrong ones; the busier the link is, the fewer come in time.
        """
        misses, recall = self.misses(1), self.expect.head_recall
        late = misses * (1.0 - recall)
        compute_s = self.compute_s(1) + self._handling_s(late + misses)
        needed_s = self.link_s(misses)
        in_time = recall * compute_s / (compute_s + needed_s)
        awaited = self.awaited(misses * (1.0 - in_time), 1)
        hidden = self._resident_s(1, misses)
        behind = max(0.0, needed_s - self.link_s(awaited.num_on_host) - compute_s)
        stall_s = max(0.0, awaited.wait_s - hidden) + behind
        moved = (late + misses - awaited.num_on_host) * self.room.slot_bytes
        return StepCosts(
            compute_s=compute_s,
            stall_s=stall_s,
            moved_bytes=moved,
            host_share=awaited.host_share,
        )

    def _handling_s(self, num_records: float) -> float:
        """Seconds of the computing thread for records that move."""
        return 0.0 if self.rates.is_gpu else num_records * RECORD_HANDLING_S

    def draft_step(self) -> StepCosts:
        """One draft token: all of it is resident."""
        work, room = self.work, self.room
        num_bytes = room.draft_dense_bytes + self.num_cached_tokens * work.kv_token_bytes
        num_bytes += work.num_layers * work.top_k * room.draft_read_bytes
        seconds = num_bytes / self.rates.device_bytes_per_s
        return StepCosts(compute_s=seconds + work.num_layers * self.rates.layer_overhead_s)

    def verify(self, num_tokens: int, *, draft_s: float) -> StepCosts:
        """One pass over `num_tokens`, of whose experts the link moved what it could before.

        Args:
            num_tokens: Draft tokens and the one before them.
            draft_s: Seconds that the draft took.
        """
        recall = self.expect.lookahead_recall
        return self._target_pass(num_tokens, prefetch_s=(1.0 - COLD_START) * draft_s, recall=recall)

    def _target_pass(self, num_tokens: int, *, prefetch_s: float, recall: float) -> StepCosts:
        misses = self.misses(num_tokens)
        num_before = min(recall * misses, prefetch_s / self.link_s(1))
        awaited = self.awaited(misses - num_before, num_tokens)
        hidden = self._resident_s(num_tokens, misses)
        return StepCosts(
            compute_s=self.compute_s(num_tokens) + self._handling_s(misses),
            stall_s=max(0.0, awaited.wait_s - hidden),
            moved_bytes=(num_before + awaited.num_on_link) * self.room.slot_bytes,
            host_share=awaited.host_share,
        )

    def _resident_s(self, num_tokens: int, misses: float) -> float:
        """Seconds of expert arithmetic that needs no missing record."""
        distinct = self.work.num_layers * self.work.distinct_experts(num_tokens)
        return self._expert_read_s(num_tokens) * (1.0 - misses / distinct)

    def prefill(self, num_tokens: int) -> StepCosts:
        """A prompt in chunks: each layer's experts stream in while the layer before computes.

        Prefill evicts nothing for long, so slots serve their share of what a chunk needs.
        """
        full, rest = divmod(num_tokens, self.work.chunk_tokens)
        chunks = [(self.work.chunk_tokens, full), (rest, 1 if rest else 0)]
        compute_s = stall_s = moved = 0.0
        for size, count in chunks:
            if not count:
                continue
            distinct = self.work.num_layers * self.work.distinct_experts(size)
            missing = distinct * (1.0 - min(1.0, self.slot_share))
            chunk_s = self.compute_s(size)
            compute_s += count * chunk_s
            stall_s += count * max(0.0, self.link_s(missing) - chunk_s)
            moved += count * missing * self.room.slot_bytes
        return StepCosts(compute_s=compute_s, stall_s=stall_s, moved_bytes=moved)

    def speculative_tpot_s(self, num_draft_tokens: int) -> float:
        """Seconds of a new token with drafts of K tokens, K above 0."""
        round_s = self._draft_s(num_draft_tokens) + self.verify_after(num_draft_tokens).total_s
        return round_s / (1.0 + expected_accepted(num_draft_tokens, self.acceptance))

    def verify_after(self, num_draft_tokens: int) -> StepCosts:
        """The target pass after a draft of K tokens."""
        return self.verify(num_draft_tokens + 1, draft_s=self._draft_s(num_draft_tokens))

    def _draft_s(self, num_draft_tokens: int) -> float:
        return num_draft_tokens * self.draft_step().total_s

    @property
    def acceptance(self) -> float:
        """Expected chance of a draft token whose predecessors were accepted."""
        expect = self.expect
        if not self.room.is_draft_cached:
            return expect.acceptance
        return expect.acceptance * self.hit_rate**expect.cached_exponent

    def ttft_s(self, num_prompt_tokens: int) -> float:
        """Seconds from a prompt, none of it cached, to the first token."""
        return replace(self, num_cached_tokens=0).prefill(num_prompt_tokens).total_s
