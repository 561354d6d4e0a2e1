"""The tiny checkpoints are what other tests take them for."""

from __future__ import annotations

import json

import pytest
import torch
import transformers
from tiny_families import SLIDING_WINDOW
from tiny_hybrids import RECURRENT_FAMILIES
from tiny_models import FAMILIES, IM_END_ID, IM_START_ID, tiny_config, tiny_tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

NUM_TOKENS = 32


def load(folder):
    """The model, of the class that its checkpoint names, and a text."""
    (architecture,) = json.loads((folder / "config.json").read_text())["architectures"]
    model_class = getattr(transformers, architecture)
    model = model_class.from_pretrained(folder, dtype=torch.float32).eval()
    generator = torch.Generator().manual_seed(1)
    return model, torch.randint(0, 256, (1, NUM_TOKENS), generator=generator)


def expert_modules(model):
    return [module for module in model.modules() if hasattr(module, "has_gate")]


@pytest.mark.parametrize("family", FAMILIES)
def test_checkpoint_read_back_routes_tokens_to_different_experts(family, tiny_checkpoint):
    model, token_ids = load(tiny_checkpoint(family))
    modules = expert_modules(model)
    chosen: dict[torch.nn.Module, torch.Tensor] = {}
    for module in modules:
        module.register_forward_pre_hook(lambda module, args: chosen.update({module: args[1]}))
    with torch.no_grad():
        logits = model(token_ids).logits[0]
    assert len(modules) >= 2
    for module in modules:
        assert chosen[module].shape == (NUM_TOKENS, 1 if family == "zaya" else 2)
        assert len(chosen[module].unique()) >= 3
    assert logits.isfinite().all()
    assert len(logits.argmax(dim=-1).unique()) >= NUM_TOKENS // 4


@pytest.mark.parametrize("family", FAMILIES)
def test_greedy_text_of_checkpoint_is_not_one_token(family, tiny_checkpoint):
    model, token_ids = load(tiny_checkpoint(family))
    text = model.generate(token_ids[:, :12], max_new_tokens=20, do_sample=False)[0, 12:]
    assert len(text) == 20, "ended early"
    assert len(text.unique()) >= 5
    assert text.max() < IM_START_ID


@pytest.mark.parametrize("family", ["mixtral", "qwen2_moe", "qwen3_moe", "phimoe", "gpt_oss"])
def test_sliding_window_is_seen_in_the_logits(family, tiny_checkpoint):
    """A token that left every window changes nothing; with full attention it would."""
    model, token_ids = load(tiny_checkpoint(family))
    full = AutoModelForCausalLM.from_pretrained(
        tiny_checkpoint(family), dtype=torch.float32, sliding_window=4096
    )
    assert model.config.sliding_window == SLIDING_WINDOW
    with torch.no_grad():
        windowed, whole = model(token_ids).logits[0], full(token_ids).logits[0]
    assert torch.allclose(windowed[: SLIDING_WINDOW - 1], whole[: SLIDING_WINDOW - 1], atol=1e-5)
    assert not torch.allclose(windowed[-1], whole[-1], atol=1e-3)


@pytest.mark.parametrize("family", RECURRENT_FAMILIES)
def test_recurrent_family_has_recurrent_and_attention_layers(family):
    layer_types = set(tiny_config(family).get_text_config().layer_types)
    assert "linear_attention" in layer_types
    assert layer_types & {"full_attention", "indexed_attention"}


def test_same_seed_gives_same_bytes_and_another_seed_others(tmp_path):
    from tiny_models import save_tiny

    weights = [
        (save_tiny("olmoe", tmp_path / name, seed=seed) / "model.safetensors").read_bytes()
        for name, seed in (("a", 0), ("b", 0), ("c", 1))
    ]
    assert weights[0] == weights[1] != weights[2]


def test_small_shards_give_an_index(tiny_checkpoint):
    folder = tiny_checkpoint("qwen2_moe", dtype=torch.bfloat16, max_shard_size="60KB")
    index = json.loads((folder / "model.safetensors.index.json").read_text())
    files = set(index["weight_map"].values())
    assert len(files) > 3
    assert all((folder / name).is_file() for name in files)


def test_tokenizer_maps_bytes_and_renders_chats(tmp_path):
    tokenizer = AutoTokenizer.from_pretrained(tiny_tokenizer(tmp_path))
    text = "Hé 😀\n\tx  y"
    ids = tokenizer(text)["input_ids"]
    assert ids == list(text.encode())
    assert tokenizer.decode(ids) == text
    chat = [{"role": "user", "content": "hi"}]
    rendered = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    assert rendered == "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\n"
    assert tokenizer(rendered)["input_ids"].count(IM_END_ID) == 1
