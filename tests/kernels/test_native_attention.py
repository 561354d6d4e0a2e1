"""The C++ attention against torch's; bits that depend on neither rows nor threads."""

from __future__ import annotations

import pytest
import torch
from native_weights import BF16, assert_close, caches, num_threads, random
from torch.nn import functional


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
@pytest.mark.parametrize(("size", "value_size"), [(64, 64), (96, 72), (24, 5), (192, 128)])
def test_attend_agrees_with_torch(native_kernels, size, value_size, dtype):
    for num_cached, num_queries in ((0, 1), (0, 5), (255, 1), (254, 5), (700, 3), (37, 60)):
        num_keys = num_cached + num_queries
        keys, values = caches(num_keys, size=size, value_size=value_size, dtype=dtype)
        query = random(1, num_queries, 9, size, dtype=dtype).transpose(1, 2)
        y = native_kernels.attend(query, keys, values, num_cached, 0.3)
        sees = torch.arange(num_keys) <= num_cached + torch.arange(num_queries)[:, None]
        wide = (t.double() for t in (query, keys, values))
        truth = functional.scaled_dot_product_attention(
            *wide, attn_mask=sees, scale=0.3, enable_gqa=True
        )
        assert y.dtype == dtype
        assert y.is_contiguous()
        assert_close(y, truth.transpose(1, 2), 4e-3 if dtype == BF16 else 2e-6)


@pytest.mark.parametrize("dtype", [BF16, torch.float32])
def test_attend_has_the_same_bits_in_any_company(native_kernels, dtype):
    for num_cached in (0, 253, 600):
        keys, values = caches(num_cached + 60, dtype=dtype)
        query = random(1, 9, 60, 64, dtype=dtype)
        with num_threads(1):
            whole = native_kernels.attend(query, keys, values, num_cached, 0.125)
        with num_threads(2):
            for first, end in ((0, 1), (3, 8), (10, 26), (59, 60)):
                part = native_kernels.attend(
                    query[:, :, first:end],
                    keys[:, :, : num_cached + end],
                    values[:, :, : num_cached + end],
                    num_cached + first,
                    0.125,
                )
                assert torch.equal(part, whole[:, first:end])
