"""Which use of the memory is the fastest: draft, prediction, demand, or INT4 experts.

Pure. `compare_plans` lists the alternatives with their bytes, predicted times and reasons;
`choose_plan` returns the plan of the chosen one. What was asked for (`-k`, `--budget`) is
never overruled: then the list only says what it costs. Without machine rates nothing is
predicted, and a draft is taken wherever it fits.

Source: Mira IV-C (budget to slots); Specter (K by mean time per token over candidates).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..config import MachineRates, MemoryAmount, format_bytes
from ..errors import BudgetError
from ..events import MemoryPlan, PlanAlternative
from ..types import CacheMode, DraftDense, DraftExperts, Precision, Strategy
from .budget import (
    DEFAULT_NUM_DRAFT_TOKENS,
    ModelFacts,
    in_both,
    plan_memory,
    room_for_experts,
    suggest,
    usual_draft_experts,
)
from .cost_model import Expectations
from .host_plan import HostWork
from .planned_steps import cost_model_of

DRAFT_TOKEN_CANDIDATES = (1, 2, 3, 4, 6, 8, 12, 16)
"""K that are compared where nobody chose one. Source: Specter's offline selection, which
goes to 32; above 16 the predictions differ by less than they are good for."""

DEFAULT_SHARE = 0.75
"""Budget where neither it nor the memory was chosen, of all experts in INT8. It leaves
something to see on a model that would fit."""

DEFAULT_PROMPT_TOKENS = 512

_MIN_MARGIN_BYTES = 512 * 2**20
_MARGIN_SHARE = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class PlanWishes:
    """What was asked for, and what the model and the user allow.

    Attributes:
        budget: For experts; `None` gives them what else leaves of `memory_bytes`.
        memory_bytes: Most that the engine may hold on the device, `None` for no limit.
        num_draft_tokens: K, `None` where nobody chose.
        draft_dense: What a draft multiplies with outside of the experts.
        draft_experts: Which routed experts a draft computes with.
        precision: Expert format of the target.
        is_compact_allowed: Whether INT4 experts may be the target.
        is_link_slow: Whether the link is known to be slow, where rates are not.
        has_heads: Whether there are predictor heads for this model.
        num_prompt_tokens: Prompt length for the time to the first token.
    """

    budget: MemoryAmount | None = None
    memory_bytes: int | None = None
    num_draft_tokens: int | None = None
    draft_dense: DraftDense = DraftDense.AUTO
    draft_experts: DraftExperts = DraftExperts.AUTO
    precision: Precision = Precision.NESTED
    is_compact_allowed: bool = False
    is_link_slow: bool = False
    has_heads: bool = False
    num_prompt_tokens: int = DEFAULT_PROMPT_TOKENS

    def __post_init__(self) -> None:
        assert self.budget is not None or self.memory_bytes is not None


def usable_memory(free_bytes: int) -> int:
    """Returns what the engine takes of free memory where nobody chose: all but a margin."""
    return max(0, free_bytes - max(_MIN_MARGIN_BYTES, int(_MARGIN_SHARE * free_bytes)))


def usual_budget(facts: ModelFacts, memory_bytes: int) -> tuple[MemoryAmount, str]:
    """Returns the budget where neither it nor the memory was chosen, and a sentence on it.

    Three quarters of all experts in INT8, or what the memory leaves if that is less.
    """
    share = MemoryAmount(share=DEFAULT_SHARE)
    wanted, room = share.resolve(facts.reference_bytes), room_for_experts(facts, memory_bytes)
    if wanted <= room:
        return share, (
            f"Experts may use {share} of their INT8 size ({format_bytes(wanted)}); "
            "--budget changes it."
        )
    return MemoryAmount(num_bytes=max(1, room)), (
        f"Experts may use {format_bytes(max(0, room))}, what free memory leaves; "
        "--budget changes it."
    )


def with_link(rates: MachineRates, *, bytes_per_s: float | None, latency_s: float) -> MachineRates:
    """Returns the rates of a machine whose link is slowed down on purpose."""
    return replace(
        rates,
        link_bytes_per_s=min(rates.link_bytes_per_s, bytes_per_s or rates.link_bytes_per_s),
        link_latency_s=rates.link_latency_s + latency_s,
    )


def choose_plan(
    facts: ModelFacts,
    wishes: PlanWishes,
    rates: MachineRates | None,
    expect: Expectations | None = None,
) -> tuple[MemoryPlan, str]:
    """Divides the memory as the chosen alternative does.

    Returns:
        The plan, and a sentence where speculation is off though nobody asked for that
        (else an empty string).

    Raises:
        BudgetError: Nothing that was asked for fits; says the missing bytes.
    """
    alternatives = compare_plans(facts, wishes, rates, expect)
    chosen = next((each for each in alternatives if each.is_chosen), None)
    if chosen is None or chosen.plan is None:
        raise refusal(facts, wishes, alternatives)
    note = ""
    if wishes.num_draft_tokens is None and chosen.strategy is not Strategy.SPECULATIVE:
        note = _speculation_off(facts, wishes, alternatives, chosen)
    return chosen.plan, note


def _speculation_off(
    facts: ModelFacts,
    wishes: PlanWishes,
    alternatives: Sequence[PlanAlternative],
    chosen: PlanAlternative,
) -> str:
    draft = next((a for a in alternatives if a.strategy is Strategy.SPECULATIVE), None)
    if draft is None:
        return ""
    if draft.tpot_s is not None and chosen.tpot_s is not None:
        return (
            f"Speculation is off: {_ms(chosen.tpot_s)} a token are predicted without it, "
            f"{_ms(draft.tpot_s)} with K = {draft.num_draft_tokens}; "
            f"-k {draft.num_draft_tokens} turns it on."
        )
    if wishes.budget is not None:
        return plan_memory(facts, wishes.budget, None)[1]
    return f"Speculation is off: {draft.reason}."


def compare_plans(
    facts: ModelFacts,
    wishes: PlanWishes,
    rates: MachineRates | None,
    expect: Expectations | None = None,
    host: HostWork | None = None,
) -> tuple[PlanAlternative, ...]:
    """Lists the alternatives, in the order of `Strategy`; at most one is chosen.

    Args:
        facts: The model's sizes.
        wishes: What was asked for and is allowed.
        rates: The machine's, `None` where they are unknown: then nothing is predicted.
        expect: Routing and drafting; `None` for the usual numbers.
        host: What the processor beside a card computes of its misses, `None` for nothing.
    """
    comparison = _Comparison(facts, wishes, rates, expect or Expectations(), host)
    rows = comparison.rows()
    allowed = [row for row in rows if row.plan is not None and not comparison.objection(row)]
    chosen = None
    if allowed:
        # The first one where nothing is predicted, and where two are equal.
        chosen = min(allowed, key=lambda row: row.tpot_s or 0.0)
    return tuple(
        replace(
            row,
            is_chosen=row is chosen,
            reason=comparison.reason(row, chosen, is_only=len(allowed) == 1)
            + comparison.host_remark(row),
        )
        for row in rows
    )


class _Comparison:
    """One comparison under way."""

    def __init__(
        self,
        facts: ModelFacts,
        wishes: PlanWishes,
        rates: MachineRates | None,
        expect: Expectations,
        host: HostWork | None,
    ) -> None:
        self.facts, self.wishes, self.rates, self.expect = facts, wishes, rates, expect
        self.host = host
        self.compact_facts = replace(facts, whole_record_bytes=facts.draft_record_bytes)

    def rows(self) -> list[PlanAlternative]:
        rows = []
        is_int4 = self.wishes.precision is Precision.INT4
        if not is_int4:
            rows.append(self._speculative_row())
        rows.append(self._row(Strategy.PREDICTIVE, 0))
        rows.append(self._row(Strategy.ON_DEMAND, 0))
        if not is_int4:
            rows.append(self._row(Strategy.COMPACT, 0))
        return rows

    def _speculative_row(self) -> PlanAlternative:
        """The fastest draft of the ones that were left open, or the usual one."""
        wanted = self.wishes.num_draft_tokens
        usual = self.usual_draft_experts
        row = self._row(Strategy.SPECULATIVE, wanted or DEFAULT_NUM_DRAFT_TOKENS, usual)
        if self.rates is None or self.facts.work is None:
            return row
        sources = [self.wishes.draft_experts]
        if sources[0] is DraftExperts.AUTO:
            sources = [DraftExperts.ALL]
            if self.facts.has_own_draft_plane:
                sources.append(DraftExperts.CACHED)
        rows = [
            self._row(Strategy.SPECULATIVE, k, source)
            for source in sources
            for k in ([wanted] if wanted else DRAFT_TOKEN_CANDIDATES)
        ]
        fitting = [each for each in rows if each.tpot_s is not None]
        return min(fitting, key=lambda each: each.tpot_s or 0.0) if fitting else row

    @property
    def usual_draft_experts(self) -> DraftExperts:
        """As asked for, else what is usual in this room."""
        wanted = self.wishes.draft_experts
        if wanted is not DraftExperts.AUTO:
            return wanted
        return usual_draft_experts(
            self.facts,
            self._room(),
            self.wishes.num_draft_tokens,
            is_link_slow=self.wishes.is_link_slow,
        )

    def _row(
        self, strategy: Strategy, k: int, draft_experts: DraftExperts = DraftExperts.ALL
    ) -> PlanAlternative:
        facts, precision = self._facts_of(strategy), self.wishes.precision
        if strategy is Strategy.COMPACT:
            precision = Precision.INT4
        row = PlanAlternative(strategy=strategy, precision=precision, num_draft_tokens=k)
        room = self._room()
        missing = self._minimum(strategy, draft_experts) - room
        if missing > 0:
            return replace(row, missing_bytes=missing)
        budget = self.wishes.budget or MemoryAmount(num_bytes=room)
        plan, _ = plan_memory(facts, budget, k, self.wishes.draft_dense, draft_experts)
        limit = self.wishes.memory_bytes
        if limit is not None and plan.total_bytes > limit:
            return replace(row, missing_bytes=plan.total_bytes - limit)
        return self._predicted(replace(row, plan=plan), plan, facts)

    def _room(self) -> int:
        """Bytes for experts, below 0 where the rest alone is too much."""
        if self.wishes.budget is not None:
            return self.wishes.budget.resolve(self.facts.reference_bytes)
        assert self.wishes.memory_bytes is not None
        return room_for_experts(self.facts, self.wishes.memory_bytes)

    def _minimum(self, strategy: Strategy, draft_experts: DraftExperts) -> int:
        if strategy is Strategy.SPECULATIVE:
            return self.facts.min_bytes_with_draft(self.wishes.draft_dense, draft_experts)
        return self._facts_of(strategy).min_bytes

    def _predicted(
        self, row: PlanAlternative, plan: MemoryPlan, facts: ModelFacts
    ) -> PlanAlternative:
        if self.rates is None or facts.work is None:
            return row
        model = cost_model_of(
            facts,
            plan,
            self.rates,
            self.expect,
            num_cached_tokens=self.wishes.num_prompt_tokens,
            host=self.host and self.host.setup(facts, plan, row.precision, self.rates),
        )
        if row.strategy is Strategy.SPECULATIVE:
            step = model.verify_after(row.num_draft_tokens)
            tpot_s = model.speculative_tpot_s(row.num_draft_tokens)
        else:
            is_plain = row.strategy is not Strategy.PREDICTIVE
            step = model.plain_step() if is_plain else model.predictive_step()
            tpot_s = step.total_s
        ttft_s = model.ttft_s(self.wishes.num_prompt_tokens)
        return replace(
            row,
            hit_rate=model.hit_rate,
            tpot_s=tpot_s,
            ttft_s=ttft_s,
            host_share=step.host_share,
        )

    def host_remark(self, row: PlanAlternative) -> str:
        """What the processor beside the card has to do with a row's misses."""
        if self.host is None or self.rates is None:
            return ""
        return self.host.remark(self._facts_of(row.strategy), row, self.rates)

    def _facts_of(self, strategy: Strategy) -> ModelFacts:
        return self.compact_facts if strategy is Strategy.COMPACT else self.facts

    def objection(self, row: PlanAlternative) -> str:
        """Why a row that fits may not be chosen; empty where it may."""
        k = self.wishes.num_draft_tokens
        if row.strategy is Strategy.SPECULATIVE:
            return "-k 0 turns drafting off" if k == 0 else ""
        if k:
            return f"-k {k} asks for a draft"
        if row.strategy is Strategy.PREDICTIVE:
            if not self.wishes.has_heads:
                return "there are no predictor heads for this model"
            if row.plan is not None and row.plan.mode is CacheMode.RESIDENT:
                return "all experts are resident, so there is nothing to predict"
        if row.strategy is Strategy.COMPACT and not self.wishes.is_compact_allowed:
            return "replies would be those of INT4 experts, which was not allowed"
        return ""

    def reason(self, row: PlanAlternative, chosen: PlanAlternative | None, *, is_only: bool) -> str:
        """Why a row is chosen, or why not."""
        if row.plan is None:
            return self._shortage(row)
        if objection := self.objection(row):
            return objection
        if row is chosen:
            if self.wishes.num_draft_tokens is not None:
                return f"-k {self.wishes.num_draft_tokens} asks for it"
            if is_only:
                return "the only one that fits and is allowed"
            if row.tpot_s is None:
                return "taken where it fits, as long as this machine's rates are unknown"
            return "the fastest that fits and is allowed"
        if row.tpot_s is None or chosen is None or not chosen.tpot_s:
            return "not the default"
        return f"predicted to take {row.tpot_s / chosen.tpot_s:.2f} times as long"

    def _shortage(self, row: PlanAlternative) -> str:
        short, minimum = (
            format_bytes(row.missing_bytes),
            self._minimum(row.strategy, self.usual_draft_experts),
        )
        if self.wishes.budget is None:
            needed = self.facts.fixed_bytes + minimum
            return f"{short} short: it needs {format_bytes(needed)} in all"
        if minimum > self._room():
            return f"{short} short: experts need at least {in_both(minimum, self.facts)}"
        return f"{short} more than the memory allows"


def refusal(
    facts: ModelFacts, wishes: PlanWishes, alternatives: Sequence[PlanAlternative]
) -> BudgetError:
    """Builds the refusal where no alternative is chosen; names the missing bytes."""
    k, limit = wishes.num_draft_tokens, wishes.memory_bytes
    is_drafting = bool(k)
    minimum = facts.min_bytes
    if is_drafting:
        source = wishes.draft_experts
        if source is DraftExperts.AUTO and facts.has_own_draft_plane:
            source = DraftExperts.CACHED  # What needs least.
        minimum = facts.min_bytes_with_draft(wishes.draft_dense, source)
    if wishes.budget is not None:
        try:
            plan, _ = plan_memory(
                facts, wishes.budget, k or 0, wishes.draft_dense, wishes.draft_experts
            )
        except BudgetError as error:
            return error
        minimum = plan.budget_bytes
    assert limit is not None
    needed = facts.fixed_bytes + minimum
    what = f"K = {k} needs" if is_drafting else "This model needs"
    hint = f"Give at least --memory {suggest(needed)}, or a smaller --context"
    if wishes.budget is not None:
        hint += " or --budget"
    if is_drafting:
        hint += ", or -k 0"
    elif not wishes.is_compact_allowed and _has_room_for_compact(alternatives):
        hint += ", or allow INT4 experts"
    return BudgetError(
        f"{what} {format_bytes(needed)}: {format_bytes(facts.fixed_bytes)} for its other layers, "
        f"KV cache and workspace and {format_bytes(minimum)} for experts. {format_bytes(limit)} "
        f"of memory is {format_bytes(needed - limit)} short.",
        hint=hint + ".",
    )


def _has_room_for_compact(alternatives: Sequence[PlanAlternative]) -> bool:
    return any(a.strategy is Strategy.COMPACT and a.plan is not None for a in alternatives)


def _ms(seconds: float) -> str:
    return f"{1e3 * seconds:.1f} ms"
