"""What `mira-chat eval` takes and prints: precisions by name, progress, and the table."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TextIO

from mira_engine.api import (
    ConfigError,
    EvaluationProgress,
    EvaluationReport,
    Precision,
    PrecisionFidelity,
    format_bytes,
    to_plain,
)

from .figures import count
from .progress import duration_text
from .sanitise import sanitise

_MIN_RATE_S = 2.0
"""Seconds after which the time that is left can be told."""

_HEADINGS = ("precision", "perplexity", "KL", "top-1", "greedy", "expert")
_ROW = "{:<10}{:>12}{:>10}{:>9}{:>10}{:>12}"


def parse_precisions(names: Sequence[str]) -> tuple[Precision, ...]:
    """Returns precisions by name.

    Raises:
        ConfigError: There is no such precision.
    """
    try:
        return tuple(Precision(name.lower()) for name in names)
    except ValueError:
        raise ConfigError.for_field(
            "precision", ", ".join(names), f"Choose among {', '.join(Precision)}."
        ) from None


class EvaluationLines:
    """Progress of an evaluation as plain lines: each step once, and each tenth of the whole.

    Args:
        out: Takes the lines.
        now: Seconds.
    """

    def __init__(self, out: TextIO, now: Callable[[], float] = time.monotonic) -> None:
        self._out = out
        self._now = now
        self._started = now()
        self._last: tuple[str, int] | None = None

    def show(self, progress: EvaluationProgress) -> None:
        """Prints a line when a new step or a new tenth begins, with the time left."""
        tenth = 10 * progress.done // progress.total if progress.total else 0
        if (progress.detail, tenth) == self._last:
            return
        self._last = (progress.detail, tenth)
        parts = [f"{progress.done} of {progress.total} tokens", progress.detail]
        elapsed_s = self._now() - self._started
        if progress.done and elapsed_s >= _MIN_RATE_S and progress.done < progress.total:
            left_s = elapsed_s * (progress.total - progress.done) / progress.done
            parts.append(f"{duration_text(left_s)} left")
        print(sanitise(f"eval: {' · '.join(parts)}"), file=self._out, flush=True)


def evaluation_lines(report: EvaluationReport) -> Iterator[str]:
    """Yields the table and what has to be known to read it."""
    yield sanitise(
        f"{report.title}: {count(report.num_tokens, 'token')} of "
        f"{count(report.num_texts, 'text')}, arithmetic in {report.dtype}"
    )
    yield sanitise(f"reference: {report.reference}")
    yield ""
    yield _ROW.format(*_HEADINGS)
    for result in report.results:
        yield _ROW.format(*_cells(result, report.num_greedy_tokens))
    yield ""
    yield (
        "KL: mean divergence of the next token from the reference's, nats. top-1: both find the "
        "same token likeliest."
    )
    yield (
        f"greedy: mean tokens until {count(report.num_continuations, 'continuation')} of "
        f"{report.num_greedy_tokens} tokens differ from the reference's. expert: bytes of one."
    )
    for note in report.notes:
        yield sanitise(f"note: {note}")


def _cells(result: PrecisionFidelity, num_greedy_tokens: int) -> tuple[str, ...]:
    perplexity, size = f"{result.perplexity:.3f}", format_bytes(result.expert_bytes)
    if result.is_reference:
        return (result.precision, perplexity, "-", "-", "-", size)
    return (
        result.precision,
        perplexity,
        f"{result.kl:.5f}",
        f"{result.top1_agreement:.1%}",
        f"{result.greedy_tokens:.1f}/{num_greedy_tokens}",
        size,
    )


def evaluation_json(report: EvaluationReport) -> str:
    """Returns all of it as one JSON object, ASCII only."""
    return json.dumps(to_plain(report))
