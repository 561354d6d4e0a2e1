"""Prompts of unequal length, what is asked for each, and their answers alone and together."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.library import ModelHome
from mira_engine.runtime.requests import BatchEvent, BatchToken, RequestResult
from mira_engine.types import ComputeDtype, Precision

FAMILIES = ("mixtral", "qwen2_moe", "deepseek_v3", "olmoe", "ernie4_5_moe")
"""With full attention: grouped, biased and latent; shared experts, dense layers first."""

IN_TURN_FAMILIES = ("gpt_oss", "jamba")
"""Sliding windows, and recurrent state."""

BASE = EngineConfig(
    precision=Precision.FLOAT32,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=8.0),
    num_draft_tokens=0,
    context_length=512,
    num_threads=1,
)

LENGTHS = (5, 21, 13, 1)
NEW_TOKENS = (17, 24, 9, 30)
"""Of the four requests: the third ends long before the others, in the middle of the batch."""


def some_tokens(num_tokens: int, seed: int) -> list[int]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(3, 250, (num_tokens,), generator=generator).tolist()


PROMPTS = [some_tokens(length, seed) for seed, length in enumerate(LENGTHS)]


def make_samplings(temperature: float = 0.0, **fields: object) -> list[SamplingConfig]:
    return [
        SamplingConfig(max_new_tokens=limit, temperature=temperature, seed=seed, **fields)
        for seed, limit in enumerate(NEW_TOKENS)
    ]


Prepared = Callable[..., ModelHome]

Load = Callable[..., Engine]


def replies_alone(
    engine: Engine, prompts: Sequence[list[int]], samplings: Sequence[SamplingConfig]
) -> list[list[int]]:
    """Each prompt's reply by itself, from an empty cache."""
    replies = []
    for prompt, sampling in zip(prompts, samplings, strict=True):
        engine.state.reset()
        replies.append([t for t in engine.reply(prompt, sampling) if isinstance(t, int)])
    return replies


def collect(events: Iterator[BatchEvent]) -> tuple[list[list[int]], list[RequestResult]]:
    """Tokens as they came and results, both by request; every request ends once."""
    tokens: dict[int, list[int]] = {}
    results: dict[int, RequestResult] = {}
    for event in events:
        if isinstance(event, BatchToken):
            assert event.request not in results, "a token after the end"
            tokens.setdefault(event.request, []).append(event.token)
        else:
            assert event.request not in results
            results[event.request] = event
    ordered = [results[number] for number in range(len(results))]
    streamed = [tokens.get(number, []) for number in range(len(results))]
    assert streamed == [list(result.tokens) for result in ordered]
    return streamed, ordered


def minimum(engine: Engine) -> MemoryAmount:
    """A budget of exactly top-k slots, with the draft where the engine has one."""
    plan = engine.plan
    return MemoryAmount(num_bytes=plan.draft_bytes + engine._top_k * plan.slot_bytes)
