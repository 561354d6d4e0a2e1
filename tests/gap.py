"""How much of the time that loading experts costs is won back: the bound, and the gap closed.

What benches compare rows with; pure arithmetic in milliseconds a token.
"""

from __future__ import annotations


def bound_ms(compute_ms: float, bytes_per_token: float, bytes_per_s: float | None) -> float:
    """Returns the least a row can take: its computing, or its bytes on the link.

    Args:
        compute_ms: Of the row's schedule with all experts resident.
        bytes_per_token: That the row moves.
        bytes_per_s: Of the link, `None` where it is not known: then it bounds nothing.
    """
    return max(compute_ms, 1e3 * bytes_per_token / bytes_per_s if bytes_per_s else 0.0)


def gap_closed(lru_ms: float, row_ms: float, bound: float) -> float | None:
    """Returns the share of what LRU on demand loses to the bound that a row wins back.

    `None` where LRU is at the bound and nothing can be won.
    """
    return (lru_ms - row_ms) / (lru_ms - bound) if lru_ms > bound else None
