"""Codes chosen by calibration: what reached each expert, and what GPTQ makes of it.

A recording holds each layer's inputs and which experts took them; an expert's own second
matrix sees what its first one and the gate make of them. One matrix is quantised at a
time, so memory holds the Hessian of one, whatever the number of experts. The algorithm
itself is a parameter. Runs in the process that quantises.

Source: Specter, draft quantisation: GPTQ, symmetric INT4, experts only. There all matrices of a
model are calibrated at once by GPTQModel's loader; here one at a time, on the target's own
inputs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import linear

from ..predictor.traces import TraceFolder
from ..types import ExpertShape
from .architecture import meta_model
from .experts import CheckpointExperts, expert_modules_of
from .formats import ExpertTensors
from .quantised_expert import QuantisedExpert

_BATCH_ROWS = 512
"""Inputs that pass through an expert at a time."""

_HESSIAN_COPIES = 4
"""What GPTQ holds of one: the sum, its damped copy, its inverse and that one's factor."""

_MATRIX_COPIES = 6
"""What GPTQ holds of a matrix in float32: as read, its own, what is left of it, the result, the
losses, the codes."""


@dataclass(frozen=True, slots=True, eq=False)
class MatrixCodes:
    """A matrix as INT4 codes: `w = code * scale`.

    Attributes:
        codes: `[N, K]` int8, -8..7.
        scales: `[N, K / group_size]` float32.
    """

    codes: Tensor
    scales: Tensor


MatrixQuantiser = Callable[[Tensor, Iterable[Tensor]], MatrixCodes | None]
"""`(weight [N, K] float32, batches of inputs [T, K] float32) -> codes`; `None` where it fails."""


def working_bytes(shape: ExpertShape, *, max_input_bytes: int) -> int:
    """Most bytes that quantising a layer holds.

    Args:
        shape: Dimensions of an expert.
        max_input_bytes: A layer's recorded inputs, float16.
    """
    widest = max(shape.hidden_size, shape.intermediate_size)
    hessian = _HESSIAN_COPIES * 4 * widest**2
    matrix = _MATRIX_COPIES * 4 * shape.up_rows * shape.hidden_size
    batch = 4 * _BATCH_ROWS * (shape.up_rows + shape.intermediate_size)
    return hessian + matrix + batch + 2 * 2 * max_input_bytes


class CalibratedCodes:
    """Chooses an expert's codes by what reached it in a recording.

    Args:
        checkpoint: Says what lies between an expert's matrices.
        traces: The recording.
        group_size: Inputs that share a scale.
        quantise: The algorithm for one matrix.
    """

    def __init__(
        self,
        checkpoint: CheckpointExperts,
        traces: TraceFolder,
        *,
        group_size: int,
        quantise: MatrixQuantiser,
    ) -> None:
        self._modules = [module for _, module in expert_modules_of(meta_model(checkpoint.config))]
        self._traces = traces
        self._ids = traces.routing().ids
        self._group_size = group_size
        self._quantise = quantise
        self._layer: int | None = None
        self._inputs = torch.empty(0)
        """Of that layer: `[N, C]` float32."""

    def choose(self, layer: int, expert: int, tensors: ExpertTensors) -> QuantisedExpert | None:
        """Returns the codes of one expert, `None` where no input reached it or GPTQ failed."""
        inputs = self._inputs_of(layer, expert)
        if not len(inputs):
            return None
        batches, first = inputs.split(_BATCH_ROWS), tensors.up.to(torch.float32)
        up = self._quantise(first, batches)
        if up is None:
            return None
        inner = self._inner(self._modules[layer], first, tensors.up_bias, batches)
        down = self._quantise(tensors.down.to(torch.float32), inner)
        if down is None:
            return None
        return QuantisedExpert(
            up_codes=up.codes,
            up_scales=up.scales,
            down_codes=down.codes,
            down_scales=down.scales,
            group_size=self._group_size,
            up_bias=tensors.up_bias,
            down_bias=tensors.down_bias,
        )

    def _inputs_of(self, layer: int, expert: int) -> Tensor:
        """Returns what reached the expert, `[T, C]`; states beyond float16 are left out."""
        if layer != self._layer:
            self._layer, self._inputs = layer, self._traces.hidden(layer)
        inputs = self._inputs[(self._ids[:, layer] == expert).any(dim=1)]
        return inputs[torch.isfinite(inputs).all(dim=1)]

    @staticmethod
    def _inner(
        module: Any, first: Tensor, bias: Tensor | None, batches: Iterable[Tensor]
    ) -> Iterator[Tensor]:
        """Yields what reaches the second matrix, `[T, R]`."""
        bias = None if bias is None else bias.to(torch.float32)
        for batch in batches:
            inner = linear(batch, first, bias)
            yield module._apply_gate(inner) if module.has_gate else module.act_fn(inner)
