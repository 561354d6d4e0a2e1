"""The real models whose shapes are decoded, and their backbones with random weights.

Configurations are written here: nothing is fetched, no file is read. A backbone is the
model's own classes without their routed experts, as the engine loads one.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from mira_engine.checkpoint.architecture import model_class
from mira_engine.checkpoint.expert import ExpertFormat
from mira_engine.checkpoint.formats import make_format
from mira_engine.model import experts
from mira_engine.model.attention import use_short_query_attention
from mira_engine.model.loader import without_experts
from mira_engine.types import ExpertShape, Precision
from mira_kernels.weights import Int4Layout
from torch import nn
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel


@dataclass(frozen=True, slots=True, kw_only=True)
class Shape:
    """A model's dimensions.

    Attributes:
        name: For people.
        family: transformers' `model_type`.
        fields: Of its configuration.
        num_draft_tokens: K of a draft with all experts.
        depth_source: Where that K is from.
    """

    name: str
    family: str
    fields: Mapping[str, Any]
    num_draft_tokens: int
    depth_source: str

    @property
    def num_dense_layers(self) -> int:
        """Layers before the first with routed experts."""
        return self.fields.get("first_k_dense_replace", 0)

    @property
    def num_layers(self) -> int:
        """MoE layers."""
        return self.fields["num_hidden_layers"] - self.num_dense_layers

    @property
    def num_experts(self) -> int:
        """Routed experts of a layer."""
        return self.fields.get("num_experts") or self.fields["n_routed_experts"]

    @property
    def top_k(self) -> int:
        """Experts of a token in a layer."""
        return self.fields["num_experts_per_tok"]

    @property
    def expert_shape(self) -> ExpertShape:
        """Dimensions of an expert."""
        return gated_expert(self.fields["hidden_size"], self.fields["moe_intermediate_size"])

    def format(self, precision: Precision) -> ExpertFormat:
        """The experts' format, in the layout that cards read."""
        return card_format(precision, self.expert_shape)

    def config(self, num_moe_layers: int | None = None) -> PreTrainedConfig:
        """The configuration, with fewer MoE layers if asked for."""
        fields = dict(self.fields)
        if num_moe_layers is not None:
            fields["num_hidden_layers"] = self.num_dense_layers + num_moe_layers
        return AutoConfig.for_model(self.family, **fields)


def gated_expert(hidden_size: int, intermediate_size: int) -> ExpertShape:
    """Dimensions of an expert with a gate and no biases."""
    return ExpertShape(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        has_gate=True,
        has_bias=False,
        is_interleaved=False,
    )


def card_format(precision: Precision, shape: ExpertShape) -> ExpertFormat:
    """The format in the layout that cards read."""
    return make_format(precision, shape, layout=Int4Layout.ROWS.value)


QWEN3 = Shape(
    name="Qwen3-30B-A3B",
    family="qwen3_moe",
    fields={
        "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 48,
        "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128,
        "intermediate_size": 6144, "moe_intermediate_size": 768,
        "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": True,
        "max_position_embeddings": 40960,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    num_draft_tokens=8,
    depth_source="not in the papers; Specter's smallest",
)  # fmt: skip

DEEPSEEK = Shape(
    name="DeepSeek-V2-Lite",
    family="deepseek_v2",
    # Positions are plain here: within a few hundred tokens YaRN costs the same.
    fields={
        "vocab_size": 102400, "hidden_size": 2048, "num_hidden_layers": 27,
        "num_attention_heads": 16, "num_key_value_heads": 16,
        "kv_lora_rank": 512, "q_lora_rank": None, "qk_nope_head_dim": 128,
        "qk_rope_head_dim": 64, "v_head_dim": 128,
        "intermediate_size": 10944, "moe_intermediate_size": 1408,
        "n_routed_experts": 64, "num_experts_per_tok": 6, "n_shared_experts": 2,
        "first_k_dense_replace": 1, "n_group": 1, "topk_group": 1, "topk_method": "greedy",
        "max_position_embeddings": 163840,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    },
    num_draft_tokens=16,
    depth_source="Specter, figure 7",
)  # fmt: skip

QWEN15 = Shape(
    name="Qwen1.5-MoE-A2.7B",
    family="qwen2_moe",
    fields={
        "vocab_size": 151936, "hidden_size": 2048, "num_hidden_layers": 24,
        "num_attention_heads": 16, "num_key_value_heads": 16,
        "intermediate_size": 5632, "moe_intermediate_size": 1408,
        "shared_expert_intermediate_size": 5632,
        "num_experts": 60, "num_experts_per_tok": 4, "norm_topk_prob": False,
        "use_sliding_window": False, "max_position_embeddings": 8192,
        "rope_parameters": {"rope_type": "default", "rope_theta": 1e6},
    },
    num_draft_tokens=8,
    depth_source="Specter, figure 7",
)  # fmt: skip

SHAPES = {"qwen3": QWEN3, "deepseek": DEEPSEEK, "qwen1.5": QWEN15}

SMALL = Shape(
    name="small",
    family="qwen3_moe",
    fields={
        "vocab_size": 264, "hidden_size": 32, "num_hidden_layers": 2,
        "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16,
        "intermediate_size": 64, "moe_intermediate_size": 32,
        "num_experts": 8, "num_experts_per_tok": 2, "norm_topk_prob": True,
        "max_position_embeddings": 512,
    },
    num_draft_tokens=3,
    depth_source="small",
)  # fmt: skip
"""What is run without a card: the interpreter takes a tenth of a second for each tile."""


def make_backbone(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """Makes a model without its routed experts, of random bfloat16 weights."""
    experts.register()
    made = _on_meta(
        without_experts(model_class(config)),
        config,
        experts_implementation=experts.EXPERTS_IMPLEMENTATION,
    )
    _fill_at_random(made, device)
    use_short_query_attention(made)
    return made.eval()


def make_whole(config: PreTrainedConfig, device: torch.device) -> PreTrainedModel:
    """Makes a model as transformers has it, experts included, of random bfloat16 weights."""
    made = _on_meta(model_class(config), config)
    _fill_at_random(made, device)
    return made.eval()


def _on_meta(
    cls: type[PreTrainedModel], config: PreTrainedConfig, **others: str
) -> PreTrainedModel:
    with torch.device("meta"):
        return cls._from_config(config, dtype=torch.bfloat16, **others)


@torch.no_grad()
def _fill_at_random(model: PreTrainedModel, device: torch.device) -> None:
    """Gives a model on the meta device weights: matrices of unit gain, norms of 1, biases of 0."""
    generator = torch.Generator(device).manual_seed(0)
    for module in list(model.modules()):
        for name, parameter in list(module.named_parameters(recurse=False)):
            data = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
            if data.ndim > 1:
                data.normal_(std=data.shape[-1] ** -0.5, generator=generator)
            else:
                data.fill_(0.0 if name.endswith("bias") else 1.0)
            setattr(module, name, nn.Parameter(data, requires_grad=False))
        for name, child in list(module.named_children()):
            if any(buffer.is_meta for buffer in child.buffers(recurse=False)):
                # Positions: what is computed from the configuration alone.
                setattr(module, name, type(child)(child.config).to(device))
