"""Sizes of a model that a memory plan follows from, without loading a weight.

Counts parameters on the meta device, and KV and workspace from the configuration.
"""

from __future__ import annotations

from pathlib import Path

import torch
from transformers import PreTrainedConfig, PreTrainedModel

from ..checkpoint.architecture import load_config, meta_model
from ..checkpoint.experts import expert_modules_of, find_expert_modules
from ..checkpoint.formats import ExpertFormat, int8_reference_bytes, make_format
from ..config import MAX_DRAFT_TOKENS, EngineConfig
from ..errors import ConfigError
from ..policy.budget import ModelFacts
from ..policy.cost_model import ModelWork
from ..types import CompileMode, ComputeDtype, Plane, Precision
from .linear import draft_copy_bytes
from .loader import TORCH_DTYPES
from .recurrent import running_state_bytes

DEFAULT_CONTEXT_TOKENS = 8192
"""Context where nobody chose one and the model allows more."""

_RUNTIME_BYTES = 224 * 2**20
"""What torch, the allocator, tokenizer and thread pools take while a model runs.
Measured 2026-11-30 on two Zen 4 cores, torch 2.13, the built-in model: 185 MiB."""

_COMPILED_BYTES = 112 * 2**20
"""What compiled steps take besides: torch's compiler, the steps, the native library.
Measured as above: 85 MiB with three steps."""

_TOP_K_FIELDS = (
    "num_experts_per_tok",
    "num_experts_per_token",
    "moe_k",
    "moe_topk",
    "top_k_experts",
    "top_k",
)
"""Names that families give to how many experts a token uses."""

_PREFILL_COPIES = 3
"""How often a prefill chunk's activations are held at once, freed blocks that the
allocator keeps included. Measured as above at 2048 tokens: 0.39 MiB a token of the chunk,
where one copy of the activations is 0.16."""


def context_length(config: PreTrainedConfig, wanted: int | None) -> int:
    """Returns tokens of KV cache: what is wanted, else the model's own up to 8192.

    Raises:
        ConfigError: More is wanted than the model was trained for.
    """
    own = longest_context(config)
    if wanted is None:
        return min(own, DEFAULT_CONTEXT_TOKENS)
    if wanted > own:
        raise ConfigError.for_field("context", wanted, f"This model reads up to {own} tokens.")
    return wanted


def longest_context(config: PreTrainedConfig) -> int:
    """Returns the tokens a model was trained to read, 8192 where it does not say."""
    text = config.get_text_config()
    return getattr(text, "max_position_embeddings", None) or DEFAULT_CONTEXT_TOKENS


def gather_facts(
    folder: Path, config: EngineConfig, target: ExpertFormat, draft: ExpertFormat
) -> ModelFacts:
    """Collects the sizes for a plan.

    Args:
        folder: The model's configuration.
        config: Arithmetic, context and chunk size.
        target: The target's expert format.
        draft: Format whose `draft_plane` is kept resident for drafting.

    Raises:
        UnsupportedModelError: The model has no experts that the engine can run.
        ConfigError: The context is longer than the model's.
    """
    model_config = load_config(folder)
    return _facts(meta_model(model_config), model_config, config, target, draft)


def facts_of(
    model_config: PreTrainedConfig, config: EngineConfig, *, layout: str | None = None
) -> ModelFacts:
    """Collects the sizes of a model that need not be prepared, from its configuration alone.

    Args:
        model_config: The model's configuration.
        config: Precision, arithmetic, context and chunk size.
        layout: Of INT4 experts; `None` takes what is fastest on this machine.

    Raises:
        UnsupportedModelError: The model has no experts that the engine can run.
        FormatError: The precision, or INT4 for a draft, cannot hold its experts.
        ConfigError: The context is longer than the model's.
    """
    model = meta_model(model_config)
    shape = find_expert_modules(model)[0].shape
    is_grouped = config.precision in (Precision.INT4, Precision.NESTED)
    target = make_format(config.precision, shape, layout=layout if is_grouped else None)
    draft = target
    if target.draft_plane is None:
        draft = make_format(Precision.INT4, shape, layout=layout)
    return _facts(model, model_config, config, target, draft)


def _facts(
    model: PreTrainedModel,
    model_config: PreTrainedConfig,
    config: EngineConfig,
    target: ExpertFormat,
    draft: ExpertFormat,
) -> ModelFacts:
    modules = find_expert_modules(model)
    dtype = TORCH_DTYPES[config.arithmetic]
    assert draft.draft_plane is not None
    whole = sum(target.record_bytes(plane) for plane in target.planes)
    lo_only = target.record_bytes(Plane.LO) if target.precision is Precision.NESTED else whole
    num_tokens = context_length(model_config, config.context_length)
    dense_weights = _dense_weights(model)
    top_k = experts_per_token(model_config)
    max_drafted = MAX_DRAFT_TOKENS if config.num_draft_tokens is None else config.num_draft_tokens
    return ModelFacts(
        num_layers=len(modules),
        num_experts_per_layer=modules[0].num_experts,
        top_k=top_k,
        reference_record_bytes=int8_reference_bytes(modules[0].shape),
        draft_record_bytes=draft.record_bytes(draft.draft_plane),
        target_record_bytes=lo_only,
        whole_record_bytes=whole,
        draft_copy_bytes=_draft_copy_bytes(model, config),
        non_expert_bytes=_non_expert_bytes(model, dtype),
        kv_bytes=_kv_bytes(model_config, dtype, num_tokens),
        workspace_bytes=_workspace_bytes(model_config, config, target, num_tokens)
        + running_state_bytes(model, dtype, max_drafted),
        work=ModelWork(
            num_layers=len(modules),
            num_experts=modules[0].num_experts,
            top_k=top_k,
            dense_read_bytes=dense_weights * dtype.itemsize,
            dense_weights=dense_weights,
            expert_weights=modules[0].shape.num_weights,
            kv_token_bytes=_kv_bytes(model_config, dtype, 1),
            chunk_tokens=config.prefill_chunk_tokens,
        ),
    )


def _draft_copy_bytes(model: PreTrainedModel, config: EngineConfig) -> int:
    is_possible = (
        config.arithmetic is ComputeDtype.BFLOAT16 and config.compile_mode is not CompileMode.OFF
    )
    return draft_copy_bytes(model) if is_possible else 0


def experts_per_token(config: PreTrainedConfig) -> int:
    """Returns top-k under any of the names that families give it."""
    text = config.get_text_config()
    for name in _TOP_K_FIELDS:
        value = getattr(text, name, None)
        if isinstance(value, int):
            return value
        if isinstance(value, (list, tuple)) and value:
            return max(int(v) for v in value)
    raise ConfigError(
        f"The configuration of this {text.model_type} model does not say how many experts a "
        "token uses.",
        hint="Pick another model.",
    )


def _non_expert_bytes(model: PreTrainedModel, dtype: torch.dtype) -> int:
    """Bytes of all parameters and buffers but the routed experts', tied ones once."""
    routed = {id(p) for _, module in expert_modules_of(model) for p in module.parameters()}
    total, seen = 0, set()
    for tensor in (*model.parameters(), *model.buffers()):
        if id(tensor) in routed or id(tensor) in seen:
            continue
        seen.add(id(tensor))
        is_small = tensor.numel() < 2**16
        width = max(4, tensor.element_size()) if is_small else dtype.itemsize
        total += tensor.numel() * width
    return total


def _dense_weights(model: PreTrainedModel) -> int:
    """Parameters beside the routed experts that every token passes through.

    The input embedding is read by rows, so it counts only where the output layer is tied
    to it. Encoders of images and sound are not told apart.
    """
    routed = {id(p) for _, module in expert_modules_of(model) for p in module.parameters()}
    embedding, output = model.get_input_embeddings(), model.get_output_embeddings()
    if embedding is not None and (output is None or output.weight is not embedding.weight):
        routed.add(id(embedding.weight))
    return sum(p.numel() for p in model.parameters() if id(p) not in routed)


def _kv_bytes(config: PreTrainedConfig, dtype: torch.dtype, num_tokens: int) -> int:
    """KV cache at `num_tokens`, every layer counted as full attention.

    A growing cache holds its old and its new tensor for a moment, so one layer is
    counted twice.
    """
    widths = [_kv_width(layer) for layer in config.get_text_config().per_layer_config]
    return (sum(widths) + max(widths)) * num_tokens * dtype.itemsize


def _kv_width(layer: PreTrainedConfig) -> int:
    """Numbers that a layer of this configuration keeps of each token."""
    num_heads = layer.num_attention_heads
    if getattr(layer, "kv_lora_rank", None):
        width = layer.kv_lora_rank + layer.qk_rope_head_dim
    else:
        kv_heads = getattr(layer, "num_key_value_heads", None) or num_heads
        head_dim = getattr(layer, "head_dim", None) or layer.hidden_size // num_heads
        width = 2 * kv_heads * head_dim
    return width + (getattr(layer, "index_head_dim", None) or 0)  # Keys that are chosen by.


def _workspace_bytes(
    config: PreTrainedConfig, engine: EngineConfig, target: ExpertFormat, num_tokens: int
) -> int:
    """Temporaries of the largest prefill chunk, of one unpacked expert, and of torch itself."""
    text = config.get_text_config()
    chunk, top_k = engine.prefill_chunk_tokens, experts_per_token(config)
    shape = target.shape
    activations = chunk * top_k * (3 * shape.up_rows + 4 * shape.hidden_size) * 4
    activations += chunk * 24 * text.hidden_size * 4
    scores = 2 * chunk * num_tokens * 4
    logits = 34 * text.vocab_size * 4 * 3
    unpacked = 2 * shape.num_weights * 4
    compiled = _COMPILED_BYTES if engine.compile_mode is not CompileMode.OFF else 0
    temporary = _PREFILL_COPIES * activations + scores + logits + unpacked
    return temporary + _RUNTIME_BYTES + compiled
