"""What the figures are held against. A figure that was not measured is neither met nor missed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from gpu.captured import MAX_RATIO
from gpu.decoding import BUDGETS, LINKS, MIN_GAP_CLOSED, best_row
from gpu.kernel_checks import CASES
from gpu.offloaded import MIN_SPEEDUP
from mira_engine.types import Precision

MIN_LINK_KEPT = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """A figure and what is asked of it.

    Attributes:
        name: What it is.
        value: As measured, `None` where it was not.
        limit: Least, or most.
        is_most: Whether the limit is the most.
        note: What the figure is of.
    """

    name: str
    value: float | None
    limit: float
    is_most: bool = False
    note: str = ""

    @property
    def is_met(self) -> bool | None:
        """Whether it is; `None` where nothing was measured."""
        if self.value is None:
            return None
        return self.value <= self.limit if self.is_most else self.value >= self.limit

    def as_dict(self) -> dict[str, Any]:
        """For the document."""
        return asdict(self) | {"is_met": self.is_met}

    def __str__(self) -> str:
        word = {True: "met", False: "MISSED", None: "not measured"}[self.is_met]
        asked = f"{'at most' if self.is_most else 'at least'} {self.limit:g}"
        value = "-" if self.value is None else f"{self.value:.2f}"
        note = f" ({self.note})" if self.note else ""
        return f"  {word:12} {self.name}: {value}, {asked}{note}"


def targets(results: dict[str, dict[str, Any]]) -> Iterator[Target]:
    """Yields every target with what was measured.

    Args:
        results: Of the sections, by their names.
    """
    cases = results.get("kernel times", {}).get("cases", {})
    for case in CASES:
        for precision in (Precision.NESTED, Precision.INT8, Precision.INT4):
            name = f"{case.name}, {precision}"
            yield Target(
                name=f"share of a copy's rate, {name}",
                value=cases.get(name, {}).get("share_of_copy_bandwidth"),
                limit=case.least_share,
            )
    yield Target(
        name="link while products run, share of the link alone",
        value=results.get("link", {}).get("kept"),
        limit=MIN_LINK_KEPT,
    )
    captured = results.get("captured draft", {})
    yield Target(
        name="captured draft step, times its kernels",
        value=captured.get("ratio"),
        limit=MAX_RATIO,
        is_most=True,
        note=captured.get("what", ""),
    )
    decoding = results.get("decoding", {})
    for budget in BUDGETS:
        for link in LINKS:
            best = best_row(decoding, budget, link)
            yield Target(
                name=f"share of the gap closed, {budget.name}, {link}",
                value=best[1].get("gap_closed") if best else None,
                limit=MIN_GAP_CLOSED,
                note=f"{best[0]}; routing and acceptance are set" if best else "",
            )
    offloaded = results.get("transformers with accelerate", {}).get("ms_per_token")
    best = best_row(decoding, BUDGETS[0], next(iter(LINKS)))
    yield Target(
        name=f"times faster than transformers' offload, {BUDGETS[0].name}",
        value=offloaded / best[1]["ms_per_token"] if offloaded and best else None,
        limit=MIN_SPEEDUP,
        note=f"{best[0]}; the other bfloat16, added up from few layers" if best else "",
    )
