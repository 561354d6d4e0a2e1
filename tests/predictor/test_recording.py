"""Recorded routing is what the model routes, whatever is read beside it."""

import itertools

import pytest
import torch
from mira_engine.checkpoint.progress import Progress
from mira_engine.config import EngineConfig, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.events import ChatMessage
from mira_engine.library import ModelLibrary
from mira_engine.model.experts import stamp
from mira_engine.model.routers import find_routers
from mira_engine.predictor.coverage import coverage
from mira_engine.predictor.train import MIN_ROUTER_AGREEMENT
from mira_engine.prepare import prepare
from mira_engine.routing_recording import RoutingRecording
from mira_engine.runtime.recording import (
    RecordingSettings,
    RoutingRecorder,
    plan_batches,
    shared_prefix_lengths,
)
from mira_engine.types import CompileMode, ComputeDtype, Precision

PROMPTS = ("hello there", "a much longer prompt than the other two", "abc")
SETTINGS = RecordingSettings(max_reply_tokens=5)


@pytest.fixture(scope="module")
def home_of(tiny_checkpoint, tmp_path_factory):
    data = tmp_path_factory.mktemp("data")

    def make(family):
        home = ModelLibrary(data).resolve(str(tiny_checkpoint(family, tokenizer=True)))
        prepare(home, Precision.FLOAT32, on_progress=lambda *_: None)
        return home

    return make


def record(home, folder, texts=PROMPTS, settings=SETTINGS):
    recording = RoutingRecording(home, Precision.FLOAT32, folder, Progress(), step="test")
    recording.open("test")
    recording.record(texts, settings, None)
    return recording


def routed_alone(home, text, num_tokens):
    """One prompt through the engine's own loop: ids `[N, L, k]` of what it routed."""
    config = EngineConfig(
        precision=Precision.FLOAT32,
        dtype=ComputeDtype.FLOAT32,
        num_draft_tokens=0,
        compile_mode=CompileMode.OFF,
    )
    engine = Engine.load(home, config)
    try:
        num_layers = stamp(engine.model, engine.executor)
        recorder = RoutingRecorder(engine.executor, num_layers)
        stamp(engine.model, recorder)
        prompt = engine.render([ChatMessage(role="user", content=text)])
        recorder.rows = torch.arange(len(prompt))
        steps = engine.reply(prompt, SamplingConfig(max_new_tokens=num_tokens + 1))
        for step in steps:
            if isinstance(step, int):
                recorder.rows = torch.zeros(1, dtype=torch.int64)
    finally:
        engine.close()
    return torch.stack([torch.cat(ids) for ids in recorder.ids], dim=1)


@pytest.mark.parametrize("family", ["qwen2_moe", "gpt_oss", "qwen3_next"])
def test_batch_records_what_each_prompt_routes_alone(home_of, tmp_path, family):
    home = home_of(family)
    trace = record(home, tmp_path).traces.routing()
    for number, text in enumerate(PROMPTS):
        alone = routed_alone(home, text, SETTINGS.max_reply_tokens)
        mine = trace.ids[trace.sequence == number]
        # The recording runs in bfloat16, so a near-tie may fall otherwise.
        alone, mine = (torch.sort(ids, dim=-1).values for ids in (alone[-len(mine) :], mine))
        assert (alone == mine).all(dim=-1).float().mean() > 0.8
        assert int(trace.is_reply[trace.sequence == number].sum()) == SETTINGS.max_reply_tokens


def test_hidden_states_and_routers_explain_the_recorded_choices(home_of, tmp_path):
    recording = record(home_of("qwen2_moe"), tmp_path)
    trace, routers = recording.traces.routing(), recording.routers()
    for layer, router in enumerate(routers):
        found = coverage(router.logits(recording.traces.hidden(layer)), trace.ids[:, layer], (2,))
        assert found[0] > MIN_ROUTER_AGREEMENT
        assert router.input_gain is not None
    assert recording.shape() == {"num_layers": 3, "num_experts": 8, "top_k": 2}


def test_what_all_chats_begin_with_is_recorded_once(home_of, tmp_path):
    trace = record(home_of("qwen2_moe"), tmp_path).traces.routing()
    prefix = len("<user\n")
    lengths = [int(((trace.sequence == n) & ~trace.is_reply).sum()) for n in range(3)]
    assert lengths[0] - len(PROMPTS[0]) == lengths[1] - len(PROMPTS[1]) + prefix


def test_shared_prefix_is_the_longest_that_an_earlier_prompt_has():
    assert shared_prefix_lengths([[1, 2, 3], [1, 2, 4, 5], [1, 2, 4], [9]]) == (0, 2, 3, 0)


def test_batches_keep_their_bounds_and_lose_no_prompt():
    lengths = [5, 40, 7, 300, 22, 9, 6, 31]
    settings = RecordingSettings(
        max_reply_tokens=8,
        max_prompt_tokens=50,
        max_batch_prompts=3,
        max_batch_tokens=100,
        max_batch_bytes=10 * 120,
    )
    batches = plan_batches(lengths, 10, settings)
    assert sorted(itertools.chain(*batches)) == list(range(8))
    for batch in batches:
        longest = max(min(lengths[one], 50) for one in batch)
        assert len(batch) <= 3
        assert len(batch) * longest <= 100
        assert len(batch) * (longest + 8) * 10 <= 1200


def test_batches_leave_out_what_the_disk_has_no_room_for():
    settings = RecordingSettings(max_reply_tokens=10, max_bytes=1000)
    assert sorted(itertools.chain(*plan_batches([10] * 9, 10, settings))) == [0, 1, 2, 3, 4]
    assert sorted(itertools.chain(*plan_batches([500] * 9, 10, settings))) == [0, 1]


def test_routers_are_found_in_every_family_with_a_linear_one(home_of):
    from mira_engine.model.loader import load_backbone

    for family in ("mixtral", "gpt_oss", "granitemoe"):
        model = load_backbone(home_of(family).backbone_dir, ComputeDtype.FLOAT32)
        assert all(router is not None for router in find_routers(model)), family
