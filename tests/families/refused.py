"""Families that do not run, each with a configuration that the engine refuses.

Some are refused by the engine's own list, the others by their form. The configurations are
small where building them would be slow; a refusal looks at no weight.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from pathlib import Path

import transformers
from mira_engine.checkpoint.preflight import examine
from mira_engine.errors import UnsupportedModelError
from transformers import PreTrainedConfig

_FEW = {"num_hidden_layers": 2, "vocab_size": 64}

REFUSED: dict[str, tuple[str, Callable[[], PreTrainedConfig]]] = {
    "dbrx": (
        "DbrxForCausalLM",
        lambda: transformers.DbrxConfig(
            n_layers=2, vocab_size=64, attn_config={"kv_n_heads": 8, "rope_theta": 500000.0}
        ),
    ),
    "deepseek_ocr2": (
        "DeepseekOcr2ForConditionalGeneration",
        lambda: transformers.DeepseekOcr2Config(text_config=_FEW | {"hidden_size": 64}),
    ),
    "diffusion_gemma": (
        "DiffusionGemmaForBlockDiffusion",
        transformers.DiffusionGemmaConfig,
    ),
    "ernie4_5_vl_moe": (
        "Ernie4_5_VLMoeForConditionalGeneration",
        transformers.Ernie4_5_VLMoeConfig,
    ),
    "inkling2_loop": (
        "Inkling2LoopForConditionalGeneration",
        transformers.Inkling2LoopConfig,
    ),
    "inkling2_loop_text": ("Inkling2LoopForCausalLM", transformers.Inkling2LoopTextConfig),
    "jetmoe": ("JetMoeForCausalLM", lambda: transformers.JetMoeConfig(**_FEW)),
    "llama4": (
        "Llama4ForConditionalGeneration",
        lambda: transformers.Llama4Config(
            text_config={"num_hidden_layers": 2}, vision_config={"num_hidden_layers": 1}
        ),
    ),
    "longcat_flash": ("LongcatFlashForCausalLM", transformers.LongcatFlashConfig),
    "minimax": ("MiniMaxForCausalLM", lambda: transformers.MiniMaxConfig(**_FEW)),
    "openai_privacy_filter": (
        "OpenAIPrivacyFilterForTokenClassification",
        transformers.OpenAIPrivacyFilterConfig,
    ),
    "qwen3_omni_moe": (
        "Qwen3OmniMoeForConditionalGeneration",
        transformers.Qwen3OmniMoeConfig,
    ),
    "unlimited_ocr": (
        "UnlimitedOcrForConditionalGeneration",
        transformers.UnlimitedOcrConfig,
    ),
}
"""Class and configuration by `model_type`."""


def save_refused(family: str, folder: Path) -> Path:
    """Writes the configuration of one of `REFUSED`, with its class named in it."""
    architecture, make = REFUSED[family]
    config = make()
    config.architectures = [architecture]
    config.save_pretrained(folder)
    return folder


def refusals() -> dict[str, str]:
    """Returns what the engine says of each, by family.

    Raises:
        AssertionError: It refuses one of them no more.
    """
    found = {}
    for family in REFUSED:
        with tempfile.TemporaryDirectory() as folder:
            try:
                examine(save_refused(family, Path(folder)))
            except UnsupportedModelError as error:
                found[family] = error.message
            else:
                raise AssertionError(f"{family} is refused no more: give it a tiny shape")
    return found
