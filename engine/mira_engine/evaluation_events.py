"""What is said of an evaluation: the request, its progress, and the report.

Frozen, plain values, as all of `mira_engine.events`, which hands them on.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from .config import EngineConfig
from .types import ComputeDtype, Precision

DEFAULT_EVALUATION_TOKENS = 4096
"""Most tokens of an evaluation where nobody says how many."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluateModel:
    """Compare precisions of a prepared model; the model loaded before is given up.

    Attributes:
        config: How each is loaded; its precision and K are left aside.
        precisions: Which are compared; empty for every one that is prepared.
        files: Text files to read instead of the texts that ship with the program.
        max_tokens: Most tokens of text that are read in each precision.
    """

    request_id: str
    model: str
    config: EngineConfig = field(default_factory=EngineConfig)
    precisions: tuple[Precision, ...] = ()
    files: tuple[str, ...] = ()
    max_tokens: int = DEFAULT_EVALUATION_TOKENS


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationProgress:
    """Tokens that were read or made, of an evaluation's `total`; `detail` says for what."""

    request_id: str
    done: int
    total: int
    detail: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class KindFidelity:
    """What one precision makes of one kind of text.

    Attributes:
        kind: Of the shipped texts, or a file's name.
        num_tokens: Tokens that were predicted.
        perplexity: exp of the mean negative log-probability of the text's tokens.
        kl: Mean Kullback-Leibler divergence of the reference's distribution of the next token
            from this one's, nats.
        top1_agreement: Share of tokens where both find the same one likeliest.
    """

    kind: str
    num_tokens: int
    perplexity: float
    kl: float
    top1_agreement: float


@dataclass(frozen=True, slots=True, kw_only=True)
class PrecisionFidelity:
    """How near one precision comes to the reference, over all texts.

    Attributes:
        precision: Format of the experts.
        perplexity: As in `KindFidelity`.
        kl: As there; 0 for the reference itself.
        top1_agreement: As there; 1 for the reference itself.
        greedy_tokens: Mean number of tokens for which the greedy continuation is the
            reference's own, of `EvaluationReport.num_greedy_tokens`.
        expert_bytes: Bytes of one expert's records.
        is_reference: Whether it is what the others are compared with.
        kinds: The same by kind of text.
    """

    precision: Precision
    perplexity: float
    kl: float
    top1_agreement: float
    greedy_tokens: float
    expert_bytes: int
    is_reference: bool = False
    kinds: tuple[KindFidelity, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationReport:
    """What came of an evaluation.

    Attributes:
        model: As in the request.
        title: Its name for people.
        reference: What the precisions were compared with, for people.
        dtype: Arithmetic of all of them.
        num_texts: Texts that were read.
        num_tokens: Tokens that were predicted in each precision.
        num_continuations: Beginnings of texts that were continued.
        num_greedy_tokens: Tokens of each continuation.
        results: The reference first, then the precisions from the nearest to the farthest.
        notes: What a person should know besides, a sentence each.
    """

    model: str
    title: str
    reference: str
    dtype: ComputeDtype
    num_texts: int
    num_tokens: int
    num_continuations: int
    num_greedy_tokens: int
    results: tuple[PrecisionFidelity, ...]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class EvaluationDone:
    """The answer to `EvaluateModel`."""

    request_id: str
    report: EvaluationReport
