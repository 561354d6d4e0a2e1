"""Torch operators through which a compiled step reaches what is outside of its graph.

A step that is compiled as one graph keeps two things out of it, as opaque operators:
`mira::routed_experts` calls the experts function of a MoE layer, which loads, pins and
counts; `mira::cached_attention` appends keys and values to the layer's reserved room and
attends over the part in use, so that the graph has fixed shapes and no cache tensors.
Both act on what `bound` has made current, in the engine thread; a graph holds no
reference to a model or an engine and can be kept on disk.

The arithmetic of `mira_kernels.native` is reached through its own operators.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from mira_kernels import native

from .kv import ReservedLayer

_LIBRARY = torch.library.Library("mira", "FRAGMENT")
_LIBRARY.define("routed_experts(Tensor x, Tensor index, Tensor weights, int layer) -> Tensor")
_LIBRARY.define("cached_attention(Tensor q, Tensor k, Tensor v, float scale, int layer) -> Tensor")


@dataclass(frozen=True, slots=True)
class StepBinding:
    """What the operators act on.

    Attributes:
        run_experts: `(layer, hidden [T, C], index [T, k], weights [T, k]) -> [T, C]`.
        layers: KV state by decoder layer.
        attend: `(layer, q, k, v, scale) -> [B, T, H, Dv]`: appends, then attends causally.
    """

    run_experts: Callable[[int, torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
    layers: Sequence[ReservedLayer]
    attend: Callable[[ReservedLayer, torch.Tensor, torch.Tensor, torch.Tensor, float], torch.Tensor]


_current: StepBinding | None = None


@contextmanager
def bound(binding: StepBinding) -> Iterator[None]:
    """Makes `binding` current for the steps inside."""
    global _current
    before, _current = _current, binding
    try:
        yield
    finally:
        _current = before


def _routed_experts(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, layer: int
) -> torch.Tensor:
    assert _current is not None
    return _current.run_experts(layer, x, index, weights)


def _cached_attention(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, layer: int
) -> torch.Tensor:
    assert _current is not None
    return _current.attend(_current.layers[layer], q, k, v, scale)


def _routed_experts_shape(
    x: torch.Tensor, index: torch.Tensor, weights: torch.Tensor, layer: int
) -> torch.Tensor:
    del index, weights, layer
    return torch.empty_like(x, memory_format=torch.contiguous_format)


def _cached_attention_shape(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float, layer: int
) -> torch.Tensor:
    del k, scale, layer
    return q.new_empty((q.shape[0], q.shape[2], q.shape[1], v.shape[3]))


_LIBRARY.impl("routed_experts", _routed_experts, "CPU")
_LIBRARY.impl("cached_attention", _cached_attention, "CPU")
torch.library.register_fake("mira::routed_experts", _routed_experts_shape, lib=_LIBRARY)
torch.library.register_fake("mira::cached_attention", _cached_attention_shape, lib=_LIBRARY)


def has_native_attention() -> bool:
    """Whether `native_attention` can be called."""
    return native.is_loaded()


def native_attention(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, num_cached: int, scale: float
) -> torch.Tensor:
    """Causal attention by the native kernel. Returns `[1, T, H, Dv]`.

    Args:
        query: `[1, H, T, D]`.
        key: `[1, G, N, D]`, the T new tokens included.
        value: `[1, G, N, Dv]`.
        num_cached: N - T.
        scale: Factor of the scores.
    """
    return torch.ops.mira.attend(query, key, value, num_cached, scale)


def native_cached_attention(
    query: torch.Tensor,
    new_keys: torch.Tensor,
    new_values: torch.Tensor,
    keys: torch.Tensor,
    values: torch.Tensor,
    num_cached: int,
    scale: float,
) -> torch.Tensor:
    """Writes new states behind the cached ones and attends causally. Returns `[1, T, H, Dv]`.

    Args:
        query: `[1, H, T, D]`.
        new_keys: `[1, G, T, D]`.
        new_values: `[1, G, T, Dv]`.
        keys: Room `[1, G, capacity, D]`, written to.
        values: Room `[1, G, capacity, Dv]`, written to.
        num_cached: Tokens in the room before.
        scale: Factor of the scores.
    """
    return torch.ops.mira.attend_cached_(
        query, new_keys, new_values, keys, values, num_cached, scale
    )
