"""Reserved room for keys and values: in place, bounded, and attended over where it lies."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from mira_engine.errors import GenerationError
from mira_engine.model import operators
from mira_engine.model.attention import cached_attention, few_query_attention
from mira_engine.model.kv import ReservedLayer
from mira_kernels import native
from torch import Tensor

CAPACITY, GROUPS, HEADS, WIDTH, VALUE_WIDTH, SCALE = 24, 3, 9, 64, 48, 0.2


def _states(
    num_tokens: int, seed: int = 0, dtype: torch.dtype = torch.float32
) -> tuple[Tensor, ...]:
    """Query, keys and values of new tokens."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator).to(dtype)

    return (
        draw(1, HEADS, num_tokens, WIDTH),
        draw(1, GROUPS, num_tokens, WIDTH),
        draw(1, GROUPS, num_tokens, VALUE_WIDTH),
    )


def _layer(num_tokens: int, dtype: torch.dtype = torch.float32) -> ReservedLayer:
    layer = ReservedLayer(CAPACITY)
    _, keys, values = _states(num_tokens, seed=1, dtype=dtype)
    layer.append(keys, values)
    return layer


def test_states_are_written_behind_those_in_use() -> None:
    layer = ReservedLayer(CAPACITY)
    assert not layer.is_initialized
    assert (layer.get_seq_length(), layer.get_max_length()) == (0, CAPACITY)
    assert layer.num_bytes == 0
    _, first_keys, first_values = _states(5)
    _, more_keys, more_values = _states(2, seed=1)
    assert layer.append(first_keys, first_values) == 5
    room = layer.keys.data_ptr()
    keys, values = layer.update(more_keys, more_values)
    assert layer.get_seq_length() == keys.shape[2] == values.shape[2] == 7
    assert layer.keys.data_ptr() == keys.data_ptr() == room, "nothing was moved"
    assert torch.equal(keys, torch.cat((first_keys, more_keys), 2))
    assert torch.equal(values, torch.cat((first_values, more_values), 2))
    assert layer.num_bytes == 7 * GROUPS * (WIDTH + VALUE_WIDTH) * 4


def test_crop_lowers_the_counter_and_what_follows_is_written_over_it() -> None:
    layer = _layer(6)
    kept = layer.keys[:, :, :4].clone()
    layer.crop(-2)
    assert layer.get_seq_length() == 4
    _, keys, values = _states(1, seed=2)
    seen, _ = layer.update(keys, values)
    assert torch.equal(seen, torch.cat((kept, keys), 2))
    layer.crop(0)
    assert layer.get_seq_length() == 5
    layer.crop(-99)
    assert layer.get_seq_length() == 0


def test_extend_counts_tokens_that_others_write() -> None:
    layer = _layer(6)
    before = layer.keys[:, :, :6].clone(), layer.values[:, :, :6].clone()
    assert layer.extend(3) == 9
    assert layer.get_seq_length() == 9
    assert torch.equal(layer.keys[:, :, :6], before[0])
    assert torch.equal(layer.values[:, :, :6], before[1])
    assert layer.extend(CAPACITY - 9) == CAPACITY
    assert layer.extend(0) == CAPACITY


@pytest.mark.parametrize("way", ["extend", "append", "update"])
def test_beyond_the_capacity_is_an_error_and_changes_nothing(way: str) -> None:
    layer = _layer(CAPACITY - 2)
    before = layer.keys.clone(), layer.values.clone()
    _, keys, values = _states(3, seed=2)
    with pytest.raises(GenerationError, match="context of 24 tokens is full") as caught:
        layer.extend(3) if way == "extend" else getattr(layer, way)(keys, values)
    assert "new chat" in caught.value.hint
    assert layer.get_seq_length() == CAPACITY - 2
    assert torch.equal(layer.keys[:, :, : CAPACITY - 2], before[0][:, :, : CAPACITY - 2])
    assert torch.equal(layer.values[:, :, : CAPACITY - 2], before[1][:, :, : CAPACITY - 2])
    assert layer.extend(2) == CAPACITY


def test_reset_forgets_tokens_and_keeps_the_room() -> None:
    layer = _layer(6)
    room = layer.keys.data_ptr()
    layer.reset()
    assert (layer.get_seq_length(), layer.num_bytes) == (0, 0)
    _, keys, values = _states(2, seed=3)
    seen, _ = layer.update(keys, values)
    assert torch.equal(seen, keys)
    assert layer.keys.data_ptr() == room


# -- attention over the room -----------------------------------------------------------------


@pytest.fixture(params=["native", "torch"])
def kernels(request: pytest.FixtureRequest, native_cache: Path, monkeypatch: pytest.MonkeyPatch):
    """With the native attention, and as it is before that is loaded."""
    if request.param == "torch":
        monkeypatch.setattr(native, "_loaded", None)
        return None
    status = native.load(native_cache)
    assert status.is_available, status.reason
    return torch.ops.mira


def _expected(query: Tensor, keys: Tensor, values: Tensor) -> Tensor:
    num_queries, num_keys = query.shape[2], keys.shape[2]
    place = torch.arange(num_keys)
    mask = (place[None] <= place[num_keys - num_queries :, None])[None, None]
    return few_query_attention(query, keys, values, mask, SCALE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_tokens", [1, 4])
@pytest.mark.parametrize("num_cached", [0, 1, 11, CAPACITY - 4])
def test_cached_attention_writes_and_attends(
    kernels: object, dtype: torch.dtype, num_tokens: int, num_cached: int
) -> None:
    assert operators.has_native_attention() == (kernels is not None)
    layer = _layer(max(num_cached, 1), dtype)
    layer.crop(-1 if not num_cached else 0)
    layer.keys[:, :, num_cached:] = float("nan")  # Whatever is there belongs to nobody.
    layer.values[:, :, num_cached:] = float("nan")
    before = layer.keys[:, :, :num_cached].clone(), layer.values[:, :, :num_cached].clone()
    query, keys, values = _states(num_tokens, seed=4, dtype=dtype)
    mixed = cached_attention(layer, query, keys, values, SCALE)
    stop = num_cached + num_tokens
    assert layer.get_seq_length() == stop
    for room, old, new in ((layer.keys, before[0], keys), (layer.values, before[1], values)):
        assert torch.equal(room[:, :, :stop], torch.cat((old, new), 2))
        assert bool(room[:, :, stop:].isnan().all())
    assert (mixed.dtype, tuple(mixed.shape)) == (dtype, (1, num_tokens, HEADS, VALUE_WIDTH))
    # Exact but for the order of sums; bfloat16 rounds scores, weights and the result.
    wide = [t.float() for t in (query, layer.keys[:, :, :stop], layer.values[:, :, :stop])]
    exact = _expected(*wide)
    tolerance = 1e-5 if dtype is torch.float32 else 1.5e-2
    assert (mixed.float() - exact).norm() <= tolerance * exact.norm()
    if dtype is torch.bfloat16:
        rounded = _expected(query, layer.keys[:, :, :stop], layer.values[:, :, :stop])
        assert (mixed.float() - exact).norm() <= 1.2 * (rounded.float() - exact).norm() + 1e-6


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_cached_attention_of_several_tokens_is_that_of_one_after_another(
    kernels: object, dtype: torch.dtype
) -> None:
    query, keys, values = _states(4, seed=4, dtype=dtype)
    together, single = _layer(7, dtype), _layer(7, dtype)
    mixed = cached_attention(together, query, keys, values, SCALE)
    for t in range(4):
        one = [states[:, :, t : t + 1] for states in (query, keys, values)]
        part = cached_attention(single, *one, SCALE)
        if kernels is not None:
            assert torch.equal(part[:, 0], mixed[:, t])
        torch.testing.assert_close(part[:, 0], mixed[:, t], rtol=2e-2, atol=2e-2)
    assert torch.equal(together.keys[:, :, :11], single.keys[:, :, :11])


def test_cached_attention_takes_states_in_any_strides(kernels: object) -> None:
    """As projections give them: `[1, T, H, D]` seen as `[1, H, T, D]`."""
    states = _states(4, seed=4)
    strided = [s.transpose(1, 2).contiguous().transpose(1, 2) for s in states]
    assert not strided[0].is_contiguous()
    expected = cached_attention(_layer(7), *states, SCALE)
    assert torch.equal(cached_attention(_layer(7), *strided, SCALE), expected)


@pytest.mark.parametrize("is_first", [True, False])
def test_cached_attention_beyond_the_capacity_changes_nothing(
    kernels: object, is_first: bool
) -> None:
    layer = ReservedLayer(3) if is_first else _layer(CAPACITY - 3)
    length = layer.get_seq_length()
    before = None if is_first else layer.keys[:, :, :length].clone()
    with pytest.raises(GenerationError):
        cached_attention(layer, *_states(4, seed=4), SCALE)
    assert layer.get_seq_length() == length
    if before is not None:
        assert torch.equal(layer.keys[:, :, :length], before)
