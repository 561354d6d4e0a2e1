"""Messages survive the line of JSON; a foreign line is refused."""

from __future__ import annotations

import dataclasses
import typing

import pytest
from mira_engine import events, wire
from mira_engine.config import EngineConfig, LinkConfig, MachineRates, MemoryAmount, SamplingConfig
from mira_engine.errors import (
    BudgetError,
    ConfigError,
    EngineProcessError,
    MiraError,
    error_from_fields,
)
from mira_engine.types import (
    CacheMode,
    CompileMode,
    ComputeDtype,
    DraftDense,
    Eviction,
    ExpertShape,
    FactMark,
    FinishReason,
    Precision,
    Strategy,
)

PLAN = events.MemoryPlan(
    non_expert_bytes=1, kv_bytes=2, workspace_bytes=3, budget_bytes=4, draft_bytes=5,
    draft_dense=DraftDense.INT8, draft_dense_bytes=11, slot_bytes=6, num_slots=7,
    reference_bytes=8, num_experts=9, num_draft_tokens=10, mode=CacheMode.SMALL,
    num_hot_slots=12, num_stage_slots=13,
)  # fmt: skip

MACHINE = MachineRates(
    name="m", device_memory_bytes=2**33, device_bytes_per_s=1e10, link_bytes_per_s=2.5e9
)
MESSAGES = [
    events.DescribeModel(request_id="r", model="owner/name@main"),
    events.ModelDescribed(request_id="r", model="m", title="t", refusal="no", hint="h"),
    events.ModelDescribed(
        request_id="r",
        model="m",
        title="t",
        family="f",
        revision="c",
        license="mit",
        num_parameters=1,
        num_active_parameters=2,
        num_layers=3,
        num_experts=4,
        top_k=5,
        expert_shape=ExpertShape(hidden_size=64, intermediate_size=32, has_bias=True),
        download_bytes=6,
        cached_bytes=7,
        sizes=(
            events.PreparedSize(
                precision=Precision.INT8, prepared_bytes=1, draft_bytes=2, peak_bytes=3
            ),
            events.PreparedSize(
                precision=Precision.NESTED,
                prepared_bytes=1,
                draft_bytes=2,
                peak_bytes=3,
                peak_deleting_bytes=4,
            ),
        ),
        notes=("a",),
    ),
    events.PlanModel(
        request_id="r",
        model="m",
        config=EngineConfig(memory_bytes=2**30),
        machine=MACHINE,
        is_compact_allowed=True,
    ),
    events.PlanModel(request_id="r", model="m"),
    events.PlanMade(
        request_id="r",
        model="m",
        title="t",
        machine=MACHINE,
        memory_bytes=1,
        context_length=2,
        num_prompt_tokens=3,
        notes=("a", "b"),
        refusal="no",
        hint="h",
        steps=events.PlannedSteps(
            num_layers=2,
            num_experts=8,
            top_k=2,
            record_bytes=4096,
            token_s=0.01,
            experts_s=0.004,
            draft_s=0.005,
            link_bytes_per_s=2e10,
        ),
        alternatives=(
            events.PlanAlternative(
                strategy=Strategy.SPECULATIVE,
                precision=Precision.NESTED,
                num_draft_tokens=4,
                plan=PLAN,
                hit_rate=0.5,
                tpot_s=0.01,
                ttft_s=1.0,
                is_chosen=True,
                reason="r",
            ),
            events.PlanAlternative(
                strategy=Strategy.COMPACT,
                precision=Precision.INT4,
                num_draft_tokens=0,
                missing_bytes=7,
            ),
        ),
    ),
    events.PrepareModel(request_id="r", model="builtin", precision=Precision.INT8),
    events.PrepareModel(
        request_id="r", model="builtin", is_predicting=True, calibration="/a/b c.txt"
    ),
    events.PrepareModel(request_id="r", model="owner/m", is_download_deleted=False),
    events.LoadModel(
        request_id="r",
        model="/a/b c",
        config=EngineConfig(
            dtype=ComputeDtype.FLOAT32,
            budget=MemoryAmount(share=0.4),
            num_draft_tokens=0,
            link=LinkConfig(bytes_per_s=5e8, latency_s=1e-3),
            eviction=Eviction.LFU,
            compile_mode=CompileMode.WAIT,
            draft_dense=DraftDense.SPLIT,
            draft_words=32000,
        ),
    ),
    events.Generate(
        request_id="r",
        messages=(events.ChatMessage(role="user", content="naïve\n\t\u2028 🦀"),),
        sampling=SamplingConfig(temperature=0.7, seed=3),
        is_residency_wanted=False,
    ),
    events.Cancel(request_id="r"),
    events.Shutdown(),
    events.EngineReady(protocol_version=1, pid=2),
    events.Heartbeat(uptime_s=2.0),
    events.Notice(code="c", text="t"),
    events.PrepareProgress(request_id="r", step="convert", done=1, total=2, unit="layers"),
    events.PrepareDone(request_id="r", model="m", precision=Precision.NESTED),
    events.ModelLoaded(
        request_id="r", model="m", title="M", context_length=5, plan=PLAN, load_s=1.5
    ),
    events.PromptProgress(request_id="r", done=1, total=2),
    events.ProfileModel(request_id="r", model="builtin", is_quick=True),
    events.ProfileProgress(request_id="r", done=1, total=20, detail="K 4"),
    events.ProfileDone(
        request_id="r",
        model="builtin",
        profile=events.KProfile(
            best=4,
            acceptance=0.75,
            results=(events.DepthResult(num_draft_tokens=4, tpot_s=0.125, num_replies=75),),
        ),
    ),
    events.TokenDelta(request_id="r", text=" \n", num_tokens=1),
    events.StatsSample(request_id="r", stats=events.ReplyStats(num_hits=3, stall_s=0.25)),
    events.GenerationDone(
        request_id="r", text="x", reason=FinishReason.LENGTH, stats=events.ReplyStats()
    ),
    events.RequestFailed(request_id="r", code="BudgetError", message="m", hint="h"),
    events.Reconfigure(request_id="r", config=EngineConfig(num_draft_tokens=2)),
    events.ContextTrimmed(request_id="r", num_turns=2, num_tokens=900, limit=1024),
    events.DescribeMachine(request_id="r", model="builtin", config=EngineConfig(num_threads=1)),
    events.MachineDescribed(
        request_id="r",
        facts=(
            events.MachineFact(code="cores", text="2 cores", value=2.0),
            events.MachineFact(code="gpu", text="none", mark=FactMark.NOTE, hint="h"),
        ),
    ),
    events.EvaluateModel(
        request_id="r",
        model="m",
        config=EngineConfig(dtype=ComputeDtype.FLOAT32),
        precisions=(Precision.INT8, Precision.NESTED),
        files=("/a/b c.txt",),
        max_tokens=200,
    ),
    events.EvaluationProgress(request_id="r", done=1, total=2, detail="int8 reads"),
    events.EvaluationDone(
        request_id="r",
        report=events.EvaluationReport(
            model="m",
            title="t",
            reference="bf16",
            dtype=ComputeDtype.FLOAT32,
            num_texts=1,
            num_tokens=2,
            num_continuations=3,
            num_greedy_tokens=4,
            results=(
                events.PrecisionFidelity(
                    precision=Precision.INT4,
                    perplexity=9.5,
                    kl=0.25,
                    top1_agreement=0.5,
                    greedy_tokens=3.5,
                    expert_bytes=6,
                    is_reference=True,
                    kinds=(
                        events.KindFidelity(
                            kind="code", num_tokens=7, perplexity=8.5, kl=0.5, top1_agreement=1.0
                        ),
                    ),
                ),
            ),
            notes=("n",),
        ),
    ),
    events.ResidencySample(request_id="r", regions=("HS.s", "...."), heat=("9010", "0000")),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_message_survives_the_wire(message: events.Event) -> None:
    line = wire.encode(message)
    assert "\n" not in line
    assert wire.decode(line) == message


def test_every_message_class_is_tested() -> None:
    known = {*typing.get_args(events.Request), *typing.get_args(events.Event)}
    assert known == {type(m) for m in MESSAGES}
    assert all(dataclasses.is_dataclass(cls) for cls in known)


@pytest.mark.parametrize("line", ["", "{", "[]", '{"type": "Nonsense"}', '{"type": "Cancel"}', "1"])
def test_foreign_line_is_refused(line: str) -> None:
    with pytest.raises(EngineProcessError):
        wire.decode(line)


def test_error_crosses_the_boundary_with_its_class_and_hint() -> None:
    error = error_from_fields(BudgetError("too small", hint="give more").to_fields())
    assert isinstance(error, BudgetError)
    assert (error.message, error.hint) == ("too small", "give more")
    assert type(error_from_fields({"code": "FromTheFuture"})) is MiraError


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("300MiB", MemoryAmount(num_bytes=300 * 2**20)),
        ("1.5GB", MemoryAmount(num_bytes=1_500_000_000)),
        ("40%", MemoryAmount(share=0.4)),
        (" 12 kib ", MemoryAmount(num_bytes=12 * 1024)),
    ],
)
def test_memory_amount_parses(text: str, expected: MemoryAmount) -> None:
    assert MemoryAmount.parse(text) == expected


@pytest.mark.parametrize("text", ["", "300", "-5%", "0%", "0MiB", "many", "5 apples", "%"])
def test_memory_amount_refuses_and_says_what_to_write(text: str) -> None:
    with pytest.raises(ConfigError) as caught:
        MemoryAmount.parse(text)
    assert "300MiB" in caught.value.hint


@pytest.mark.parametrize("k", [-1, 33])
def test_k_out_of_range_is_refused(k: int) -> None:
    with pytest.raises(ConfigError, match="K cannot be"):
        EngineConfig(num_draft_tokens=k)


def test_enums_cross_the_wire_as_enums() -> None:
    load = next(m for m in MESSAGES if isinstance(m, events.LoadModel))
    config = wire.decode(wire.encode(load)).config
    assert config.eviction is Eviction.LFU
    assert config.compile_mode is CompileMode.WAIT
    assert config.draft_dense is DraftDense.SPLIT
    assert config.draft_words == 32000
    loaded = next(m for m in MESSAGES if isinstance(m, events.ModelLoaded))
    assert wire.decode(wire.encode(loaded)).plan.draft_dense is DraftDense.INT8
    plain = dataclasses.replace(load, config=EngineConfig())
    assert wire.decode(wire.encode(plain)).config.eviction is None


def test_negative_draft_words_are_refused() -> None:
    with pytest.raises(ConfigError, match="draft words cannot be") as caught:
        EngineConfig(draft_words=-1)
    assert "0 (all)" in caught.value.hint
    assert EngineConfig(draft_words=0).draft_words == 0


def test_drafting_for_the_draft_itself_is_refused() -> None:
    with pytest.raises(ConfigError, match="K cannot be") as caught:
        EngineConfig(num_draft_tokens=4, precision=Precision.INT4)
    assert "-k 0" in caught.value.hint
