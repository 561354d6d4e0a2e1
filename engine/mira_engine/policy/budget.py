"""From a memory budget to a plan: draft or not, how many slots, and their regions.

Pure: measured facts come in as `ModelFacts`, nothing is probed here. Refuses with the
missing bytes before anything is loaded. Which of several plans is the fastest is decided
in `mira_engine.policy.alternatives`.

Source: Mira IV-C (budget in expert slots, HOT and STAGE, large and small mode); DESIGN,
"Budget": percentages refer to all routed experts in INT8, whatever the precision. Unlike
Mira's, the regions are labels: a slot passes from one to the other without a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..config import MemoryAmount, format_bytes
from ..errors import BudgetError
from ..events import MemoryPlan
from ..types import CacheMode, DraftDense, DraftExperts
from .cost_model import HitCurve, ModelWork

DEFAULT_NUM_DRAFT_TOKENS = 4
"""K where nobody chose one and the draft fits."""

NUM_TRANSIENT_SLOTS = 2
"""Slots of neither region, for misses when STAGE has no room: one computes, one loads."""

LARGE_STAGE_SHARE = 0.25
"""Share of the slots that is STAGE in `large` mode."""

STAGE_LAYERS = 2
"""Layers whose predicted experts STAGE holds in `small` mode: the next and the one after
it. Source: Mira IV-E, lookahead of two layers."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelFacts:
    """Sizes that a plan follows from, in bytes unless said otherwise.

    Attributes:
        num_layers: MoE layers.
        num_experts_per_layer: Routed experts of one layer.
        top_k: Experts of one token in one layer.
        reference_record_bytes: One expert in INT8.
        draft_record_bytes: One expert of the INT4 draft.
        draft_copy_bytes: INT8 copies of the dense layers for the draft, 0 where a draft
            can only use the target's own layers.
        target_record_bytes: What one slot needs beside a resident draft.
        whole_record_bytes: What one slot needs without a draft.
        non_expert_bytes: All weights but the routed experts.
        kv_bytes: KV cache at the full context.
        workspace_bytes: Temporaries of the largest prefill chunk.
        work: What a token makes the model do; `None` where nothing is predicted.
    """

    num_layers: int
    num_experts_per_layer: int
    top_k: int
    reference_record_bytes: int
    draft_record_bytes: int
    draft_copy_bytes: int
    target_record_bytes: int
    whole_record_bytes: int
    non_expert_bytes: int
    kv_bytes: int
    workspace_bytes: int
    work: ModelWork | None = None

    @property
    def has_own_draft_plane(self) -> bool:
        """Whether a slot's record has a plane that is a draft by itself, as `nested` has."""
        return self.target_record_bytes < self.whole_record_bytes

    @property
    def fixed_bytes(self) -> int:
        """What the engine holds beside the experts."""
        return self.non_expert_bytes + self.kv_bytes + self.workspace_bytes

    @property
    def all_draft_bytes(self) -> int:
        """The draft of every expert."""
        return self.num_experts * self.draft_record_bytes

    @property
    def num_experts(self) -> int:
        """Routed experts over all layers."""
        return self.num_layers * self.num_experts_per_layer

    @property
    def reference_bytes(self) -> int:
        """What 100 % means."""
        return self.num_experts * self.reference_record_bytes

    @property
    def min_slots(self) -> int:
        """Fewest slots the engine runs with: one token's experts of one layer."""
        return self.top_k

    @property
    def min_bytes(self) -> int:
        """Fewest bytes for experts without a draft."""
        return self.min_slots * self.whole_record_bytes

    def min_bytes_with_draft(
        self,
        draft_dense: DraftDense = DraftDense.AUTO,
        draft_experts: DraftExperts = DraftExperts.AUTO,
    ) -> int:
        """Fewest bytes for experts with a draft."""
        copies = self.draft_copy_bytes if draft_dense is DraftDense.INT8 else 0
        if draft_experts is DraftExperts.CACHED:
            return copies + self.min_bytes
        return self.all_draft_bytes + copies + self.min_slots * self.target_record_bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Regions:
    """How slots are divided; what HOT and STAGE leave is transient."""

    mode: CacheMode
    num_hot_slots: int
    num_stage_slots: int


def divide_slots(num_slots: int, facts: ModelFacts) -> Regions:
    """Divides slots into HOT, STAGE and transient ones.

    The mode is `large` where STAGE, generously measured, holds what a token is expected to
    miss: then a staged expert can stay until its layer comes round again and be observed.
    Else it is `small`, and STAGE holds the experts of the next layers only.

    Args:
        num_slots: Slots, all layers together.
        facts: The model's sizes.

    Source: Mira IV-C, which names both modes and no threshold.
    """
    if num_slots >= facts.num_experts:
        return Regions(mode=CacheMode.RESIDENT, num_hot_slots=num_slots, num_stage_slots=0)
    kept = num_slots - min(NUM_TRANSIENT_SLOTS, num_slots - 1)
    generous = int(LARGE_STAGE_SHARE * kept)
    hit_rate = HitCurve().at(num_slots / facts.num_experts)
    missed_by_a_token = facts.num_layers * facts.top_k * (1.0 - hit_rate)
    if generous >= missed_by_a_token:
        mode, num_stage = CacheMode.LARGE, generous
    else:
        mode, num_stage = CacheMode.SMALL, min(STAGE_LAYERS * facts.top_k, kept // 2)
    return Regions(mode=mode, num_hot_slots=kept - num_stage, num_stage_slots=num_stage)


MIN_CACHED_SHARE = 0.5
"""Share of the experts in whole slots from which a draft with those alone is preferred.
Measured 2026-11-30, built-in model, 75 % (.71 of the experts), one thread: on the disk 21.2 ms
a token at K = 2 where all experts in INT4 give 23.0 at K = 4 and K = 0 22.5; on a link of
379 MB/s 24.0 to 24.7, 27.7 and 29.3. Below, too much of the draft is missing."""


MAX_CACHED_DRAFT_TOKENS = 2
"""K up to which a fixed depth is preferred with the cached experts, on a link that is not known
to be slow. What they lack costs more with each token. Measured as above, K = 4: on the disk
26.3 ms with the cached experts and 23.0 with all. All experts move twice the bytes: on links
of 220 to 256 MB/s, K = 4 took .87 of K = 0 with the cached experts and 1.24 with all."""

SLOW_LINK_BYTES_PER_S = 500e6
"""Rate below which a link is known to be slow beside the built-in model's steps."""


def usual_draft_experts(
    facts: ModelFacts,
    budget_bytes: int,
    num_draft_tokens: int | None = None,
    *,
    is_link_slow: bool = False,
) -> DraftExperts:
    """Returns which experts a draft computes with where nobody chose and nothing is predicted.

    Those in the slots where a slot holds a plane that is a draft by itself, most experts have
    one, and the draft is short, a governor keeps it so, or the link is slow; else all. Where
    all do not fit and a draft was asked for, those in the slots.

    Args:
        facts: The model's sizes.
        budget_bytes: For experts.
        num_draft_tokens: K as asked for, `None` where a governor chooses it.
        is_link_slow: Whether the link is known to be slow.
    """
    if not facts.has_own_draft_plane:
        return DraftExperts.ALL
    most = MIN_CACHED_SHARE * facts.num_experts * facts.whole_record_bytes
    if num_draft_tokens and budget_bytes < facts.min_bytes_with_draft():
        return DraftExperts.CACHED
    is_short = num_draft_tokens is None or num_draft_tokens <= MAX_CACHED_DRAFT_TOKENS
    is_better = (is_short or is_link_slow) and budget_bytes >= most
    return DraftExperts.CACHED if is_better else DraftExperts.ALL


def room_for_experts(facts: ModelFacts, memory_bytes: int) -> int:
    """Returns what all of the engine's memory leaves for experts; below 0 what is missing."""
    return memory_bytes - facts.fixed_bytes


def plan_memory(
    facts: ModelFacts,
    budget: MemoryAmount,
    num_draft_tokens: int | None,
    draft_dense: DraftDense = DraftDense.AUTO,
    draft_experts: DraftExperts = DraftExperts.ALL,
) -> tuple[MemoryPlan, str]:
    """Divides the budget into draft and slots; what would hold nothing is not taken.

    Args:
        facts: The model's sizes.
        budget: For experts, draft and slots together.
        num_draft_tokens: K as asked for; `None` drafts where the draft fits.
        draft_dense: What the draft multiplies with outside of the experts.
        draft_experts: Which routed experts the draft computes with; `AUTO` is all.

    Returns:
        The plan, and a sentence where K had to be given up (else an empty string).

    Raises:
        BudgetError: Less than the minimum, or no room for the draft that was asked for.
    """
    given = budget.resolve(facts.reference_bytes)
    minimum = facts.min_bytes
    if given < minimum:
        raise BudgetError(
            f"A budget of {describe_budget(budget, given)} is below the minimum of "
            f"{in_both(minimum, facts)} for this model and precision.",
            hint=f"Give at least --budget {suggest(minimum)}.",
        )
    is_cached = draft_experts is DraftExperts.CACHED
    draft_bytes = 0 if is_cached else facts.all_draft_bytes
    minimum_with_draft = facts.min_bytes_with_draft(draft_experts=draft_experts)
    note = ""
    k = DEFAULT_NUM_DRAFT_TOKENS if num_draft_tokens is None else num_draft_tokens
    if k > 0 and given < minimum_with_draft:
        if num_draft_tokens is not None:
            raise BudgetError(
                f"K = {k} needs the INT4 draft resident: {in_both(minimum_with_draft, facts)} "
                f"with the fewest slots; the budget of {describe_budget(budget, given)} is "
                f"{format_bytes(minimum_with_draft - given)} short.",
                hint=f"Give at least --budget {suggest(minimum_with_draft)}, or -k 0.",
            )
        k = 0
        note = (
            f"Speculation is off: the INT4 draft needs {in_both(minimum_with_draft, facts)}, "
            f"the budget is {describe_budget(budget, given)}."
        )
    has_draft = k > 0
    is_beside_draft = has_draft and not is_cached
    slot_bytes = facts.target_record_bytes if is_beside_draft else facts.whole_record_bytes
    fixed = draft_bytes if has_draft else 0
    dense = DraftDense.TARGET
    if has_draft:
        room = given - fixed - facts.min_slots * slot_bytes
        dense = _draft_dense(facts, draft_dense, room)
    dense_bytes = facts.draft_copy_bytes if dense is DraftDense.INT8 else 0
    fixed += dense_bytes
    num_slots = min((given - fixed) // slot_bytes, facts.num_experts)
    if num_slots == facts.num_experts:
        given = fixed + num_slots * slot_bytes
    regions = divide_slots(num_slots, facts)
    plan = MemoryPlan(
        non_expert_bytes=facts.non_expert_bytes,
        kv_bytes=facts.kv_bytes,
        workspace_bytes=facts.workspace_bytes,
        budget_bytes=given,
        draft_experts=DraftExperts.CACHED if is_cached else DraftExperts.ALL,
        draft_bytes=draft_bytes if has_draft else 0,
        draft_dense=dense,
        draft_dense_bytes=dense_bytes,
        slot_bytes=slot_bytes,
        num_slots=num_slots,
        reference_bytes=facts.reference_bytes,
        num_experts=facts.num_experts,
        num_draft_tokens=k,
        mode=regions.mode,
        num_hot_slots=regions.num_hot_slots,
        num_stage_slots=regions.num_stage_slots,
    )
    return plan, note


def _draft_dense(facts: ModelFacts, wanted: DraftDense, room: int) -> DraftDense:
    """Returns what the draft multiplies with outside of the routed experts.

    Split weights cost no memory, so they are taken where nobody chose.

    Raises:
        BudgetError: INT8 copies were asked for and do not fit.
    """
    if not facts.draft_copy_bytes or wanted is DraftDense.TARGET:
        return DraftDense.TARGET
    if wanted is not DraftDense.INT8:
        return DraftDense.SPLIT
    short = facts.draft_copy_bytes - room
    if short > 0:
        raise BudgetError(
            f"INT8 dense layers for the draft take {format_bytes(facts.draft_copy_bytes)}; the "
            f"budget is {format_bytes(short)} short.",
            hint="Give a larger --budget, or --draft-dense split.",
        )
    return DraftDense.INT8


def describe_budget(budget: MemoryAmount, given: int) -> str:
    """Formats a budget as it was given, with its bytes."""
    if budget.share is not None:
        return f"{budget} ({format_bytes(given)})"
    return format_bytes(given)


def in_both(num_bytes: int, facts: ModelFacts) -> str:
    """Formats bytes with their share of all experts, rounded up."""
    share = -(-1000 * num_bytes // facts.reference_bytes) / 10
    return f"{format_bytes(num_bytes)} ({share:g}%)"


def suggest(num_bytes: int) -> str:
    """Formats bytes as an option takes them, rounded up."""
    return f"{-(-num_bytes // 2**20)}MiB"
