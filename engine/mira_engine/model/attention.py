"""Attention for few new tokens on a CPU, as an attention implementation of transformers.

torch's fused attention on CPUs packs keys and values for blocks of many queries; for the
one to a few queries of a decode, draft or verification step that packing is most of its
time. Here the queries that share a key/value head are one small matrix product. Prompts,
other devices and special forms go to transformers' own `sdpa` function.

Measured 2026-11-30 on two Zen 4 cores, torch 2.13, 9 query and 3 key/value heads of 64,
bfloat16, one query, two threads: .055 ms instead of .28 at 512 cached tokens, .10 instead
of 1.1 at 2048.
"""

from __future__ import annotations

import torch
from transformers import AttentionInterface, AttentionMaskInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from transformers.masking_utils import sdpa_mask

from . import operators
from .kv import ReservedLayer

ATTENTION_IMPLEMENTATION = "mira_short_query"

SPECIAL_FORMS = ("position_bias", "softcap", "s_aux", "indices", "block_indices")
"""What some families pass to their attention and the functions here do not know."""

MAX_SHORT_QUERIES = 40
"""Most queries taken here: the largest verification has 33."""


def short_query_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float = 0.0,
    scaling: float | None = None,
    **kwargs: object,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Computes attention; a transformers attention function.

    Args:
        module: The attention module.
        query: `[B, H, T, D]`.
        key: `[B, G, N, D]`, H a multiple of G.
        value: `[B, G, N, Dv]`.
        attention_mask: `None`, boolean or additive `[B, 1, T, N]`.
        dropout: 0 outside of training.
        scaling: Factor of the scores, `None` for `1 / sqrt(D)`.
        **kwargs: Passed on where sdpa takes over.

    Returns:
        `[B, T, H, Dv]`, and no attention weights.
    """
    num_queries, num_keys = query.shape[2], key.shape[2]
    is_short = num_queries <= MAX_SHORT_QUERIES and query.device.type == "cpu"
    is_special = dropout or any(kwargs.get(name) is not None for name in SPECIAL_FORMS)
    if not is_short or is_special:
        return _library_attention(
            module, query, key, value, attention_mask, dropout, scaling, kwargs
        )
    scale = query.shape[-1] ** -0.5 if scaling is None else scaling
    if is_causal(module, kwargs) and operators.has_native_attention():
        return operators.native_attention(query, key, value, num_keys - num_queries, scale), None
    if num_queries > 1 and attention_mask is None:
        return _library_attention(
            module, query, key, value, attention_mask, dropout, scaling, kwargs
        )
    return few_query_attention(query, key, value, attention_mask, scale), None


def _library_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    dropout: float,
    scaling: float | None,
    others: dict[str, object],
) -> tuple[torch.Tensor, torch.Tensor | None]:
    return sdpa_attention_forward(
        module, query, key, value, attention_mask, dropout=dropout, scaling=scaling, **others
    )


def is_causal(module: torch.nn.Module, others: dict[str, object]) -> bool:
    """Whether a query sees all keys up to its own and no others, so that no mask is needed.

    Args:
        module: The attention module.
        others: What transformers passes to an attention function beside the tensors.
    """
    window = others.get("sliding_window", getattr(module, "sliding_window", None))
    chunk = getattr(module, "attention_chunk_size", None)
    return bool(getattr(module, "is_causal", False)) and window is None and chunk is None


def few_query_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scale: float,
) -> torch.Tensor:
    """Computes attention with one product a key/value head. Returns `[B, T, H, Dv]`.

    Args:
        query: `[B, H, T, D]`.
        key: `[B, G, N, D]`, H a multiple of G.
        value: `[B, G, N, Dv]`.
        attention_mask: Boolean or additive `[B, 1, T, N]`, `None` to see everything.
        scale: Factor of the scores.
    """
    batch, num_heads, num_queries, width = query.shape
    num_groups = key.shape[1]
    shared = num_heads // num_groups
    if key.dtype is torch.bfloat16 and key.device.type == "cpu":
        # There torch's product copies what is not contiguous, as `[D, N]`: across the rows of
        # keys in a reserved room. Along the rows the same copy takes less: all of this .71 of the
        # time (8 requests, 512 tokens, one thread of a Zen 4, torch 2.13, 2026-11-30), the same
        # bits. A card's product takes them as they lie.
        key, value = key.contiguous(), value.contiguous()
    rows = query.reshape(batch, num_groups, shared * num_queries, width) * scale
    scores = torch.matmul(rows, key.transpose(-1, -2))
    if attention_mask is not None:
        by_query = scores.view(batch, num_groups, shared, num_queries, -1)
        mask = attention_mask[:, :, None, :, : key.shape[2]]
        if mask.dtype == torch.bool:
            by_query.masked_fill_(~mask, float("-inf"))
        else:
            by_query.add_(mask)
    weights = torch.softmax(scores, dim=-1, dtype=torch.float32).to(value.dtype)
    mixed = torch.matmul(weights, value)
    mixed = mixed.view(batch, num_heads, num_queries, value.shape[-1])
    return mixed.transpose(1, 2).contiguous()


def cached_attention(
    layer: ReservedLayer,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
) -> torch.Tensor:
    """Appends new keys and values to a layer and attends causally. Returns `[1, T, H, Dv]`.

    Args:
        layer: State of the layer, N tokens.
        query: `[1, H, T, D]`, T at most `MAX_SHORT_QUERIES`.
        key: `[1, G, T, D]`.
        value: `[1, G, T, Dv]`.
        scale: Factor of the scores.
    """
    num_queries = query.shape[2]
    if layer.is_initialized and operators.has_native_attention():
        start = layer.extend(num_queries) - num_queries
        return operators.native_cached_attention(
            query, key, value, layer.keys, layer.values, start, scale
        )
    keys, values = layer.update(key, value)
    mask = None
    if num_queries > 1:
        num_keys = keys.shape[2]
        positions = torch.arange(num_keys)
        mask = (positions[None] <= positions[num_keys - num_queries :, None])[None, None]
    return few_query_attention(query, keys, values, mask, scale)


def use_short_query_attention(model: PreTrainedModel) -> bool:
    """Switches a model that runs transformers' `sdpa` to this implementation.

    Returns:
        Whether it was switched; a model with an attention of its own keeps it.
    """
    AttentionInterface.register(ATTENTION_IMPLEMENTATION, short_query_attention)
    AttentionMaskInterface.register(ATTENTION_IMPLEMENTATION, sdpa_mask)
    if model.config._attn_implementation != "sdpa":
        return False
    model.set_attn_implementation(ATTENTION_IMPLEMENTATION)
    return model.config._attn_implementation == ATTENTION_IMPLEMENTATION
