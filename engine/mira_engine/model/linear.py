"""Dense layers of the backbone in bfloat16, and cheaper forms of them for the draft.

A step with few tokens reads every dense weight once and does little with it: what counts
is reading at the memory's rate, and reading less. `NativeLinear` is transformers' own
linear module with the product of `mira_kernels.native`. While a draft runs, a layer may
multiply with less than its weights: the draft only proposes, so this costs acceptance and
never changes an answer. Two ways:

- split: the weights lie in two planes of bytes, which together are exactly what they were;
  the draft reads the first alone. Takes no memory.
- INT8 copies: nearer to the weights, at one byte more for each of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import torch
from mira_kernels import native
from mira_kernels.split import SplitWeight, split
from torch import nn

from ..types import DraftDense

MIN_WEIGHTS = 2**16
"""Smaller layers keep their weights: a copy would not be worth its call."""


class DenseSwitch:
    """Whether the layers of one model multiply with their draft forms now."""

    __slots__ = ("is_drafting",)

    def __init__(self) -> None:
        self.is_drafting = False


class NativeLinear(nn.Linear):
    """A linear layer whose product is the native kernel's; bfloat16 on the CPU.

    Never constructed: `use_native_linear` turns a layer into one in place.
    """

    switch: DenseSwitch
    draft_codes: torch.Tensor | None
    draft_scales: torch.Tensor | None

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns `[..., N]` for `[..., K]`."""
        if self.draft_codes is not None and self.switch.is_drafting:
            return torch.ops.mira.int8_linear(input, self.draft_codes, self.draft_scales, self.bias)
        return torch.ops.mira.dense_linear(input, self.weight, self.bias)


class _Split(nn.Module):
    """A layer whose weight lies in two planes."""

    high: torch.Tensor
    low: torch.Tensor
    bases: torch.Tensor
    exceptions: torch.Tensor
    exception_values: torch.Tensor

    def take(self, weight: SplitWeight) -> None:
        """Replaces the layer's weight by its planes."""
        self._parameters["weight"] = None
        for name in SPLIT_BUFFERS:
            self.register_buffer(name, getattr(weight, name), persistent=False)


class SplitLinear(_Split, nn.Linear):
    """A linear layer on split weights, of which a draft reads the high plane alone."""

    switch: DenseSwitch

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns `[..., N]` for `[..., K]`."""
        return torch.ops.mira.split_linear(
            input,
            self.high,
            None if self.switch.is_drafting else self.low,
            self.bases,
            self.exceptions,
            self.exception_values,
            self.bias,
        )


class SplitEmbedding(_Split, nn.Embedding):
    """An embedding that shares its split weights with the output layer."""

    def forward(self, input: torch.Tensor) -> torch.Tensor:
        """Returns rows `[..., K]`, exact, also in a draft."""
        return torch.ops.mira.split_rows(
            input, self.high, self.low, self.bases, self.exceptions, self.exception_values
        )


SPLIT_BUFFERS = ("high", "low", "bases", "exceptions", "exception_values")
DRAFT_BUFFERS = ("draft_codes", "draft_scales", *SPLIT_BUFFERS)
"""Names of the tensors that layers get here."""


def use_native_linear(model: nn.Module, switch: DenseSwitch) -> int:
    """Turns every bfloat16 linear layer of the model into a `NativeLinear`.

    Args:
        model: Its parameters stay the same objects under the same names.
        switch: Shared by all layers.

    Returns:
        How many layers were turned; 0 where the native kernels are not loaded.
    """
    if not native.is_loaded():
        return 0
    num_turned = 0
    for module in model.modules():
        if type(module) is nn.Linear and module.weight.dtype is torch.bfloat16:
            module.__class__ = NativeLinear
            module.switch = switch
            module.draft_codes = module.draft_scales = None
            num_turned += 1
    return num_turned


def _draft_layers(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yields the dense layers that a draft may see otherwise: all linear ones of some size."""
    for name, module in model.named_modules():
        is_large = isinstance(module, nn.Linear) and (
            module.in_features * module.out_features >= MIN_WEIGHTS
        )
        if is_large:
            yield name, module


# -- INT8 copies ---------------------------------------------------------------------------


def draft_copy_bytes(model: nn.Module) -> int:
    """Returns the bytes of INT8 copies of all layers."""
    return sum(
        layer.in_features * layer.out_features + 4 * layer.out_features
        for _, layer in _draft_layers(model)
    )


def add_draft_copies(model: nn.Module) -> None:
    """Gives every `NativeLinear` of some size an INT8 copy."""
    for _, layer in _draft_layers(model):
        if not isinstance(layer, NativeLinear):
            continue
        codes, scales = quantise_rows(layer.weight)
        del layer.draft_codes, layer.draft_scales
        layer.register_buffer("draft_codes", codes, persistent=False)
        layer.register_buffer("draft_scales", scales, persistent=False)


@torch.no_grad()
def quantise_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantises `[N, K]` to INT8 by rows: codes `[N, K]` int8, scales `[N]` float32.

    In blocks of rows, so that no second whole matrix is held.
    """
    codes = torch.empty(weight.shape, dtype=torch.int8, device=weight.device)
    scales = torch.empty(weight.shape[0], dtype=torch.float32, device=weight.device)
    for start in range(0, weight.shape[0], 1024):
        block = weight[start : start + 1024].float()
        scale = block.abs().amax(1).clamp_min_(1e-8) / 127
        scales[start : start + 1024] = scale
        codes[start : start + 1024] = (block / scale[:, None]).round_()
    return codes, scales


# -- split weights -------------------------------------------------------------------------


def split_census(model: nn.Module) -> dict[str, int]:
    """Returns the layers that are split, or can be, with their numbers of exceptions.

    Where they are not split yet, each is split to see it and the result is dropped.
    """
    census = {}
    for name, layer in _draft_layers(model):
        if isinstance(layer, SplitLinear):
            census[name] = len(layer.exceptions)
        elif (planes := _planes_of(model, layer)) is not None:
            census[name] = len(planes.exceptions)
    return census


def split_layers(model: nn.Module) -> None:
    """Replaces the weights of the `NativeLinear` layers of some size by planes."""
    for _, layer in list(_draft_layers(model)):
        planes = _planes_of(model, layer)
        if planes is not None:
            _replace(model, layer, planes)
    for parameter in model.parameters():
        # Small ones would keep the whole file mapped that they are read from.
        if parameter.numel() < MIN_WEIGHTS:
            parameter.data = parameter.data.clone()


def _planes_of(model: nn.Module, layer: nn.Linear) -> SplitWeight | None:
    """Splits a layer's weight; `None` where it stays as it is.

    It does where somebody else than an ordinary embedding shares it, or where its numbers
    cannot be split.
    """
    if all(type(module) is nn.Embedding for module in _sharers(model, layer)):
        return split(layer.weight)
    return None


def split_fakes(model: nn.Module, names: Mapping[str, int]) -> None:
    """As `split_layers` for a model of fake tensors, which has no weights to look at."""
    for name, num_exceptions in names.items():
        layer = model.get_submodule(name)
        shape = (layer.out_features, layer.in_features)
        planes = SplitWeight(
            torch.empty(shape, dtype=torch.uint8),
            torch.empty(shape, dtype=torch.uint8),
            torch.empty(shape[0], dtype=torch.int16),
            torch.empty((num_exceptions, 2), dtype=torch.int32),
            torch.empty(num_exceptions, dtype=torch.float32),
        )
        _replace(model, layer, planes)


def _sharers(model: nn.Module, layer: nn.Linear) -> list[nn.Module]:
    """Other modules with the same weight."""
    return [
        module
        for module in model.modules()
        if module is not layer and module._parameters.get("weight") is layer.weight
    ]


def _replace(model: nn.Module, layer: nn.Module, planes: SplitWeight) -> None:
    for module in _sharers(model, layer):
        module.__class__ = SplitEmbedding
        module.take(planes)
    switch = layer.switch
    del layer.draft_codes, layer.draft_scales
    layer.__class__ = SplitLinear
    layer.switch = switch
    layer.take(planes)


def apply_draft_dense(model: nn.Module, form: DraftDense) -> None:
    """Gives the model's `NativeLinear` layers what the draft is to multiply with.

    Args:
        model: The loaded model.
        form: Which form; `AUTO` is none.
    """
    match form:
        case DraftDense.INT8:
            add_draft_copies(model)
        case DraftDense.SPLIT:
            split_layers(model)
