"""Values inside requests and events: plain, frozen, and nothing but what they say."""

from __future__ import annotations

from dataclasses import dataclass

from .types import CacheMode, DraftDense, DraftExperts, Precision, Strategy


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatMessage:
    """One message of a chat; `role` is `system`, `user` or `assistant`.

    Attributes:
        thinking: What an assistant thought before it answered, for templates that want it back.
    """

    role: str
    content: str
    thinking: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryPlan:
    """Planned device memory in bytes, and the slots that follow from it.

    Attributes:
        non_expert_bytes: Attention, norms, routers, shared experts, embeddings.
        kv_bytes: KV cache at the full context.
        workspace_bytes: The largest prefill chunk's temporaries.
        budget_bytes: What experts may hold: `draft_bytes`, `draft_dense_bytes` and the slots.
        draft_experts: Which routed experts the draft computes with.
        draft_bytes: The resident INT4 draft, 0 without one.
        draft_dense: What the draft multiplies with outside of the routed experts.
        draft_dense_bytes: Its copies of dense layers, 0 without.
        slot_bytes: One slot.
        num_slots: Slots for target records.
        reference_bytes: All routed experts in INT8, which percentages refer to.
        num_experts: Routed experts of the model, over all layers.
        num_draft_tokens: K in force.
        mode: How much of the experts the slots hold.
        num_hot_slots: Slots of the HOT region.
        num_stage_slots: Slots of the STAGE region. What HOT and STAGE leave is transient:
            kept for misses that find no room in STAGE.
    """

    non_expert_bytes: int
    kv_bytes: int
    workspace_bytes: int
    budget_bytes: int
    draft_experts: DraftExperts = DraftExperts.ALL
    draft_bytes: int
    draft_dense: DraftDense = DraftDense.TARGET
    draft_dense_bytes: int = 0
    slot_bytes: int
    num_slots: int
    reference_bytes: int
    num_experts: int
    num_draft_tokens: int
    mode: CacheMode = CacheMode.LARGE
    num_hot_slots: int = 0
    num_stage_slots: int = 0

    @property
    def num_transient_slots(self) -> int:
        """Slots of neither region."""
        return self.num_slots - self.num_hot_slots - self.num_stage_slots

    @property
    def fixed_bytes(self) -> int:
        """What the engine holds beside the experts."""
        return self.non_expert_bytes + self.kv_bytes + self.workspace_bytes

    @property
    def total_bytes(self) -> int:
        """Everything the engine may hold on the device."""
        return self.fixed_bytes + self.budget_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanAlternative:
    """One way to use the memory, with what is expected of it.

    Attributes:
        strategy: Draft, prediction, demand, or INT4 experts.
        precision: Expert format of its target.
        num_draft_tokens: K.
        plan: Where the bytes go; `None` where they do not suffice.
        missing_bytes: What is missing then, else 0.
        hit_rate: Expected share of routed tokens served by a resident expert.
        tpot_s: Predicted seconds of one new token; `None` without machine rates or plan.
        ttft_s: Predicted seconds from a prompt to its first token, as above.
        is_chosen: Whether the engine would run this one. At most one of a list is.
        reason: Why it is chosen, or why not; one sentence.
        host_share: Expected share of the misses that the processor beside a card computes, of
            those that nothing brought before.
    """

    strategy: Strategy
    precision: Precision
    num_draft_tokens: int
    plan: MemoryPlan | None = None
    missing_bytes: int = 0
    hit_rate: float | None = None
    tpot_s: float | None = None
    ttft_s: float | None = None
    is_chosen: bool = False
    reason: str = ""
    host_share: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class PlannedSteps:
    """What single steps of a planned model should take there; simulations are made of them.

    Attributes:
        num_layers: MoE layers.
        num_experts: Routed experts of each.
        top_k: Experts of a token in each.
        record_bytes: One whole expert of the target.
        token_s: Predicted seconds of a target token whose experts are all resident.
        experts_s: Of those, seconds of its experts.
        draft_s: Predicted seconds of a draft token.
        link_bytes_per_s: Rate at which records come, those included that lie on the disk.
        link_latency_s: Seconds of a record beside its bytes.
    """

    num_layers: int
    num_experts: int
    top_k: int
    record_bytes: int
    token_s: float
    experts_s: float
    draft_s: float
    link_bytes_per_s: float
    link_latency_s: float = 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplyStats:
    """Figures of one reply, so far or at its end. Every panel and `--json` reads these.

    Attributes:
        num_prompt_tokens: Tokens of the rendered chat.
        num_cached_tokens: Of those, taken from the KV cache.
        num_new_tokens: Tokens generated.
        elapsed_s: Seconds from the request to these figures.
        ttft_s: Seconds from the request to the first token.
        decode_s: Seconds from the first token to the last.
        num_hits: Routed tokens (token x expert) after prefill served by a resident expert.
        num_misses: Routed tokens after prefill whose expert was not on the device.
        num_on_host: Of those, computed by the processor beside a card.
        num_stage_hits: Of the hits, by an expert labelled STAGE.
        num_prefetch_hits: Of the hits, by an expert that a prefetch brought.
        num_records_loaded: Records moved to the device after prefill.
        num_records_prefetched: Of those, submitted before they were needed.
        num_prefetch_used: Of the prefetched, used by the pass they were moved for.
        num_prefetch_skipped: Experts expected ahead that were there, or had no room.
        bytes_moved: Bytes of those records.
        prefill_bytes_moved: Bytes of records moved during prefill.
        stall_s: Seconds after prefill in which compute waited for a record.
        prefetch_stall_s: Of those, for records that were on their way before they were needed.
        host_s: Seconds of the processor for `num_on_host`, beside the copies and the card.
        sample_s: Seconds of judging the draft and choosing the next token from a target pass.
        draft_s: Seconds spent drafting.
        verify_s: Seconds spent in target passes after prefill, `stall_s` and `sample_s`
            included.
        num_drafted: Draft tokens proposed.
        num_accepted: Draft tokens accepted.
        num_rounds: Draft and verify rounds.
        num_draft_tokens: K in force, which the governor may change from round to round.
        governor_reason: Why it is that K, in one sentence for people.
        num_compiled_passes: Forward passes that ran as a compiled step, prefill included.
        num_eager_passes: Forward passes that ran module by module.
        expert_peak_bytes: Most device bytes held for experts.
        peak_memory_bytes: Most memory of the process above what it held before loading.
        planned_memory_bytes: What the plan allows for that.
    """

    num_prompt_tokens: int = 0
    num_cached_tokens: int = 0
    num_new_tokens: int = 0
    elapsed_s: float = 0.0
    ttft_s: float = 0.0
    decode_s: float = 0.0
    num_hits: int = 0
    num_misses: int = 0
    num_on_host: int = 0
    num_stage_hits: int = 0
    num_prefetch_hits: int = 0
    num_records_loaded: int = 0
    num_records_prefetched: int = 0
    num_prefetch_used: int = 0
    num_prefetch_skipped: int = 0
    bytes_moved: int = 0
    prefill_bytes_moved: int = 0
    stall_s: float = 0.0
    prefetch_stall_s: float = 0.0
    host_s: float = 0.0
    sample_s: float = 0.0
    draft_s: float = 0.0
    verify_s: float = 0.0
    num_drafted: int = 0
    num_accepted: int = 0
    num_rounds: int = 0
    num_draft_tokens: int = 0
    governor_reason: str = ""
    num_compiled_passes: int = 0
    num_eager_passes: int = 0
    expert_peak_bytes: int = 0
    peak_memory_bytes: int = 0
    planned_memory_bytes: int = 0

    @property
    def tokens_per_s(self) -> float:
        """Decode rate, the first token left out; 0 before the second token."""
        if self.num_new_tokens < 2 or self.decode_s <= 0:
            return 0.0
        return (self.num_new_tokens - 1) / self.decode_s

    @property
    def hit_rate(self) -> float:
        """Share of routed tokens served by a resident expert."""
        total = self.num_hits + self.num_misses
        return self.num_hits / total if total else 0.0

    @property
    def host_share(self) -> float:
        """Share of routed tokens whose expert the processor computed beside a card."""
        total = self.num_hits + self.num_misses
        return self.num_on_host / total if total else 0.0

    @property
    def stall_ms_per_token(self) -> float:
        """Milliseconds of waiting for records per generated token."""
        return 1e3 * self.stall_s / self.num_new_tokens if self.num_new_tokens else 0.0

    @property
    def accepted_per_round(self) -> float:
        """Mean accepted draft tokens per round, the bonus token not counted."""
        return self.num_accepted / self.num_rounds if self.num_rounds else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class DepthResult:
    """What one K was worth in a profile.

    Attributes:
        num_draft_tokens: K.
        tpot_s: Mean seconds per output token over the replies, the first token left out.
        num_replies: Replies measured.
    """

    num_draft_tokens: int
    tpot_s: float
    num_replies: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KProfile:
    """What `profile` found for one model, machine, budget and precision.

    Source: Specter, selection of K.

    Attributes:
        best: The K with the lowest mean TPOT; the smallest of equals.
        acceptance: Share of judged draft tokens that were accepted, over all K above 0.
        results: Every K that was measured, smallest first.
    """

    best: int
    acceptance: float
    results: tuple[DepthResult, ...]

    @property
    def expected_accepted(self) -> float:
        """E[A] = a / (1 - a): draft tokens accepted in a row before one is rejected."""
        a = self.acceptance
        return a / (1 - a) if a < 1 else float("inf")

    @property
    def rates(self) -> dict[int, float]:
        """Tokens per second by K."""
        return {r.num_draft_tokens: 1 / r.tpot_s for r in self.results if r.tpot_s > 0}
