"""What `mira-chat plan` prints: where the memory goes, and what each use of it gives. Pure."""

from __future__ import annotations

import json
from collections.abc import Iterator

from mira_engine.api import (
    MemoryPlan,
    MiraError,
    PlanAlternative,
    PlanMade,
    format_bytes,
    to_plain,
)

_HEADINGS = ("", "use of the memory", "K", "slots", "hits", "TPOT", "TTFT", "why")


def plan_lines(made: PlanMade) -> Iterator[str]:
    """Yields the report's lines; no line is wider than its reason makes it."""
    machine = made.machine
    yield f"{made.title} on {machine.name}"
    yield (
        f"  reads memory at {format_bytes(machine.device_bytes_per_s)}/s, "
        f"the link moves {format_bytes(machine.link_bytes_per_s)}/s"
    )
    yield f"  memory for the engine: {format_bytes(made.memory_bytes)}"
    chosen = next((each for each in made.alternatives if each.is_chosen), None)
    shown = chosen or next((each for each in made.alternatives if each.plan is not None), None)
    if shown is not None and shown.plan is not None:
        yield ""
        yield from _division(shown, shown.plan, made)
    yield ""
    yield from _table([_HEADINGS, *(_cells(each) for each in made.alternatives)])
    yield ""
    yield (
        f"TPOT is predicted per new token, TTFT for a new prompt of {made.num_prompt_tokens} "
        "tokens; * is what would run, x does not fit."
    )
    if made.measured is not None:
        k, tpot_s = made.measured.num_draft_tokens, made.measured.tpot_s
        yield f"A profile measured {1e3 * tpot_s:.1f} ms per new token here, with K {k}."
    for note in made.notes:
        yield f"note: {note}"


def plan_json(made: PlanMade | None, error: MiraError | None) -> str:
    """Returns a plan, or why there is none, as one JSON object, ASCII only."""
    plain = to_plain(made) if made is not None else {}
    assert isinstance(plain, dict)
    plain.pop("request_id", None)
    plain["error"] = error.to_fields() if error is not None else None
    return json.dumps(plain)


def _division(row: PlanAlternative, plan: MemoryPlan, made: PlanMade) -> Iterator[str]:
    parts = [
        ("layers that are not experts", plan.non_expert_bytes, ""),
        (f"KV cache, {made.context_length} tokens", plan.kv_bytes, ""),
        ("workspace of the largest prompt chunk", plan.workspace_bytes, ""),
        ("INT4 draft", plan.draft_bytes, "" if plan.draft_bytes else "none"),
    ]
    if plan.draft_dense_bytes:
        parts.append(("INT8 copies for the draft", plan.draft_dense_bytes, ""))
    slots = (
        f"{plan.num_slots} of {plan.num_experts} experts, {format_bytes(plan.slot_bytes)} each: "
        f"{plan.num_hot_slots} HOT, {plan.num_stage_slots} STAGE, "
        f"{plan.num_transient_slots} for misses"
    )
    parts.append((f"slots, {row.precision}", plan.num_slots * plan.slot_bytes, slots))
    parts.append(("total", plan.total_bytes, f"mode: {plan.mode}"))
    for name, num_bytes, remark in parts:
        yield f"  {name:<38}{format_bytes(num_bytes):>11}  {remark}".rstrip()


def _cells(row: PlanAlternative) -> tuple[str, ...]:
    slots = "-" if row.plan is None else f"{row.plan.num_slots}"
    hits = "-" if row.hit_rate is None else f"{row.hit_rate:.0%}"
    tpot = "-" if row.tpot_s is None else f"{1e3 * row.tpot_s:.1f} ms"
    ttft = "-" if row.ttft_s is None else f"{row.ttft_s:.2f} s"
    mark = "*" if row.is_chosen else "" if row.plan is not None else "x"
    return (
        mark, f"{row.strategy}, {row.precision}", str(row.num_draft_tokens),
        slots, hits, tpot, ttft, row.reason,
    )  # fmt: skip


def _table(rows: list[tuple[str, ...]]) -> Iterator[str]:
    """Aligns columns: names and reasons to the left, figures to the right."""
    widths = [max(len(row[i]) for row in rows) for i in range(len(_HEADINGS))]
    for row in rows:
        cells = [
            cell.ljust(width) if i in (0, 1, len(row) - 1) else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        ]
        yield "  ".join(cells).rstrip()
