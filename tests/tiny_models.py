"""Tiny random Mixture-of-Experts checkpoints, one per supported family.

Owns the shapes and the weights, nothing of the engine. Everything is seeded: the same
family, seed and dtype give the same bytes. The weights are scaled so that activations
stay near unit size through all layers; hence logits differ clearly between tokens,
routers choose different experts for different tokens, and greedy text is not one token
for ever. The special tokens' output rows are damped, so that a random model does not
end its text by chance; a test that wants an early end sets its own end-of-text ids.
"""

from __future__ import annotations

import math
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
)

HIDDEN_SIZE = 64
VOCAB_SIZE = 264
"""256 bytes, the four special tokens, and four ids that no text uses."""

SLIDING_WINDOW = 8
"""Tokens. Small, so that a short text leaves the window."""

IM_START_ID, IM_END_ID, END_OF_TEXT_ID, PAD_ID = 256, 257, 258, 259
SPECIAL_TOKENS = ("<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|pad|>")

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n"
    "{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)

_SHARED = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": HIDDEN_SIZE,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "tie_word_embeddings": False,
    "bos_token_id": IM_START_ID,
    "eos_token_id": IM_END_ID,
    "pad_token_id": PAD_ID,
}

_MLA = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "first_k_dense_replace": 1,
    "moe_intermediate_size": 32,
    "intermediate_size": 96,
    "num_hidden_layers": 3,
    "n_routed_experts": 8,
    "num_experts_per_tok": 2,
}

_MAMBA2 = {"mamba_n_heads": 4, "mamba_d_head": 32, "mamba_d_state": 16, "mamba_n_groups": 2}

_FAMILY_FIELDS: dict[str, dict[str, object]] = {
    "mixtral": {
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "sliding_window": SLIDING_WINDOW,
    },
    "qwen2_moe": {
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "norm_topk_prob": True,
        "use_sliding_window": True,
        "sliding_window": SLIDING_WINDOW,
        "max_window_layers": 1,
    },
    "qwen3_moe": {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "mlp_only_layers": [0],
        "use_sliding_window": True,
        "sliding_window": SLIDING_WINDOW,
    },
    "deepseek_v2": {
        **_MLA,
        "topk_method": "group_limited_greedy",
        "n_group": 2,
        "topk_group": 1,
        "n_shared_experts": 1,
    },
    "deepseek_v3": {**_MLA, "n_group": 2, "topk_group": 1, "n_shared_experts": 1},
    "phimoe": {
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_local_experts": 8,
        "sliding_window": SLIDING_WINDOW,
    },
    "olmoe": {
        "num_hidden_layers": 2,
        "intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "gpt_oss": {
        "num_hidden_layers": 4,
        "head_dim": 16,
        "intermediate_size": 64,
        "num_local_experts": 4,
        "num_experts_per_tok": 2,
        "sliding_window": SLIDING_WINDOW,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 150000.0,
            "factor": 32.0,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": False,
            "original_max_position_embeddings": 16,
        },
    },
    "glm4_moe": {
        "num_hidden_layers": 3,
        "head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "use_qk_norm": True,
    },
    "granitemoe": {"num_hidden_layers": 2, "intermediate_size": 32, "num_local_experts": 8},
    "ernie4_5_moe": {
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "moe_num_experts": 8,
        "moe_k": 2,
        "moe_num_shared_experts": 1,
        "moe_layer_start_index": 1,
        "tie_word_embeddings": True,
    },
    "hunyuan_v1_moe": {
        "num_hidden_layers": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "num_experts": 8,
        "moe_topk": 2,
    },
    "minimax_m2": {
        "num_hidden_layers": 2,
        "head_dim": 16,
        "intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
    },
    "dots1": {
        "num_hidden_layers": 3,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "n_routed_experts": 8,
        "n_shared_experts": 1,
        "num_experts_per_tok": 2,
        "first_k_dense_replace": 1,
        "norm_topk_prob": True,
        "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
        "sliding_window": SLIDING_WINDOW,
    },
    "flex_olmo": {
        "num_hidden_layers": 2,
        "intermediate_size": 64,
        "num_experts": 4,
        "num_experts_per_tok": 2,
    },
    "lfm2_moe": {
        "num_hidden_layers": 4,
        "layer_types": ["conv", "full_attention", "conv", "full_attention"],
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "num_dense_layers": 1,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "tie_word_embeddings": True,
    },
    "jamba": {
        "num_hidden_layers": 4,
        "attn_layer_period": 4,
        "attn_layer_offset": 1,
        "expert_layer_period": 2,
        "expert_layer_offset": 1,
        "intermediate_size": 32,
        "num_experts": 8,
        "num_experts_per_tok": 2,
        "mamba_d_state": 8,
        "mamba_dt_rank": 4,
    },
    "qwen3_next": {
        "num_hidden_layers": 4,
        "layer_types": [
            "linear_attention", "full_attention", "linear_attention", "full_attention",
        ],
        "head_dim": 16,
        "linear_num_key_heads": 2,
        "linear_num_value_heads": 4,
        "linear_key_head_dim": 16,
        "linear_value_head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 64,
        "num_experts": 8,
        "num_experts_per_tok": 2,
    },
    "nemotron_h": {
        "num_hidden_layers": 4,
        "layers_block_type": ["linear_attention", "moe", "full_attention", "moe"],
        "head_dim": 16,
        "intermediate_size": 96,
        "moe_intermediate_size": 32,
        "moe_shared_expert_intermediate_size": 64,
        "n_routed_experts": 8,
        "num_experts_per_tok": 2,
        "mamba_num_heads": 4,
        "mamba_head_dim": 32,
        "ssm_state_size": 16,
        "n_groups": 2,
        "chunk_size": 8,
    },
    "granitemoehybrid": {
        **_MAMBA2,
        "num_hidden_layers": 3,
        "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        "intermediate_size": 32,
        "shared_intermediate_size": 64,
        "num_local_experts": 8,
        "num_experts_per_tok": 2,
        "mamba_chunk_size": 8,
        "position_embedding_type": "rope",
    },
}  # fmt: skip

FAMILIES = tuple(_FAMILY_FIELDS)
"""The families, by transformers' `model_type`."""

RECURRENT_FAMILIES = ("jamba", "qwen3_next", "nemotron_h", "granitemoehybrid")
"""Families whose state cannot be rolled back: speculation is off for them."""


def tiny_config(family: str, *, has_windows: bool = True) -> PreTrainedConfig:
    """Returns the family's configuration in its tiny shape.

    Args:
        family: One of `FAMILIES`.
        has_windows: Whether families that can have sliding windows have them.

    Raises:
        KeyError: The family is none of `FAMILIES`.
    """
    fields = _SHARED | _FAMILY_FIELDS[family]
    if not has_windows:
        fields = fields | {"sliding_window": None, "use_sliding_window": False}
        fields.pop("layer_types", None)
    return AutoConfig.for_model(family, **fields)


def save_tiny(
    family: str,
    folder: Path,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.float32,
    max_shard_size: str = "1GB",
    has_windows: bool = True,
) -> Path:
    """Writes a random checkpoint of the family, as `save_pretrained` does.

    Args:
        family: One of `FAMILIES`.
        folder: Where to write; made if it does not exist.
        seed: Seed of the weights.
        dtype: Type of the stored weights.
        max_shard_size: Size above which the weights are split into several files.
        has_windows: Whether families that can have sliding windows have them.

    Returns:
        `folder`.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        config = tiny_config(family, has_windows=has_windows)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        _scale_weights(model)
    model.generation_config = GenerationConfig(
        bos_token_id=IM_START_ID, eos_token_id=[IM_END_ID, END_OF_TEXT_ID], pad_token_id=PAD_ID
    )
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def tiny_tokenizer(folder: Path) -> Path:
    """Writes a byte-level tokenizer with a chat template: token id = byte value.

    The special tokens are `SPECIAL_TOKENS`, ids from 256.

    Returns:
        `folder`.
    """
    byte_to_char = _byte_alphabet()
    vocabulary = {char: byte for byte, char in enumerate(byte_to_char)}
    backend = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(list(SPECIAL_TOKENS))
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=backend,
        bos_token="<|im_start|>",
        eos_token="<|im_end|>",
        pad_token="<|pad|>",
        additional_special_tokens=["<|endoftext|>"],
        model_max_length=512,
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    tokenizer.save_pretrained(folder)
    return folder


def _byte_alphabet() -> list[str]:
    """The character that stands for each byte in byte-level vocabularies, by byte value."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    chars = {byte: chr(byte) for byte in printable}
    others = [byte for byte in range(256) if byte not in chars]
    chars.update({byte: chr(256 + position) for position, byte in enumerate(others)})
    return [chars[byte] for byte in range(256)]


@torch.no_grad()
def _scale_weights(model: torch.nn.Module) -> None:
    """Redraws matrices at unit gain; recurrences' own constants stay as the family sets them."""
    transposed = {
        id(parameter)
        for module in model.modules()
        if getattr(module, "is_transposed", False)
        for parameter in module.parameters(recurse=False)
    }
    embedding = model.get_input_embeddings().weight
    head = model.get_output_embeddings().weight
    routers = _router_weights(model)
    for name, parameter in model.named_parameters():
        if parameter is embedding:
            parameter.normal_(std=0.3 if embedding is head else 1.0)
        elif name.endswith("bias"):
            parameter.normal_(std=0.1)
        elif "norm" in name and parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
        elif parameter.ndim >= 2 and "conv" not in name and "A_log" not in name:
            fan_in = parameter.shape[-2 if id(parameter) in transposed else -1]
            gain = 2.0 if id(parameter) in routers else 1.5
            parameter.normal_(std=gain / math.sqrt(fan_in))
    for name, buffer in model.named_buffers():
        if "correction_bias" in name or "expert_bias" in name:
            buffer.normal_(std=0.05)
    head[IM_START_ID:] *= 0.05


def _router_weights(model: torch.nn.Module) -> set[int]:
    """Ids of the parameters that score experts."""
    return {
        id(parameter)
        for name, module in model.named_modules()
        if name.endswith((".gate", ".router", ".router.layer", ".gate.wg"))
        for parameter in module.parameters(recurse=False)
    }
