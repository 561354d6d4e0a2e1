"""Up to how many rows the native kernels multiply is measured, and can be set."""

from __future__ import annotations

import pytest
import torch
from mira_kernels import dispatch
from mira_kernels.weights import DenseWeight


@pytest.fixture
def dense() -> DenseWeight:
    return DenseWeight(torch.randn(64, 96).to(torch.bfloat16))


def test_limit_is_a_measured_number_of_rows(native_kernels, dense):
    limit = dispatch.measure_native_limit(dense)
    assert limit in range(0, 49, 8)


@pytest.mark.parametrize(("factor", "limit"), [(0.5, 48), (2.0, 0)])
def test_faster_kernel_wins(native_kernels, dense, monkeypatch, factor, limit):
    times = iter([factor, 1.0] * 6)
    monkeypatch.setattr(dispatch, "_fastest", lambda product: next(times))
    assert dispatch.measure_native_limit(dense) == limit


def test_weight_that_is_not_taken_has_limit_zero(native_kernels):
    assert dispatch.measure_native_limit(DenseWeight(torch.randn(64, 96))) == 0


def test_rows_above_the_limit_go_elsewhere(native_kernels, dense, monkeypatch):
    monkeypatch.setattr(dispatch, "_native_limits", dict(dispatch._native_limits))
    rows = []
    taken = dispatch._native_product

    def watched(x, weight):
        rows.append(x.shape[0])
        return taken(x, weight)

    monkeypatch.setattr(dispatch, "_native_product", watched)
    dispatch.use_native_limit(DenseWeight, 16)
    x = torch.randn(24, 96).to(torch.bfloat16)
    for count in (1, 16, 17, 24):
        y = dispatch.linear(x[:count], dense)
        truth = x[:count].float() @ dense.data.float().t()
        torch.testing.assert_close(y.float(), truth, rtol=2e-2, atol=2e-1)
    assert rows == [1, 16]
