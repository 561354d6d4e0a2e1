"""What is slower or less exact with a loaded model than it could be, in words for people.

What was asked for, what was planned, and what has shown since in, notices out; nothing is
changed.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from mira_kernels.weights import Int4Layout

from .checkpoint.formats import ExpertFormat
from .config import EngineConfig, format_bytes
from .events import MemoryPlan, Notice
from .runtime.spill import CODE as SPILLED
from .runtime.spill import SpillVerdict
from .types import ComputeDtype, DraftDense

if TYPE_CHECKING:
    from .runtime.executor import ExpertExecutor


def load_fallbacks(
    config: EngineConfig,
    plan: MemoryPlan,
    target: ExpertFormat,
    draft: ExpertFormat | None,
    *,
    is_memory_exact: bool,
) -> list[Notice]:
    """Returns a notice for each fallback that holds from loading on.

    Args:
        config: What was asked for.
        plan: What was planned.
        target: Format of the target's experts.
        draft: Format of the draft's, `None` without one.
        is_memory_exact: Whether the system keeps the peak of the memory held.
    """
    notices = []
    link = config.link
    if link.is_emulated:
        rate = f"{format_bytes(link.bytes_per_s)}/s" if link.bytes_per_s else "own speed"
        text = f"The link is emulated: {rate}, {1e3 * link.latency_s:g} ms latency."
        notices.append(Notice(code="emulated-link", text=text))
    if config.arithmetic is ComputeDtype.FLOAT16:
        text = (
            "The arithmetic is float16, as bfloat16 is not to be had or was not wanted: a reply "
            "in which a number grows too large for it goes on in float32."
        )
        notices.append(Notice(code="float16", text=text))
    fmt = draft or target
    is_unpacked = fmt.group_size is not None and (
        fmt.layout == Int4Layout.ROWS or not fmt.is_native
    )
    if is_unpacked and config.arithmetic is ComputeDtype.BFLOAT16 and config.gpu is None:
        text = (
            "INT4 experts are unpacked for every use: this processor has no packed kernel "
            "for them, or their sizes do not fit it."
        )
        notices.append(Notice(code="unpacked-experts", text=text))
    wanted = config.draft_dense
    is_fast_wanted = wanted in (DraftDense.SPLIT, DraftDense.INT8)
    if draft is not None and is_fast_wanted and plan.draft_dense is not wanted:
        text = (
            f"The draft multiplies as the target does, not by {wanted}: that takes bfloat16 "
            "and compiled steps."
        )
        notices.append(Notice(code="draft-dense", text=text))
    if not is_memory_exact:
        text = "Peak memory is sampled here: a short peak can be missed."
        notices.append(Notice(code="sampled-memory", text=text))
    return notices


def round_fallbacks(
    config: EngineConfig, executor: ExpertExecutor, spill: SpillVerdict | None
) -> Iterator[Notice]:
    """Yields a notice for each fallback that shows only while replies are made.

    Args:
        config: What was asked for.
        executor: Between two passes.
        spill: What of the card's memory was found moved just now.
    """
    if config.is_direct_io and not executor.transfer.is_direct:
        text = "O_DIRECT is not to be had here: records pass through the system's cache of files."
        yield Notice(code="no-direct-io", text=text)
    if spill is not None:
        yield Notice(code=SPILLED, text=spill.text)
    if executor.meter.decode.num_on_host:
        text = (
            "Some experts are computed by the processor; texts can differ in rounding. "
            "--deterministic turns that off."
        )
        yield Notice(code="host-experts", text=text)
    driver = executor.driver
    if not driver.payoff.is_on:
        yield Notice(code="prefetch-off", text=driver.payoff.reason)
    if not driver.prediction_payoff.is_on:
        text = f"Of the predictor heads: {driver.prediction_payoff.reason}"
        yield Notice(code="predictions-off", text=text)


def unusable_predictors(model: str, *, is_made: bool, is_begun: bool) -> str | None:
    """Returns why a model's predictors are not used, `None` where none were ever wanted.

    Args:
        model: As a person names it.
        is_made: Whether they were made, and cannot be used.
        is_begun: Whether making them was begun.
    """
    prepare = f"mira-chat prepare {model}"
    if is_made:
        return (
            "The predictors are damaged or of other weights and are not used; "
            f"{prepare} makes them anew."
        )
    if is_begun:
        return f"The predictors are not trained yet; {prepare} goes on with that."
    return None
