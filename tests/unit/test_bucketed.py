"""Attention over a bucket is attention over what is in it, wherever the pass stands."""

from __future__ import annotations

import pytest
import torch
from mira_engine.errors import UnsupportedModelError
from mira_engine.model.attention import few_query_attention
from mira_engine.model.bucketed import BucketCache, bucket_attention, bucket_mask, bucket_of
from mira_engine.model.kv import ReservedLayer
from torch import Tensor, nn

CAPACITY, GROUPS, HEADS, WIDTH = 24, 2, 6, 16


class _Attention(nn.Module):
    is_causal = True
    layer_idx = 0


def _states(num_tokens: int, num_heads: int, seed: int) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(1, num_heads, num_tokens, WIDTH, generator=generator)


def _filled(num_tokens: int) -> ReservedLayer:
    layer = ReservedLayer(CAPACITY)
    layer.append(_states(num_tokens, GROUPS, 1), _states(num_tokens, GROUPS, 2))
    layer.make_finite()
    return layer


@pytest.mark.parametrize(
    ("num_tokens", "bucket"), [(1, 256), (256, 256), (257, 512), (1025, 2048), (3000, 3000)]
)
def test_bucket_is_the_next_power_of_two_within_the_context(num_tokens: int, bucket: int) -> None:
    assert bucket_of(num_tokens, 3000) == bucket


def test_small_context_is_one_bucket() -> None:
    assert bucket_of(1, 100) == bucket_of(100, 100) == 100


@pytest.mark.parametrize("num_tokens", [1, 3])
@pytest.mark.parametrize("bucket", [16, CAPACITY])
def test_bucket_attention_is_causal_attention(num_tokens: int, bucket: int) -> None:
    num_cached = 9
    layer, plain = _filled(num_cached), _filled(num_cached)
    query = _states(num_tokens, HEADS, 3)
    key, value = _states(num_tokens, GROUPS, 4), _states(num_tokens, GROUPS, 5)
    positions = torch.arange(num_cached, num_cached + num_tokens)

    keys, values = BucketCache([layer], positions, bucket).update(key, value, 0)
    mask = bucket_mask(positions, bucket)
    found, _ = bucket_attention(_Attention(), query, keys, values, mask)

    all_keys, all_values = plain.update(key, value)
    places = torch.arange(num_cached + num_tokens)
    causal = (places[None] <= positions[:, None])[None, None]
    expected = few_query_attention(query, all_keys, all_values, causal, WIDTH**-0.5)
    torch.testing.assert_close(found, expected)


def test_states_written_twice_are_those_written_last() -> None:
    layer, positions = _filled(9), torch.tensor([9, 10])
    cache = BucketCache([layer], positions, 16)

    for seed in (7, 8):
        cache.update(_states(2, GROUPS, seed), _states(2, GROUPS, seed), 0)

    assert torch.equal(layer.keys[:, :, 9:11], _states(2, GROUPS, 8))
    assert layer.get_seq_length() == 9, "counting is left to somebody else"


def test_room_that_is_nan_is_made_finite_behind_what_is_in_use() -> None:
    layer = _filled(9)
    before = layer.values[:, :, :9].clone()
    layer.values[:, :, 9:] = float("nan")

    layer.make_finite()

    assert torch.equal(layer.values[:, :, :9], before)
    assert not layer.values[:, :, 9:].any()


@pytest.mark.parametrize("special", [{"s_aux": torch.zeros(6)}, {"sliding_window": 4}])
def test_attention_of_another_kind_is_refused(special: dict[str, object]) -> None:
    layer, positions = _filled(9), torch.tensor([9])
    keys, values = BucketCache([layer], positions, 16).update(
        _states(1, GROUPS, 4), _states(1, GROUPS, 5), 0
    )

    with pytest.raises(UnsupportedModelError, match="plainly causal"):
        bucket_attention(
            _Attention(), _states(1, HEADS, 3), keys, values, bucket_mask(positions, 16), **special
        )


def test_length_that_the_host_knows_is_refused() -> None:
    with pytest.raises(UnsupportedModelError, match="length"):
        BucketCache([_filled(9)], torch.tensor([9]), 16).get_seq_length()
