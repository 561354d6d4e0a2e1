"""The report that the fake engine answers an evaluation with."""

from __future__ import annotations

from mira_engine import api

EVALUATION = api.EvaluationReport(
    model="builtin",
    title="Fake MoE",
    reference="bf16 experts, read from the checkpoint",
    dtype=api.ComputeDtype.FLOAT32,
    num_texts=5,
    num_tokens=400,
    num_continuations=5,
    num_greedy_tokens=32,
    results=(
        api.PrecisionFidelity(
            precision=api.Precision.BF16,
            perplexity=9.5,
            kl=0.0,
            top1_agreement=1.0,
            greedy_tokens=32.0,
            expert_bytes=2 * 2**20,
            is_reference=True,
        ),
        api.PrecisionFidelity(
            precision=api.Precision.INT8,
            perplexity=9.75,
            kl=0.0125,
            top1_agreement=0.955,
            greedy_tokens=20.25,
            expert_bytes=2**20,
            kinds=(
                api.KindFidelity(
                    kind="code", num_tokens=400, perplexity=9.75, kl=0.0125, top1_agreement=0.955
                ),
            ),
        ),
    ),
)
