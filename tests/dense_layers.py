"""A small model whose dense layers are arranged in every form, and how they are compared."""

from __future__ import annotations

from collections.abc import Callable

import torch
from mira_engine.model.linear import DenseSwitch, arrange_dense
from mira_engine.types import DraftDense
from torch import Tensor, nn

BF16 = torch.bfloat16
WIDTH, WORDS = 256, 1000
FORMS = (DraftDense.TARGET, DraftDense.SPLIT, DraftDense.INT8)
INFINITE, SPREAD, EXCEPTIONAL = "infinite", "spread", "mlp.down_proj"
"""Layers that cannot be split, one for an infinity and one for weights of all sizes; and one
that can, but for a few weights."""


class TinyAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj = nn.Linear(WIDTH, 512)
        self.k_proj = nn.Linear(WIDTH, WIDTH)
        self.v_proj = nn.Linear(WIDTH, WIDTH)
        self.o_proj = nn.Linear(512, WIDTH, bias=False)


class TinyMlp(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(WIDTH, 384, bias=False)
        self.up_proj = nn.Linear(WIDTH, 384, bias=False)
        self.down_proj = nn.Linear(384, WIDTH)


class TinyModel(nn.Module):
    """Layers as families name them; nothing calls them in order."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(WORDS, WIDTH)
        self.attention = TinyAttention()
        self.mlp = TinyMlp()
        self.infinite = nn.Linear(WIDTH, WIDTH, bias=False)
        self.spread = nn.Linear(WIDTH, WIDTH)
        self.router = nn.Linear(WIDTH, 8, bias=False)
        self.norm = nn.LayerNorm(WIDTH)
        self.lm_head = nn.Linear(WIDTH, WORDS, bias=False)
        self.lm_head.weight = self.embed.weight

    def get_output_embeddings(self) -> nn.Module:
        return self.lm_head


def build(change: Callable[[TinyModel], None] = lambda model: None) -> TinyModel:
    generator = torch.Generator().manual_seed(5)
    model = TinyModel().to(BF16).eval().requires_grad_(False)
    for parameter in model.parameters():
        parameter.copy_(torch.randn(parameter.shape, generator=generator) / 16)
    model.infinite.weight[3, 7] = float("inf")
    powers = torch.randint(0, 60, (WIDTH, WIDTH), generator=generator)
    model.spread.weight.mul_(torch.exp2(-powers.float()))
    model.mlp.down_proj.weight[[0, 9, 255], [1, 0, 383]] = 1e-30
    change(model)
    return model


def inputs_of(width: int, num_rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * num_rows)
    return torch.randn(1, num_rows, width, generator=generator).to(BF16)


def dense_product(layer: nn.Linear, x: Tensor) -> Tensor:
    return torch.ops.mira.dense_linear(x, layer.weight, layer.bias)


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def arranged(form: DraftDense) -> tuple[TinyModel, TinyModel, DenseSwitch, dict[str, int]]:
    """The model as it was, the same arranged, its switch and its census."""
    model, switch = build(), DenseSwitch()
    census = arrange_dense(model, form, switch)
    return build(), model, switch, census
