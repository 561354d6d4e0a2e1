"""Dense layers of the backbone in bfloat16, and cheaper forms of them for the draft.

A step with few tokens reads every dense weight once and does little with it: what counts
is reading at the memory's rate, and reading less. So all large linear layers are put, one
behind the other, into one block of huge pages, those that share an input (query, key and
value; gate and up) as one matrix, and multiplied by the kernels of `mira_kernels.native`.

While a draft runs, a layer may multiply with less than its weights: the draft only
proposes, so this costs acceptance and never changes an answer. Three ways:

- split: the weights lie in two planes of bytes, which together are exactly what they were;
  the draft reads the first alone. Takes no memory.
- INT8 copies: nearer to the weights, at one byte more for each of them.
- fewer words: the output layer's first rows only, which in a byte-pair vocabulary are the
  most frequent tokens.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from mira_kernels.pages import Arena
from mira_kernels.split import SplitWeight, split
from torch import Tensor, nn

from ..types import DraftDense

MIN_WEIGHTS = 2**16
"""Smaller layers stay as they are: their weights are read in no time."""

_SIBLINGS = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))
"""Layers of one module that get the same input, by the names that families give them."""

_READ_DIRECTLY = frozenset({"dt_proj"})
"""Layers whose weight their module multiplies with itself (Mamba's time steps): they stay."""


class DenseSwitch:
    """Whether the layers of one model multiply with their draft forms now."""

    __slots__ = ("is_drafting",)

    def __init__(self) -> None:
        self.is_drafting = False


# -- products ------------------------------------------------------------------------------


class DenseRows(nn.Module):
    """One matrix `[N, K]` of a layer or of several with the same input.

    Attributes:
        draft_rows: Rows that a draft multiplies with, `None` for all.
    """

    draft_rows: int | None = None

    def __init__(self, switch: DenseSwitch, bias: Tensor | None) -> None:
        super().__init__()
        self._switch = switch
        self.register_buffer("bias", bias, persistent=False)

    def _bias(self) -> Tensor | None:
        if self.bias is None or not self._switch.is_drafting:
            return self.bias
        return self.bias[: self.draft_rows]


class PlainRows(DenseRows):
    """Weights as they were, with INT8 copies for the draft or without."""

    def __init__(self, switch: DenseSwitch, weight: Tensor, bias: Tensor | None) -> None:
        super().__init__(switch, bias)
        self.register_buffer("weight", weight, persistent=False)
        self.register_buffer("codes", None, persistent=False)
        self.register_buffer("scales", None, persistent=False)

    def add_copy(self) -> None:
        """Adds an INT8 copy."""
        self.codes, self.scales = quantise_rows(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Returns `[..., N]` for `[..., K]`."""
        if not self._switch.is_drafting:
            return torch.ops.mira.dense_linear(x, self.weight, self.bias)
        count = self.draft_rows
        if self.codes is None:
            return torch.ops.mira.dense_linear(x, self.weight[:count], self._bias())
        return torch.ops.mira.int8_linear(x, self.codes[:count], self.scales[:count], self._bias())


class SplitRows(DenseRows):
    """Weights in two planes, of which a draft reads the high one alone."""

    def __init__(self, switch: DenseSwitch, planes: SplitWeight, bias: Tensor | None) -> None:
        super().__init__(switch, bias)
        has_exceptions = len(planes.exceptions) > 0
        self.register_buffer("high", planes.high, persistent=False)
        self.register_buffer("low", planes.low, persistent=False)
        self.register_buffer("bases", planes.bases, persistent=False)
        for name in ("exceptions", "exception_values"):
            value = getattr(planes, name) if has_exceptions else None
            self.register_buffer(name, value, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        """Returns `[..., N]` for `[..., K]`."""
        if self._switch.is_drafting:
            count = self.draft_rows
            return torch.ops.mira.split_linear(
                x, self.high[:count], None, self.bases[:count], None, None, self._bias()
            )
        return torch.ops.mira.split_linear(
            x, self.high, self.low, self.bases, self.exceptions, self.exception_values, self.bias
        )

    def look_up(self, ids: Tensor) -> Tensor:
        """Returns the rows of these numbers, exact, also in a draft."""
        return torch.ops.mira.split_rows(
            ids, self.high, self.low, self.bases, self.exceptions, self.exception_values
        )


class _Share:
    """The product that layers with the same input share: computed for the first of them."""

    __slots__ = ("_input", "_num_left", "_output", "num_layers", "rows")

    def __init__(self, rows: DenseRows, num_layers: int) -> None:
        self.rows = rows
        self.num_layers = num_layers
        self._input: Tensor | None = None
        self._output: Tensor | None = None
        self._num_left = 0

    def product(self, x: Tensor, start: int, stop: int) -> Tensor:
        if self.num_layers == 1:
            return self.rows(x)
        if self._input is not x:
            self._input, self._output = x, self.rows(x)
            self._num_left = self.num_layers
        assert self._output is not None
        y = self._output[..., start:stop].contiguous()
        self._num_left -= 1
        if not self._num_left:
            self._input = self._output = None
        return y


class DenseLinear(nn.Linear):
    """A linear layer whose weights are rows of a `DenseRows`.

    Never constructed: `arrange_dense` turns a layer into one in place.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Returns `[..., N]` for `[..., K]`."""
        return self._share.product(input, self._start, self._start + self.out_features)

    def join(self, share: _Share, start: int, *, keeps_weight: bool) -> None:
        """Takes the layer's rows from `start` on; its own weight goes."""
        if not keeps_weight:
            self._parameters["weight"] = None
        self._parameters["bias"] = None
        self.__dict__["_share"], self._start = share, start


class SplitEmbedding(nn.Embedding):
    """An embedding that shares its split weights with the output layer."""

    def forward(self, input: Tensor) -> Tensor:
        """Returns rows `[..., K]`, exact."""
        return self._rows.look_up(input)


# -- which layers, together ----------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class DenseGroup:
    """Layers that become one matrix.

    Attributes:
        name: Name of the first, which owns the rows.
        layers: In the order of their rows.
        embedding: The embedding whose weight the only layer shares, or `None`.
    """

    name: str
    layers: tuple[nn.Linear, ...]
    embedding: nn.Embedding | None

    @property
    def shape(self) -> tuple[int, int]:
        """Rows and columns of the matrix."""
        return sum(layer.out_features for layer in self.layers), self.layers[0].in_features


def dense_groups(model: nn.Module) -> list[DenseGroup]:
    """Finds the large bfloat16 layers and which of them become one matrix, in module order."""
    groups, seen = [], set()
    for owner_name, owner in model.named_modules():
        for name, layer in owner.named_children():
            if id(layer) in seen or name in _READ_DIRECTLY or not _is_large(layer):
                continue
            full = f"{owner_name}.{name}".lstrip(".")
            sharers = _sharers(model, layer)
            if sharers:
                # Whatever else shares a weight would lose it.
                if len(sharers) == 1 and type(sharers[0]) is nn.Embedding:
                    groups.append(DenseGroup(full, (layer,), sharers[0]))
                continue
            layers = _siblings(model, owner, name)
            seen.update(map(id, layers))
            groups.append(DenseGroup(full, layers, None))
    return groups


def _is_large(layer: nn.Module) -> bool:
    return (
        type(layer) is nn.Linear
        and layer.weight.dtype is torch.bfloat16
        and layer.in_features * layer.out_features >= MIN_WEIGHTS
    )


def _siblings(model: nn.Module, owner: nn.Module, name: str) -> tuple[nn.Linear, ...]:
    """The layers that become one matrix with `owner.name`, itself first."""
    first = getattr(owner, name)
    for names in _SIBLINGS:
        if name != names[0]:
            continue
        layers = tuple(getattr(owner, other, None) for other in names)
        is_fitting = all(
            _is_large(layer)
            and layer.in_features == first.in_features
            and (layer.bias is None) == (first.bias is None)
            and not _sharers(model, layer)
            for layer in layers
        )
        if is_fitting:
            return layers
    return (first,)


def _sharers(model: nn.Module, layer: nn.Linear) -> list[nn.Module]:
    """Other modules with the same weight."""
    return [
        module
        for module in model.modules()
        if module is not layer and module._parameters.get("weight") is layer.weight
    ]


# -- arranging -----------------------------------------------------------------------------


def split_census(groups: Sequence[DenseGroup]) -> dict[str, int]:
    """Returns the groups that can be split, by name, with their numbers of exceptions.

    Every matrix is split to see it and the result is dropped. In a model that is arranged
    already, `arrange_dense` has said the same.
    """
    census = {}
    for group in groups:
        parts = [split(layer.weight) for layer in group.layers]
        if all(part is not None for part in parts):
            census[group.name] = sum(len(part.exceptions) for part in parts)
    return census


def arrange_dense(model: nn.Module, form: DraftDense, switch: DenseSwitch) -> dict[str, int]:
    """Puts the large layers into one block and gives the draft what it multiplies with.

    The native kernels must be loaded.

    Args:
        model: The loaded model; its layers are changed in place.
        form: What the draft multiplies with; `AUTO` is none.
        switch: Shared by all layers.

    Returns:
        What `split_census` would have said, if `form` is `SPLIT`.
    """
    groups = dense_groups(model)
    arena = Arena(sum(2 * Arena.padded(_num_weights(g.shape)) for g in groups))
    census = {}
    for group in groups:
        planes = _split_group(group, arena) if form is DraftDense.SPLIT else None
        if planes is not None:
            census[group.name] = len(planes.exceptions)
            rows: DenseRows = SplitRows(switch, planes, _joined_bias(group))
        else:
            weight = arena.take(group.shape, torch.bfloat16)
            start = 0
            for layer in group.layers:
                weight[start : start + layer.out_features] = layer.weight.detach()
                start += layer.out_features
            rows = PlainRows(switch, weight, _joined_bias(group))
            if form is DraftDense.INT8:
                rows.add_copy()
        _attach(group, rows)
    for parameter in model.parameters():
        # Small ones would keep the whole file mapped that they are read from.
        if parameter.numel() < MIN_WEIGHTS:
            parameter.data = parameter.data.clone()
    return census


def arrange_fakes(
    model: nn.Module, form: DraftDense, switch: DenseSwitch, census: Mapping[str, int]
) -> None:
    """As `arrange_dense` for a model of fake tensors, which has no weights to look at."""
    for group in dense_groups(model):
        shape = group.shape
        if form is DraftDense.SPLIT and group.name in census:
            num_exceptions = census[group.name]
            planes = SplitWeight(
                torch.empty(shape, dtype=torch.uint8),
                torch.empty(shape, dtype=torch.uint8),
                torch.empty(shape[0], dtype=torch.int16),
                torch.empty((num_exceptions, 2), dtype=torch.int32),
                torch.empty(num_exceptions, dtype=torch.float32),
            )
            rows: DenseRows = SplitRows(switch, planes, _joined_bias(group))
        else:
            weight = torch.empty(shape, dtype=torch.bfloat16)
            rows = PlainRows(switch, weight, _joined_bias(group))
            if form is DraftDense.INT8:
                rows.add_copy()
        _attach(group, rows)


def limit_draft_words(model: nn.Module, num_words: int | None) -> None:
    """Has a draft choose among the first `num_words` tokens only; `None` for all."""
    output = model.get_output_embeddings()
    if isinstance(output, DenseLinear) and output._share.num_layers == 1:
        output._share.rows.draft_rows = num_words


def _num_weights(shape: tuple[int, int]) -> int:
    return shape[0] * shape[1]


def _split_group(group: DenseGroup, arena: Arena) -> SplitWeight | None:
    """Splits a group's weights into the arena; `None` where one of them cannot be."""
    parts = []
    for layer in group.layers:
        part = split(layer.weight)
        if part is None:
            return None
        parts.append(part)
    high, low = (arena.take(group.shape, torch.uint8) for _ in range(2))
    exceptions, start = [], 0
    for part in parts:
        stop = start + part.shape[0]
        high[start:stop], low[start:stop] = part.high, part.low
        exceptions.append(part.exceptions + torch.tensor([start, 0], dtype=torch.int32))
        start = stop
    return SplitWeight(
        high,
        low,
        torch.cat([part.bases for part in parts]),
        torch.cat(exceptions),
        torch.cat([part.exception_values for part in parts]),
    )


def _joined_bias(group: DenseGroup) -> Tensor | None:
    biases = [layer.bias.detach() for layer in group.layers if layer.bias is not None]
    return torch.cat(biases) if biases else None


def _attach(group: DenseGroup, rows: DenseRows) -> None:
    """Makes the group's layers use `rows`, which becomes a part of the first."""
    share, start = _Share(rows, len(group.layers)), 0
    is_split = isinstance(rows, SplitRows)
    if group.embedding is not None:
        if is_split:
            group.embedding._parameters["weight"] = None
            group.embedding.__class__ = SplitEmbedding
            group.embedding.__dict__["_rows"] = rows
        else:
            group.embedding.weight.data = rows.weight
    for layer in group.layers:
        layer.__class__ = DenseLinear
        layer.join(share, start, keeps_weight=group.embedding is not None and not is_split)
        start += layer.out_features
    group.layers[0].register_module("rows", rows)


# -- INT8 copies ---------------------------------------------------------------------------


def draft_copy_bytes(model: nn.Module) -> int:
    """Returns the bytes of INT8 copies of all large layers of a model that is not arranged."""
    return sum(
        layer.in_features * layer.out_features + 4 * layer.out_features
        for layer in _large_linears(model)
    )


def _large_linears(model: nn.Module) -> Iterator[nn.Linear]:
    for module in model.modules():
        if (
            isinstance(module, nn.Linear)
            and module.in_features * module.out_features >= MIN_WEIGHTS
        ):
            yield module


@torch.no_grad()
def quantise_rows(weight: Tensor) -> tuple[Tensor, Tensor]:
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
