"""Figures of real models from their configuration and index alone, and of tiny ones."""

import json

import pytest
import stored_forms
import tiny_models
from mira_engine.checkpoint.architecture import load_config, meta_model
from mira_engine.checkpoint.experts import CheckpointExperts
from mira_engine.checkpoint.hub_home import folder_figures
from mira_engine.checkpoint.preflight import KeyKind, classify_keys, examine
from mira_engine.checkpoint.shards import CheckpointShards
from mira_engine.errors import CheckpointError, FormatError, UnsupportedModelError
from mira_engine.types import Precision

INDEX = "model.safetensors.index.json"

PUBLISHED = {
    "DeepSeek-V2-Lite": (15.7e9, 64, 26, 8.25),
    "Mixtral-8x7B": (46.7e9, 8, 32, 168),
    "OLMoE-1B-7B": (6.9e9, 64, 16, 6),
    "Phi-3.5-MoE": (41.9e9, 16, 32, 75),
    "PowerMoE-3B": (3.3e9, 40, 32, 2.25),
    "Qwen1.5-MoE-A2.7B": (14.3e9, 60, 24, 8.25),
    "gpt-oss-20b": (20.9e9, 32, 24, 23.7),
}
"""Parameters, experts a layer, MoE layers, MiB of one expert in INT8 without scales."""

INDEXES = {
    "Qwen3.5-25B-REAP-A3B-Coding": {KeyKind.EXPERT: 21_600, KeyKind.BACKBONE: 613},
    "WizardLM-2-8x22B": {KeyKind.EXPERT: 1_344, KeyKind.BACKBONE: 395},
    "gpt-oss-20b": {KeyKind.EXPERT: 144, KeyKind.BACKBONE: 315},
}


def read_index(folder):
    index = json.loads((folder / INDEX).read_text())
    return index["weight_map"], index["metadata"]["total_size"]


@pytest.mark.parametrize("name", INDEXES)
def test_classify_keys_of_real_index_leaves_none_unknown(name, shared_inputs):
    keys, total = read_index(shared_inputs / "data" / "configs" / name)
    found = examine(shared_inputs / "data" / "configs" / name, keys=keys, weights_bytes=total)
    assert found.kinds == INDEXES[name]
    assert sum(found.kinds.values()) == len(keys)


@pytest.mark.parametrize("name", PUBLISHED)
def test_examine_real_config_gives_the_published_sizes(name, shared_inputs):
    num_parameters, num_experts, num_layers, expert_mib = PUBLISHED[name]
    found = examine(shared_inputs / "data" / "configs" / name)
    assert found.num_parameters == pytest.approx(num_parameters, rel=0.01)
    assert (found.num_experts, len(found.modules)) == (num_experts, num_layers)
    assert found.shape.num_weights / 2**20 == pytest.approx(expert_mib, rel=0.01)
    int8 = num_layers * num_experts * expert_mib * 2**20
    assert found.store_bytes(Precision.INT8) == pytest.approx(int8, rel=0.01)
    assert found.store_bytes(Precision.BF16) == pytest.approx(2 * int8, rel=0.01)


def test_examine_index_of_a_float_model_agrees_with_its_total(shared_inputs):
    for name in ("WizardLM-2-8x22B", "Qwen3.5-25B-REAP-A3B-Coding"):
        folder = shared_inputs / "data" / "configs" / name
        keys, total = read_index(folder)
        found = examine(folder, keys=keys, weights_bytes=total)
        assert found.problem is None
        assert found.num_parameters * 2 == pytest.approx(total, rel=0.001)
        whole = found.store_bytes(Precision.BF16) + found.backbone_bytes
        assert whole == pytest.approx(total, rel=0.01)


def test_examine_mxfp4_model_runs_and_is_kept_in_bfloat16(shared_inputs):
    folder = shared_inputs / "data" / "configs" / "gpt-oss-20b"
    keys, total = read_index(folder)
    found = examine(folder, keys=keys, weights_bytes=total)
    assert found.problem is None
    assert found.backbone_bytes == 2 * (found.num_parameters - found.num_expert_parameters)
    int8 = found.store_bytes(Precision.INT8)
    assert int8 == pytest.approx(found.num_expert_parameters, rel=0.01)
    assert found.peak_bytes((Precision.INT8,)) == pytest.approx(
        total + int8 + found.backbone_bytes, rel=0.002
    )
    assert examine(folder).weights_bytes == pytest.approx(total, rel=0.002)


@pytest.mark.parametrize("missing", ["layers.3.mlp.experts.down_proj_", "lm_head.weight"])
def test_examine_mxfp4_index_with_a_gap_says_which(shared_inputs, missing):
    folder = shared_inputs / "data" / "configs" / "gpt-oss-20b"
    keys = {key: name for key, name in read_index(folder)[0].items() if missing not in key}
    problem = examine(folder, keys=keys).problem
    assert isinstance(problem, CheckpointError)
    assert missing.rstrip("_") in problem.message


def test_examine_fp8_model_runs_with_the_sizes_of_its_files(tmp_path):
    folder = stored_forms.save_shaped(
        "qwen3_moe",
        tmp_path,
        hidden_size=256,
        moe_intermediate_size=384,
        intermediate_size=384,
        num_hidden_layers=2,
    )
    backbone = CheckpointExperts(folder)
    backbone_bytes = sum(backbone.shards[key].num_bytes for key in backbone.backbone_keys)
    stored_forms.to_fp8(folder)
    shards = CheckpointShards(folder)
    keys = dict.fromkeys(shards, "model.safetensors")
    assert any(key.endswith("_scale_inv") for key in keys)
    size = (folder / "model.safetensors").stat().st_size
    found = examine(folder, keys=keys, shard_bytes={"model.safetensors": size})
    assert found.problem is None
    assert set(found.kinds) == {KeyKind.EXPERT, KeyKind.BACKBONE}
    assert found.weights_bytes == size
    assert found.backbone_bytes == backbone_bytes
    assert examine(folder).weights_bytes == pytest.approx(size, rel=0.03)


@pytest.mark.parametrize("method", ["awq", "bitsandbytes", "compressed-tensors", "gptq"])
def test_examine_other_quantised_model_is_described_and_refused_by_name(tmp_path, method):
    config = tiny_models.tiny_config("qwen3_moe")
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.quantization_config = {"quant_method": method}
    config.save_pretrained(tmp_path)
    found = examine(tmp_path)
    assert isinstance(found.problem, UnsupportedModelError)
    assert method in found.problem.message
    assert found.num_experts == 8


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_classify_keys_of_every_tiny_family_leaves_none_unknown(family, tiny_checkpoint):
    folder = tiny_checkpoint(family)
    model = meta_model(load_config(folder))
    kinds = dict(classify_keys(model, CheckpointShards(folder)))
    assert set(kinds.values()) <= {KeyKind.EXPERT, KeyKind.BACKBONE}
    found = examine(folder, keys=dict.fromkeys(kinds, "model.safetensors"))
    assert found.problem is None


@pytest.mark.parametrize(
    ("key", "kind"),
    [
        ("mtp.layers.0.mlp.gate.weight", KeyKind.SKIPPED),
        ("model.visual.blocks.0.attn.qkv.weight", KeyKind.SKIPPED),
        ("vision_tower.encoder.layers.0.weight", KeyKind.SKIPPED),
        ("model.layers.3.mlp.experts.0.up_proj.weight", KeyKind.SKIPPED),
        ("model.layers.0.self_attn.rotary_emb.inv_freq", KeyKind.SKIPPED),
        ("model.layers.1.mlp.experts.0.up_proj.weight", KeyKind.EXPERT),
        ("model.layers.1.mlp.experts.0.up_proj.weight_scale_inv", KeyKind.EXPERT),
        ("model.layers.1.mlp.experts.0.up_proj.weight_scale", KeyKind.EXPERT),
        ("model.layers.1.mlp.experts.0.up_proj.activation_scale", KeyKind.EXPERT),
        ("model.layers.1.mlp.experts.0.up_proj.qweight", KeyKind.EXPERT),
        ("model.layers.1.self_attn.q_proj.weight_scale_inv", KeyKind.BACKBONE),
        ("audio_tower.layers.0.weight", KeyKind.SKIPPED),
        ("model.layers.3.self_attn.q_proj.weight_scale_inv", KeyKind.SKIPPED),
        ("model.layers.1.mlp.gate.weight", KeyKind.BACKBONE),
        ("model.layers.1.mlp.surprise.weight", KeyKind.UNKNOWN),
    ],
)
def test_classify_keys_tells_the_kinds_apart(key, kind, tiny_checkpoint):
    model = meta_model(load_config(tiny_checkpoint("qwen3_moe")))
    assert dict(classify_keys(model, [key])) == {key: kind}


@pytest.mark.parametrize(
    ("dropped", "words"),
    [
        ("layers.2.mlp.experts.", "no tensors for"),
        ("layers.1.mlp.experts.3.", "7 experts for"),
        ("lm_head.weight", "no tensors for lm_head.weight"),
        ("layers.0.self_attn.o_proj", "no tensors for model.layers.0.self_attn.o_proj.weight"),
    ],
)
def test_examine_index_that_lacks_experts_says_which(dropped, words, tiny_checkpoint):
    folder = tiny_checkpoint("qwen3_moe")
    keys = {key: "model.safetensors" for key in CheckpointShards(folder) if dropped not in key}
    problem = examine(folder, keys=keys).problem
    assert isinstance(problem, CheckpointError)
    assert words in problem.message


def test_examine_family_that_is_dense_or_unknown_is_raised(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "own_moe"}))
    with pytest.raises(UnsupportedModelError, match="own_moe"):
        examine(tmp_path)


def test_examine_experts_that_no_group_fits_are_refused_by_every_format(tmp_path):
    config = tiny_models.tiny_config("qwen3_moe")
    config.moe_intermediate_size = 20
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    assert isinstance(examine(tmp_path).problem, FormatError)


def test_peak_deleting_is_what_is_made_and_a_few_shards(shared_inputs):
    folder = shared_inputs / "data" / "configs" / "WizardLM-2-8x22B"
    keys, total = read_index(folder)
    names = sorted(set(keys.values()))
    shard = total // len(names)
    found = examine(folder, keys=keys, shard_bytes=dict.fromkeys(names, shard))
    for stores in ((Precision.NESTED,), (Precision.INT8, Precision.INT4)):
        made = sum(map(found.store_bytes, stores)) + found.backbone_bytes
        assert found.peak_bytes(stores) == pytest.approx(total + made, rel=0.001)
        assert made < found.peak_deleting_bytes(stores) < made + 3 * shard


def test_peak_deleting_without_names_is_not_known(shared_inputs):
    folder = shared_inputs / "data" / "configs" / "OLMoE-1B-7B"
    assert examine(folder).peak_deleting_bytes((Precision.NESTED,)) is None


def test_shard_parameters_are_those_of_the_backbone(tiny_checkpoint):
    folder = tiny_checkpoint("qwen3_moe", max_shard_size="100KB")
    found = folder_figures(folder)
    experts = CheckpointExperts(folder)
    expected = {}
    for key in experts.backbone_keys:
        name = experts.shards.shard_of(key)
        expected[name] = expected.get(name, 0) + experts.shards[key].num_bytes // 4
    assert found.shard_parameters == expected


def test_draft_bytes_are_the_hi_planes_or_the_int4_store(shared_inputs):
    found = examine(shared_inputs / "data" / "configs" / "OLMoE-1B-7B")
    assert 2 * found.draft_bytes(Precision.NESTED) == pytest.approx(
        found.store_bytes(Precision.NESTED), rel=0.04
    )
    assert found.draft_bytes(Precision.INT8) == pytest.approx(
        found.store_bytes(Precision.INT4), rel=0.001
    )
