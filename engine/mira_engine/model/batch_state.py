"""State Manager of a batch: one padded KV cache, and which of its entries are whose.

Every pass appends the same number of columns for all requests (rows). What a row does not
need of them is padding, and what the target rejected is a hole: both stay in the cache and
are hidden from their row by a mask over the entries. A row's entries lie in the order of its
tokens, so the mask together with causal order by column is exactly the row's own causal
order; positions are given explicitly, counted without holes. `compact` moves each row's
entries together and drops rows.

Padding stands behind a row's own entries of a pass, never before them: each query sees at
least one key, and no nan comes up that a later product could spread.

Keys and values are where the model computes. Which entries are whose is kept on the host, so
that no pass waits for a device to say it: what a pass needs of that is copied there.

Source: Specter, batched execution (independent sequence and KV states and rollback
boundaries for each request); the paper does not say how they are kept.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import numpy as np
import torch
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    DynamicCache,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.cache_utils import DynamicLayer
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from .attention import (
    ATTENTION_IMPLEMENTATION,
    MAX_SHORT_QUERIES,
    SPECIAL_FORMS,
    few_query_attention,
)
from .kv import ReservedLayer

PADDED_ATTENTION_IMPLEMENTATION = "mira_padded"

_LENGTH_DEPENDENT_ROPE = frozenset({"dynamic", "longrope"})
"""Rotary forms in transformers 5.24 whose frequencies follow from the longest position of a
pass: past that length one request would change the others."""


@dataclass(frozen=True, slots=True, eq=False)
class BatchInputs:
    """What one pass over a batch of B rows takes.

    Attributes:
        ids: Tokens `[B, T]` int64, padding 0.
        positions: `[B, T]` int64.
        mask: Entries that belong to their row, `[B, N + T]` bool: cached ones, then the new.
        real: Places in `[B * T]` that hold a token; `None` where all do.
    """

    ids: torch.Tensor
    positions: torch.Tensor
    mask: torch.Tensor
    real: torch.Tensor | None

    def to(self, device: torch.device) -> BatchInputs:
        """Returns the inputs on a device, without waiting for it."""
        real = None if self.real is None else self.real.to(device, non_blocking=True)
        return BatchInputs(
            ids=self.ids.to(device, non_blocking=True),
            positions=self.positions.to(device, non_blocking=True),
            mask=self.mask.to(device, non_blocking=True),
            real=real,
        )


class PaddedLayer(ReservedLayer):
    """A full-attention layer with a row for each request."""

    def gather(self, rows: Sequence[int], columns: Sequence[torch.Tensor]) -> None:
        """Keeps `rows` only, and of each its `columns` (int64, ascending) as its first ones.

        In place, row by row: no second cache is held. The columns are where the keys are.
        """
        for target, (row, kept) in enumerate(zip(rows, columns, strict=True)):
            for states in (self.keys, self.values):
                states[target, :, : len(kept)] = states[row][:, kept]
        self.keys, self.values = self.keys[: len(rows)], self.values[: len(rows)]
        self._length = max(map(len, columns), default=0)


class BatchState:
    """KV state of several requests on one model.

    Args:
        config: The model's; all its layers must be full attention (`can_pad`).
        num_rows: B, requests.
        num_columns: Most columns, padding and holes included.
    """

    def __init__(self, config: PreTrainedConfig, *, num_rows: int, num_columns: int) -> None:
        self.cache = DynamicCache(config=config)
        self.cache.layers = [PaddedLayer(num_columns) for _ in self.cache.layers]
        self.lengths = [0] * num_rows
        """Tokens of each row that are in the cache."""
        self.num_compactions = 0
        self._is_own = np.zeros((num_rows, num_columns), dtype=np.bool_)

    @property
    def num_columns(self) -> int:
        """N, columns in use."""
        return self.cache.get_seq_length()

    @torch.inference_mode()
    def extend(self, tokens: Sequence[Sequence[int]]) -> BatchInputs:
        """Takes each row's next tokens (of a row that waits: none) for the coming pass.

        Returns:
            Inputs on the host.
        """
        start, width = self.num_columns, max(map(len, tokens))
        stop = start + width
        ids = np.zeros((len(tokens), width), dtype=np.int64)
        positions = np.zeros_like(ids)
        for row, own in enumerate(tokens):
            count, length = len(own), self.lengths[row]
            ids[row, :count] = own
            positions[row, :count] = range(length, length + count)
            positions[row, count:] = max(0, length + count - 1)
            self._is_own[row, start : start + count] = True
            self._is_own[row, start + count : stop] = False
            self.lengths[row] = length + count
        new = self._is_own[:, start:stop]
        return BatchInputs(
            ids=torch.from_numpy(ids),
            positions=torch.from_numpy(positions),
            # A copy: what is rejected later must not change a mask that is on its way.
            mask=torch.from_numpy(self._is_own[:, :stop].copy()),
            real=None if new.all() else torch.from_numpy(np.flatnonzero(new)),
        )

    def keep(self, num_columns: int, counts: Sequence[int]) -> None:
        """Rejects entries: of the last `num_columns` each row keeps its first `counts[row]`.

        Columns at the end that no row keeps are given back, the others become holes.
        """
        stop = self.num_columns
        start = stop - num_columns
        for row, count in enumerate(counts):
            rejected = self._is_own[row, start + count : stop]
            self.lengths[row] -= int(rejected.sum())
            rejected[:] = False
        surplus = num_columns - max(counts)
        if surplus:
            self.cache.crop(-surplus)

    def removable_share(self, rows: Sequence[int]) -> float:
        """Returns the share of entries that `compact(rows)` would give back, 0 to 1.

        Padding behind a short request beside a long one is not counted: it has to stay.
        """
        num_entries = len(self.lengths) * self.num_columns
        if not num_entries:
            return 0.0
        needed = len(rows) * max((self.lengths[row] for row in rows), default=0)
        return 1 - needed / num_entries

    @torch.inference_mode()
    def compact(self, rows: Sequence[int]) -> None:
        """Keeps `rows` (ascending) only, and moves each one's entries together."""
        used, device = self.num_columns, self.cache.layers[0].keys.device
        owned = [torch.from_numpy(np.flatnonzero(self._is_own[row, :used])) for row in rows]
        columns = [own.to(device, non_blocking=True) for own in owned]
        for layer in self.cache.layers:
            layer.gather(rows, columns)
        self.lengths = [self.lengths[row] for row in rows]
        self._is_own = np.zeros((len(rows), self._is_own.shape[1]), dtype=np.bool_)
        for row, length in enumerate(self.lengths):
            self._is_own[row, :length] = True
        self.num_compactions += 1


def can_pad(config: PreTrainedConfig, num_tokens: int) -> bool:
    """Whether requests of up to `num_tokens` tokens can share a padded cache.

    Not with sliding windows (which count columns, not tokens), not with recurrent state
    (which padding would change), and not where positions beyond some length change the
    rotary frequencies of all rows.
    """
    if any(type(layer) is not DynamicLayer for layer in DynamicCache(config=config).layers):
        return False
    text = config.get_text_config()
    for rope in _rope_parameters(text):
        if rope.get("rope_type") in _LENGTH_DEPENDENT_ROPE:
            own = rope.get("original_max_position_embeddings") or text.max_position_embeddings
            if num_tokens > own:
                return False
    return True


def _rope_parameters(config: PreTrainedConfig) -> list[dict[str, object]]:
    """Returns the rotary parameters, one entry for each kind of layer that has its own."""
    rope = getattr(config, "rope_parameters", None) or {}
    nested = [value for value in rope.values() if isinstance(value, dict)]
    return nested or [rope]


def padded_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes attention over several rows; a transformers attention function.

    As `short_query_attention`, but never by its native kernel, which knows one row and no
    mask: holes and padding would be seen.
    """
    num_queries = query.shape[2]
    is_special = dropout or any(kwargs.get(name) is not None for name in SPECIAL_FORMS)
    is_short = num_queries <= MAX_SHORT_QUERIES and query.device.type == "cpu"
    if is_special or not is_short or (num_queries > 1 and attention_mask is None):
        return sdpa_attention_forward(
            module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    return few_query_attention(query, key, value, attention_mask, scale), None


@contextmanager
def attending_padded(model: PreTrainedModel) -> Iterator[None]:
    """Has the model attend by `padded_attention` inside, where it does not by its own way."""
    AttentionInterface.register(PADDED_ATTENTION_IMPLEMENTATION, padded_attention)
    AttentionMaskInterface.register(PADDED_ATTENTION_IMPLEMENTATION, sdpa_mask)
    config = model.config
    if config._attn_implementation != ATTENTION_IMPLEMENTATION:
        yield
        return
    config._attn_implementation = PADDED_ATTENTION_IMPLEMENTATION
    try:
        yield
    finally:
        config._attn_implementation = ATTENTION_IMPLEMENTATION
