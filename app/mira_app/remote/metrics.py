"""Reads what a server tells under `/metrics`. Pure.

Only names that vLLM documents are known. Counters run since the server began; what they
say of a reply is the difference of two readings.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping

from .figures import ServerFigures

Metrics = Mapping[str, tuple[float, ...]]
"""Values by name, one for each set of labels."""

_LINE = re.compile(r"([A-Za-z_:][\w:]*)(?:\{[^}]*\})?[ \t]+(\S+)", re.ASCII)
_PREFIX = "vllm:"
_CACHE_SHARE = ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc")
_DRAFTED, _ACCEPTED = "vllm:spec_decode_num_draft_tokens", "vllm:spec_decode_num_accepted_tokens"
_QUERIES, _PREFIX_HITS = "vllm:prefix_cache_queries", "vllm:prefix_cache_hits"


def read_metrics(text: str) -> Metrics:
    """Returns the metrics that are known here; none where the text is something else."""
    found: dict[str, tuple[float, ...]] = {}
    for line in text.splitlines():
        if not line.startswith(_PREFIX):
            continue
        match = _LINE.match(line)
        if match is None:
            continue
        try:
            value = float(match[2])
        except ValueError:
            continue
        name = match[1].removesuffix("_total")
        if math.isfinite(value):
            found[name] = (*found.get(name, ()), value)
    return found


def server_figures(
    address: str, context_length: int | None, now: Metrics, before: Metrics | None = None
) -> ServerFigures:
    """Returns what two readings say.

    Args:
        address: Where the server is.
        context_length: Tokens that the model reads, `None` where unknown.
        now: The last reading.
        before: The one at the beginning of the reply; without it, rates are unknown.
    """
    shares = next((now[name] for name in _CACHE_SHARE if name in now), ())
    return ServerFigures(
        address=address,
        context_length=context_length,
        num_running=_number(now, "vllm:num_requests_running"),
        num_waiting=_number(now, "vllm:num_requests_waiting"),
        cache_share=sum(shares) / len(shares) if shares else None,
        prefix_hit_rate=_rate(now, before, _PREFIX_HITS, _QUERIES),
        acceptance_rate=_rate(now, before, _ACCEPTED, _DRAFTED),
    )


def _number(metrics: Metrics, name: str) -> int | None:
    return round(sum(metrics[name])) if name in metrics else None


def _rate(now: Metrics, before: Metrics | None, part: str, whole: str) -> float | None:
    if before is None or whole not in now or whole not in before:
        return None
    total = sum(now[whole]) - sum(before[whole])
    share = sum(now.get(part, ())) - sum(before.get(part, ()))
    return share / total if total > 0 and 0 <= share <= total else None
