"""Memory that ran out: how that is told from other failures, and how memory is given back.

Whoever loads or computes turns such a failure into a `MemoryShortageError`, and raises it
outside of the `except` block: a traceback holds the tensors of every frame that it passed
through, and what is held cannot be used for a second try. What that try is,
`mira_engine.memory_retry` knows. Any thread.
"""

from __future__ import annotations

import errno
import gc
import traceback

import torch

from ..errors import MemoryShortageError, MiraError
from ..events import MemoryPlan

LEAST_CHUNK = 16
"""Prompt tokens of a pass below which its temporaries are not what takes the memory."""

_SIGNS = (
    "out of memory",
    "can't allocate memory",
    "not enough memory",
    "cannot allocate memory",
    "alloc_failed",
    "can't start new thread",
    "failed to map segment",
)
"""In the words of torch's allocators, of the driver, of CUDA's libraries, and of Python where no
room is left for a thread's stack, and of the system's loader; in lower case."""

_HINT = "Close other programs, or give a smaller --budget, --memory or --context."


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error says that there is no memory, on the device or the host."""
    if isinstance(error, MemoryError | torch.OutOfMemoryError):
        return True
    if isinstance(error, OSError):
        return error.errno == errno.ENOMEM
    text = str(error).lower()
    is_told = isinstance(error, RuntimeError | ImportError)
    return is_told and any(sign in text for sign in _SIGNS)


def as_shortage(
    error: BaseException, what: str, plan: MemoryPlan | None = None
) -> MemoryShortageError | None:
    """Returns what to raise in place of an error, once its `except` block is left.

    Args:
        error: Whatever was raised.
        what: What was going on, for the message: "while the model was loaded".
        plan: What was planned, `None` where nothing was yet.

    Returns:
        An error without any hold on the one given, whose traceback is a note of it; `None`
        where that is no shortage of memory, or was told as one before.
    """
    if isinstance(error, MiraError) or not is_out_of_memory(error):
        return None
    shortage = MemoryShortageError(f"Memory ran out {what}.", hint=_HINT)
    shortage.add_note("".join(traceback.format_exception(error)))
    if plan is not None:
        shortage.planned_bytes, shortage.budget_bytes = plan.total_bytes, plan.budget_bytes
    return shortage


def shortage_of(
    error: BaseException, what: str, plan: MemoryPlan | None = None
) -> MemoryShortageError | None:
    """Returns what `as_shortage` does, and of a shortage that was told before a copy.

    The copy has its figures and notes, and like all others no traceback; where a reader has
    told it, which knows no plan, it gets the one that is given.
    """
    if not isinstance(error, MemoryShortageError):
        return as_shortage(error, what, plan)
    copy = MemoryShortageError(error.message, hint=error.hint)
    copy.planned_bytes, copy.budget_bytes = error.planned_bytes, error.budget_bytes
    if plan is not None and not copy.planned_bytes:
        copy.planned_bytes, copy.budget_bytes = plan.total_bytes, plan.budget_bytes
    copy.num_prompt_tokens = error.num_prompt_tokens
    for note in getattr(error, "__notes__", ()):
        copy.add_note(note)
    return copy


def smaller_chunk(num_tokens: int) -> int:
    """Returns how many prompt tokens to read at once where so many took too much."""
    return max(LEAST_CHUNK, num_tokens // 4)


def is_long_pass(num_tokens: int, most_tokens: int) -> bool:
    """Whether a pass over a prompt that failed took the memory, rather than what lies below it.

    Args:
        num_tokens: Prompt tokens of the pass, 0 where it was another one.
        most_tokens: Those of the longest passes.
    """
    return num_tokens > LEAST_CHUNK and 2 * num_tokens >= most_tokens


def give_memory_back() -> None:
    """Frees what nobody refers to any more, and what torch keeps of it for later."""
    gc.collect()  # Parts of an engine know each other.
    if torch.cuda.is_initialized():
        torch.cuda.empty_cache()
        torch.accelerator.empty_host_cache()  # Pinned chunks.
