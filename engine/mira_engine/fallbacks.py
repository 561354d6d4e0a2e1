"""What is slower or less exact with a loaded model than it could be, in words for people.

Pure: what was asked for, what was planned and how the experts are stored in, notices out.
"""

from __future__ import annotations

from mira_kernels.weights import Int4Layout

from .checkpoint.formats import ExpertFormat
from .config import EngineConfig, format_bytes
from .events import MemoryPlan, Notice
from .types import ComputeDtype, DraftDense


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
