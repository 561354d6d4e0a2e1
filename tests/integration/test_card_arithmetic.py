"""A card without bfloat16 computes in float16, and goes on in float32 where that overflows."""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from mira_engine.config import EngineConfig, MemoryAmount, SamplingConfig
from mira_engine.engine import Engine
from mira_engine.errors import ConfigError, NonFiniteError
from mira_engine.events import GenerationDone, ModelLoaded, Notice, Reconfigure, RequestFailed
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.memory_retry import WIDENED
from mira_engine.model import sampling
from mira_engine.prepare import prepare
from mira_engine.types import ComputeDtype, DraftExperts, Precision
from safetensors.torch import load_file, save_file
from shortages import FakeCard, Session, failing

pytest.importorskip("triton", reason="triton has no wheel for this system")

CONFIG = EngineConfig(
    precision=Precision.NESTED,
    budget=MemoryAmount(share=4.0),
    num_draft_tokens=0,
    draft_experts=DraftExperts.ALL,
    context_length=64,
    num_threads=1,
    gpu=0,
)
QUESTION = "Two and two?"
BRIEF = SamplingConfig(max_new_tokens=5)
PROMPT = [7, 99, 23, 180, 41, 5, 66]
OUTPUT_SCALE = 3e4
"""Of the output layer: its weights fit float16, its logits do not."""


@pytest.fixture(scope="module")
def home(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> ModelHome:
    """A tiny chat model, prepared."""
    return _prepared(tmp_path_factory.mktemp("float16"), tiny_checkpoint)


@pytest.fixture(scope="module")
def large_home(
    tmp_path_factory: pytest.TempPathFactory, tiny_checkpoint: Callable[..., Path]
) -> ModelHome:
    """The same model with logits that float16 cannot hold."""
    made = _prepared(tmp_path_factory.mktemp("large"), tiny_checkpoint)
    path = next(made.backbone_dir.glob("*.safetensors"))
    tensors = load_file(path)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].float() * OUTPUT_SCALE
    assert tensors["lm_head.weight"].abs().max() < torch.finfo(torch.float16).max
    written = path.with_suffix(".new")
    save_file(tensors, written, metadata={"format": "pt"})
    shutil.move(written, path)
    return made


def _prepared(folder: Path, tiny_checkpoint: Callable[..., Path]) -> ModelHome:
    made = ModelLibrary(folder).resolve(str(tiny_checkpoint("olmoe", tokenizer=True)))
    prepare(made, Precision.NESTED, on_progress=lambda *_: None, is_cancelled=lambda: False)
    return made


@pytest.fixture
def card(monkeypatch: pytest.MonkeyPatch) -> FakeCard:
    """One of compute capability 7.5, on which experts add nothing."""
    made = FakeCard(monkeypatch)
    made.capability = (7, 5)
    made.leave_experts_out()
    return made


@pytest.fixture
def start() -> Iterator[Callable[..., Session]]:
    sessions: list[Session] = []

    def make(home: ModelHome, **changes: object) -> Session:
        sessions.append(Session(home, replace(CONFIG, **changes)))
        return sessions[-1]

    yield make
    for session in sessions:
        session.close()


def _text(engine: Engine) -> list[int]:
    return [step for step in engine.reply(PROMPT, BRIEF) if isinstance(step, int)]


def test_card_without_bfloat16_computes_in_float16_and_says_so(
    home: ModelHome, monkeypatch: pytest.MonkeyPatch, start: Callable[..., Session]
) -> None:
    FakeCard(monkeypatch).capability = (7, 5)
    session = start(home, num_draft_tokens=2)
    assert isinstance(session.last, ModelLoaded)
    assert session.last.dtype is ComputeDtype.FLOAT16
    assert session.engine.model.dtype is torch.float16
    assert "float32" in session.notices("float16")[0]

    steps = session.engine.reply(PROMPT[:2], SamplingConfig(max_new_tokens=3))

    assert sum(isinstance(step, int) for step in steps) == 3
    assert session.engine.stats().num_drafted > 0
    assert not session.notices(WIDENED)
    caches = [layer.keys.dtype for layer in session.engine.state.cache.layers]
    assert set(caches) == {torch.float16}


def test_plan_counts_float16_as_half_of_float32(home: ModelHome, card: FakeCard) -> None:
    plans = {}
    for dtype in (None, ComputeDtype.FLOAT32):
        engine = Engine.load(home, replace(CONFIG, dtype=dtype))
        engine.close()
        plans[dtype] = engine.plan

    assert 2 * plans[None].kv_bytes == plans[ComputeDtype.FLOAT32].kv_bytes


def test_card_with_bfloat16_takes_it(
    home: ModelHome, card: FakeCard, start: Callable[..., Session]
) -> None:
    card.capability = (8, 0)

    session = start(home)

    assert session.engine.model.dtype is torch.bfloat16
    assert not session.notices("float16")


def test_bfloat16_on_a_card_without_it_is_refused_and_float32_is_not(
    home: ModelHome, card: FakeCard, start: Callable[..., Session]
) -> None:
    refused = start(home, dtype=ComputeDtype.BFLOAT16).last
    assert isinstance(refused, RequestFailed)
    assert refused.code == "ConfigError"
    assert "7.5" in refused.hint
    assert "float32" in refused.hint

    taken = start(home, dtype=ComputeDtype.FLOAT32)
    assert taken.engine.model.dtype is torch.float32


def test_float16_on_the_processor_is_refused_with_the_fix(home: ModelHome) -> None:
    with pytest.raises(ConfigError, match="float16") as caught:
        Engine.load(home, replace(CONFIG, gpu=None, dtype=ComputeDtype.FLOAT16))

    assert "--gpu" in caught.value.hint


def test_overflow_goes_on_in_float32_once_and_stays_there(
    large_home: ModelHome, card: FakeCard, start: Callable[..., Session]
) -> None:
    expected = start(large_home, dtype=ComputeDtype.FLOAT32).answer(QUESTION, BRIEF)
    session = start(large_home)
    assert session.engine.model.dtype is torch.float16

    found = session.answer(QUESTION, BRIEF)

    assert found.text == expected.text
    assert session.engine.model.dtype is torch.float32
    assert len(session.notices(WIDENED)) == 1
    assert session.answer(QUESTION, BRIEF).text == expected.text
    assert len(session.notices(WIDENED)) == 1


def test_overflow_in_the_middle_keeps_what_was_told(
    home: ModelHome,
    card: FakeCard,
    start: Callable[..., Session],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = start(home)

    with failing(monkeypatch, sampling, "check_finite", lambda: NonFiniteError("inf"), at=3):
        found = session.answer(QUESTION, BRIEF)

    assert found.stats.num_new_tokens == 5
    assert session.engine.model.dtype is torch.float32
    assert len(session.notices(WIDENED)) == 1


def test_float32_gets_its_memory_from_the_experts(
    home: ModelHome,
    card: FakeCard,
    start: Callable[..., Session],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = start(home)
    plan = session.engine.plan
    wide = plan.total_bytes + plan.non_expert_bytes + plan.kv_bytes
    card.free_bytes = wide - plan.budget_bytes // 2

    with failing(monkeypatch, sampling, "check_finite", lambda: NonFiniteError("inf"), at=3):
        session.answer(QUESTION, BRIEF)

    assert session.engine.plan.budget_bytes == plan.budget_bytes - plan.budget_bytes // 2
    assert session.engine.plan.total_bytes <= card.free_bytes
    assert "instead of" in session.notices(WIDENED)[0]


def test_float32_without_memory_is_told_and_the_model_stays(
    home: ModelHome,
    card: FakeCard,
    start: Callable[..., Session],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = start(home)
    card.free_bytes = session.engine.plan.total_bytes

    with failing(monkeypatch, sampling, "check_finite", lambda: NonFiniteError("inf"), at=3):
        failed = session.failure(QUESTION, BRIEF)

    assert failed.code == "NonFiniteError"
    assert "no memory for float32" in failed.message
    assert "former settings" in failed.message
    assert session.engine.model.dtype is torch.float16
    assert isinstance(session.ask(QUESTION, BRIEF), GenerationDone)


def test_overflow_in_float32_is_an_error(
    home: ModelHome,
    card: FakeCard,
    start: Callable[..., Session],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    session = start(home)

    def overflow() -> NonFiniteError:
        return NonFiniteError("inf", hint="Try --dtype float32.")

    with failing(monkeypatch, sampling, "check_finite", overflow, at=3, num_times=99) as calls:
        failed = session.failure(QUESTION, BRIEF)

    assert failed.code == "NonFiniteError"
    assert calls[0] == 5, "once in float16, once in float32"
    assert isinstance(session.ask(QUESTION, BRIEF), GenerationDone)


def test_other_live_setting_keeps_float32_after_an_overflow(
    large_home: ModelHome, card: FakeCard, start: Callable[..., Session]
) -> None:
    session = start(large_home)
    session.answer(QUESTION, BRIEF)

    loaded = session.do(
        Reconfigure(request_id="c", config=replace(session.asked, is_prefetch_enabled=False))
    )

    assert isinstance(loaded, ModelLoaded)
    assert loaded.is_cache_kept
    assert loaded.dtype is ComputeDtype.FLOAT32


def test_notice_of_float16_comes_without_a_worker_too(home: ModelHome, card: FakeCard) -> None:
    notices: list[Notice] = []
    engine = Engine.load(home, CONFIG, on_notice=notices.append)
    try:
        assert len(_text(engine)) == 5
    finally:
        engine.close()
    assert "float16" in {notice.code for notice in notices}
