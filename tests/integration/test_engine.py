"""The engine on a tiny chat model: chats, limits and bad input."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mira_engine.checkpoint.store import ExpertStore, file_name
from mira_engine.config import EngineConfig, LinkConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.errors import (
    BudgetError,
    CheckpointError,
    ConfigError,
    ContextLengthError,
    ModelError,
    NonFiniteError,
    StoreError,
    UnsupportedModelError,
)
from mira_engine.events import (
    ChatMessage,
    GenerationDone,
    Notice,
    TokenDelta,
)
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.policy.budget import plan_memory
from mira_engine.policy.residency import SlotState
from mira_engine.prepare import preflight, prepare
from mira_engine.runtime.telemetry import MemoryProbe
from mira_engine.types import (
    CachePolicy,
    ComputeDtype,
    DraftExperts,
    FinishReason,
    Phase,
    Plane,
    Precision,
)

CHAT = (ChatMessage(role="user", content="Hello, who are you?"),)
CONFIG = EngineConfig(
    precision=Precision.NESTED,
    dtype=ComputeDtype.FLOAT32,
    budget=MemoryAmount(share=2.0),
    num_draft_tokens=3,
    context_length=128,
    num_threads=1,
)


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> ModelHome:
    """A tiny chat model, prepared."""
    library = ModelLibrary(tmp_path_factory.mktemp("engine"))
    made = library.resolve(str(tiny_checkpoint("qwen3_moe", tokenizer=True)))
    for precision in (Precision.NESTED, Precision.INT8, Precision.BF16):
        prepare(made, precision, on_progress=lambda *_: None, is_cancelled=lambda: False)
    return made


@pytest.fixture
def load(home: ModelHome) -> Iterator[Callable[..., Engine]]:
    engines: list[Engine] = []

    def make(*, notices: list[Notice] | None = None, **changes: object) -> Engine:
        told = notices if notices is not None else []
        engine = Engine.load(home, replace(CONFIG, **changes), on_notice=told.append)
        engines.append(engine)
        return engine

    yield make
    for engine in engines:
        engine.close()


def _text(engine: Engine, sampling: SamplingConfig) -> str:
    *_, done = engine.stream("r", CHAT, sampling)
    assert isinstance(done, GenerationDone)
    return done.text


@pytest.mark.parametrize("precision", [Precision.NESTED, Precision.INT8, Precision.BF16])
def test_text_does_not_depend_on_budget_or_k(
    load: Callable[..., Engine], precision: Precision
) -> None:
    sampling = SamplingConfig(max_new_tokens=30)
    roomy = load(precision=precision, num_draft_tokens=0, budget=MemoryAmount(share=4.0))
    expected = _text(roomy, sampling)
    for share, k in ((0.4, 0), (1.2, 4), (2.0, 8)):
        engine = load(precision=precision, budget=MemoryAmount(share=share), num_draft_tokens=k)
        assert _text(engine, sampling) == expected
        stats = engine.stats()
        assert 0 < stats.expert_peak_bytes <= engine.plan.budget_bytes
        assert stats.num_new_tokens <= 30


@pytest.mark.parametrize("precision", [Precision.NESTED, Precision.INT8])
def test_draft_with_cached_experts_takes_no_memory_and_changes_no_text(
    load: Callable[..., Engine], precision: Precision
) -> None:
    sampling = SamplingConfig(max_new_tokens=30)
    plain = load(precision=precision, num_draft_tokens=0, budget=MemoryAmount(share=0.5))
    expected = _text(plain, sampling)
    tight, roomy = (
        load(
            precision=precision,
            num_draft_tokens=4,
            draft_experts=DraftExperts.CACHED,
            budget=MemoryAmount(share=share),
        )
        for share in (0.5, 4.0)
    )
    assert tight.plan.num_slots == plain.plan.num_slots
    assert tight.plan.draft_bytes == 0
    assert tight.executor.draft.num_bytes == 0
    for engine in (tight, roomy):
        assert _text(engine, sampling) == expected
        assert engine.stats().expert_peak_bytes <= engine.plan.budget_bytes
    assert 0 < tight.stats().num_accepted < roomy.stats().num_accepted
    assert tight.executor.meter.decode.num_prefetched > 0


def test_draft_with_cached_experts_is_the_whole_draft_where_all_are_resident(
    load: Callable[..., Engine],
) -> None:
    sampling, share = SamplingConfig(max_new_tokens=30), MemoryAmount(share=4.0)
    drafts = []
    for which in DraftExperts.ALL, DraftExperts.CACHED:
        engine = load(num_draft_tokens=4, draft_experts=which, budget=share)
        for _ in range(2):  # The first fills the slots.
            engine.state.reset()
            _text(engine, sampling)
        stats = engine.stats()
        drafts.append((stats.num_drafted, stats.num_accepted, stats.num_rounds))
    assert drafts[0] == drafts[1]


@pytest.mark.parametrize("policy", [CachePolicy.REGIONS, CachePolicy.STATIC])
@pytest.mark.parametrize("share", [0.4, 0.8])
def test_text_does_not_depend_on_the_cache_policy(
    load: Callable[..., Engine], policy: CachePolicy, share: float
) -> None:
    sampling = SamplingConfig(max_new_tokens=30)
    expected = _text(load(num_draft_tokens=0, budget=MemoryAmount(share=4.0)), sampling)
    engine = load(num_draft_tokens=0, budget=MemoryAmount(share=share), cache_policy=policy)
    residency = engine.executor.driver.residency
    assert residency.regions is not None
    for _ in range(3):
        engine.state.reset()
        assert _text(engine, sampling) == expected
        assert engine.stats().num_misses
    assert residency.num_used <= engine.plan.num_slots
    assert residency.num_loading == 0
    if policy is CachePolicy.REGIONS:
        assert residency.regions.num_hot, "the prompt's end warmed it"
        assert engine.stats().num_stage_hits < engine.stats().num_hits


def test_governor_begins_without_a_draft_where_that_is_predicted_to_be_faster(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    def without_draft(facts, wishes, rates, expect):
        return plan_memory(facts, wishes.budget, 0)

    monkeypatch.setattr("mira_engine.load_plan.choose_plan", without_draft)
    notices: list[Notice] = []
    engine = load(notices=notices, num_draft_tokens=None, budget=MemoryAmount(share=0.5))
    assert engine.governor is not None
    assert engine.governor.current == 0
    assert engine.governor.candidates == (0, 1, 2, 3, 4)
    plain = load(num_draft_tokens=0, budget=MemoryAmount(share=0.5))
    assert engine.plan.num_slots == plain.plan.num_slots
    assert plain.governor is None
    whole = load(
        num_draft_tokens=None, budget=MemoryAmount(share=0.5), draft_experts=DraftExperts.ALL
    )
    assert whole.governor is None
    assert not [n for n in notices if n.code == "speculation-off"]


def test_predictors_that_cannot_be_used_are_said(
    load: Callable[..., Engine], home: ModelHome
) -> None:
    notices: list[Notice] = []
    load(notices=notices)
    assert not [n for n in notices if n.code == "no-predictors"], "none were made"
    home.predictors_dir.mkdir()
    try:
        (home.predictors_dir / "predictors.json").write_text("{", encoding="utf-8")
        engine = load(notices=notices)
    finally:
        shutil.rmtree(home.predictors_dir)
    assert engine.executor.predictor is None
    (notice,) = [n for n in notices if n.code == "no-predictors"]
    assert "damaged" in notice.text


def test_nested_moves_half_of_what_int8_moves(load: Callable[..., Engine]) -> None:
    nested = load(draft_experts=DraftExperts.ALL)
    int8 = load(precision=Precision.INT8)
    assert nested.transfer.record_bytes * 2 <= int8.transfer.record_bytes + 4096
    for engine in (nested, int8):
        _text(engine, SamplingConfig(max_new_tokens=20))
        stats = engine.stats()
        assert stats.bytes_moved == stats.num_records_loaded * engine.transfer.record_bytes


def test_deltas_add_up_to_the_text(load: Callable[..., Engine]) -> None:
    events = list(load().stream("r", CHAT, SamplingConfig(max_new_tokens=25)))
    done = events[-1]
    assert isinstance(done, GenerationDone)
    assert "".join(e.text for e in events if isinstance(e, TokenDelta)) == done.text
    assert sum(e.num_tokens for e in events if isinstance(e, TokenDelta)) == (
        done.stats.num_new_tokens
    )


def test_sampled_text_repeats_with_its_seed(load: Callable[..., Engine]) -> None:
    engine = load()
    sampling = SamplingConfig(temperature=0.9, top_p=0.95, seed=4, max_new_tokens=20)
    first = _text(engine, sampling)
    assert _text(engine, sampling) == first
    assert _text(engine, replace(sampling, seed=5)) != first


def test_prompt_longer_than_the_context_is_refused_not_trimmed(
    load: Callable[..., Engine],
) -> None:
    engine = load(context_length=32)
    before = engine.state.num_cached
    with pytest.raises(ContextLengthError, match="holds 32"):
        list(engine.stream("r", (ChatMessage(role="user", content="x" * 200),), SamplingConfig()))
    assert engine.state.num_cached == before


def test_reply_that_fills_the_context_says_so(load: Callable[..., Engine]) -> None:
    engine = load(context_length=64)
    engine._end_ids = frozenset()
    *_, done = engine.stream("r", CHAT, SamplingConfig())
    assert isinstance(done, GenerationDone)
    assert done.reason is FinishReason.CONTEXT
    assert done.stats.num_prompt_tokens + done.stats.num_new_tokens == 64


def test_context_beyond_the_model_is_refused(load: Callable[..., Engine]) -> None:
    with pytest.raises(ConfigError, match="context"):
        load(context_length=10**7)


def test_budget_below_the_minimum_loads_nothing(load: Callable[..., Engine]) -> None:
    with pytest.raises(BudgetError, match="below the minimum"):
        load(budget=MemoryAmount(num_bytes=4096))


def test_nan_in_the_logits_stops_with_an_error(load: Callable[..., Engine]) -> None:
    engine = load()
    weight = engine.model.get_output_embeddings().weight
    kept = weight[5].clone()
    with torch.no_grad():
        weight[5] = float("nan")
    with pytest.raises(NonFiniteError):
        list(engine.stream("r", CHAT, SamplingConfig()))
    with torch.no_grad():
        weight[5] = kept
    assert _text(engine, SamplingConfig(max_new_tokens=5))


def test_end_of_text_inside_a_draft_ends_the_reply(load: Callable[..., Engine]) -> None:
    plain = load(num_draft_tokens=0)
    plain._end_ids = frozenset()
    prompt = plain.render(CHAT)
    sampling = SamplingConfig(max_new_tokens=24)
    tokens = [t for t in plain.reply(prompt, sampling) if isinstance(t, int)]
    end = next(t for i, t in enumerate(tokens) if i > 2 and t not in tokens[:i])
    engine = load(num_draft_tokens=8)
    engine._end_ids = frozenset({end})
    stopped = [t for t in engine.reply(prompt, sampling) if isinstance(t, int)]
    assert stopped == tokens[: tokens.index(end) + 1]


def test_cancel_in_a_draft_leaves_only_the_target_s_own_state(
    tmp_path: Path, tiny_checkpoint: Callable[..., Path]
) -> None:
    """What a broken-off draft wrote must not serve as the prefix of the next turn.

    On a family with full attention, which keeps its state after a cancel.
    """
    full = ModelLibrary(tmp_path).resolve(str(tiny_checkpoint("olmoe", tokenizer=True)))
    prepare(full, Precision.NESTED, on_progress=lambda *_: None, is_cancelled=lambda: False)
    engine, fresh = (Engine.load(full, replace(CONFIG, num_draft_tokens=k)) for k in (4, 0))
    engine._end_ids = frozenset()
    prompt = engine.render(CHAT)
    num_drafting = 0

    def is_cancelled() -> bool:
        nonlocal num_drafting
        num_drafting += engine.executor.phase is Phase.DRAFT
        return (
            num_drafting > 2 * engine.executor.driver.lookahead.num_layers + 1
        )  # inside the third step

    engine.executor.is_cancelled = is_cancelled
    reply = engine.reply(prompt, SamplingConfig(max_new_tokens=20))
    made = [step for step in reply if isinstance(step, int)]
    engine.executor.is_cancelled = lambda: False
    assert made, "the first token comes before any draft"
    assert engine.state.tokens == prompt

    longer = [*prompt, *made, 65, 66]
    for each in (engine, fresh):
        each._end_ids = frozenset()
        list(each.reply(longer, SamplingConfig(max_new_tokens=1)))
    assert engine.stats().num_cached_tokens > 0
    for ours, theirs in zip(engine.state.cache.layers, fresh.state.cache.layers, strict=True):
        length = ours.get_seq_length()
        assert length == theirs.get_seq_length()
        for states, others in ((ours.keys, theirs.keys), (ours.values, theirs.values)):
            used, expected = states[:, :, :length], others[:, :, :length]
            torch.testing.assert_close(used, expected, rtol=1e-4, atol=1e-5)
    for each in (engine, fresh):
        each.close()


def test_unpacked_experts_are_announced(load: Callable[..., Engine]) -> None:
    notices: list[Notice] = []
    engine = load(notices=notices, dtype=ComputeDtype.BFLOAT16)
    is_packed = engine._target.format.layout != "rows"
    assert ("unpacked-experts" in [n.code for n in notices]) is not is_packed
    exact: list[Notice] = []
    load(notices=exact)  # float32 arithmetic always unpacks
    assert "unpacked-experts" not in [n.code for n in exact]


def test_sampled_memory_is_announced(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(MemoryProbe, "_reset_peak", staticmethod(lambda: False))
    notices: list[Notice] = []
    engine = load(notices=notices)
    assert "sampled-memory" in [n.code for n in notices]
    assert engine.stats().peak_memory_bytes >= 0


def test_emulated_link_is_announced_and_slows(load: Callable[..., Engine]) -> None:
    notices: list[Notice] = []
    engine = load(
        notices=notices,
        budget=MemoryAmount(share=0.4),
        num_draft_tokens=0,
        link=LinkConfig(latency_s=0.002),
    )
    _text(engine, SamplingConfig(max_new_tokens=8))
    stats = engine.stats()
    assert "emulated-link" in [n.code for n in notices]
    assert stats.num_misses > 0
    assert stats.stall_s >= 0.002


def _await_reads(engine: Engine) -> None:
    """Takes what is still under way when a reply has ended."""
    residency = engine.executor.driver.residency
    while any(residency.state(s) is SlotState.LOADING for s in range(engine.plan.num_slots)):
        engine.executor.collect(engine.transfer.wait_any(1.0))


def test_damaged_store_file_is_named(
    home: ModelHome, tmp_path: Path, load: Callable[..., Engine]
) -> None:
    engine = load(budget=MemoryAmount(share=0.4), num_draft_tokens=0)
    path = home.store_dir(Precision.NESTED) / file_name(1, Plane.LO)
    content = path.read_bytes()
    os.truncate(path, 8192)
    try:
        with pytest.raises(StoreError, match=path.name):
            list(engine.stream("r", CHAT, SamplingConfig(max_new_tokens=4)))
        _await_reads(engine)  # one that begins before the file is back fails too
    finally:
        path.write_bytes(content)
    assert _text(engine, SamplingConfig(max_new_tokens=4)), "the engine goes on once it is back"
    ExpertStore.open(home.store_dir(Precision.NESTED)).verify()


def test_unprepared_precision_says_what_to_run(home: ModelHome) -> None:
    with pytest.raises(StoreError, match="mira-chat prepare"):
        Engine.load(home, replace(CONFIG, precision=Precision.FLOAT32))


def _copy_of(home: ModelHome, folder: Path) -> ModelHome:
    shutil.copytree(home.checkpoint_dir, folder)
    return ModelLibrary(folder.parent / "data").resolve(str(folder))


@pytest.mark.parametrize("name", ["tokenizer.json", "tokenizer_config.json"])
def test_damaged_tokenizer_is_named_before_anything_is_made(
    home: ModelHome, tmp_path: Path, name: str
) -> None:
    copy = _copy_of(home, tmp_path / "model")
    preflight(copy)
    (copy.checkpoint_dir / name).write_text("{", encoding="utf-8")
    with pytest.raises(CheckpointError, match=name):
        preflight(copy)
    assert not copy.root.exists()


def test_missing_tokenizer_is_named(home: ModelHome, tmp_path: Path) -> None:
    copy = _copy_of(home, tmp_path / "model")
    (copy.checkpoint_dir / "tokenizer.json").unlink()
    with pytest.raises(CheckpointError, match="tokenizer"):
        preflight(copy)
    (copy.checkpoint_dir / "tokenizer_config.json").unlink()
    with pytest.raises(CheckpointError, match="has no tokenizer"):
        preflight(copy)


def test_model_without_chat_template_is_refused(home: ModelHome, tmp_path: Path) -> None:
    copy = _copy_of(home, tmp_path / "model")
    (copy.checkpoint_dir / "chat_template.jinja").unlink(missing_ok=True)
    path = copy.checkpoint_dir / "tokenizer_config.json"
    fields = json.loads(path.read_text(encoding="utf-8"))
    fields.pop("chat_template", None)
    path.write_text(json.dumps(fields), encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="chat template"):
        preflight(copy)


def test_family_is_refused_before_its_tokenizer_is_looked_at(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    (folder / "config.json").write_text('{"model_type": "llama"}', encoding="utf-8")
    with pytest.raises(UnsupportedModelError, match="llama"):
        preflight(ModelLibrary(tmp_path / "data").resolve(str(folder)))


def test_configuration_that_transformers_cannot_read_is_named(tmp_path: Path) -> None:
    folder = tmp_path / "model"
    folder.mkdir()
    text = '{"model_type": "dbrx", "ffn_config": {"moe_num_experts": 4, "moe_top_k": 2}}'
    (folder / "config.json").write_text(text, encoding="utf-8")
    with pytest.raises(ModelError, match=r"config\.json|dbrx"):
        preflight(ModelLibrary(tmp_path / "data").resolve(str(folder)))


def test_more_memory_than_is_free_is_refused(
    load: Callable[..., Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Little:
        total = available = 2**20

    monkeypatch.setattr("psutil.virtual_memory", Little)
    with pytest.raises(BudgetError, match="short"):
        load()


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seed_out_of_range_is_refused(seed: int) -> None:
    with pytest.raises(ConfigError, match="seed"):
        SamplingConfig(seed=seed)
