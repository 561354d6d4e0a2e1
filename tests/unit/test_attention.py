"""Short-query attention equals transformers' sdpa function."""

from __future__ import annotations

import pytest
import torch
from mira_engine.model.attention import MAX_SHORT_QUERIES, short_query_attention
from transformers.integrations.sdpa_attention import sdpa_attention_forward


class FakeAttention(torch.nn.Module):
    """What the functions read of an attention module."""

    is_causal = True

    def __init__(self, num_key_value_groups: int) -> None:
        super().__init__()
        self.num_key_value_groups = num_key_value_groups


def _states(
    num_queries: int, num_heads: int, num_groups: int, dtype: torch.dtype, length: int = 37
) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(num_queries)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return (
        draw(1, num_heads, num_queries, 16),
        draw(1, num_groups, length, 16),
        draw(1, num_groups, length, 12),
    )


def _causal_mask(num_queries: int, length: int, window: int) -> torch.Tensor:
    query = torch.arange(length - num_queries, length)[:, None]
    key = torch.arange(length)[None, :]
    return ((key <= query) & (key > query - window))[None, None]


@pytest.mark.parametrize("num_groups", [1, 2, 6])
@pytest.mark.parametrize("num_queries", [1, 2, 5, 33])
@pytest.mark.parametrize("kind", ["none", "bool", "window", "additive"])
def test_equals_sdpa_in_float32(num_groups: int, num_queries: int, kind: str) -> None:
    query, key, value = _states(num_queries, 6, num_groups, torch.float32)
    mask = None
    if kind != "none":
        mask = _causal_mask(num_queries, 37, window=9 if kind == "window" else 99)
    if kind == "additive":
        mask = torch.zeros(mask.shape).masked_fill_(~mask, float("-inf"))
    module = FakeAttention(6 // num_groups)
    ours, weights = short_query_attention(module, query, key, value, mask, scaling=0.3)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask, scaling=0.3)
    assert weights is None
    assert ours.shape == theirs.shape == (1, num_queries, 6, 12)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


def test_default_scaling_is_that_of_sdpa() -> None:
    query, key, value = _states(1, 4, 2, torch.float32)
    module = FakeAttention(2)
    ours, _ = short_query_attention(module, query, key, value, None)
    theirs, _ = sdpa_attention_forward(module, query, key, value, None)
    torch.testing.assert_close(ours, theirs)


def test_bfloat16_is_as_close_to_float32_as_sdpa() -> None:
    query, key, value = _states(1, 6, 2, torch.float32, length=400)
    module = FakeAttention(3)
    exact, _ = sdpa_attention_forward(module, query, key, value, None)
    half = [t.to(torch.bfloat16) for t in (query, key, value)]
    exact_of_half, _ = sdpa_attention_forward(module, *(t.float() for t in half), None)
    ours, _ = short_query_attention(module, *half, None)
    assert (ours.float() - exact_of_half).abs().max() <= 0.02 * exact.abs().max()


def test_many_queries_go_to_sdpa_bit_for_bit() -> None:
    num_queries = MAX_SHORT_QUERIES + 1
    query, key, value = _states(num_queries, 4, 2, torch.float32, length=64)
    mask = _causal_mask(num_queries, 64, window=99)
    module = FakeAttention(2)
    ours, _ = short_query_attention(module, query, key, value, mask)
    theirs, _ = sdpa_attention_forward(module, query, key, value, mask)
    assert torch.equal(ours, theirs)


def test_queries_without_a_mask_stay_causal() -> None:
    query, key, value = _states(5, 4, 2, torch.float32, length=5)
    module = FakeAttention(2)
    ours, _ = short_query_attention(module, query, key, value, None)
    masked, _ = short_query_attention(module, query, key, value, _causal_mask(5, 5, window=99))
    torch.testing.assert_close(ours, masked)
