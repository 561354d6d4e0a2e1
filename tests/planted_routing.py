"""Traces whose routing follows a planted rule."""

from __future__ import annotations

import torch
from mira_engine.predictor.traces import RoutingTrace

NUM_EXPERTS, TOP_K, WIDTH = 8, 2, 16


def trace_of(ids_by_layer: list[torch.Tensor], num_prompts: int = 20) -> RoutingTrace:
    """Returns a trace of `[N, k]` ids by layer, its tokens dealt to prompts in order."""
    ids = torch.stack(ids_by_layer, dim=1).to(torch.int16)
    per_prompt = -(-len(ids) // num_prompts)
    return RoutingTrace(
        ids=ids,
        weights=torch.full(ids.shape, 0.5, dtype=torch.float16),
        sequence=torch.arange(len(ids), dtype=torch.int32) // per_prompt,
        is_reply=torch.ones(len(ids), dtype=torch.bool),
    )


def hidden_decides(num_tokens: int = 1500, seed: int = 0) -> tuple[RoutingTrace, torch.Tensor]:
    """Routing that hidden states decide: layer 2's by another map than layer 0's.

    All experts are equally popular, and layer 0's choices say nothing of layer 2's.
    """
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(num_tokens, WIDTH, generator=generator)
    maps = torch.randn(3, NUM_EXPERTS, WIDTH, generator=generator)
    maps = maps / maps.norm(dim=2, keepdim=True)
    return trace_of([(hidden @ one.T).topk(TOP_K).indices for one in maps]), hidden


def history_decides(num_tokens: int = 1500, seed: int = 0) -> RoutingTrace:
    """Routing in which a pair of experts decides the next: no sum over single ones tells."""
    generator = torch.Generator().manual_seed(seed)
    source = torch.rand(num_tokens, NUM_EXPERTS, generator=generator).topk(TOP_K).indices
    first = source.sum(dim=1) % NUM_EXPERTS
    target = torch.stack((first, (first + 3) % NUM_EXPERTS), dim=1)
    return trace_of([source, source, target])


def noise(num_tokens: int = 600, seed: int = 0) -> tuple[RoutingTrace, torch.Tensor]:
    """Routing that nothing tells, some experts more popular than others."""
    generator = torch.Generator().manual_seed(seed)
    taste = torch.linspace(0.0, 1.0, NUM_EXPERTS)
    layers = [
        (torch.rand(num_tokens, NUM_EXPERTS, generator=generator) + taste).topk(TOP_K).indices
        for _ in range(3)
    ]
    return trace_of(layers), torch.randn(num_tokens, WIDTH, generator=generator)
