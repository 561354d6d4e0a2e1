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
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path

import torch
from tiny_families import ATTENTION_FAMILIES
from tiny_hybrids import HYBRID_FAMILIES
from tiny_wrapped import WRAPPED_FAMILIES
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerFast,
)

HIDDEN_SIZE = 64
VOCAB_SIZE = 264
"""256 bytes, the four special tokens, and four ids that no text uses."""

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

_FAMILY_FIELDS = ATTENTION_FAMILIES | HYBRID_FAMILIES | WRAPPED_FAMILIES

_LISTED_BESIDE_IMAGES = ("mistral4",)
"""Families of text alone that transformers lists among those that see."""

FAMILIES = tuple(_FAMILY_FIELDS)
"""The families, by transformers' `model_type`."""

FORMS = (
    "mixtral",
    "qwen2_moe",
    "gpt_oss",
    "granitemoe",
    "ernie4_5_moe",
    "lfm2_moe",
    "jamba",
    "nemotron_h",
    "inkling_text",
    "deepseek_v4",
    "aria",
    "gemma4",
    "qwen3_vl_moe",
    "muse_spark",
)
"""One family for each way in which checkpoints hold experts: one by one under several names,
all in one tensor, transposed, interleaved, with biases, without gates, beside a norm."""


def tiny_config(family: str, *, has_windows: bool = True) -> PreTrainedConfig:
    """Returns the family's configuration in its tiny shape.

    Args:
        family: One of `FAMILIES`.
        has_windows: Whether families that can have sliding windows have them.

    Raises:
        KeyError: The family is none of `FAMILIES`.
    """
    fields = deepcopy(_FAMILY_FIELDS[family])
    if family in WRAPPED_FAMILIES:
        tied = {"tie_word_embeddings": fields.get("tie_word_embeddings", False)}
        text = _SHARED | fields["text_config"] | tied
        return AutoConfig.for_model(family, **fields | tied | {"text_config": text})
    fields = _SHARED | fields
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
    config = tiny_config(family, has_windows=has_windows)
    is_whole = family in WRAPPED_FAMILIES or family in _LISTED_BESIDE_IMAGES
    auto = AutoModelForImageTextToText if is_whole else AutoModelForCausalLM
    model = random_model(config, auto.from_config, seed=seed)
    model.to(dtype).save_pretrained(folder, max_shard_size=max_shard_size)
    return folder


def random_model(
    config: PreTrainedConfig, build: Callable[..., PreTrainedModel], *, seed: int
) -> PreTrainedModel:
    """Builds a float32 model with the weights that this module's docstring describes.

    Args:
        config: Its configuration.
        build: Makes a model from the configuration and a `dtype`.
        seed: Seed of the weights.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = build(config, dtype=torch.float32)
        _scale_weights(model)
    model.generation_config = GenerationConfig(
        bos_token_id=IM_START_ID, eos_token_id=[IM_END_ID, END_OF_TEXT_ID], pad_token_id=PAD_ID
    )
    return model


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
    embedding_scale = _embedding_scale(model)
    head = model.get_output_embeddings().weight
    routers = _router_weights(model)
    for name, parameter in model.named_parameters():
        if parameter is embedding:
            parameter.normal_(std=(0.3 if embedding is head else 1.0) / embedding_scale)
        elif name.endswith("bias"):
            parameter.normal_(std=0.1)
        elif ("norm" in name or name.endswith("scale")) and parameter.ndim == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
        elif parameter.ndim >= 2 and "conv" not in name and "A_log" not in name:
            fan_in = parameter.shape[-2 if id(parameter) in transposed else -1]
            gain = 2.0 if id(parameter) in routers else 1.5
            parameter.normal_(std=gain / math.sqrt(fan_in))
    for name, buffer in model.named_buffers():
        if "correction_bias" in name or "expert_bias" in name:
            buffer.normal_(std=0.05)
        elif name.endswith("tid2eid"):  # Experts by token, where a layer does not score them.
            for row in buffer:
                row.copy_(torch.randperm(model.config.n_routed_experts)[: len(row)])
    head[IM_START_ID:] *= 0.05


def _embedding_scale(model: PreTrainedModel) -> float:
    """How much louder than each layer's part a family makes the embedding; else a token would
    follow itself for ever where the output layer is tied."""
    config = model.config.get_text_config()
    multiplier = getattr(model.get_input_embeddings(), "embed_scale", 1.0)
    multiplier *= getattr(config, "embedding_multiplier", 1.0)
    return float(multiplier / getattr(config, "residual_multiplier", 1.0))


def _router_weights(model: torch.nn.Module) -> set[int]:
    """Ids of the parameters that score experts."""
    return {
        id(parameter)
        for name, module in model.named_modules()
        if name.endswith((".gate", ".router", ".router.layer", ".router.proj", ".gate.wg"))
        for parameter in module.parameters(recurse=False)
    }
