"""Coverage@k, counted by hand."""

import pytest
import torch
from mira_engine.predictor.coverage import coverage, rank_of_experts

SCORES = torch.tensor([[0.1, 0.9, 0.5, 0.2], [0.4, 0.3, 0.2, 0.1]])
TARGETS = torch.tensor([[1, 3], [2, 3]], dtype=torch.int16)


def test_rank_of_experts_with_ties_prefers_the_lower_id():
    assert rank_of_experts(torch.tensor([[1.0, 2.0, 2.0, 0.0]])).tolist() == [[2, 0, 1, 3]]


def test_coverage_counts_routed_tokens_within_the_first_k():
    # Places of the targets: row 0 has 0 and 2, row 1 has 2 and 3.
    assert coverage(SCORES, TARGETS, (1, 2, 3, 4)) == (0.25, 0.25, 0.75, 1.0)


def test_coverage_with_gate_weights_counts_their_mass():
    mass = torch.tensor([[0.7, 0.3], [0.9, 0.1]])
    found = coverage(SCORES, TARGETS, (1, 3, 4), mass)
    assert found == pytest.approx((0.7 / 2, 1.9 / 2, 1.0))


def test_coverage_of_no_tokens_is_zero():
    assert coverage(torch.zeros(0, 4), torch.zeros(0, 2, dtype=torch.int64), (1, 2)) == (0.0, 0.0)
