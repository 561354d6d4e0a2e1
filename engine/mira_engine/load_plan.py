"""What a model is loaded with: its memory plan, and who says how many tokens are drafted.

Brings together what was asked for, what was measured on this machine (rates, a profile of
K) and the model's sizes. Loads and measures nothing.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from .checkpoint.store import ExpertStore, StoreManifest
from .config import EngineConfig, MachineRates, MemoryAmount, format_bytes
from .errors import BudgetError, StoreError
from .events import KProfile, MemoryPlan, Notice
from .library import ModelHome
from .model.facts import gather_facts
from .policy.alternatives import PlanWishes, choose_plan, usable_memory, usual_budget, with_link
from .policy.budget import (
    DEFAULT_NUM_DRAFT_TOKENS,
    SLOW_LINK_BYTES_PER_S,
    ModelFacts,
    plan_memory,
    room_for_experts,
)
from .policy.cache_setup import CacheSetup
from .policy.cost_model import usual_expectations
from .policy.eviction import preferred_eviction
from .policy.rebalance import DEFAULT_HOT_SHARE
from .policy.regions import MIN_TRANSIENT_SLOTS
from .policy.speculation import (
    DRAFT_DEPTHS,
    FixedDepth,
    SpeculationGovernor,
    allowed_depths,
)
from .predictor.bank import predictors_bytes
from .profiles import ProfileKey, load_profile
from .runtime import gpu_device
from .runtime.probe import PROFILE_FILE, MachineProfile, machine_name
from .system_memory import system_memory
from .types import (
    CacheMode,
    CachePolicy,
    CompileMode,
    DraftDense,
    DraftExperts,
    Lookahead,
    Precision,
)

OnNotice = Callable[[Notice], None]

FIRST_CACHED_DRAFT_TOKENS = 1
"""K of the first rounds of a draft with the cached experts. Measured 2026-11-30 as
`MIN_CACHED_SHARE` was: K = 1, 2, 4 take 24.0, 24.7 and 28.7 ms a token on the slow link, 26.1,
21.2 and 26.3 on the disk."""

_DRAFTED_LOADING_SHARE, _MIN_DRAFTED_LOADING = 0.125, 4
"""Of the slots, how many may wait for what a draft asked for. Without a bound a batch asks for
more than there is room for, and its draft is left with nothing to compute with: on the built-in
model at 75 %, K = 4, 2.4 accepted tokens a round for one request became 0.2 for eight."""


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """What a model is loaded with.

    Attributes:
        memory: The memory plan.
        top_k: Experts of one token in one layer.
        profile_key: What a profile of K for this load is kept under.
        profile: The profile that is kept, where nobody chose K.
        is_k_chosen: Whether somebody chose K.
        first_k: K of the first rounds, which a governor may adjust.
        link_bytes_per_s: Rate of the expert link as measured before or emulated, 0 where
            neither is known.
    """

    memory: MemoryPlan
    top_k: int
    profile_key: ProfileKey
    profile: KProfile | None
    is_k_chosen: bool
    first_k: int
    link_bytes_per_s: float = 0.0

    def cache_setup(
        self, config: EngineConfig, manifest: StoreManifest, record_bytes: int
    ) -> CacheSetup:
        """Returns what the driver is set up with.

        Args:
            config: Cache policy and eviction.
            manifest: Of the target's store.
            record_bytes: Bytes moved for one expert.
        """
        memory, policy = self.memory, config.cache_policy
        num_slots = memory.num_slots
        num_hot, num_stage = None, None
        has_regions = policy in (CachePolicy.REGIONS, CachePolicy.STATIC)
        if has_regions and memory.mode is not CacheMode.RESIDENT and num_slots > 2 * self.top_k:
            num_hot = int(DEFAULT_HOT_SHARE * num_slots)
            if policy is CachePolicy.STATIC:
                num_hot = num_slots - max(MIN_TRANSIENT_SLOTS, self.top_k)
            elif memory.mode is CacheMode.SMALL:
                num_hot, num_stage = memory.num_hot_slots, memory.num_stage_slots
        return CacheSetup(
            num_layers=manifest.num_layers,
            num_experts=manifest.num_experts,
            top_k=self.top_k,
            num_slots=num_slots,
            eviction=config.eviction
            or preferred_eviction(
                memory.num_draft_tokens,
                is_draft_cached=memory.draft_experts is DraftExperts.CACHED,
            ),
            num_hot_slots=num_hot,
            num_stage_slots=num_stage,
            mode=CacheMode.LARGE if policy is CachePolicy.STATIC else memory.mode,
            is_rebalancing=policy is CachePolicy.REGIONS,
            record_bytes=record_bytes,
            num_links=config.num_reader_threads,
            num_reserved_slots=min(2, num_slots - 1),
            # An emulated link is one: two records at a time would both come late.
            max_predicted=1 if config.link.bytes_per_s else config.num_reader_threads,
            is_lookahead_immediate=_is_lookahead_immediate(config),
            max_drafted_loading=max(_MIN_DRAFTED_LOADING, int(_DRAFTED_LOADING_SHARE * num_slots)),
        )

    def fixed_depth(self) -> FixedDepth:
        """Returns the plan's K, and why it is that."""
        k = self.memory.num_draft_tokens
        if k and not self.is_k_chosen:
            return FixedDepth(self.first_k, "fixed, since a seed was given")
        if self.profile:
            return FixedDepth(k, "from the profile")
        return FixedDepth(k, "as asked for" if k else "drafting is off")

    def governor(self, draft_depths: Collection[int] | None) -> SpeculationGovernor | None:
        """Returns what adjusts K to what is observed; `None` where K was chosen or is 0."""
        k, profile = self.memory.num_draft_tokens, self.profile
        if not k or self.is_k_chosen:
            return None
        return SpeculationGovernor(
            allowed_depths(k, DRAFT_DEPTHS if draft_depths is None else draft_depths),
            initial=self.first_k,
            prior_rates=profile.rates if profile else None,
            origin="from the profile" if profile else "the default",
        )


def open_stores(home: ModelHome, precision: Precision) -> tuple[ExpertStore, ExpertStore]:
    """Opens the target's store and the one that holds the draft's plane.

    Raises:
        StoreError: The model is not prepared in that precision, or damaged.
    """
    if not home.is_ready(precision):
        raise StoreError(
            f"{home.title} is not prepared in {precision}.",
            hint=f"Run: mira-chat prepare {home.name} --precision {precision}",
        )
    target = ExpertStore.open(home.store_dir(precision))
    if target.format.draft_plane is not None:
        return target, target
    return target, ExpertStore.open(home.store_dir(Precision.INT4))


def make_load_plan(
    home: ModelHome,
    config: EngineConfig,
    target: ExpertStore,
    draft_source: ExpertStore,
    *,
    profile_dir: Path | None,
    on_notice: OnNotice,
    reusable_bytes: int = 0,
) -> LoadPlan:
    """Plans the memory.

    Args:
        home: The model.
        config: What was asked for.
        target: The target's experts.
        draft_source: Where the draft's are.
        profile_dir: Where this machine's rates are kept, `None` for nowhere.
        on_notice: Told what was chosen without being asked for.
        reusable_bytes: Memory that a model loaded now will give back before.

    Raises:
        BudgetError: Nothing that was asked for fits; says the missing bytes.
    """

    def notice(code: str, text: str) -> None:
        on_notice(Notice(code=code, text=text))

    facts = gather_facts(home.backbone_dir, config, target.format, draft_source.format)
    heads_bytes = 0
    if config.is_predicting and config.is_prefetch_enabled:
        heads_bytes = predictors_bytes(home.predictors_dir)
        facts = replace(facts, workspace_bytes=facts.workspace_bytes + heads_bytes)
    free = system_memory().available_bytes
    if config.gpu is not None:
        free = gpu_device.free_device_bytes(config.gpu)
    available = free + reusable_bytes
    budget = config.budget
    if budget is None and config.memory_bytes is None:
        budget, note = usual_budget(facts, usable_memory(available))
        notice("default-budget", note)
    room = budget or MemoryAmount(
        num_bytes=max(1, room_for_experts(facts, config.memory_bytes or 0))
    )
    profile_key = ProfileKey.of_engine(
        config,
        machine=machine_name(),
        model_revision=target.manifest.revision,
        budget_bytes=room.resolve(facts.reference_bytes),
    )
    profile = None
    if config.num_draft_tokens is None and config.precision is not Precision.INT4:
        profile = load_profile(home.root, profile_key, notice)
    wishes = PlanWishes(
        budget=budget,
        memory_bytes=config.memory_bytes,
        num_draft_tokens=profile.best if profile else config.num_draft_tokens,
        draft_dense=config.draft_dense,
        draft_experts=config.draft_experts,
        precision=config.precision,
        has_heads=heads_bytes > 0,
        is_link_slow=(config.link.bytes_per_s or math.inf) < SLOW_LINK_BYTES_PER_S,
    )
    expect = usual_expectations(is_builtin=home.is_builtin)
    rates = _known_rates(config, profile_dir)
    memory, note = choose_plan(facts, wishes, rates, expect)
    first_k = memory.num_draft_tokens
    is_k_chosen = config.num_draft_tokens is not None
    if memory.draft_experts is DraftExperts.CACHED and not is_k_chosen:
        first_k = min(first_k, FIRST_CACHED_DRAFT_TOKENS)
    if profile is not None:
        first_k = profile.best
    elif not first_k and _is_draft_free(facts, config):
        # The governor begins without, and may draft.
        budget = MemoryAmount(num_bytes=memory.budget_bytes)
        memory, note = plan_memory(
            facts,
            budget,
            DEFAULT_NUM_DRAFT_TOKENS,
            config.draft_dense,
            DraftExperts.CACHED,
        )
    if note:
        notice("speculation-off", note)
    if memory.total_bytes > available:
        raise BudgetError(
            f"This needs {format_bytes(memory.total_bytes)} of memory, "
            f"{format_bytes(available)} is free: "
            f"{format_bytes(memory.total_bytes - available)} short.",
            hint="Give a smaller --budget or --context, or close other programs.",
        )
    return LoadPlan(
        memory=memory,
        top_k=facts.top_k,
        profile_key=profile_key,
        profile=profile,
        is_k_chosen=is_k_chosen,
        first_k=first_k,
        link_bytes_per_s=rates.link_bytes_per_s if rates else config.link.bytes_per_s or 0.0,
    )


def _is_draft_free(facts: ModelFacts, config: EngineConfig) -> bool:
    """Whether a draft takes no memory, and nobody said that there is none."""
    return (
        config.num_draft_tokens is None
        and facts.has_own_draft_plane
        and config.precision is Precision.NESTED
        and config.draft_experts is not DraftExperts.ALL
        and config.draft_dense is not DraftDense.INT8
    )


def _known_rates(config: EngineConfig, profile_dir: Path | None) -> MachineRates | None:
    """This machine's rates if they were measured before; loading measures nothing."""
    if profile_dir is None or config.gpu is not None:  # Rates are the processor's.
        return None
    profile = MachineProfile(profile_dir / PROFILE_FILE)
    rates = profile.rates(torch.get_num_threads(), system_memory().available_bytes)
    if rates is None:
        return None
    return with_link(rates, bytes_per_s=config.link.bytes_per_s, latency_s=config.link.latency_s)


def _is_lookahead_immediate(config: EngineConfig) -> bool:
    """Whether what a draft's routers choose is fetched at once, where nobody decided that.

    Not where a card launches a draft's pass as a whole: then no choice is seen on the host.
    """
    if config.lookahead is not Lookahead.AUTO:
        return config.lookahead is Lookahead.AT_ONCE
    return config.gpu is None or config.compile_mode is CompileMode.OFF
