"""What the engine cannot run is refused by name, from the configuration alone."""

import json

import pytest
import tiny_models
import torch
import transformers
from mira_engine.checkpoint.experts import CheckpointExperts, find_expert_modules, meta_model
from mira_engine.checkpoint.shards import INDEX_FILE
from mira_engine.errors import CheckpointError, MiraError, UnknownModelError, UnsupportedModelError
from mira_engine.library import ModelLibrary
from mira_engine.prepare import prepare
from mira_engine.types import Precision

OUTSIDE = {
    "llama4": transformers.Llama4TextConfig(num_hidden_layers=2, vocab_size=64),
    "jetmoe": transformers.JetMoeConfig(num_hidden_layers=2, vocab_size=64),
    "dbrx": transformers.DbrxConfig(
        n_layers=2, vocab_size=64, attn_config={"kv_n_heads": 8, "rope_theta": 500000.0}
    ),
}
CLASSES = {"llama4": "Llama4ForCausalLM", "jetmoe": "JetMoeForCausalLM", "dbrx": "DbrxForCausalLM"}


def write_config(folder, config, architecture):
    config.architectures = [architecture]
    config.save_pretrained(folder)


def refuse(folder, tmp_path):
    """Prepares and returns the error; the folder has no weights, so none can be touched."""
    home = ModelLibrary(tmp_path / "data").resolve(str(folder))
    seen = []
    with pytest.raises(MiraError) as caught:
        prepare(home, Precision.NESTED, on_progress=lambda *args: seen.append(args))
    assert seen == []
    assert not (tmp_path / "data").exists()
    return caught.value


@pytest.mark.parametrize("family", OUTSIDE)
def test_family_outside_the_interface_is_refused_by_name(family, tmp_path):
    write_config(tmp_path / "m", OUTSIDE[family], CLASSES[family])
    error = refuse(tmp_path / "m", tmp_path)
    assert type(error) is UnsupportedModelError
    assert family in error.message
    assert "outside transformers' experts interface" in error.message


def test_multimodal_llama4_is_refused_by_name(tmp_path):
    config = transformers.Llama4Config(
        text_config={"num_hidden_layers": 2}, vision_config={"num_hidden_layers": 1}
    )
    write_config(tmp_path / "m", config, "Llama4ForConditionalGeneration")
    error = refuse(tmp_path / "m", tmp_path)
    assert "llama4" in error.message
    assert "outside" in error.message


def test_dense_model_is_refused_in_other_words(tmp_path):
    config = transformers.LlamaConfig(num_hidden_layers=2, hidden_size=64, num_attention_heads=4)
    write_config(tmp_path / "m", config, "LlamaForCausalLM")
    error = refuse(tmp_path / "m", tmp_path)
    assert type(error) is UnsupportedModelError
    assert "llama" in error.message
    assert "dense" in error.message


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        (
            {"model_type": "own_moe", "auto_map": {"AutoConfig": "configuration_own.OwnConfig"}},
            "needs code from its own repository",
        ),
        ({"model_type": "own_moe"}, "unknown to transformers"),
        ({"model_type": "vit", "auto_map": {"AutoModel": "x.Y"}}, "needs code"),
    ],
)
def test_model_that_needs_its_own_code_is_refused_and_the_code_not_run(tmp_path, fields, words):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(fields))
    (folder / "configuration_own.py").write_text("raise SystemExit('remote code ran')")
    error = refuse(folder, tmp_path)
    assert type(error) is UnsupportedModelError
    assert words in error.message
    assert fields["model_type"] in error.message


def test_family_that_transformers_has_ignores_the_repositorys_code(tiny_checkpoint, tmp_path):
    folder = tmp_path / "m"
    folder.mkdir()
    for path in tiny_checkpoint("qwen2_moe").iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((folder / "config.json").read_text())
    config["auto_map"] = {"AutoModelForCausalLM": "modeling_own.OwnForCausalLM"}
    config["architectures"] = ["OwnForCausalLM"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "modeling_own.py").write_text("raise SystemExit('remote code ran')")
    assert CheckpointExperts(folder).load(0, 0).up.shape == (64, 64)


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_quantised_checkpoint_is_refused_by_method(tmp_path, method):
    config = tiny_models.tiny_config("gpt_oss")
    config.quantization_config = {"quant_method": method}
    write_config(tmp_path / "m", config, "GptOssForCausalLM")
    error = refuse(tmp_path / "m", tmp_path)
    assert type(error) is UnsupportedModelError
    assert method in error.message


def test_format_that_no_group_fits_is_refused_before_anything_is_written(tmp_path):
    config = tiny_models.tiny_config("qwen2_moe")
    config.moe_intermediate_size = 20
    config.architectures = ["Qwen2MoeForCausalLM"]
    model = transformers.Qwen2MoeForCausalLM(config)
    model.save_pretrained(tmp_path / "m")
    assert "20" in refuse(tmp_path / "m", tmp_path).message


@pytest.mark.parametrize("text", ["", "[]", "no json"])
def test_config_unreadable_is_named(tmp_path, text):
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "config.json").write_text(text)
    error = refuse(folder, tmp_path)
    assert type(error) is CheckpointError
    assert "config.json" in error.message


def test_config_that_transformers_cannot_read_is_named(tmp_path):
    write_config(tmp_path / "m", tiny_models.tiny_config("mixtral"), "MixtralForCausalLM")
    path = tmp_path / "m" / "config.json"
    fields = json.loads(path.read_text()) | {"num_hidden_layers": "two"}
    path.write_text(json.dumps(fields))
    error = refuse(tmp_path / "m", tmp_path)
    assert type(error) is CheckpointError
    assert "num_hidden_layers" in error.message


def test_folder_without_config_is_unknown(tmp_path):
    with pytest.raises(UnknownModelError, match=r"config\.json"):
        CheckpointExperts(tmp_path)


def drop_keys(folder, drop):
    """Takes tensors out of a single-file checkpoint."""
    from safetensors.torch import load_file, save_file

    path = folder / "model.safetensors"
    kept = {key: tensor for key, tensor in load_file(path).items() if not drop(key)}
    save_file(kept, path, metadata={"format": "pt"})


@pytest.mark.parametrize(
    ("family", "dropped", "words"),
    [
        ("qwen2_moe", "layers.1.mlp.experts.3.up_proj", "Expert 3 is missing"),
        ("qwen2_moe", "layers.1.mlp.experts.7.down_proj", "7 experts for .*8 expected"),
        ("qwen2_moe", "layers.2.mlp.experts.", "no tensors for"),
        ("gpt_oss", "layers.0.mlp.experts.down_proj_bias", "no tensors for"),
    ],
)
def test_experts_missing_from_the_checkpoint_are_named(tmp_path, family, dropped, words):
    folder = tiny_models.save_tiny(family, tmp_path / "m")
    drop_keys(folder, lambda key: dropped in key)
    with pytest.raises(CheckpointError, match=words):
        CheckpointExperts(folder)


def test_whole_projection_missing_is_named(tmp_path):
    folder = tiny_models.save_tiny("qwen2_moe", tmp_path / "m")
    drop_keys(folder, lambda key: "layers.1.mlp.experts" in key and "gate_proj" in key)
    with pytest.raises(CheckpointError, match="gate_proj"):
        CheckpointExperts(folder)


def test_sharded_checkpoint_reads_like_a_single_file(tmp_path):
    single = tiny_models.save_tiny("qwen3_moe", tmp_path / "single")
    sharded = tiny_models.save_tiny("qwen3_moe", tmp_path / "sharded", max_shard_size="100KB")
    assert (sharded / INDEX_FILE).exists()
    one, many = CheckpointExperts(single), CheckpointExperts(sharded)
    assert sorted(one.backbone_keys) == sorted(many.backbone_keys)
    for expert in range(one.num_experts):
        assert torch.equal(one.load(1, expert).up, many.load(1, expert).up)


def test_load_outside_the_layer_is_an_index_error(tiny_checkpoint):
    checkpoint = CheckpointExperts(tiny_checkpoint("qwen2_moe"))
    with pytest.raises(IndexError):
        checkpoint.load(0, checkpoint.num_experts)
    with pytest.raises(IndexError):
        checkpoint.load(0, -1)


def test_find_expert_modules_with_unlike_layers_is_refused():
    config = tiny_models.tiny_config("qwen2_moe")
    config.architectures = ["Qwen2MoeForCausalLM"]
    model = meta_model(config)
    model.model.layers[1].mlp.experts.num_experts = 4
    with pytest.raises(UnsupportedModelError, match="qwen2_moe"):
        find_expert_modules(model)
