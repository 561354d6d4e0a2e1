"""Routing that is replayed: recorded choices brought to a shape, or drawn ones.

The recorded texts are DeepSeek-V2-Lite's. A shape with more experts gets texts side by side,
each with experts of its own, a part of the token's choices from each; one with fewer takes
numbers modulo its own. Layers are taken modulo those recorded. Which it was is said.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from mira_engine.policy.cost_model import LOOKAHEAD_RECALL
from mira_engine.simulator.synthetic import synthetic_trace
from mira_engine.simulator.workload import TokenTrace, blurred, read_token_trace

REPOSITORY = Path(__file__).resolve().parents[2]
NAMES = ("law", "summary")

FIDELITY = LOOKAHEAD_RECALL
"""Share of the target's experts that the draft's routing names: set, not measured."""


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class Routing:
    """Chosen experts, token by token.

    Attributes:
        target: `[N, L, k]`, distinct in the last axis.
        draft: The same with some of them replaced, as a draft would.
        num_experts: Of a layer.
        source: Where they are from, for people.
    """

    target: np.ndarray
    draft: np.ndarray
    num_experts: int
    source: str

    def narrowed(self, num_experts: int) -> Routing:
        """Returns the routing of a model with fewer experts, or itself where it has no more."""
        if num_experts >= self.num_experts:
            return self
        target, draft = (
            np.apply_along_axis(_distinct, -1, ids, ids.shape[-1], num_experts)
            for ids in (self.target, self.draft)
        )
        return Routing(
            target=target,
            draft=draft,
            num_experts=num_experts,
            source=f"{self.source}, {num_experts} experts of a layer alone",
        )


def trace_folder() -> Path:
    """Where recorded routing is looked for."""
    return Path(os.environ.get("MIRA_SHARED", REPOSITORY.parent / "shared")) / "traces"


def make_routing(
    *, num_layers: int, num_experts: int, top_k: int, num_tokens: int, folder: Path | None = None
) -> Routing:
    """Brings recorded routing to a shape; draws it where nothing is recorded.

    Args:
        num_layers: MoE layers.
        num_experts: Of a layer.
        top_k: Experts of a token in a layer.
        num_tokens: Tokens that are wanted.
        folder: Of the recorded routing, `None` for the usual one.
    """
    folder = folder or trace_folder()
    paths = [folder / f"{name}.npz" for name in NAMES]
    if all(path.is_file() for path in paths):
        traces = [read_token_trace(path) for path in paths]
        target, how = _fitted(traces, (num_tokens, num_layers, top_k), num_experts)
        source = f"recorded ({how})"
    else:
        target = synthetic_trace(
            num_layers=num_layers, num_experts=num_experts, top_k=top_k, num_tokens=num_tokens
        ).ids
        source = "drawn: there is no recorded routing here"
    draft = blurred(np.random.default_rng(0), target, FIDELITY, num_experts)
    return Routing(target=target, draft=draft, num_experts=num_experts, source=source)


def _fitted(
    traces: Sequence[TokenTrace], shape: tuple[int, int, int], num_experts: int
) -> tuple[np.ndarray, str]:
    """Returns ids `[N, L, k]` of a shape, and how they were made."""
    num_tokens, num_layers, top_k = shape
    recorded = traces[0].num_experts
    num_texts = -(-num_experts // recorded)
    tokens = np.arange(num_tokens)
    layers = np.arange(num_layers) % traces[0].ids.shape[1]
    texts = []
    for text in range(num_texts):
        ids = traces[text % len(traces)].ids
        # A trace that is used again goes on where it was left.
        rows = (tokens + text // len(traces) * num_tokens) % len(ids)
        texts.append(ids[rows][:, layers].astype(np.int64) + text * recorded)
    shares = [len(part) for part in np.array_split(np.arange(top_k), num_texts)]
    first = [ids[..., :share] for ids, share in zip(texts, shares, strict=True)]
    rest = [ids[..., share:] for ids, share in zip(texts, shares, strict=True)]
    wished = np.concatenate([*first, *rest], axis=-1)
    target = np.apply_along_axis(_distinct, -1, wished, top_k, num_experts)
    names = " and ".join(trace.name for trace in traces[:num_texts])
    how = f"{names}, {recorded} experts each" if num_texts > 1 else f"{names}, {recorded} experts"
    return target, f"{how}, {len(set(layers.tolist()))} layers for {num_layers}"


def _distinct(wished: Iterable[int], count: int, num_experts: int) -> list[int]:
    """Returns the first `count` different experts, modulo how many there are.

    Where there are fewer, those that follow the last one in number complete them.
    """
    chosen: list[int] = []
    for expert in wished:
        expert = int(expert) % num_experts
        if expert not in chosen:
            chosen.append(expert)
        if len(chosen) == count:
            return chosen
    while len(chosen) < count:
        following = (chosen[-1] + 1) % num_experts
        while following in chosen:
            following = (following + 1) % num_experts
        chosen.append(following)
    return chosen
