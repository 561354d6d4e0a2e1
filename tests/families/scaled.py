"""Real configurations made small, every structural flag kept, and checkpoints of that shape.

Sizes shrink; what decides how a model computes stays as published: kinds of layers in their
order, ratio of heads, rotary forms and their factors, windows and whether they are used,
biases, ties, multipliers, how routers score and normalise, shared experts and dense layers.
Lengths (windows, trained contexts) shrink so far that a short text exceeds them.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

from mira_engine.checkpoint.architecture import load_config, model_class
from safetensors.torch import load_file, save_file
from tiny_families import SLIDING_WINDOW
from tiny_models import IM_END_ID, IM_START_ID, PAD_ID, VOCAB_SIZE, random_model

CONFIGS = (
    "DeepSeek-V2-Lite",
    "Mixtral-8x7B",
    "OLMoE-1B-7B",
    "Phi-3.5-MoE",
    "PowerMoE-3B",
    "Qwen1.5-MoE-A2.7B",
    "Qwen3.5-25B-REAP-A3B-Coding",
    "WizardLM-2-8x22B",
    "gpt-oss-20b",
    "granite-3.1-1b-a400m-instruct",
)
"""Folders of the shared inputs, each with a `config.json`."""

NUM_LAYERS = 4
NUM_EXPERTS = 8
HEAD_DIM = 16
TRAINED_TOKENS = 16
"""Stands for the length before rotary factors apply; the tests' prompts are longer."""

LONGEST_TOKENS = 512

_SIZES = {
    "vocab_size": VOCAB_SIZE,
    "num_hidden_layers": NUM_LAYERS,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 64,
    "kv_lora_rank": 32,
    "q_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "bos_token_id": IM_START_ID,
    "eos_token_id": IM_END_ID,
    "pad_token_id": PAD_ID,
}
"""Replaces a field that is there and not null."""

_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts")
_TOP_K = ("num_experts_per_tok", "experts_per_token")
_ELSEWHERE = ("quantization_config", "initial_context_length")
"""What says how weights are stored, or repeats what stands in the rotary fields."""

_PREFIXES = {"Qwen3.5-25B-REAP-A3B-Coding": ("model.", "model.language_model.")}
"""How a checkpoint names what transformers' class of its text part names otherwise."""


def scaled_down(fields: Mapping[str, object]) -> dict[str, object]:
    """Returns a small form of a published `config.json`.

    Args:
        fields: The file's content.
    """
    small = {name: value for name, value in fields.items() if name not in _ELSEWHERE}
    small |= {name: size for name, size in _SIZES.items() if small.get(name) is not None}
    num_heads, num_kv_heads = _heads(fields["num_attention_heads"], fields["num_key_value_heads"])
    head_dim = HEAD_DIM if num_heads * HEAD_DIM % 32 == 0 else 2 * HEAD_DIM
    if "head_dim" in fields and "partial_rotary_factor" in fields:
        head_dim = 2 * HEAD_DIM  # So that a quarter of it is divided in three sections.
    small |= {"num_attention_heads": num_heads, "num_key_value_heads": num_kv_heads}
    small["hidden_size"] = 64 if "head_dim" in fields else num_heads * head_dim
    if "head_dim" in fields:
        small["head_dim"] = head_dim
    if "intermediate_size" in fields:
        small["intermediate_size"] = 96 if "moe_intermediate_size" in fields else 64
    small |= {name: NUM_EXPERTS for name in _COUNTS if name in fields}
    small |= {name: min(fields[name], NUM_EXPERTS // 2) for name in _TOP_K if name in fields}
    if "layer_types" in fields:
        small["layer_types"] = fields["layer_types"][:NUM_LAYERS]
    if "max_window_layers" in fields:
        small["max_window_layers"] = min(fields["max_window_layers"], NUM_LAYERS)
    small |= _lengths(fields)
    small |= _rotary(fields, head_dim)
    return small


def _heads(num_heads: int, num_kv_heads: int) -> tuple[int, int]:
    """Returns few heads in the same ratio, query and key/value."""
    ratio = num_heads // num_kv_heads
    num_kv_heads = max(1, 4 // ratio)
    return ratio * num_kv_heads, num_kv_heads


def _lengths(fields: Mapping[str, object]) -> dict[str, int]:
    """Returns the context, and the window: short where it is shorter than the context."""
    rotary = _rotary_fields(fields)
    longest = LONGEST_TOKENS
    own = rotary.get("original_max_position_embeddings")
    if own:
        longest = TRAINED_TOKENS * fields["max_position_embeddings"] // own
    lengths = {"max_position_embeddings": longest}
    window = fields.get("sliding_window")
    if window is not None:
        is_effective = window < fields["max_position_embeddings"]
        lengths["sliding_window"] = SLIDING_WINDOW if is_effective else longest
    if "original_max_position_embeddings" in fields:
        lengths["original_max_position_embeddings"] = TRAINED_TOKENS
    return lengths


def _rotary_fields(fields: Mapping[str, object]) -> Mapping[str, object]:
    return fields.get("rope_scaling") or fields.get("rope_parameters") or {}


def _rotary(fields: Mapping[str, object], head_dim: int) -> dict[str, object]:
    """Returns the rotary field under its own name; tables keep a share of their entries."""
    name = "rope_parameters" if fields.get("rope_parameters") else "rope_scaling"
    rotary = dict(_rotary_fields(fields))
    if not rotary:
        return {}
    if "original_max_position_embeddings" in rotary:
        rotary["original_max_position_embeddings"] = TRAINED_TOKENS
    for table in ("long_factor", "short_factor"):
        if table in rotary:
            rotary[table] = rotary[table][:: len(rotary[table]) // (head_dim // 2)]
    if "mrope_section" in rotary:
        rotary["mrope_section"] = [2, 1, 1]
    return {name: rotary}


def save_scaled(name: str, configs: Path, folder: Path) -> Path:
    """Writes a random checkpoint of a real configuration's small form.

    The configuration keeps the published file's form, and weights their published names.

    Args:
        name: One of `CONFIGS`.
        configs: Folder with the published configurations.
        folder: Where to write; made if it does not exist.

    Returns:
        `folder`.
    """
    small = scaled_down(json.loads((configs / name / "config.json").read_text(encoding="utf-8")))
    folder.mkdir(exist_ok=True)
    _write_config(folder, small)
    config = load_config(folder)
    model = random_model(config, model_class(config)._from_config, seed=0)
    model.save_pretrained(folder)
    _write_config(folder, small)
    if name in _PREFIXES:
        _rename(folder / "model.safetensors", *_PREFIXES[name])
    return folder


def _write_config(folder: Path, fields: Mapping[str, object]) -> None:
    (folder / "config.json").write_text(json.dumps(fields), encoding="utf-8")


def _rename(path: Path, prefix: str, published: str) -> None:
    tensors = load_file(path)
    renamed = {
        published + key.removeprefix(prefix) if key.startswith(prefix) else key: tensor
        for key, tensor in tensors.items()
    }
    save_file(renamed, path, metadata={"format": "pt"})
