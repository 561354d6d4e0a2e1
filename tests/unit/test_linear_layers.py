"""Dense layers in one block: the target's bits, drafts near them, and nothing held twice."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from dense_layers import (
    BF16,
    FORMS,
    INFINITE,
    SPREAD,
    WIDTH,
    WORDS,
    TinyModel,
    arranged,
    assert_same_bits,
    build,
    dense_product,
    inputs_of,
)
from mira_engine.model.linear import (
    MIN_WEIGHTS,
    DenseLinear,
    DenseSwitch,
    SplitEmbedding,
    arrange_dense,
    dense_groups,
    draft_copy_bytes,
    quantise_rows,
)
from mira_engine.types import DraftDense
from mira_kernels import native
from mira_kernels.split import join_draft, split
from torch import Tensor, nn


@pytest.fixture(autouse=True)
def _kernels(native_cache: Path) -> Iterator[None]:
    status = native.load(native_cache)
    assert status.is_available, status.reason
    with torch.inference_mode():
        yield


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def _error(y: Tensor, truth: Tensor) -> float:
    return float((y.double() - truth.double()).norm() / truth.double().norm())


# -- which layers ----------------------------------------------------------------------------


def test_layers_with_one_input_are_grouped_and_small_ones_stay() -> None:
    groups = {group.name: group for group in dense_groups(build())}
    assert {name: (len(g.layers), g.shape) for name, g in groups.items()} == {
        "attention.q_proj": (3, (1024, WIDTH)),
        "attention.o_proj": (1, (WIDTH, 512)),
        "mlp.gate_proj": (2, (768, WIDTH)),
        "mlp.down_proj": (1, (WIDTH, 384)),
        INFINITE: (1, (WIDTH, WIDTH)),
        SPREAD: (1, (WIDTH, WIDTH)),
        "lm_head": (1, (WORDS, WIDTH)),
    }
    assert groups["lm_head"].embedding is not None
    assert all(g.embedding is None for name, g in groups.items() if name != "lm_head")


@pytest.mark.parametrize("change", ["missing", "small", "float32", "bias", "width", "shared"])
def test_layers_that_do_not_fit_together_stay_apart(change: str) -> None:
    def alter(model: TinyModel) -> None:
        attention = model.attention
        if change == "missing":
            del attention.v_proj
        elif change == "small":
            attention.k_proj = nn.Linear(WIDTH, 64).to(BF16)
        elif change == "float32":
            attention.k_proj = nn.Linear(WIDTH, WIDTH)
        elif change == "bias":
            attention.k_proj = nn.Linear(WIDTH, WIDTH, bias=False).to(BF16)
        elif change == "width":
            attention.k_proj = nn.Linear(384, WIDTH).to(BF16)
        else:
            model.other = nn.Linear(WIDTH, WIDTH)
            model.other.weight = attention.k_proj.weight

    groups = {group.name: group for group in dense_groups(build(alter))}
    assert len(groups["attention.q_proj"].layers) == 1
    assert ("attention.k_proj" in groups) == (change in ("missing", "bias", "width"))
    assert "other" not in groups


def test_weight_that_others_share_is_left_to_them() -> None:
    def share(model: TinyModel) -> None:
        model.second = nn.Embedding(WORDS, WIDTH)
        model.second.weight = model.embed.weight

    assert "lm_head" not in {group.name for group in dense_groups(build(share))}


def test_copies_are_counted_before_a_weight_is_loaded() -> None:
    with torch.device("meta"):
        empty = TinyModel()
    layers = [layer for layer in _linears(empty).values() if layer.weight.numel() >= MIN_WEIGHTS]
    assert len(layers) == 10
    expected = sum(layer.weight.numel() + 4 * layer.out_features for layer in layers)
    assert draft_copy_bytes(empty) == expected
    model = build()
    arrange_dense(model, DraftDense.INT8, DenseSwitch())
    held = [b for n, b in model.named_buffers() if n.endswith((".codes", ".scales"))]
    assert sum(b.nbytes for b in held) == expected


# -- the target ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_target_multiplies_with_the_same_bits(form: DraftDense) -> None:
    before, model, _, _ = arranged(form)
    layers = _linears(model)
    for name, original in _linears(before).items():
        assert isinstance(layers[name], DenseLinear) == (name != "router")
        for num_rows in (1, 5, 40):
            x = inputs_of(original.in_features, num_rows)
            truth = original(x) if name == "router" else dense_product(original, x)
            assert_same_bits(layers[name](x), truth)


@pytest.mark.parametrize("form", FORMS)
def test_target_of_many_rows_is_close(form: DraftDense) -> None:
    before, model, _, _ = arranged(form)
    layers = _linears(model)
    for name, original in _linears(before).items():
        if name == INFINITE:
            continue
        x = inputs_of(original.in_features, 100)
        bias = 0.0 if original.bias is None else original.bias.double()
        truth = x.double() @ original.weight.double().t() + bias
        assert _error(layers[name](x), truth) <= 4e-3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_drafting", [False, True])
def test_embedding_gives_exact_rows(form: DraftDense, is_drafting: bool) -> None:
    before, model, switch, _ = arranged(form)
    assert isinstance(model.embed, SplitEmbedding) == (form is DraftDense.SPLIT)
    switch.is_drafting = is_drafting
    for ids in (torch.arange(WORDS), torch.tensor([[0, 999, 3], [3, 3, 500]])):
        assert_same_bits(model.embed(ids), before.embed(ids))


@pytest.mark.parametrize("form", FORMS)
def test_layers_can_be_called_with_any_leading_axes(form: DraftDense) -> None:
    before, model, _, _ = arranged(form)
    x = inputs_of(WIDTH, 6).view(2, 3, WIDTH)
    for name in ("k_proj", "v_proj", "q_proj"):
        y = getattr(model.attention, name)(x)
        assert y.is_contiguous()
        assert_same_bits(y, dense_product(getattr(before.attention, name), x))


# -- layers with one input -------------------------------------------------------------------


def _count_products(rows: nn.Module) -> list[int]:
    calls: list[int] = []
    rows.register_forward_hook(lambda module, inputs, output: calls.append(output.shape[-1]))
    return calls


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_drafting", [False, True])
@pytest.mark.parametrize("order", ["qkv", "vkq", "kqv"])
def test_siblings_are_computed_once(form: DraftDense, is_drafting: bool, order: str) -> None:
    before, model, switch, _ = arranged(form)
    switch.is_drafting = is_drafting
    calls = _count_products(model.attention.q_proj.rows)
    for num_passes in (1, 2):
        x = inputs_of(WIDTH, 4, seed=num_passes)
        for letter in order:
            name = f"{letter}_proj"
            y = getattr(model.attention, name)(x)
            truth = dense_product(getattr(before.attention, name), x)
            if is_drafting:
                assert _error(y, truth) <= 3e-2
            else:
                assert_same_bits(y, truth)
        assert calls == [1024] * num_passes
    share = model.attention.q_proj._share
    assert share._input is None, "an input and its product are held no longer than needed"
    assert share._output is None


@pytest.mark.parametrize(
    "calls",
    [
        "q1 k2 v1",
        "q1 k2 q2 v2 k1 v1",
        "k1 k2 k3",
        "v1 v1 v1 v1 q1",
        "q1 q2 k2 v2 q1",
        "q1 k1 q2 v1 k2 v2",
    ],
)
def test_siblings_are_right_in_any_order_and_with_any_inputs(calls: str) -> None:
    before, model, _, _ = arranged(DraftDense.SPLIT)
    inputs = {str(n): inputs_of(WIDTH, n + 1, seed=n) for n in (1, 2, 3)}
    for letter, number in calls.split():
        name, x = f"{letter}_proj", inputs[number]
        y = getattr(model.attention, name)(x)
        assert_same_bits(y, dense_product(getattr(before.attention, name), x))


@pytest.mark.parametrize("form", FORMS)
def test_draft_after_a_pass_that_called_one_sibling_is_a_draft(form: DraftDense) -> None:
    before, model, switch, _ = arranged(form)
    model.mlp.gate_proj(inputs_of(WIDTH, 2))
    switch.is_drafting = True
    x = inputs_of(WIDTH, 2)  # Equal to the other, and another tensor.
    up = model.mlp.up_proj(x)
    truth = dense_product(before.mlp.up_proj, x)
    assert torch.equal(up, truth) == (form is DraftDense.TARGET)
    switch.is_drafting = False
    assert_same_bits(model.mlp.up_proj(x.clone()), truth)


# -- the draft -------------------------------------------------------------------------------


def _draft_weight(form: DraftDense, layer: nn.Linear) -> Tensor:
    """The weights that a draft is to multiply with, float64."""
    weight = layer.weight
    if form is DraftDense.INT8:
        scale = weight.float().abs().amax(1, keepdim=True) / 127
        return ((weight.float() / scale).round() * scale).double()
    planes = split(weight) if form is DraftDense.SPLIT else None
    if planes is None:
        return weight.double()
    return join_draft(planes, 0, weight.shape[0]).double()


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("num_rows", [1, 5, 40, 100])
def test_draft_is_near_the_target_and_cheaper(form: DraftDense, num_rows: int) -> None:
    before, model, switch, _ = arranged(form)
    layers = _linears(model)
    switch.is_drafting = True
    for name, original in _linears(before).items():
        if name in (INFINITE, "router"):
            continue
        x = inputs_of(original.in_features, num_rows)
        bias = 0.0 if original.bias is None else original.bias.double()
        exact = x.double() @ original.weight.double().t() + bias
        drafted = x.double() @ _draft_weight(form, original).t() + bias
        y = layers[name](x)
        assert _error(y, drafted) <= 4e-3
        is_cheaper = form is DraftDense.INT8 or (form is DraftDense.SPLIT and name != SPREAD)
        assert (_error(y, exact) > 4e-3) == is_cheaper
        assert _error(y, exact) <= 3e-2
        if not is_cheaper and num_rows <= 40:
            assert_same_bits(y, dense_product(original, x))


@pytest.mark.parametrize("form", FORMS)
def test_target_after_a_draft_is_the_target_again(form: DraftDense) -> None:
    before, model, switch, _ = arranged(form)
    x = inputs_of(WIDTH, 2)
    for is_drafting in (True, False, True, False):
        switch.is_drafting = is_drafting
        y = model.lm_head(x.clone())
        assert torch.equal(y, dense_product(before.lm_head, x)) == (
            not is_drafting or form is DraftDense.TARGET
        )


def test_int8_copies_are_of_rows() -> None:
    weight = build().lm_head.weight.clone()
    weight[5] = 0
    weight[700] *= 1e4
    codes, scales = quantise_rows(weight)
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert not codes[5].any()
    others = torch.arange(WORDS) != 5
    assert bool((codes[others].abs().amax(1) == 127).all())
    error = (codes * scales[:, None] - weight.float()).abs().amax(1)
    assert bool((error <= 0.5001 * scales + 1e-8).all())
