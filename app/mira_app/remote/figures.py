"""What a server tells of itself: an event of a remote client, and what panels show. Pure."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerFigures:
    """Figures of a server as it reported them last; `None` where it reports none.

    All but `context_length` are of the whole server, other people's requests included.

    Attributes:
        address: Where it is.
        context_length: Tokens that the model reads, prompt and reply together.
        num_running: Requests under way.
        num_waiting: Requests that wait.
        cache_share: Share of the KV cache in use, 0 to 1.
        prefix_hit_rate: Share of prompt tokens found in its prefix cache, over the last reply.
        acceptance_rate: Share of drafted tokens that were accepted, over the last reply.
    """

    address: str
    context_length: int | None = None
    num_running: int | None = None
    num_waiting: int | None = None
    cache_share: float | None = None
    prefix_hit_rate: float | None = None
    acceptance_rate: float | None = None
