"""Dense layers in one block: the target's bits, drafts near them, and nothing held twice."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from mira_engine.model.linear import (
    MIN_WEIGHTS,
    DenseLinear,
    DenseSwitch,
    PlainRows,
    SplitEmbedding,
    SplitRows,
    arrange_dense,
    arrange_fakes,
    dense_groups,
    draft_copy_bytes,
    limit_draft_words,
    quantise_rows,
    split_census,
)
from mira_engine.model.steps import other_dtypes
from mira_engine.runtime.passes import ModelPasses
from mira_engine.runtime.telemetry import ReplyMeter
from mira_engine.types import DraftDense, Phase
from mira_kernels import native
from mira_kernels.pages import huge_bytes
from mira_kernels.split import join_draft, split
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode

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


def _build(change: Callable[[TinyModel], None] = lambda model: None) -> TinyModel:
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


@pytest.fixture(autouse=True)
def _kernels(native_cache: Path) -> Iterator[None]:
    status = native.load(native_cache)
    assert status.is_available, status.reason
    with torch.inference_mode():
        yield


def _linears(model: nn.Module) -> dict[str, nn.Linear]:
    return {name: m for name, m in model.named_modules() if isinstance(m, nn.Linear)}


def _inputs(width: int, num_rows: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + 31 * num_rows)
    return torch.randn(1, num_rows, width, generator=generator).to(BF16)


def _dense(layer: nn.Linear, x: Tensor) -> Tensor:
    return torch.ops.mira.dense_linear(x, layer.weight, layer.bias)


def _assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert (a.shape, a.dtype) == (b.shape, b.dtype)
    assert torch.equal(a.contiguous().view(torch.int16), b.contiguous().view(torch.int16))


def _error(y: Tensor, truth: Tensor) -> float:
    return float((y.double() - truth.double()).norm() / truth.double().norm())


def _arranged(form: DraftDense) -> tuple[TinyModel, TinyModel, DenseSwitch, dict[str, int]]:
    """The model as it was, the same arranged, its switch and its census."""
    model, switch = _build(), DenseSwitch()
    census = arrange_dense(model, form, switch)
    return _build(), model, switch, census


# -- which layers ----------------------------------------------------------------------------


def test_layers_with_one_input_are_grouped_and_small_ones_stay() -> None:
    groups = {group.name: group for group in dense_groups(_build())}
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

    groups = {group.name: group for group in dense_groups(_build(alter))}
    assert len(groups["attention.q_proj"].layers) == 1
    assert ("attention.k_proj" in groups) == (change in ("missing", "bias", "width"))
    assert "other" not in groups


def test_weight_that_others_share_is_left_to_them() -> None:
    def share(model: TinyModel) -> None:
        model.second = nn.Embedding(WORDS, WIDTH)
        model.second.weight = model.embed.weight

    assert "lm_head" not in {group.name for group in dense_groups(_build(share))}


def test_copies_are_counted_before_a_weight_is_loaded() -> None:
    with torch.device("meta"):
        empty = TinyModel()
    layers = [layer for layer in _linears(empty).values() if layer.weight.numel() >= MIN_WEIGHTS]
    assert len(layers) == 10
    expected = sum(layer.weight.numel() + 4 * layer.out_features for layer in layers)
    assert draft_copy_bytes(empty) == expected
    model = _build()
    arrange_dense(model, DraftDense.INT8, DenseSwitch())
    held = [b for n, b in model.named_buffers() if n.endswith((".codes", ".scales"))]
    assert sum(b.nbytes for b in held) == expected


# -- the target ------------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
def test_target_multiplies_with_the_same_bits(form: DraftDense) -> None:
    before, model, _, _ = _arranged(form)
    layers = _linears(model)
    for name, original in _linears(before).items():
        assert isinstance(layers[name], DenseLinear) == (name != "router")
        for num_rows in (1, 5, 40):
            x = _inputs(original.in_features, num_rows)
            truth = original(x) if name == "router" else _dense(original, x)
            _assert_same_bits(layers[name](x), truth)


@pytest.mark.parametrize("form", FORMS)
def test_target_of_many_rows_is_close(form: DraftDense) -> None:
    before, model, _, _ = _arranged(form)
    layers = _linears(model)
    for name, original in _linears(before).items():
        if name == INFINITE:
            continue
        x = _inputs(original.in_features, 100)
        bias = 0.0 if original.bias is None else original.bias.double()
        truth = x.double() @ original.weight.double().t() + bias
        assert _error(layers[name](x), truth) <= 4e-3


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_drafting", [False, True])
def test_embedding_gives_exact_rows(form: DraftDense, is_drafting: bool) -> None:
    before, model, switch, _ = _arranged(form)
    assert isinstance(model.embed, SplitEmbedding) == (form is DraftDense.SPLIT)
    switch.is_drafting = is_drafting
    for ids in (torch.arange(WORDS), torch.tensor([[0, 999, 3], [3, 3, 500]])):
        _assert_same_bits(model.embed(ids), before.embed(ids))


@pytest.mark.parametrize("form", FORMS)
def test_layers_can_be_called_with_any_leading_axes(form: DraftDense) -> None:
    before, model, _, _ = _arranged(form)
    x = _inputs(WIDTH, 6).view(2, 3, WIDTH)
    for name in ("k_proj", "v_proj", "q_proj"):
        y = getattr(model.attention, name)(x)
        assert y.is_contiguous()
        _assert_same_bits(y, _dense(getattr(before.attention, name), x))


# -- layers with one input -------------------------------------------------------------------


def _count_products(rows: nn.Module) -> list[int]:
    calls: list[int] = []
    rows.register_forward_hook(lambda module, inputs, output: calls.append(output.shape[-1]))
    return calls


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("is_drafting", [False, True])
@pytest.mark.parametrize("order", ["qkv", "vkq", "kqv"])
def test_siblings_are_computed_once(form: DraftDense, is_drafting: bool, order: str) -> None:
    before, model, switch, _ = _arranged(form)
    switch.is_drafting = is_drafting
    calls = _count_products(model.attention.q_proj.rows)
    for num_passes in (1, 2):
        x = _inputs(WIDTH, 4, seed=num_passes)
        for letter in order:
            name = f"{letter}_proj"
            y = getattr(model.attention, name)(x)
            truth = _dense(getattr(before.attention, name), x)
            if is_drafting:
                assert _error(y, truth) <= 3e-2
            else:
                _assert_same_bits(y, truth)
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
    before, model, _, _ = _arranged(DraftDense.SPLIT)
    inputs = {str(n): _inputs(WIDTH, n + 1, seed=n) for n in (1, 2, 3)}
    for letter, number in calls.split():
        name, x = f"{letter}_proj", inputs[number]
        y = getattr(model.attention, name)(x)
        _assert_same_bits(y, _dense(getattr(before.attention, name), x))


@pytest.mark.parametrize("form", FORMS)
def test_draft_after_a_pass_that_called_one_sibling_is_a_draft(form: DraftDense) -> None:
    before, model, switch, _ = _arranged(form)
    model.mlp.gate_proj(_inputs(WIDTH, 2))
    switch.is_drafting = True
    x = _inputs(WIDTH, 2)  # Equal to the other, and another tensor.
    up = model.mlp.up_proj(x)
    truth = _dense(before.mlp.up_proj, x)
    assert torch.equal(up, truth) == (form is DraftDense.TARGET)
    switch.is_drafting = False
    _assert_same_bits(model.mlp.up_proj(x.clone()), truth)


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
    before, model, switch, _ = _arranged(form)
    layers = _linears(model)
    switch.is_drafting = True
    for name, original in _linears(before).items():
        if name in (INFINITE, "router"):
            continue
        x = _inputs(original.in_features, num_rows)
        bias = 0.0 if original.bias is None else original.bias.double()
        exact = x.double() @ original.weight.double().t() + bias
        drafted = x.double() @ _draft_weight(form, original).t() + bias
        y = layers[name](x)
        assert _error(y, drafted) <= 4e-3
        is_cheaper = form is DraftDense.INT8 or (form is DraftDense.SPLIT and name != SPREAD)
        assert (_error(y, exact) > 4e-3) == is_cheaper
        assert _error(y, exact) <= 3e-2
        if not is_cheaper and num_rows <= 40:
            _assert_same_bits(y, _dense(original, x))


@pytest.mark.parametrize("form", FORMS)
def test_target_after_a_draft_is_the_target_again(form: DraftDense) -> None:
    before, model, switch, _ = _arranged(form)
    x = _inputs(WIDTH, 2)
    for is_drafting in (True, False, True, False):
        switch.is_drafting = is_drafting
        y = model.lm_head(x.clone())
        assert torch.equal(y, _dense(before.lm_head, x)) == (
            not is_drafting or form is DraftDense.TARGET
        )


def test_int8_copies_are_of_rows() -> None:
    weight = _build().lm_head.weight.clone()
    weight[5] = 0
    weight[700] *= 1e4
    codes, scales = quantise_rows(weight)
    assert (codes.dtype, scales.dtype) == (torch.int8, torch.float32)
    assert not codes[5].any()
    others = torch.arange(WORDS) != 5
    assert bool((codes[others].abs().amax(1) == 127).all())
    error = (codes * scales[:, None] - weight.float()).abs().amax(1)
    assert bool((error <= 0.5001 * scales + 1e-8).all())


# -- kinds of rows, census, fakes ------------------------------------------------------------


def test_layer_that_cannot_be_split_stays_whole() -> None:
    _, model, _, census = _arranged(DraftDense.SPLIT)
    kinds = {n: type(m.rows) for n, m in model.named_modules() if hasattr(m, "rows")}
    assert kinds == {
        "attention.q_proj": SplitRows,
        "attention.o_proj": SplitRows,
        "mlp.gate_proj": SplitRows,
        "mlp.down_proj": SplitRows,
        INFINITE: PlainRows,
        SPREAD: PlainRows,
        "lm_head": SplitRows,
    }
    assert set(census) == {name for name, kind in kinds.items() if kind is SplitRows}


def test_one_sibling_that_cannot_be_split_keeps_all_whole() -> None:
    def change(model: TinyModel) -> None:
        model.attention.v_proj.weight[0, 0] = float("inf")

    before, model = _build(change), _build(change)
    census = arrange_dense(model, DraftDense.SPLIT, DenseSwitch())
    assert "attention.q_proj" not in census
    assert "attention.q_proj" not in split_census(dense_groups(before))
    x = _inputs(WIDTH, 3)
    for name in ("q_proj", "k_proj", "v_proj"):
        _assert_same_bits(
            getattr(model.attention, name)(x), _dense(getattr(before.attention, name), x)
        )


@pytest.mark.parametrize("form", FORMS)
def test_census_is_that_of_the_model_before(form: DraftDense) -> None:
    before, _, _, census = _arranged(form)
    if form is not DraftDense.SPLIT:
        assert census == {}
        return
    assert census == split_census(dense_groups(before))
    assert census[EXCEPTIONAL] == 3
    assert census["lm_head"] == 0


def test_exceptions_of_siblings_are_counted_from_the_first_of_them() -> None:
    def change(model: TinyModel) -> None:
        model.attention.q_proj.weight[511, 2] = 1e-30
        model.attention.k_proj.weight[0, 9] = -1e-30
        model.attention.v_proj.weight[255, 255] = 2e-30

    before, model, switch = _build(change), _build(change), DenseSwitch()
    census = arrange_dense(model, DraftDense.SPLIT, switch)
    assert census["attention.q_proj"] == 3
    assert split_census(dense_groups(before)) == census
    assert model.attention.q_proj.rows.exceptions.tolist() == [[511, 2], [512, 9], [1023, 255]]
    x = _inputs(WIDTH, 2)
    x[..., [2, 9, 255]] = 2.0**100
    for name in ("q_proj", "k_proj", "v_proj"):
        _assert_same_bits(
            getattr(model.attention, name)(x), _dense(getattr(before.attention, name), x)
        )


def _tensors(model: nn.Module) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    named = (
        *model.named_parameters(remove_duplicate=False),
        *model.named_buffers(remove_duplicate=False),
    )
    return {name: (tuple(tensor.shape), tensor.dtype) for name, tensor in named}


def _fake(form: DraftDense, census: dict[str, int]) -> nn.Module:
    before = torch.get_default_dtype()
    torch.set_default_dtype(BF16)
    try:
        with torch.inference_mode(False), FakeTensorMode():
            fake = TinyModel().eval().requires_grad_(False)
            arrange_fakes(fake, form, DenseSwitch(), census)
    finally:
        torch.set_default_dtype(before)
    return fake


@pytest.mark.parametrize("form", FORMS)
def test_fakes_have_the_same_tensors(form: DraftDense) -> None:
    before, model, _, _ = _arranged(form)
    census = split_census(dense_groups(before))
    assert _tensors(_fake(form, census)) == _tensors(model)
    assert other_dtypes(model, BF16) == other_dtypes(before, BF16) == {}


def test_fakes_of_another_census_differ() -> None:
    """What the test above could not see if names and shapes were always the same."""
    fakes = [
        _tensors(_fake(DraftDense.SPLIT, census)) for census in ({}, {"lm_head": 0}, {"lm_head": 2})
    ]
    assert fakes[0] != fakes[1] != fakes[2] != fakes[0]


# -- fewer words -----------------------------------------------------------------------------


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("has_bias", [False, True])
def test_draft_chooses_among_the_first_words(form: DraftDense, has_bias: bool) -> None:
    def change(model: TinyModel) -> None:
        if has_bias:
            model.lm_head.bias = nn.Parameter(torch.linspace(-1, 1, WORDS).to(BF16))
            model.lm_head.weight = nn.Parameter(model.embed.weight.clone())

    before, model, switch = _build(change), _build(change), DenseSwitch()
    arrange_dense(model, form, switch)
    x = _inputs(WIDTH, 3)
    switch.is_drafting = True
    whole = model.lm_head(x)
    for words in (300, 1, WORDS):
        limit_draft_words(model, words)
        assert torch.equal(model.lm_head(x), whole[..., :words])
        switch.is_drafting = False
        _assert_same_bits(model.lm_head(x), _dense(before.lm_head, x))
        switch.is_drafting = True
        ids = torch.tensor([WORDS - 1])
        assert torch.equal(model.embed(ids), before.embed(ids))
    limit_draft_words(model, None)
    assert torch.equal(model.lm_head(x), whole)


def test_output_layer_that_is_not_arranged_has_all_words() -> None:
    model = _build()
    x, truth = _inputs(WIDTH, 2), model.lm_head(_inputs(WIDTH, 2))
    limit_draft_words(model, 10)
    assert torch.equal(model.lm_head(x), truth)


class FakeCausalModel(nn.Module):
    """Logits of an arranged output layer, as transformers gives them."""

    def __init__(self, inner: TinyModel) -> None:
        super().__init__()
        self.inner = inner
        text = SimpleNamespace(vocab_size=WORDS)
        self.config = SimpleNamespace(get_text_config=lambda: text)

    def forward(self, input_ids: Tensor, logits_to_keep: int, **_: object) -> SimpleNamespace:
        hidden = self.inner.embed(input_ids)[:, -logits_to_keep:]
        return SimpleNamespace(logits=self.inner.lm_head(hidden))


class FakeState:
    capacity = 64

    def __init__(self) -> None:
        self.cache, self.num_cached = SimpleNamespace(layers=()), 0

    def begin_verification(self) -> None:
        pass

    def commit(self, tokens: list[int]) -> None:
        self.num_cached += len(tokens)


@pytest.mark.parametrize("form", FORMS)
def test_pass_gives_words_that_a_draft_leaves_out_no_chance(form: DraftDense) -> None:
    before, model, switch, _ = _arranged(form)
    limit_draft_words(model, 300)
    executor = SimpleNamespace(phase=Phase.PREFILL, meter=ReplyMeter())
    passes = ModelPasses(FakeCausalModel(model), executor, FakeState(), switch)
    for phase in (Phase.PREFILL, Phase.DRAFT, Phase.VERIFY, Phase.DRAFT, Phase.DECODE):
        logits = passes.forward([1, 2, 999], phase, num_logits=2)
        assert tuple(logits.shape) == (2, WORDS)
        if phase is Phase.DRAFT:
            assert bool((logits[:, 300:] == float("-inf")).all())
            assert bool(logits[:, :300].isfinite().all())
            assert int(logits.argmax(-1).max()) < 300
        else:
            truth = _dense(before.lm_head, before.embed(torch.tensor([[2, 999]])))
            assert torch.equal(logits, truth[0])
    assert executor.meter.num_eager_passes == 5


# -- memory ----------------------------------------------------------------------------------


def _storages(model: nn.Module) -> dict[int, int]:
    """Bytes of the memory behind all tensors of a model, by its address."""
    tensors = (*model.parameters(), *model.buffers())
    return {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}


def _held_bytes() -> int:
    """Bytes behind all tensors of this process."""
    gc.collect()
    tensors = [t for t in gc.get_objects() if issubclass(type(t), Tensor)]
    held = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in tensors}
    return sum(held.values())


@pytest.mark.parametrize("form", FORMS)
def test_weights_are_held_once(form: DraftDense) -> None:
    at_first = _held_bytes()
    model = _build()
    num_bytes = sum(p.nbytes for p in model.parameters())
    assert abs(_held_bytes() - at_first - num_bytes) < 4096
    large = {n: weakref.ref(p) for n, p in model.named_parameters() if p.numel() >= MIN_WEIGHTS}
    copies = draft_copy_bytes(model) if form is DraftDense.INT8 else 0
    arrange_dense(model, form, DenseSwitch())
    # Not split, the tied embedding keeps its parameter; the memory behind it is the block's.
    kept = set() if form is DraftDense.SPLIT else {"embed.weight"}
    assert {n for n, p in model.named_parameters() if p.numel() >= MIN_WEIGHTS} == kept
    held = _held_bytes() - at_first
    assert {name for name, ref in large.items() if ref() is not None} == kept
    overhead = huge_bytes(0).untyped_storage().nbytes() + 2**15
    assert num_bytes + copies <= held <= num_bytes + copies + overhead


@pytest.mark.parametrize("form", [DraftDense.TARGET, DraftDense.INT8])
def test_tied_layers_that_are_not_split_share_one_weight(form: DraftDense) -> None:
    _, model, _, _ = _arranged(form)
    assert model.lm_head.weight is model.embed.weight
    assert model.embed.weight.data_ptr() == model.lm_head.rows.weight.data_ptr()


def test_large_layers_lie_in_one_block() -> None:
    for form in (DraftDense.TARGET, DraftDense.SPLIT):
        _, model, _, _ = _arranged(form)
        named = [(n, b) for n, b in model.named_buffers() if b.numel() >= MIN_WEIGHTS]
        assert len({b.untyped_storage().data_ptr() for _, b in named}) == 1
        assert all(b.data_ptr() % 64 == 0 for _, b in named)


def test_small_parameters_do_not_keep_the_file_they_were_read_from() -> None:
    model, file = _build(), torch.zeros(2**20, dtype=BF16)
    small = [p for p in model.parameters() if p.numel() < MIN_WEIGHTS]
    start = 0
    for parameter in small:
        room = file[start : start + parameter.numel()].view(parameter.shape)
        parameter.data = room.copy_(parameter.data)
        start += parameter.numel()
    norm = model.norm.weight.clone()
    arrange_dense(model, DraftDense.SPLIT, DenseSwitch())
    address = file.untyped_storage().data_ptr()
    assert address not in _storages(model)
    assert torch.equal(model.norm.weight, norm)


@pytest.mark.parametrize("form", FORMS)
def test_model_without_large_layers_is_left_alone(form: DraftDense) -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(300, 300)).requires_grad_(False)
    x = torch.ones(1, 8)
    truth = model[0](x)
    assert arrange_dense(model, form, DenseSwitch()) == {}
    assert [type(layer) for layer in model] == [nn.Linear] * 2, "float32 stays as it is"
    assert torch.equal(model[0](x), truth)
