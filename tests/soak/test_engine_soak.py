"""Hours of use in minutes: many replies, stops and model changes on one engine process.

Question: does memory or the number of open files grow, and is a reply ever different
from the first one of its kind? Method: two tiny models in turn, each asked the same
questions again and again; every third reply is stopped at its first token; resident
memory is read after a warm-up and at the end. Left out: real models, real disks.
"""

from __future__ import annotations

import os
from pathlib import Path

import psutil
import pytest
from mira_app.engine_client import EngineClient
from mira_engine import api

NUM_ROUNDS = int(os.environ.get("MIRA_SOAK_ROUNDS", "2000"))
NUM_WARM_UP_ROUNDS = max(2, NUM_ROUNDS // 10)
MAX_GROWTH_BYTES = 48 * 2**20
QUESTIONS = ("one", "two two", "three three three")

CONFIG = api.EngineConfig(budget=api.MemoryAmount(share=0.75), num_threads=1)


@pytest.fixture
def client(data_dir: Path, tmp_path: Path):
    with EngineClient(api.default_engine_command(data_dir, tmp_path), log_dir=tmp_path) as client:
        yield client


def ask(client: EngineClient, question: str, *, is_stopped: bool) -> str:
    call = client.submit(
        api.Generate(
            request_id=client.new_request_id(),
            messages=(api.ChatMessage(role="user", content=question),),
            sampling=api.SamplingConfig(max_new_tokens=24),
        )
    )
    for event in call:
        if isinstance(event, api.TokenDelta) and is_stopped:
            client.cancel(call)
        if isinstance(event, api.GenerationDone):
            return event.text
    raise AssertionError("the reply has no end")


@pytest.mark.soak
def test_many_replies_stops_and_loads_leave_no_trace(client, tiny_checkpoint):
    models = [str(tiny_checkpoint(family, tokenizer=True)) for family in ("olmoe", "qwen2_moe")]
    for model in models:
        list(client.submit(api.PrepareModel(request_id=client.new_request_id(), model=model)))
    replies: dict[tuple[str, str], str] = {}
    process = psutil.Process(client.pid)
    warm_bytes = warm_files = 0
    for number in range(NUM_ROUNDS):
        model = models[number % 2]
        list(
            client.submit(
                api.LoadModel(request_id=client.new_request_id(), model=model, config=CONFIG)
            )
        )
        for position, question in enumerate(QUESTIONS):
            is_stopped = (number + position) % 3 == 2
            text = ask(client, question, is_stopped=is_stopped)
            if not is_stopped:
                assert text == replies.setdefault((model, question), text)
        if number + 1 == NUM_WARM_UP_ROUNDS:
            warm_bytes, warm_files = process.memory_info().rss, process.num_fds()
    assert process.memory_info().rss - warm_bytes < MAX_GROWTH_BYTES
    assert process.num_fds() <= warm_files
    assert client.lost is None
