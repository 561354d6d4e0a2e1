"""Memory of what runs beside or instead of the conversation: batches and beams.

They may use what the plan has for the KV cache of one conversation at full context, and its
workspace; the plan stays a ceiling. Pure arithmetic.
"""

from __future__ import annotations

from ..config import format_bytes
from ..errors import BudgetError
from ..events import MemoryPlan

_PLANNED_LOGITS = 3 * 34
"""Logits in float32, over the whole vocabulary, that a plan's workspace has room for."""


def spare_entries(plan: MemoryPlan, *, num_logits: int, num_words: int, context_length: int) -> int:
    """Returns how many entries a KV cache may have (rows times columns); below 0: too little.

    Args:
        plan: The engine's.
        num_logits: Logits in float32 that are held at a time.
        num_words: Words of the vocabulary.
        context_length: Tokens that the plan's KV cache is for.
    """
    room = plan.kv_bytes - _logits_bytes(num_logits, num_words)
    return room * context_length // plan.kv_bytes


def check_room(
    plan: MemoryPlan, *, num_entries: int, num_logits: int, num_words: int, context_length: int
) -> None:
    """Refuses what the plan has no memory for.

    Args:
        plan: The engine's.
        num_entries: Entries of the cache.
        num_logits: As for `spare_entries`.
        num_words: As for `spare_entries`.
        context_length: As for `spare_entries`.

    Raises:
        BudgetError: With the missing bytes.
    """
    cache_bytes = -(-plan.kv_bytes * num_entries // context_length)
    needed = cache_bytes + _logits_bytes(num_logits, num_words)
    if needed > plan.kv_bytes:
        raise BudgetError(
            f"Together these need {format_bytes(needed)} for their KV cache and logits, the plan "
            f"has {format_bytes(plan.kv_bytes)}: {format_bytes(needed - plan.kv_bytes)} short.",
            hint="Give fewer prompts or beams, fewer new tokens, or a larger --context, whose "
            "memory they share.",
        )


def _logits_bytes(num_logits: int, num_words: int) -> int:
    """Bytes of logits beyond those that the workspace has room for."""
    return 4 * num_words * max(0, num_logits - _PLANNED_LOGITS)
