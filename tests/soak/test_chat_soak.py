"""Two hundred turns of chat with few slots, half of them stopped: no drift, no growth.

Question: after many turns, stops, new chats and changes of K, does an engine with 60 % of
the experts' memory still say what one with all experts resident says, and does its memory
stay flat? Method: the built-in model in float32, both engines in this process, the same
random turns and stops for both; resident memory is read after a tenth and at the end.
"""

from __future__ import annotations

import os
import random
from pathlib import Path

import psutil
import pytest
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import ChatMessage
from mira_engine.library import ModelLibrary
from mira_engine.model.chat import load_tokenizer
from mira_engine.types import CachePolicy, CompileMode, ComputeDtype, FinishReason

NUM_TURNS = int(os.environ.get("MIRA_SOAK_TURNS", "200"))
MAX_GROWTH_BYTES = 48 * 2**20
WORDS = [
    "cache",
    "bread",
    "river",
    "sort",
    "list",
    "moon",
    "tea",
    "seven",
    "map",
    "train",
    "winter",
    "code",
    "blue",
    "plan",
]

WAYS = {
    "cached draft": {},
    "plain, regions": {"num_draft_tokens": 0, "cache_policy": CachePolicy.REGIONS},
}


def turn(engine: Engine, chat: list[ChatMessage], stop_after: int | None) -> tuple[list[int], bool]:
    """Answers; stops after so many tokens. Returns the tokens and whether it was stopped."""
    engine.clear_cancel()
    reply = engine.reply(engine.render(chat), SamplingConfig(max_new_tokens=12))
    tokens: list[int] = []
    while True:
        try:
            step = next(reply)
        except StopIteration as stop:
            return tokens, stop.value is FinishReason.CANCELLED
        if isinstance(step, int):
            tokens.append(step)
            if len(tokens) == stop_after:
                engine.cancel()


@pytest.mark.soak
@pytest.mark.builtin
@pytest.mark.parametrize("way", WAYS)
def test_many_turns_with_stops_neither_drift_nor_grow(
    way: str, builtin_data_dir: Path, native_cache: Path
) -> None:
    home = ModelLibrary(builtin_data_dir).resolve("builtin")

    def load(share: float, **fields: object) -> Engine:
        config = EngineConfig(
            dtype=ComputeDtype.FLOAT32,
            budget=MemoryAmount(share=share),
            context_length=1024,
            compile_mode=CompileMode.WAIT,  # What is compiled later on would count as growth.
            num_threads=1,
            **fields,
        )
        return Engine.load(home, config, cache_dir=native_cache)

    tokenizer = load_tokenizer(home.backbone_dir)
    whole, tight = load(4.0, num_draft_tokens=0), load(0.6, **WAYS[way])
    choose, chat = random.Random(5), []
    warm_bytes = num_stopped = num_hits = 0
    for number in range(NUM_TURNS):
        if len(chat) > 8 or choose.random() < 0.1:
            chat = []
        question = " ".join(choose.choices(WORDS, k=choose.randint(2, 9))) + "?"
        chat.append(ChatMessage(role="user", content=question))
        stop_after = choose.randint(1, 8) if choose.random() < 0.5 else None
        expected, _ = turn(whole, chat, stop_after)
        tokens, is_stopped = turn(tight, chat, stop_after)
        num_stopped += is_stopped
        num_hits += tight.stats().num_hits
        # A stop takes effect at the next layer; a round may have brought more tokens before.
        shared = min(len(tokens), len(expected))
        assert tokens[:shared] == expected[:shared], f"turn {number}"
        assert shared == len(expected) or is_stopped
        text = tokenizer.decode(expected[:shared], skip_special_tokens=True)
        chat.append(ChatMessage(role="assistant", content=text))
        residency = tight.executor.driver.residency
        assert not any(map(residency.is_pinned, range(residency.num_slots)))
        if number == NUM_TURNS // 10:
            warm_bytes = psutil.Process().memory_info().rss
    assert num_stopped > NUM_TURNS // 10
    assert num_hits
    assert psutil.Process().memory_info().rss - warm_bytes < MAX_GROWTH_BYTES
    for engine in (whole, tight):
        engine.close()
