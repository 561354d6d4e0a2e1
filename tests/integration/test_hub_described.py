"""A hub's model described and planned before any weight is fetched."""

import json

import pytest
import tiny_models
from hub_checks import make
from hub_scenes import NEEDED, REPO, SHARD
from mira_engine.checkpoint.preflight import SPARE_BYTES
from mira_engine.errors import UnsupportedModelError
from mira_engine.events import DescribeModel, PlanModel
from mira_engine.model_report import describe
from mira_engine.planning import plan_model
from mira_engine.types import Precision


@pytest.fixture
def server(hub_with_model):
    return hub_with_model


@pytest.fixture
def library(hub_library):
    return hub_library


def test_describe_fetches_no_weight_and_tells_what_prepare_then_takes(library, server, published):
    made = describe(library.resolve(REPO), DescribeModel(request_id="r", model=REPO))
    assert not server.bodies(SHARD)
    assert (made.family, made.license, made.refusal) == ("qwen3_moe", "apache-2.0", "")
    assert (made.num_layers, made.num_experts, made.top_k) == (2, 8, 2)
    assert made.num_active_parameters < made.num_parameters
    assert made.download_bytes == sum((published / name).stat().st_size for name in NEEDED)
    small = sum((published / name).stat().st_size for name in NEEDED if "model-" not in name)
    assert made.cached_bytes == small
    sizes = {size.precision: size for size in made.sizes}
    make(library)
    home = library.resolve(REPO)
    prepared = sum(
        path.stat().st_size for path in home.root.rglob("*") if path.suffix == ".safetensors"
    )
    assert sizes[Precision.NESTED].prepared_bytes == pytest.approx(prepared, rel=0.02)
    peak = sizes[Precision.NESTED].peak_bytes - SPARE_BYTES
    assert peak == pytest.approx(library.disk_bytes(REPO), rel=0.02)
    again = describe(home, DescribeModel(request_id="r", model=REPO))
    assert (again.num_parameters, again.sizes) == (made.num_parameters, made.sizes)


def test_describe_then_plan_needs_no_weight(library, server, tmp_path):
    describe(library.resolve(REPO), DescribeModel(request_id="r", model=REPO))
    made = plan_model(
        library.resolve(REPO),
        PlanModel(request_id="r", model=REPO),
        data_dir=tmp_path,
        cache_dir=None,
    )
    assert any(each.is_chosen for each in made.alternatives)
    assert not server.bodies(SHARD)
    assert library.installed() == []


def test_describe_model_that_cannot_run_gives_the_reason_and_its_figures(library, server, tmp_path):
    config = tiny_models.tiny_config("gpt_oss")
    config.architectures = ["GptOssForCausalLM"]
    config.quantization_config = {"quant_method": "awq"}
    folder = tmp_path / "quantised"
    config.save_pretrained(folder)
    (folder / "model.safetensors.index.json").write_text(
        json.dumps({"weight_map": {"lm_head.weight": "model-1.safetensors"}})
    )
    (folder / "model-1.safetensors").write_bytes(bytes(30_000))
    server.add("owner/quantised", folder)
    made = describe(library.resolve("owner/quantised"), DescribeModel(request_id="r", model="m"))
    assert "awq" in made.refusal
    assert made.hint
    assert made.num_experts == 4
    with pytest.raises(UnsupportedModelError, match="awq"):
        make(library, "owner/quantised")
    assert not server.bodies("model-1.safetensors")


def test_describe_model_with_code_of_its_own_gives_the_reason(library, server, tmp_path):
    folder = tmp_path / "own"
    folder.mkdir()
    fields = {"model_type": "own_moe", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}}
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "configuration_own.py").write_text("raise SystemExit('remote code ran')")
    (folder / "model.safetensors").write_bytes((8).to_bytes(8, "little") + b"{}      ")
    server.add("owner/own", folder)
    made = describe(library.resolve("owner/own"), DescribeModel(request_id="r", model="m"))
    assert "code from its own repository" in made.refusal
    assert made.num_parameters == 0


def test_describe_folder_and_builtin_need_no_hub(library, server, published):
    folder = describe(library.resolve(str(published)), DescribeModel(request_id="r", model="m"))
    builtin = describe(library.resolve("builtin"), DescribeModel(request_id="r", model="m"))
    assert (folder.refusal, folder.num_experts, folder.download_bytes) == ("", 8, 0)
    assert (builtin.refusal, builtin.num_experts) == ("", 16)
    assert builtin.download_bytes > 90_000_000
    assert server.requests == []
