"""Decoding at one real shape: time a token by policy, budget and link, and the gap they close.

Rows are those of `tests/bench/ablation.py` that need no trained heads, on replayed routing
(`gpu.trace_routing`) and set acceptance (`gpu.replay`). The bound's computing is the row's own
K with everything it uses resident, measured with routing to as many experts of a layer as
have slots.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from gap import bound_ms, gap_closed
from gpu.card import DEVICE, GIB, HAS_CARD, card_bytes, limit_memory, peak_bytes
from gpu.records import make_host_records
from gpu.replay import ACCEPTANCE, ReplayedEngine, Setting
from gpu.sections import Deadline
from gpu.shapes import Shape, make_backbone
from gpu.timeline import Recorder, summary
from gpu.trace_routing import FIDELITY, make_routing
from mira_engine.config import EngineConfig, LinkConfig, MemoryAmount
from mira_engine.events import MemoryPlan
from mira_engine.model.facts import facts_of
from mira_engine.policy.alternatives import PlanWishes, choose_plan
from mira_engine.policy.budget import MAX_CACHED_DRAFT_TOKENS, ModelFacts
from mira_engine.types import (
    CachePolicy,
    CompileMode,
    DraftDense,
    DraftExperts,
    Eviction,
    Lookahead,
    Precision,
)
from mira_kernels.weights import Int4Layout

MIN_GAP_CLOSED = 0.6
NUM_PROMPT_TOKENS = 32 if HAS_CARD else 2
PCIE4_BYTES_PER_S = 25e9
"""What a card of generation 4 with 16 lanes gives at best."""

LINKS: dict[str, float | None] = {"link as it is": None, "held to PCIe 4": PCIE4_BYTES_PER_S}

PLAIN = {"num_draft_tokens": 0, "is_prefetch_enabled": False}
ROWS: dict[str, dict[str, Any]] = {
    "lru": PLAIN | {"cache_policy": CachePolicy.POOL, "eviction": Eviction.LRU},
    "everything": {},
    "+planner": {"cache_policy": CachePolicy.REGIONS, "lookahead": Lookahead.BATCHES},
    "hot+stage": PLAIN | {"cache_policy": CachePolicy.REGIONS},
}
"""On demand; what the engine does where nobody chose; HOT and STAGE with a draft whose routing
is fetched in Specter's batches; HOT and STAGE alone."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Budget:
    """Device memory that a run may take.

    Attributes:
        name: For people.
        memory_bytes: All of it, enforced; `None` where there is no card.
        share: Of the experts in INT8, where there is none.
    """

    name: str
    memory_bytes: int | None = None
    share: float | None = None


if HAS_CARD:
    BUDGETS = tuple(Budget(name=f"{size} GiB", memory_bytes=size * GIB) for size in (8, 12))
else:
    BUDGETS = tuple(Budget(name=f"{share:.0%}", share=share) for share in (1.0, 1.5))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """One run."""

    budget: Budget
    link: str
    row: str

    @property
    def name(self) -> str:
        """For people, and in the document."""
        return f"{self.budget.name}, {self.link}, {self.row}"


def cases() -> Iterator[Case]:
    """Yields every run; what is left out when the time is over is what says least."""
    for link, rate in LINKS.items():
        for budget in BUDGETS:
            for row in ROWS:
                if rate is not None and not HAS_CARD and (budget, row) != (BUDGETS[0], "lru"):
                    continue  # Where nothing is timed a slower link only shows that it runs.
                yield Case(budget=budget, link=link, row=row)


def config_for(
    row: str, num_draft_tokens: int, bytes_per_s: float | None, *, context_length: int
) -> EngineConfig:
    """Returns what the engine would be asked for."""
    fields = {"num_draft_tokens": num_draft_tokens} | ROWS[row]
    return EngineConfig(
        precision=Precision.NESTED,
        context_length=context_length,
        link=LinkConfig(bytes_per_s=bytes_per_s),
        compile_mode=CompileMode.AUTO,
        draft_dense=DraftDense.TARGET,
        prefill_chunk_tokens=NUM_PROMPT_TOKENS,
        gpu=0,
        **fields,
    )


def facts_for(shape: Shape, *, context_length: int) -> ModelFacts:
    """Returns the sizes that a plan follows from."""
    config = config_for("everything", 0, None, context_length=context_length)
    return facts_of(shape.config(), config, layout=Int4Layout.ROWS.value)


def plan_for(facts: ModelFacts, budget: Budget, num_draft_tokens: int) -> MemoryPlan:
    """Plans memory as the engine does; a draft with the cached experts alone is short."""
    wishes = PlanWishes(
        budget=MemoryAmount(share=budget.share) if budget.share is not None else None,
        memory_bytes=budget.memory_bytes,
        num_draft_tokens=num_draft_tokens,
        draft_dense=DraftDense.TARGET,
        precision=Precision.NESTED,
    )
    plan = choose_plan(facts, wishes, None)[0]
    is_cached = plan.draft_experts is DraftExperts.CACHED
    if num_draft_tokens > MAX_CACHED_DRAFT_TOKENS and is_cached:
        return plan_for(facts, budget, MAX_CACHED_DRAFT_TOKENS)
    return plan


class Decoding:
    """Runs of one shape.

    Args:
        shape: The model.
        num_tokens: Tokens that a run is measured over; on a card as many warm the cache up before.
    """

    def __init__(self, shape: Shape, num_tokens: int) -> None:
        self.shape, self.num_tokens = shape, num_tokens
        self._num_warm_tokens = num_tokens if HAS_CARD else 0
        # Rounds go past what they are asked for, by K at most each time.
        self._num_rows = NUM_PROMPT_TOKENS + 2 * num_tokens + 4 * (shape.num_draft_tokens + 1)
        limit_memory(None)
        self._model = make_backbone(shape.config(), DEVICE)
        self._facts = facts_for(shape, context_length=self._num_rows)
        self._routing = make_routing(
            num_layers=shape.num_layers,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            num_tokens=self._num_rows,
        )
        fmt = shape.format(Precision.NESTED)
        self._host = make_host_records(fmt, shape.num_layers * shape.num_experts)

    @property
    def notes(self) -> dict[str, str]:
        """What is set, and what stands for what."""
        shape = self.shape
        return {
            "shape": shape.name,
            "routing": f"replayed: {self._routing.source}",
            "acceptance": (
                f"set: {ACCEPTANCE:.2%} a draft token (Specter, choice of K, mean of its models); "
                "a draft with the cached experts alone gets that times the share it has"
            ),
            "fidelity": f"set: the draft names {FIDELITY:.1%} of the target's experts (Specter)",
            "depth": (
                f"K = {shape.num_draft_tokens} ({shape.depth_source}); "
                f"{MAX_CACHED_DRAFT_TOKENS} with the cached experts alone"
            ),
            "records": self._host.note,
            "left out": "predictor heads, which would have to be trained",
        }

    def setting(self, case: Case) -> Setting:
        """Plans a run as the engine would."""
        wanted = ROWS[case.row].get("num_draft_tokens", self.shape.num_draft_tokens)
        plan = plan_for(self._facts, case.budget, wanted)
        return Setting(
            shape=self.shape,
            model=self._model,
            config=config_for(
                case.row, plan.num_draft_tokens, LINKS[case.link], context_length=self._num_rows
            ),
            plan=plan,
            routing=self._routing,
            host=self._host,
        )

    def run(self, case: Case) -> dict[str, Any]:
        """Measures one run in its memory, which is enforced."""
        return self._measure(self.setting(case), case.budget)

    def compute(self, case: Case) -> dict[str, Any] | None:
        """Measures a run's computing: what it uses has slots. `None` where not a token's has."""
        setting = self.setting(case)
        num_resident = min(setting.plan.num_slots // self.shape.num_layers, self.shape.num_experts)
        if num_resident < self.shape.top_k:
            return None
        setting = replace(setting, routing=setting.routing.narrowed(num_resident))
        figures = self._measure(setting, case.budget) | {"num_experts_used": num_resident}
        if HAS_CARD:
            figures["compute_ms"] = figures["ms_per_token"] - figures["stall_ms"]
        return figures

    def timeline(self, case: Case) -> dict[str, Any]:
        """Records one round of a run, after the warm-up."""
        limit_memory(case.budget.memory_bytes)
        engine = ReplayedEngine(self.setting(case), Recorder)
        try:
            engine.read_prompt(NUM_PROMPT_TOKENS)
            if self._num_warm_tokens:
                engine.run(1, num_warm_tokens=self._num_warm_tokens)
            return summary(engine.record_round())
        finally:
            engine.close()
            del engine
            limit_memory(None)

    def _measure(self, setting: Setting, budget: Budget) -> dict[str, Any]:
        limit_memory(budget.memory_bytes)
        engine = ReplayedEngine(setting)
        try:
            engine.read_prompt(NUM_PROMPT_TOKENS)
            figures = engine.run(self.num_tokens, num_warm_tokens=self._num_warm_tokens)
        finally:
            engine.close()
            del engine
        plan, peak = setting.plan, peak_bytes()
        limit_memory(None)
        is_within = peak is None or budget.memory_bytes is None or peak <= budget.memory_bytes
        assert is_within, f"{peak} bytes were taken of {budget.name}"
        num_draft = plan.num_draft_tokens
        return figures | {
            "k": num_draft,
            "draft": str(plan.draft_experts) if num_draft else None,
            "num_slots": plan.num_slots,
            "resident": plan.num_slots / plan.num_experts,
            "planned_gib": plan.total_bytes / GIB,
            "peak_gib": peak / GIB if peak is not None else None,
        }


def decode(
    results: dict[str, Any],
    deadline: Deadline,
    *,
    shape: Shape,
    num_tokens: int,
    link_bytes_per_s: float | None,
) -> None:
    """Runs every case, what each computes, and two timelines.

    Args:
        results: Filled.
        deadline: Of the section.
        shape: The model.
        num_tokens: Tokens of a run.
        link_bytes_per_s: The link's own rate, `None` where it was not measured.
    """
    decoding = Decoding(shape, num_tokens)
    results["set"] = decoding.notes
    runs, computes = results.setdefault("runs", {}), results.setdefault("computes", {})
    timelines = results.setdefault("timelines", {})
    for case in deadline.each(cases(), lambda each: each.name):
        if HAS_CARD and (case.budget.memory_bytes or 0) > card_bytes():
            deadline.left_out.append(f"{case.name}: more than this card has")
            continue
        figures = runs[case.name] = decoding.run(case)
        key = f"{case.budget.name}, K {figures['k']}"
        if key not in computes:
            computes[key] = decoding.compute(case)
        is_shown = case.row in ("lru", "+planner") and case.budget is BUDGETS[0]
        if is_shown and LINKS[case.link] is None:
            timelines[case.name] = decoding.timeline(case)
        add_gaps(results, case, link_bytes_per_s)


def add_gaps(results: dict[str, Any], case: Case, link_bytes_per_s: float | None) -> None:
    """Adds the bounds of all rows beside a run, and the share of the gap that they close.

    As `tests/bench/ablation.py` has them: the gap is between LRU and the bound of everything.
    """
    own, held = link_bytes_per_s, LINKS[case.link]
    rate = min(filter(None, (own, held)), default=None)
    beside = {
        row: figures
        for row in ROWS
        if (figures := results["runs"].get(replace(case, row=row).name)) is not None
    }
    for figures in beside.values():
        compute = results["computes"].get(f"{case.budget.name}, K {figures['k']}")
        if compute is not None and "compute_ms" in compute:
            num_bytes = 1e6 * figures["mb_per_token"]
            figures["bound_ms"] = bound_ms(compute["compute_ms"], num_bytes, rate)
    bound = beside.get("everything", {}).get("bound_ms")
    if bound is None or "lru" not in beside:
        return
    lru_ms = beside["lru"]["ms_per_token"]
    for figures in beside.values():
        figures["gap_closed"] = gap_closed(lru_ms, figures["ms_per_token"], bound)


def best_row(results: dict[str, Any], budget: Budget, link: str) -> tuple[str, dict] | None:
    """Returns the fastest row of a budget and a link, `None` without times."""
    found = {
        row: figures
        for row in ROWS
        if (figures := results.get("runs", {}).get(f"{budget.name}, {link}, {row}"))
        and figures["ms_per_token"] is not None
    }
    return min(found.items(), key=lambda item: item[1]["ms_per_token"]) if found else None


def describe_decoding(results: dict[str, Any]) -> Iterable[str]:
    """Lines for people."""
    for what, note in results.get("set", {}).items():
        yield f"  {what}: {note}"
    head = ("ms", "stall", "hits", "MB/token", "GB/s", "K", "stood", "bound", "gap")
    yield f"  {'':38}" + "".join(f"{name:>9}" for name in head)
    for name, figures in results.get("runs", {}).items():
        yield f"  {name:38}" + "".join(f"{cell:>9}" for cell in _cells(figures))
    for name, figures in results.get("computes", {}).items():
        if figures is not None and "compute_ms" in figures:
            yield (
                f"  computing alone, {name}: {figures['compute_ms']:.1f} ms, with "
                f"{figures['num_experts_used']} experts of a layer"
            )
    if results.get("runs"):
        count = sum(figures["num_device_allocations"] for figures in results["runs"].values())
        yield f"  memory asked of the card while decoding, beyond what was there: {count} times"
    for name, made in results.get("timelines", {}).items():
        share = made["hidden_share_of_copies"]
        about = ""
        if share is not None:
            about = f", {share:.0%} of their time under computing (waits for launches count)"
        yield f"  one round, {name}: {made['num_copies']} copies{about}"
        yield from (f"    {line}" for line in made["drawing"])


def _cells(figures: dict[str, Any]) -> Iterable[str]:
    """A run's figures, as they stand in the table."""

    def cell(key: str, form: str) -> str:
        value = figures.get(key)
        return "-" if value is None else format(value, form)

    yield cell("ms_per_token", ".1f")
    yield cell("stall_ms", ".1f")
    yield cell("hit_rate", ".0%")
    yield cell("mb_per_token", ".2f")
    yield cell("link_gb_per_s", ".1f")
    yield cell("k", "d")
    yield cell("accepted_per_round", ".2f") if figures["k"] else "-"
    yield cell("bound_ms", ".1f")
    yield cell("gap_closed", ".0%")
