"""The shapes are those of the models, and their random backbones are whole."""

from __future__ import annotations

import pytest

pytest.importorskip("triton", reason="triton has no wheel for this system")

import torch
from gpu.shapes import SHAPES, SMALL, make_backbone, make_whole
from mira_engine.checkpoint.architecture import meta_model
from mira_engine.checkpoint.experts import expert_modules_of, find_expert_modules
from mira_engine.types import Precision

BILLIONS = {"qwen3": 30.5, "deepseek": 15.7, "qwen1.5": 14.3}
"""Parameters, as their makers give them."""


@pytest.mark.parametrize("name", SHAPES)
def test_shape_has_its_models_experts_and_parameters(name: str) -> None:
    shape = SHAPES[name]

    model = meta_model(shape.config())

    found = find_expert_modules(model)
    assert len(found) == shape.num_layers
    assert {module.num_experts for module in found} == {shape.num_experts}
    assert {module.shape for module in found} == {shape.expert_shape}
    total = sum(parameter.numel() for parameter in model.parameters())
    assert total / 1e9 == pytest.approx(BILLIONS[name], abs=0.06)


def test_shape_with_fewer_layers_keeps_its_dense_ones() -> None:
    assert SHAPES["deepseek"].config(3).num_hidden_layers == 4


@pytest.mark.parametrize("precision", [Precision.NESTED, Precision.INT8, Precision.INT4])
def test_format_of_a_shape_is_in_the_layout_of_cards(precision: Precision) -> None:
    assert SHAPES["qwen3"].format(precision).block_rows == 1


def test_backbone_is_random_and_has_no_experts_and_nothing_on_meta() -> None:
    model = make_backbone(SMALL.config(), torch.device("cpu"))

    assert len(expert_modules_of(model)) == SMALL.num_layers
    assert not any("experts" in name for name, _ in model.named_parameters())
    assert not any(t.is_meta for t in (*model.parameters(), *model.buffers()))
    assert {p.dtype for p in model.parameters()} == {torch.bfloat16}
    assert model.model.norm.weight.eq(1).all()
    assert 0.05 < float(model.model.layers[0].self_attn.q_proj.weight.float().std()) < 0.2


def test_positions_of_a_backbone_are_those_of_the_family() -> None:
    made = make_backbone(SMALL.config(), torch.device("cpu"))
    rotary = type(made.model.rotary_emb)(made.config)

    assert made.model.rotary_emb.inv_freq.equal(rotary.inv_freq)
    assert made.model.rotary_emb.inv_freq[0] == 1


@torch.inference_mode()
def test_whole_model_has_experts_and_gives_finite_logits() -> None:
    model = make_whole(SMALL.config(2), torch.device("cpu"))

    logits = model(input_ids=torch.tensor([[1, 2, 3]])).logits

    assert logits.isfinite().all()
    assert any("experts" in name for name, _ in model.named_parameters())
