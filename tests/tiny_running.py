"""Tiny random checkpoints of families with running state that `tiny_models` does not have."""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

_SHARED = {
    "vocab_size": 264,
    "hidden_size": 64,
    "num_hidden_layers": 4,
    "layer_types": ["linear_attention", "full_attention"] * 2,
    "num_attention_heads": 4,
    "moe_intermediate_size": 32,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 512,
    "bos_token_id": 256,
    "eos_token_id": 257,
    "pad_token_id": 259,
}

_FAMILY_FIELDS: dict[str, dict[str, object]] = {
    "qwen3_5_moe_text": {
        "num_key_value_heads": 2,
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "shared_expert_intermediate_size": 64,
        "num_experts": 8,
    },
    "kimi_linear": {
        "num_key_value_heads": 4,
        "intermediate_size": 96,
        "kv_lora_rank": 32,
        "qk_rope_head_dim": 8,
        "qk_nope_head_dim": 16,
        "v_head_dim": 16,
        "linear_head_dim": 16,
        "linear_num_heads": 4,
        "num_local_experts": 8,
    },
}

OTHER_FAMILIES = tuple(_FAMILY_FIELDS)


def save_other(family: str, folder: Path) -> Path:
    """Writes a random checkpoint of one of `OTHER_FAMILIES`, always the same one.

    Matrices have unit gain; the scans' own constants stay as the family sets them.
    """
    config = AutoConfig.for_model(family, **_SHARED | _FAMILY_FIELDS[family])
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for name, parameter in model.named_parameters():
            if parameter.ndim >= 2 and "conv" not in name and "A_log" not in name:
                gain = 1.0 if "embed" in name else 1.5 * parameter.shape[-1] ** -0.5
                parameter.normal_(std=gain)
    model.save_pretrained(folder)
    return folder
