"""A pass whose place in the context only the device knows: keys, values and attention.

A step that is recorded once and replayed anywhere in the context must not hold its length as
a number. So keys and values go to where a tensor of positions says, and attention looks at a
*bucket* of the reserved room, its first 256, 512, 1024, ... places, through a mask that is
made of the positions. A recording holds for all passes that end in its bucket.

Masked places get a weight of exactly 0, but 0 times nan is nan: whoever attends this way has
to see to it that the whole room is finite (`StateManager.hold_room`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from transformers import AttentionInterface, AttentionMaskInterface, Cache, PreTrainedModel
from transformers.masking_utils import sdpa_mask

from ..errors import UnsupportedModelError
from .attention import ATTENTION_IMPLEMENTATION, SPECIAL_FORMS, few_query_attention, is_causal
from .kv import ReservedLayer

BUCKET_ATTENTION = "mira_bucketed"

MIN_BUCKET_TOKENS = 256
"""The smallest bucket. Each one that is met is recorded once."""


def bucket_of(num_tokens: int, capacity: int) -> int:
    """Returns how many places a pass looks at that ends with so many tokens in the room."""
    bucket = MIN_BUCKET_TOKENS
    while bucket < num_tokens:
        bucket *= 2
    return min(bucket, capacity)


class BucketCache(Cache):
    """Keys and values that are written by position, and read as a bucket.

    Args:
        layers: The room, by decoder layer; its counters are left to somebody else.
        positions: Of the pass's tokens, int64 `[T]` on the device.
        bucket: Places to read.
    """

    def __init__(
        self, layers: Sequence[ReservedLayer], positions: torch.Tensor, bucket: int
    ) -> None:
        super().__init__(layers=list(layers))
        self._positions = positions
        self._bucket = bucket

    def update(
        self,
        key_states: torch.Tensor,
        value_states: torch.Tensor,
        layer_idx: int,
        *args: object,
        **kwargs: object,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Writes `[1, G, T, D]` states. Returns the bucket's keys and values, views."""
        layer = self.layers[layer_idx]
        layer.keys.index_copy_(2, self._positions, key_states)
        layer.values.index_copy_(2, self._positions, value_states)
        return layer.keys[:, :, : self._bucket], layer.values[:, :, : self._bucket]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Refuses: a length that the host knows would be recorded.

        Raises:
            UnsupportedModelError: Always.
        """
        raise UnsupportedModelError("it asks for the length of its cache inside a pass")


def bucket_mask(positions: torch.Tensor, bucket: int) -> torch.Tensor:
    """Returns which places each token sees: `[1, 1, T, bucket]` bool.

    transformers takes a mask of four dimensions as it is and makes none of its own.

    Args:
        positions: Of the tokens, int64 `[T]`.
        bucket: Places.
    """
    places = torch.arange(bucket, device=positions.device)
    return (places[None] <= positions[:, None])[None, None]


def bucket_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, None]:
    """Computes attention over a bucket; a transformers attention function.

    Queries that share a key/value head are one product: nothing is repeated.

    Raises:
        UnsupportedModelError: The attention is not plain and causal.
    """
    special = [name for name in SPECIAL_FORMS if kwargs.get(name) is not None]
    if special or dropout or attention_mask is None or not is_causal(module, kwargs):
        raise UnsupportedModelError(f"its attention is not plainly causal {special or ''}".strip())
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return few_query_attention(query, key, value, attention_mask, scale), None


@contextmanager
def attending_in_buckets(model: PreTrainedModel) -> Iterator[None]:
    """Has the model attend by `bucket_attention` inside.

    Raises:
        UnsupportedModelError: It attends in a way of its own.
    """
    AttentionInterface.register(BUCKET_ATTENTION, bucket_attention)
    AttentionMaskInterface.register(BUCKET_ATTENTION, sdpa_mask)
    config = model.config
    if config._attn_implementation != ATTENTION_IMPLEMENTATION:
        raise UnsupportedModelError("it attends in a way of its own")
    config._attn_implementation = BUCKET_ATTENTION
    try:
        yield
    finally:
        config._attn_implementation = ATTENTION_IMPLEMENTATION
