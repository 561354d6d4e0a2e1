"""The C++ operators for a layer's experts: the same bits in any company, and what is counted."""

from __future__ import annotations

import pytest
import torch
from native_weights import BF16, KINDS, LAYOUTS, Layer, assert_close, num_threads, random, rng


def layers():
    for kind in KINDS:
        yield Layer(kind, 6, 64, 96)
    yield Layer("dense", 6, 37, 19)
    yield Layer("int8", 6, 37, 75)
    yield Layer("int4", 6, 96, 64, LAYOUTS[1])
    yield Layer("nested", 6, 96, 64, LAYOUTS[1])


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_gated_experts_agree_with_each_expert(native_kernels, dtype):
    for layer in layers():
        for num_tokens in (1, 5, 60):
            x = random(num_tokens, layer.hidden)
            index = torch.randint(0, 6, (num_tokens, 3), generator=rng(3))
            index[0, 1] = index[0, 0]  # twice the same
            experts = [4, 0, 2]
            out = layer.run(native_kernels, x, index, experts, dtype)
            for row, e in enumerate(index.view(-1).tolist()):
                if e in experts:
                    assert_close(out[row], layer.expert(e, x[row // 3 : row // 3 + 1])[0], 2e-2)
                else:
                    assert bool((out[row] == -77).all())


def test_gated_experts_without_work_leave_everything(native_kernels):
    layer = Layer("nested", 2, 64, 32)
    index = torch.zeros(1, 2, dtype=torch.int64)
    assert bool((layer.run(native_kernels, random(1, 64), index, []) == -77).all())
    assert bool((layer.run(native_kernels, random(1, 64), index, [1]) == -77).all())
    empty = torch.zeros(0, 2, dtype=torch.int64)
    assert layer.run(native_kernels, random(0, 64), empty, [0]).shape == (0, 64)


def test_gated_experts_have_the_same_bits_in_any_company(native_kernels):
    for layer in layers():
        x = random(9, layer.hidden)
        index = torch.randint(0, 6, (9, 3), generator=rng(3))
        with num_threads(1):
            whole = layer.run(native_kernels, x, index, list(range(6))).view(9, 3, -1)
        with num_threads(2):
            for t in range(9):
                alone = layer.run(native_kernels, x[t : t + 1], index[t : t + 1], list(range(6)))
                assert torch.equal(alone, whole[t])
            halves = layer.run(native_kernels, x, index, [0, 1, 2])
            others = layer.run(native_kernels, x, index, [3, 4, 5])
        joined = torch.where((index.view(-1) < 3)[:, None], halves, others)
        assert torch.equal(joined.view_as(whole), whole)


@pytest.mark.parametrize("dtype", [torch.float32, BF16])
def test_combine_experts_rounds_once(native_kernels, dtype):
    rows, weights = random(5 * 3, 37, dtype=dtype), random(5, 3, seed=4)
    for w in (weights, weights.float()):
        total = torch.zeros(5, 37)
        for j in range(3):
            total += rows.view(5, 3, 37)[:, j].float() * w[:, j : j + 1].float()
        y = native_kernels.combine_experts(rows, w)
        assert y.dtype == BF16
        assert_close(y, total)


def test_draft_experts_combine_and_count(native_kernels):
    for layer in layers():
        x, weights = random(5, layer.hidden), random(5, 2, seed=4, dtype=torch.float32)
        index = torch.tensor([[0, 1], [1, 5], [2, 1], [0, 0], [5, 3]])
        counts = torch.full((6,), 10, dtype=torch.int32)
        y = native_kernels.draft_experts(x, index, weights, layer.addresses, counts, *layer.sizes)
        rows = layer.run(native_kernels, x, index, list(range(6)))
        assert torch.equal(y, native_kernels.combine_experts(rows, weights))
        assert counts.tolist() == [13, 13, 11, 11, 10, 12]


def test_draft_experts_without_an_address_add_nothing_and_are_counted(native_kernels):
    for layer in layers():
        x, weights = random(5, layer.hidden), random(5, 2, seed=4, dtype=torch.float32)
        index = torch.tensor([[0, 1], [1, 5], [2, 1], [0, 0], [5, 3]])
        counts = torch.zeros(6, dtype=torch.int32)
        addresses = layer.addresses.clone()
        addresses[[1, 3]] = 0
        y = native_kernels.draft_experts(x, index, weights, addresses, counts, *layer.sizes)
        rows = layer.run(native_kernels, x, index, list(range(6)))
        rows[(index.view(-1) == 1) | (index.view(-1) == 3)] = 0
        assert torch.equal(y, native_kernels.combine_experts(rows, weights))
        assert counts.tolist() == [3, 3, 1, 1, 0, 2]
        addresses[:] = 0
        y = native_kernels.draft_experts(x, index, weights, addresses, counts, *layer.sizes)
        assert not y.any()


def test_draft_experts_unknown_expert_raises_and_counts_nothing(native_kernels):
    layer, counts = Layer("int4", 2, 64, 32), torch.zeros(2, dtype=torch.int32)
    index = torch.tensor([[0, 2]])
    with pytest.raises(RuntimeError, match="no such expert"):
        native_kernels.draft_experts(
            random(1, 64), index, random(1, 2), layer.addresses, counts, *layer.sizes
        )
    assert counts.tolist() == [0, 0]
