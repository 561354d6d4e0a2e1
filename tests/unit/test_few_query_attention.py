"""Attention of few queries over keys that lie in a larger room."""

from __future__ import annotations

import pytest
import torch
from mira_engine.model.attention import few_query_attention

Shape = tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]


def _in_a_room(dtype: torch.dtype, device: str = "cpu") -> Shape:
    """Queries, and keys and values that are the first 21 of 64 in their rooms; a mask."""
    generator = torch.Generator().manual_seed(5)
    draw = lambda *sizes: torch.randn(*sizes, generator=generator).to(device, dtype)
    keys, values = draw(3, 2, 64, 16)[:, :, :21], draw(3, 2, 64, 16)[:, :, :21]
    mask = torch.rand(3, 1, 4, 21, generator=generator) > 0.3
    mask[..., 0] = True
    return draw(3, 6, 4, 16), keys, values, mask.to(device)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_attention_over_a_room_equals_attention_over_its_copy(dtype: torch.dtype) -> None:
    query, keys, values, mask = _in_a_room(dtype)
    copied = few_query_attention(query, keys.contiguous(), values.contiguous(), mask, 0.25)
    assert torch.equal(few_query_attention(query, keys, values, mask, 0.25), copied)


@pytest.mark.parametrize(
    ("dtype", "device", "is_copied"),
    [
        (torch.bfloat16, "cpu", True),
        (torch.float32, "cpu", False),
        pytest.param(torch.bfloat16, "meta", False, id="not on the processor"),
    ],
)
def test_keys_are_copied_along_their_rows_where_the_product_would_copy_them_across(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, device: str, is_copied: bool
) -> None:
    factors = []
    multiply = torch.matmul

    def noting(first: torch.Tensor, second: torch.Tensor) -> torch.Tensor:
        factors.append(second)
        return multiply(first, second)

    monkeypatch.setattr(torch, "matmul", noting)
    few_query_attention(*_in_a_room(dtype, device), 0.25)
    keys, values = factors
    assert keys.transpose(-1, -2).is_contiguous() == is_copied
    assert values.is_contiguous() == is_copied
