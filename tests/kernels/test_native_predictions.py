"""The C++ operators that expect experts, against the same in torch."""

from __future__ import annotations

import pytest
import torch
from mira_engine.predictor.far import FarHead
from native_weights import assert_close, random


def head_parts(num_experts=5, num_inputs=37, num_units=3):
    width = num_experts + num_units + 1
    return (
        random(num_experts + 1, num_inputs, seed=1, dtype=torch.float32),
        random(num_experts + 1, seed=2, dtype=torch.float32),
        random(num_experts, width, seed=3, dtype=torch.float32),
        random(width, seed=4, dtype=torch.float32),
        random(num_experts, num_units, seed=5, dtype=torch.float32),
    )


def test_predict_experts_mixes_both_branches_by_the_gate(native_kernels):
    weight, bias, table, table_bias, outer = parts = head_parts()
    x, index = random(1, 37), torch.tensor([[4, 1]])
    selected = table_bias + table[4] + table[1]
    history = selected[:5] + outer @ torch.relu(selected[5:8])
    act = weight @ x[0].float() + bias
    gate = torch.sigmoid(act[5] + selected[8])
    shares = native_kernels.predict_experts(x, index, *parts, 5)
    assert_close(shares, torch.softmax(history + gate * (act[:5] - history), 0), 1e-4)
    alone = native_kernels.predict_experts(x, index, None, None, table, table_bias, outer, 5)
    assert_close(alone, torch.softmax(history, 0), 1e-4)
    router = native_kernels.predict_experts(x, index, weight[:5], bias[:5], None, None, None, 5)
    assert_close(router, torch.softmax(act[:5], 0), 1e-4)


def test_predict_experts_refuses_what_does_not_fit(native_kernels):
    parts, index = head_parts(), torch.tensor([[4, 1]])
    for x, ids, given, text in (
        (random(2, 37), index, parts, "one token"),
        (random(1, 36), index, parts, "weight has a wrong shape"),
        (random(1, 37), torch.tensor([[5]]), parts, "no such expert"),
        (random(1, 37), index, (None,) * 5, "needs a branch"),
        (random(1, 37), index, (*parts[:4], None), "come together"),
    ):
        with pytest.raises(RuntimeError, match=text):
            native_kernels.predict_experts(x, ids, *given, 5)


def test_far_head_expects_the_same_by_native_products(native_kernels):
    generator = torch.Generator().manual_seed(0)
    tensors = {
        "inner": torch.randn(12, 16, generator=generator),
        "inner_bias": torch.randn(12, generator=generator),
        "outer": torch.randn(3 * 8, 12, generator=generator) / 4,
        "outer_bias": torch.randn(3 * 8, generator=generator),
        "targets": torch.tensor([1, 2, 5]),
    }
    head = FarHead(tensors, top_k=2)
    state = torch.randn(1, 16, generator=generator).bfloat16()
    exact = head.probabilities(state.float())[0]
    found = head.expect(state, 0.02)
    assert len(found) > 10
    assert [layer for layer, *_ in found] == sorted(layer for layer, *_ in found)
    for layer, expert, share in found:
        row = [1, 2, 5].index(layer)
        assert share == pytest.approx(float(exact[row, expert]), abs=0.05)
