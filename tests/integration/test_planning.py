"""Plans from real configurations alone, for cards of 8 to 48 GB."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import psutil
import pytest
from mira_app.machines import find_machine
from mira_engine.config import EngineConfig, LinkConfig, MemoryAmount
from mira_engine.engine import Engine
from mira_engine.errors import BudgetError, UnsupportedModelError
from mira_engine.events import MemoryPlan, PlanMade, PlanModel
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.planning import own_rates, plan_model
from mira_engine.policy.budget import DEFAULT_NUM_DRAFT_TOKENS
from mira_engine.prepare import prepare
from mira_engine.runtime.probe import PROFILE_FILE, MachineProfile
from mira_engine.types import CacheMode, CompileMode, DraftExperts, Precision, Strategy

GIB = 2**30
CARDS = ("rtx-3070", "rtx-3060-12gb", "rtx-4060-ti-16gb", "rtx-3090", "rtx-a6000")
MODELS = (
    "Qwen1.5-MoE-A2.7B", "DeepSeek-V2-Lite", "Mixtral-8x7B", "Phi-3.5-MoE", "OLMoE-1B-7B",
    "granite-3.1-1b-a400m-instruct",
)  # fmt: skip


def made_for(folder: Path | str, tmp_path: Path, card: str | None, **config: object) -> PlanMade:
    home = ModelLibrary(tmp_path / "data").resolve(str(folder))
    request = PlanModel(
        request_id="r",
        model=str(folder),
        config=EngineConfig(**config),
        machine=find_machine(card) if card else None,
    )
    return plan_model(home, request, data_dir=tmp_path / "data", cache_dir=tmp_path / "cache")


def chosen_of(made: PlanMade):
    return next((row for row in made.alternatives if row.is_chosen), None)


@pytest.mark.parametrize("name", MODELS)
def test_real_model_on_larger_cards_has_more_slots_and_faster_tokens(shared_inputs, tmp_path, name):
    folder = shared_inputs / "data/configs" / name
    if not folder.is_dir():
        pytest.skip(f"no configuration {name}")
    before = 0
    for card in CARDS:
        made = made_for(folder, tmp_path, card)
        row = chosen_of(made)
        assert row is not None, made.refusal
        assert row.plan.total_bytes <= made.memory_bytes
        rows = {each.strategy: each for each in made.alternatives}
        assert rows[Strategy.ON_DEMAND].plan.num_slots >= before
        before = rows[Strategy.ON_DEMAND].plan.num_slots
        assert 0 < row.tpot_s < 2
        assert 0 < row.ttft_s < 60
        assert row.plan.draft_dense_bytes == 0, "split and copied layers are the processor's"
    assert list(tmp_path.iterdir()) == [], "planning for another machine writes nothing"


def test_verdicts_of_known_sizes_are_sane(shared_inputs, tmp_path):
    configs = shared_inputs / "data/configs"
    if not (configs / "Mixtral-8x7B").is_dir():
        pytest.skip("no configurations")
    olmoe = chosen_of(made_for(configs / "OLMoE-1B-7B", tmp_path, "rtx-3060-12gb"))
    assert olmoe.plan.mode is CacheMode.RESIDENT, "6 GiB of experts fit 12"
    mixtral = made_for(configs / "Mixtral-8x7B", tmp_path, "rtx-3070")
    assert chosen_of(mixtral).plan.mode is CacheMode.SMALL, "42 GiB of experts do not fit 8"
    speculative = mixtral.alternatives[0]
    assert speculative.plan.draft_experts is DraftExperts.CACHED, "all are 21 GiB too much"
    assert speculative.plan.draft_bytes == 0
    resident = made_for(configs / "DeepSeek-V2-Lite", tmp_path, "rtx-3090")
    assert chosen_of(resident).plan.mode is CacheMode.RESIDENT


def test_emulated_link_is_what_is_planned_with(shared_inputs, tmp_path):
    folder = shared_inputs / "data/configs" / "OLMoE-1B-7B"
    if not folder.is_dir():
        pytest.skip("no configurations")
    held = made_for(
        folder,
        tmp_path,
        None,
        link=LinkConfig(bytes_per_s=1e6),
        budget=MemoryAmount(share=0.2),
    )
    free = made_for(folder, tmp_path, None, budget=MemoryAmount(share=0.2))
    assert held.machine.link_bytes_per_s == 1e6 < free.machine.link_bytes_per_s
    assert chosen_of(held).tpot_s > 10 * chosen_of(free).tpot_s


def test_model_that_no_use_of_the_memory_fits_is_refused_with_the_missing_bytes(
    shared_inputs, tmp_path
):
    folder = shared_inputs / "data/configs/WizardLM-2-8x22B"
    if not folder.is_dir():
        pytest.skip("no configuration")
    made = made_for(folder, tmp_path, "rtx-3070")
    assert chosen_of(made) is None
    assert "8.5 GiB short" in made.refusal
    assert "--memory" in made.hint
    assert all(row.missing_bytes > 0 for row in made.alternatives)


def test_plan_of_a_configuration_alone_says_that_no_weight_stands_behind_it(
    tiny_checkpoint, tmp_path
):
    whole = tiny_checkpoint("olmoe", max_shard_size="20KB")
    assert not alone_notes(made_for(whole, tmp_path, "rtx-3070"))
    folder = tmp_path / "folder"
    folder.mkdir()
    shutil.copy(whole / "config.json", folder)
    (note,) = alone_notes(made_for(folder, tmp_path, "rtx-3070"))
    assert note.startswith("No weights of this model are here: sizes and speeds ")
    shutil.copytree(whole, folder, dirs_exist_ok=True)
    assert not alone_notes(made_for(folder, tmp_path, "rtx-3070"))
    shards = sorted(folder.glob("*.safetensors"))
    assert len(shards) > 1
    shards[0].unlink()
    (note,) = alone_notes(made_for(folder, tmp_path, "rtx-3070"))
    assert note.startswith("Some weights of this model are not here: ")
    (folder / "model.safetensors.index.json").unlink()
    assert not alone_notes(made_for(folder, tmp_path, "rtx-3070")), "read as they lie there"


def test_plan_of_what_is_prepared_or_built_in_needs_no_such_note(prepared, tmp_path):
    home = replace(prepared, checkpoint_dir=tmp_path / "gone")
    request = PlanModel(request_id="r", model="m", machine=find_machine("rtx-3070"))
    made = plan_model(home, request, data_dir=tmp_path, cache_dir=None)
    assert not alone_notes(made)
    assert not alone_notes(made_for("builtin", tmp_path, "rtx-3070"))


def alone_notes(made: PlanMade) -> list[str]:
    return [note for note in made.notes if "config.json alone" in note]


def test_steps_of_a_plan_are_those_of_its_own_predictions(tmp_path):
    made = made_for("builtin", tmp_path, "rtx-3070")
    on_demand = next(r for r in made.alternatives if r.strategy is Strategy.ON_DEMAND)
    assert on_demand.plan.mode is CacheMode.RESIDENT
    steps = made.steps
    assert steps.token_s == pytest.approx(on_demand.tpot_s)
    assert (steps.num_layers, steps.num_experts, steps.top_k) == (30, 16, 2)
    assert steps.record_bytes == on_demand.plan.slot_bytes
    assert 0 < steps.experts_s < steps.token_s
    assert steps.link_bytes_per_s == pytest.approx(made.machine.link_bytes_per_s)
    refused = made_for("builtin", tmp_path, "rtx-3070", memory_bytes=64 * 2**20)
    assert refused.steps is None


def test_unsupported_configuration_is_refused_by_name(shared_inputs, tmp_path):
    published = shared_inputs / "data/configs/gpt-oss-20b"
    if not published.is_dir():
        pytest.skip("no configuration")
    folder = tmp_path / "quantised"
    folder.mkdir()
    text = (published / "config.json").read_text()
    (folder / "config.json").write_text(text.replace('"mxfp4"', '"awq"'))
    with pytest.raises(UnsupportedModelError, match="awq"):
        made_for(folder, tmp_path, "rtx-3090")


def test_mxfp4_configuration_is_planned_as_its_float_form(shared_inputs, tmp_path):
    folder = shared_inputs / "data/configs/gpt-oss-20b"
    if not folder.is_dir():
        pytest.skip("no configuration")
    assert any(row.is_chosen for row in made_for(folder, tmp_path, "rtx-3090").alternatives)


def test_builtin_model_is_planned_before_anything_is_fetched(tmp_path):
    made = made_for("builtin", tmp_path, "rtx-3070")
    assert chosen_of(made).plan.mode is CacheMode.RESIDENT
    assert made.context_length == 8192
    assert not (tmp_path / "data").exists()


def test_own_machine_is_measured_once_and_planned_with_the_usual_budget(tmp_path):
    made = made_for("builtin", tmp_path, None, num_threads=1)
    assert not made.machine.is_gpu
    assert made.memory_bytes < psutil.virtual_memory().total
    plan = next(row.plan for row in made.alternatives if row.strategy is Strategy.ON_DEMAND)
    assert plan.budget_bytes <= 0.75 * plan.reference_bytes
    assert any("75%" in note for note in made.notes)
    again = own_rates(EngineConfig(num_threads=1), Path("/nowhere"), tmp_path / "cache")
    assert again.device_bytes_per_s == made.machine.device_bytes_per_s


def test_memory_and_budget_limit_the_plan(tmp_path):
    made = made_for("builtin", tmp_path, "rtx-3070", memory_bytes=GIB)
    assert made.memory_bytes == GIB
    assert all(row.plan is None or row.plan.total_bytes <= GIB for row in made.alternatives)
    budget = MemoryAmount(share=0.3)
    made = made_for("builtin", tmp_path, "rtx-3070", budget=budget)
    assert chosen_of(made).plan.budget_bytes == budget.resolve(chosen_of(made).plan.reference_bytes)
    beyond = made_for("builtin", tmp_path, "rtx-3070", memory_bytes=100 * GIB)
    assert beyond.memory_bytes == 8 * GIB
    assert "more than there is" in beyond.notes[0]


@pytest.mark.parametrize("precision", [Precision.BF16, Precision.INT8, Precision.INT4])
def test_other_precisions_are_planned_in_their_own_bytes(tmp_path, precision):
    made = made_for("builtin", tmp_path, "rtx-3070", precision=precision)
    row = next(row for row in made.alternatives if row.strategy is Strategy.ON_DEMAND)
    per_weight = {Precision.BF16: 2, Precision.INT8: 1, Precision.INT4: 0.5}[precision]
    assert row.plan.slot_bytes == pytest.approx(per_weight * 3 * 576 * 512, rel=0.1)


def test_host_memory_too_small_for_the_experts_is_told(tmp_path):
    machine = replace(find_machine("rtx-3070"), host_memory_bytes=100 * 2**20)
    home = ModelLibrary(tmp_path).resolve("builtin")
    request = PlanModel(request_id="r", model="builtin", machine=machine)
    made = plan_model(home, request, data_dir=tmp_path, cache_dir=None)
    assert any("comes from the disk" in note for note in made.notes)


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, tiny_checkpoint) -> ModelHome:
    """A tiny model that can be loaded."""
    home = ModelLibrary(tmp_path_factory.mktemp("planning")).resolve(
        str(tiny_checkpoint("qwen3_moe"))
    )
    prepare(home, Precision.NESTED, on_progress=lambda *_: None)
    return home


def loaded(home: ModelHome, cache_dir: Path, **config: object) -> tuple[MemoryPlan, list[str]]:
    """The plan of an engine that was loaded and closed, and its notices."""
    notices: list[str] = []
    engine = Engine.load(
        home,
        EngineConfig(
            compile_mode=CompileMode.OFF, num_threads=1, is_direct_io=False, context_length=128,
            **config,
        ),
        cache_dir=cache_dir,
        on_notice=lambda notice: notices.append(notice.text),
    )  # fmt: skip
    engine.close()
    return engine.plan, notices


def test_engine_drafts_unless_kept_rates_say_that_it_is_slower(prepared, tmp_path):
    budget = MemoryAmount(share=2.0)
    unknown, _ = loaded(prepared, tmp_path, budget=budget)
    assert unknown.num_draft_tokens == DEFAULT_NUM_DRAFT_TOKENS
    assert list(tmp_path.iterdir()) == [], "loading measures nothing"
    rates = replace(find_machine("rtx-3070"), flops_per_s=1e13, layer_overhead_s=0.0)
    MachineProfile(tmp_path / PROFILE_FILE).keep_rates(rates, 1)
    known, notices = loaded(prepared, tmp_path, budget=budget, draft_experts=DraftExperts.ALL)
    assert known.num_draft_tokens == 0
    assert any(text.startswith("Speculation is off: ") for text in notices)
    free, notices = loaded(prepared, tmp_path, budget=budget)
    assert free.num_draft_tokens == DEFAULT_NUM_DRAFT_TOKENS, "the governor may draft"
    assert free.num_slots == known.num_slots
    assert not any(text.startswith("Speculation is off: ") for text in notices)
    asked, _ = loaded(prepared, tmp_path, budget=budget, num_draft_tokens=4)
    assert asked.num_draft_tokens == unknown.num_draft_tokens


def test_engine_takes_what_the_memory_leaves_and_no_more(prepared, tmp_path):
    roomy, _ = loaded(prepared, tmp_path, num_draft_tokens=0, budget=MemoryAmount(share=9.0))
    assert roomy.mode is CacheMode.RESIDENT
    few = roomy.fixed_bytes + 5 * roomy.slot_bytes
    plan, notices = loaded(prepared, tmp_path, num_draft_tokens=0, memory_bytes=few)
    assert (plan.num_slots, plan.total_bytes) == (5, few)
    assert not any("75%" in text for text in notices)
    with pytest.raises(BudgetError, match="short"):
        loaded(prepared, tmp_path, memory_bytes=roomy.fixed_bytes)
