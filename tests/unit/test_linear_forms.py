"""What becomes of each dense layer of a model: kinds of rows, words of a draft, memory held."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from dense_layers import (
    BF16,
    EXCEPTIONAL,
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
    DenseSwitch,
    PlainRows,
    SplitRows,
    arrange_dense,
    arrange_fakes,
    dense_groups,
    draft_copy_bytes,
    limit_draft_words,
    split_census,
)
from mira_engine.model.steps import other_dtypes
from mira_engine.runtime.passes import ModelPasses
from mira_engine.runtime.telemetry import ReplyMeter
from mira_engine.types import DraftDense, Phase
from mira_kernels import native
from mira_kernels.pages import huge_bytes
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode


@pytest.fixture(autouse=True)
def _kernels(native_cache: Path) -> Iterator[None]:
    status = native.load(native_cache)
    assert status.is_available, status.reason
    with torch.inference_mode():
        yield


# -- kinds of rows, census, fakes ------------------------------------------------------------


def test_layer_that_cannot_be_split_stays_whole() -> None:
    _, model, _, census = arranged(DraftDense.SPLIT)
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

    before, model = build(change), build(change)
    census = arrange_dense(model, DraftDense.SPLIT, DenseSwitch())
    assert "attention.q_proj" not in census
    assert "attention.q_proj" not in split_census(dense_groups(before))
    x = inputs_of(WIDTH, 3)
    for name in ("q_proj", "k_proj", "v_proj"):
        assert_same_bits(
            getattr(model.attention, name)(x), dense_product(getattr(before.attention, name), x)
        )


@pytest.mark.parametrize("form", FORMS)
def test_census_is_that_of_the_model_before(form: DraftDense) -> None:
    before, _, _, census = arranged(form)
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

    before, model, switch = build(change), build(change), DenseSwitch()
    census = arrange_dense(model, DraftDense.SPLIT, switch)
    assert census["attention.q_proj"] == 3
    assert split_census(dense_groups(before)) == census
    assert model.attention.q_proj.rows.exceptions.tolist() == [[511, 2], [512, 9], [1023, 255]]
    x = inputs_of(WIDTH, 2)
    x[..., [2, 9, 255]] = 2.0**100
    for name in ("q_proj", "k_proj", "v_proj"):
        assert_same_bits(
            getattr(model.attention, name)(x), dense_product(getattr(before.attention, name), x)
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
    before, model, _, _ = arranged(form)
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

    before, model, switch = build(change), build(change), DenseSwitch()
    arrange_dense(model, form, switch)
    x = inputs_of(WIDTH, 3)
    switch.is_drafting = True
    whole = model.lm_head(x)
    for words in (300, 1, WORDS):
        limit_draft_words(model, words)
        assert torch.equal(model.lm_head(x), whole[..., :words])
        switch.is_drafting = False
        assert_same_bits(model.lm_head(x), dense_product(before.lm_head, x))
        switch.is_drafting = True
        ids = torch.tensor([WORDS - 1])
        assert torch.equal(model.embed(ids), before.embed(ids))
    limit_draft_words(model, None)
    assert torch.equal(model.lm_head(x), whole)


def test_output_layer_that_is_not_arranged_has_all_words() -> None:
    model = build()
    x, truth = inputs_of(WIDTH, 2), model.lm_head(inputs_of(WIDTH, 2))
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
    before, model, switch, _ = arranged(form)
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
            truth = dense_product(before.lm_head, before.embed(torch.tensor([[2, 999]])))
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
    model = build()
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
    _, model, _, _ = arranged(form)
    assert model.lm_head.weight is model.embed.weight
    assert model.embed.weight.data_ptr() == model.lm_head.rows.weight.data_ptr()


def test_large_layers_lie_in_one_block() -> None:
    for form in (DraftDense.TARGET, DraftDense.SPLIT):
        _, model, _, _ = arranged(form)
        named = [(n, b) for n, b in model.named_buffers() if b.numel() >= MIN_WEIGHTS]
        assert len({b.untyped_storage().data_ptr() for _, b in named}) == 1
        assert all(b.data_ptr() % 64 == 0 for _, b in named)


def test_small_parameters_do_not_keep_the_file_they_were_read_from() -> None:
    model, file = build(), torch.zeros(2**20, dtype=BF16)
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
