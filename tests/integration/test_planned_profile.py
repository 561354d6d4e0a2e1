"""A plan tells what a profile of just such a load has measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from mira_app.machines import find_machine
from mira_engine.config import EngineConfig, MemoryAmount
from mira_engine.engine import Engine
from mira_engine.events import DepthResult, KProfile, PlanModel
from mira_engine.library import ModelHome, ModelLibrary
from mira_engine.planning import plan_model
from mira_engine.prepare import prepare
from mira_engine.profiles import save_profile
from mira_engine.types import CompileMode, Precision

RESULTS = tuple(DepthResult(num_draft_tokens=k, tpot_s=0.1 + k, num_replies=9) for k in (0, 2))
PROFILE = KProfile(best=2, acceptance=0.5, results=RESULTS)
CONFIG = EngineConfig(
    budget=MemoryAmount(share=2.0),
    context_length=128,
    num_threads=1,
    is_direct_io=False,
    compile_mode=CompileMode.OFF,
)


@pytest.fixture(scope="module")
def profiled(tmp_path_factory, tiny_checkpoint) -> ModelHome:
    """A tiny model with a profile under the key of an engine that was loaded."""
    library = ModelLibrary(tmp_path_factory.mktemp("profiled"))
    home = library.resolve(str(tiny_checkpoint("qwen3_moe")))
    prepare(home, Precision.NESTED, on_progress=lambda *_: None)
    engine = Engine.load(home, CONFIG, cache_dir=None, on_notice=lambda notice: None)
    engine.close()
    save_profile(home.root, engine.profile_key, PROFILE)
    return home


def measured(home: ModelHome, tmp_path, config: EngineConfig, **fields) -> DepthResult | None:
    request = PlanModel(request_id="r", model=home.name, config=config, **fields)
    return plan_model(home, request, data_dir=tmp_path, cache_dir=tmp_path / "cache").measured


def test_plan_has_the_profile_of_the_load_that_it_plans(profiled, tmp_path):
    assert measured(profiled, tmp_path, CONFIG) == RESULTS[1]


def test_plan_with_a_fixed_k_has_what_was_measured_of_that_k(profiled, tmp_path):
    assert measured(profiled, tmp_path, replace(CONFIG, num_draft_tokens=0)) == RESULTS[0]
    assert measured(profiled, tmp_path, replace(CONFIG, num_draft_tokens=3)) is None


def test_plan_of_another_budget_or_machine_was_not_measured(profiled, tmp_path):
    other = replace(CONFIG, budget=MemoryAmount(share=1.5))
    assert measured(profiled, tmp_path, other) is None
    assert measured(profiled, tmp_path, CONFIG, machine=find_machine("rtx-3070")) is None
