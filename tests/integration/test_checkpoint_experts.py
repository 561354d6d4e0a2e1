"""Contract with transformers' key mapping: one expert from disk equals the loaded model's."""

import re

import pytest
import stored_forms
import tiny_models
import torch
import transformers
from mira_engine.checkpoint.experts import (
    CheckpointExperts,
    expert_modules_of,
    find_expert_modules,
    meta_model,
)

TEXT_FIELDS = (
    "vocab_size", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim",
    "max_position_embeddings", "intermediate_size", "moe_intermediate_size", "num_experts",
    "num_experts_per_tok", "mlp_only_layers",
)  # fmt: skip
SHAPES_AS_LOADED = {"gate_up_proj": (96, 64), "down_proj": (64, 48)}
"""Of experts with 48 hidden units."""
EXPERT_KEY = re.compile(r"\.experts\.(\d+\.|.*_proj)")
"""An expert's matrices; a norm or a bias for all experts may stand beside them."""


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_load_each_expert_equals_the_loaded_models_slice(family, tmp_path):
    folder = tiny_models.save_tiny(family, tmp_path / family)
    checkpoint = CheckpointExperts(folder)
    model_class = getattr(transformers, checkpoint.config.architectures[0])
    model = model_class.from_pretrained(folder, dtype=torch.float32)
    modules = dict(model.named_modules())
    assert [module.layer for module in checkpoint.modules] == list(range(len(checkpoint.modules)))
    num_compared = 0
    for module in checkpoint.modules:
        loaded = modules[module.name]
        first = "gate_up_proj" if loaded.has_gate else "up_proj"
        for expert in range(module.num_experts):
            got = checkpoint.load(module.layer, expert)
            for name, tensor in ((first, got.up), ("down_proj", got.down)):
                wanted = getattr(loaded, name)[expert]
                wanted = wanted.t() if loaded.is_transposed else wanted
                assert torch.equal(tensor, wanted)
                assert tensor.is_contiguous()
            if loaded.has_bias:
                assert torch.equal(got.up_bias, getattr(loaded, f"{first}_bias")[expert])
                assert torch.equal(got.down_bias, loaded.down_proj_bias[expert])
            else:
                assert got.up_bias is None
            assert got.up.shape == (module.shape.up_rows, module.shape.hidden_size)
            assert got.down.shape == (module.shape.hidden_size, module.shape.intermediate_size)
            num_compared += 1
    assert num_compared >= 4


@pytest.mark.parametrize("is_stored_transposed", [False, True])
def test_fused_experts_that_may_be_stored_transposed_equal_the_loaded_models(
    tmp_path, is_stored_transposed
):
    """A family whose mapping looks at the whole parameter's shape to decide."""
    text = tiny_models.tiny_config("qwen3_moe")
    config = transformers.Qwen3VLMoeConfig(
        text_config={name: getattr(text, name) for name in TEXT_FIELDS}
        | {"num_hidden_layers": 2, "moe_intermediate_size": 48},
        vision_config={"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2,
                       "out_hidden_size": 64, "deepstack_visual_indexes": [0]},
    )  # fmt: skip
    torch.manual_seed(0)
    transformers.Qwen3VLMoeForConditionalGeneration(config).save_pretrained(tmp_path)

    def arrange(tensors):
        made = {}
        for key, tensor in tensors.items():
            is_fused = key.endswith(("experts.gate_up_proj", "experts.down_proj"))
            wanted = SHAPES_AS_LOADED.get(key.rpartition(".")[2])
            if is_fused and (tuple(tensor.shape[1:]) == wanted) is is_stored_transposed:
                tensor = tensor.transpose(1, 2)
            made[key] = tensor
        return made

    stored_forms.rewrite(tmp_path, arrange)
    model = transformers.Qwen3VLMoeForConditionalGeneration.from_pretrained(
        tmp_path, dtype=torch.float32
    )
    checkpoint = CheckpointExperts(tmp_path)
    modules = dict(model.named_modules())
    for module in checkpoint.modules:
        for expert in range(module.num_experts):
            got = checkpoint.load(module.layer, expert)
            assert torch.equal(got.up, modules[module.name].gate_up_proj[expert])
            assert torch.equal(got.down, modules[module.name].down_proj[expert])


@pytest.mark.parametrize("family", tiny_models.FAMILIES)
def test_backbone_keys_are_all_that_a_model_without_experts_needs(family, tmp_path):
    folder = tiny_models.save_tiny(family, tmp_path / family)
    checkpoint = CheckpointExperts(folder)
    assert set(checkpoint.backbone_keys) < set(checkpoint.shards)
    assert not [key for key in checkpoint.backbone_keys if EXPERT_KEY.search(key)]
    expert_bytes = sum(m.num_experts * m.shape.num_weights for m in checkpoint.modules)
    sizes = {key: checkpoint.shards[key].num_bytes for key in checkpoint.shards}
    rest = sum(sizes.values()) - sum(sizes[key] for key in checkpoint.backbone_keys)
    assert rest >= 4 * expert_bytes


def test_find_expert_modules_of_a_model_without_parameters_takes_meta_shapes():
    config = tiny_models.tiny_config("qwen2_moe")
    config.architectures = ["Qwen2MoeForCausalLM"]
    model = meta_model(config)
    whole = find_expert_modules(model)
    for _, module in expert_modules_of(model):
        module.gate_up_proj = None
        module.down_proj = None
    assert find_expert_modules(model) == whole
